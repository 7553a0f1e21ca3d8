"""The curl snippets of the server's pages run in order, in one shell, and print what the page shows."""

import re
import shutil
import subprocess

import pytest

from tests.support.paths import ROOT
from tests.support.running_server import running

BLOCK = re.compile(
    r"(?P<not_run><!-- not run:.*-->\n)?```sh\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.S
)
MARKER = "---- end of block ----"
PREAMBLE = "uuidgen() { cat /proc/sys/kernel/random/uuid; }\nset -e\n"


def matches(shown: str, printed: str) -> bool:
    """`...` on the page stands for any text, and so do the seconds that an acquire waited, on a busy machine."""
    shown = shown.rstrip("\n").replace('"waited":0.0', '"waited":...')
    pattern = ".*".join(re.escape(part) for part in shown.split("..."))
    return re.fullmatch(pattern, printed.strip("\n").rstrip("\n"), re.S) is not None


def _without_sleeps(script: str) -> str:
    """Where the page sleeps for a second, wait until the stream of events is open, and until it has the event."""
    for what in ("test -s headers.txt", "grep -q why events.txt"):
        script = script.replace("sleep 1\n", f"until {what}; do sleep 0.02; done\n", 1)
    return script.replace("> events.txt &", "-D headers.txt > events.txt &")


@pytest.mark.parametrize("page", ["tutorial.md", "http-api.md"])
def test_curl_snippets_print_what_the_page_shows(page, tmp_path):
    assert shutil.which("curl"), "curl is not installed"
    found = BLOCK.finditer((ROOT / "docs" / "server" / page).read_text())
    blocks = [(each["code"], each["output"] or "") for each in found if not each["not_run"]]
    assert len(blocks) >= 5
    with running() as server:
        script = "".join(f"{code}\necho; echo '{MARKER}'\n" for code, _ in blocks)
        script = PREAMBLE + script.replace("localhost:7420", f"127.0.0.1:{server.port}")
        script = _without_sleeps(script)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    printed = done.stdout.split(MARKER)
    assert len(printed) == len(blocks) + 1, done.stdout + done.stderr
    for (code, shown), output in zip(blocks, printed, strict=False):
        assert matches(shown, output), f"{code}\nprints:\n{output}\nthe page shows:\n{shown}"
