"""Every page can be pasted into a Python prompt, block by block, and pasted again afterwards.

A prompt ends a compound statement at the first blank line, and wants one after it. So no snippet has a blank line
inside a function or a `with`, and each has one behind it.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leasehold.testing.conformance.rig import rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.docs.test_snippets import PAGES, ROOT, blocks, environment_of
from tests.support.paths import child_environment

SECONDS = 120.0  # for one block, on a busy machine
TIMES = 2


def python_blocks(page: Path) -> list[str]:
    return [block.text for block in blocks(page) if block.language == "python" and block.reason is None]


class Prompt:
    """Python's interactive prompt in a terminal."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-q", "-i"],
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._pasted = 0

    def paste(self, text: str) -> str:
        """Paste a block, and press Enter once more to end its last statement. Returns the screen from there on."""
        self._pasted += 1
        typed = f"{text}\nprint('pasted', {self._pasted})\n".encode()
        shown, wanted = "", f"pasted {self._pasted}\r\n"
        deadline = time.monotonic() + SECONDS
        while wanted not in shown:
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"the prompt hangs:\n{shown}"
            readable, writable, _ = select.select([self._master], [self._master] if typed else [], [], remaining)
            if writable:  # one line at a time: the terminal's buffer is small
                line, _, typed = typed.partition(b"\n")
                os.write(self._master, line + b"\n")
            if readable:
                shown += os.read(self._master, 65536).decode(errors="replace")
        return shown

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)


def paste_page(page: Path, folder: Path) -> list[str]:
    """The screens with an error."""
    snippets = python_blocks(page)
    environment = {key: value for key, value in child_environment().items() if not key.startswith(("PYTEST", "LEASE"))}
    environment |= environment_of(page) | {"TERM": "dumb", "PYTHONWARNINGS": "error"}
    if any("REDIS_URL" in snippet for snippet in snippets):
        environment["REDIS_URL"] = f"redis://127.0.0.1:{rig_or_skip(rig_type('redis')).server.port}"
    prompt = Prompt(folder, environment)
    try:
        screens = [prompt.paste(snippet) for _ in range(TIMES) for snippet in snippets]
    finally:
        prompt.close()
    return [screen for screen in screens if re.search(r'^(Traceback|Exception ignored|  File "<stdin>")', screen, re.M)]


def page_id(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page_id(page) in ("README.md", "docs/tutorial.md") else pytest.mark.extended)
        for page in PAGES
        if python_blocks(page)
    ],
    ids=page_id,
)
def test_page_can_be_pasted_into_a_prompt_twice(page, tmp_path):
    assert "\n".join(paste_page(page, tmp_path)) == ""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("with open('a', 'w') as file:\n    pass\nprint(1)\n", "SyntaxError"),
        ("def twice(n):\n    m = n\n\n    return m + n\n", "IndentationError"),
        ("import os\nos.mkdir('folder')\n", "FileExistsError"),
    ],
    ids=["no blank line after", "blank line inside", "not repeatable"],
)
def test_page_that_cannot_be_pasted_twice_is_reported(tmp_path, text, error):
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{text}```\n")
    assert error in "\n".join(paste_page(page, tmp_path))
