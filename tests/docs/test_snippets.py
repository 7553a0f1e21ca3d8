"""Every snippet in the docs runs and every link resolves. (Tables: `test_tables.py`.)

What a page may contain:

- A ```python block is run. The blocks of a page run in order and share a namespace, in their own process and folder,
  with warnings as errors. If a block prints, a ```text block right below it must show the output; `...` there matches
  any text, and `29.8 s` any seconds. A log at level ERROR, an exception in another thread or a lease that is not
  released also fails the page.
- A ```python pytest block is a test file, run by pytest.
- A page that starts a server of `harness.servers` is skipped if that is not installed; in CI it fails.
- A page that mentions `REDIS_URL` gets it in its environment, with a running server.
- A block that cannot run says why in the line above it: <!-- not run: needs a server -->
- A page that needs a server names it: <!-- server: postgresql -->. Its blocks find the server in $DATABASE_URL.
"""

import doctest
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import pytest

from leasehold.testing.conformance.rig import Absent, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.paths import child_environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
LONG = {"testing.md"}  # it runs the conformance suite
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))

LANGUAGES = {
    "python",
    "python pytest",
    "text",
    "sh",
    "toml",
    "sql",
    "go",
    "javascript",
    "java",
}  # a misspelt language would not be run

# ------------------------------------------------------------------ reading a page


@dataclass(frozen=True)
class Block:
    line: int  # where its text begins, 1-based
    language: str
    text: str
    reason: str | None = None  # why it is not run
    expected_output: str | None = None  # the output that the page shows

    @property
    def padded(self) -> str:
        """The code, padded so that tracebacks name the line of the page."""
        return "\n" * (self.line - 1) + self.text


FENCE = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<text>.*?)^```$(?P<rest>\s*)", re.M | re.S)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>.+) -->\n\Z")


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    before = None
    for match in FENCE.finditer(text):
        above = NOT_RUN.search(text, 0, match.start())
        block = Block(
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"].strip(),
            text=match["text"],
            reason=above["reason"] if above else None,
        )
        if block.language == "text" and before is not None and before.end() == match.start():
            last = found[-1]
            if last.language == "python" and last.reason is None:
                found[-1] = Block(last.line, last.language, last.text, expected_output=block.text)
        found.append(block)
        before = match
    return found


# --------------------------------------------------------------- running a page

RUNNER = """
import contextlib, gc, io, json, linecache, logging, sys, threading, traceback

page, blocks = json.load(sys.stdin)
trouble, results, namespace = [], [], {"__name__": "__main__"}


class Errors(logging.Handler):
    def emit(self, record):
        trouble.append("logged: " + self.format(record))


logging.getLogger().addHandler(Errors(logging.ERROR))
sys.unraisablehook = lambda it: trouble.append(f"ignored: {it.exc_value!r} in {it.object!r}")
threading.excepthook = lambda it: trouble.append(f"in thread {it.thread.name}: {it.exc_value!r}")

for code in blocks:
    printed, raised = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile(code, page, "exec", dont_inherit=True), namespace)
        except BaseException:
            raised = traceback.format_exc()
    results.append((printed.getvalue(), raised))
    if raised:
        break
namespace.clear()
gc.collect()  # a lease that nobody released warns now
json.dump((results, trouble), sys.stdout)
"""


def environment_of(page: Path) -> dict[str, str]:
    """URLs of the servers that a page needs. Skips if one is not installed."""
    servers = re.findall(r"^<!-- server: (\w+) -->$", page.read_text(encoding="utf-8"), re.M)
    assert servers in ([], ["mysql"], ["postgresql"]), servers
    if not servers:
        return {}
    from harness.rigs import mysql, postgresql

    try:
        if servers == ["mysql"]:
            mariadb = mysql.server.own()
            mariadb.run("drop database if exists leasehold")
            return {"DATABASE_URL": f"mysql://root@127.0.0.1:{mariadb.port}/leasehold"}
        server = postgresql.server.own()
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))
    server.ask("drop schema if exists leasehold cascade")
    return {"DATABASE_URL": server.url()}


def run_page(page: Path, folder: Path) -> Iterator[str]:
    """Run the snippets of a page and yield what is wrong."""
    found, extra_environment = blocks(page), environment_of(page)
    todo = [block for block in found if block.language == "python" and block.reason is None]
    if todo:
        request = json.dumps((str(page), [block.padded for block in todo]))
        done = run_python("-c", RUNNER, folder=folder, stdin=request, **extra_environment)
        if done.returncode:
            yield f"{page.name}: the snippets ended the process: {done.stderr}"
            return
        results, trouble = json.loads(done.stdout)
        for block, (printed, raised) in zip(todo, results, strict=False):  # no results after a block that raised
            yield from output_errors(f"{page.name}:{block.line}", block, printed, raised)
        yield from (f"{page.name}: {problem}" for problem in trouble)
    tests = [block for block in found if block.language == "python pytest" and block.reason is None]
    for block in tests:
        (folder / f"test_line_{block.line}.py").write_text(block.padded, encoding="utf-8")
    if tests:
        done = run_python(
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-p",
            "no:schemathesis",
            ".",
            folder=folder,
        )
        if done.returncode:
            yield f"{page.name}: {done.stdout}{done.stderr}"


def output_errors(where: str, block: Block, printed: str, raised: str | None) -> Iterator[str]:
    if raised:
        yield f"{where}: {raised}"
    elif block.expected_output is None:
        if printed:
            yield f"{where}: prints what the page does not show:\n{printed}"
    elif not doctest.OutputChecker().check_output(
        mask_seconds(block.expected_output), mask_seconds(printed), doctest.ELLIPSIS
    ):
        yield f"{where}: the page shows\n{block.expected_output}but it prints\n{printed}"


def mask_seconds(text: str) -> str:
    """Seconds that a snippet measures depend on the speed of the machine."""
    return re.sub(r"\b\d+\.\d+ s\b", "SECONDS s", text)


def run_python(
    *arguments: str, folder: Path, stdin: str = "", **extra_environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in child_environment().items() if not key.startswith(("PYTEST", "LEASEHOLD"))
    }
    environment |= extra_environment
    if "REDIS_URL" in stdin:
        environment["REDIS_URL"] = f"redis://127.0.0.1:{rig_or_skip(rig_type('redis')).server.port}"
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.extended) if page.name in LONG else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_snippets_run(page, tmp_path):
    found = "\n".join(run_page(page, tmp_path))
    if (absent := re.search(r"rig\.Absent: (.*)", found)) and not os.environ.get("CI"):
        pytest.skip(absent[1])
    assert found == ""


# ----------------------------------------------------------- the format of a page


def format_errors(page: Path) -> Iterator[str]:
    """Errors that the parser above would ignore."""
    found = blocks(page)
    for block in found:
        if block.language not in LANGUAGES:
            yield f"{page.name}:{block.line}: a block of {block.language!r}; known: {', '.join(sorted(LANGUAGES))}"
    text = page.read_text(encoding="utf-8")
    fence_count = len(re.findall(r"^ *(?:```|~~~)", text, re.M))
    if fence_count != 2 * len(found):
        yield f"{page.name}: {fence_count} fences make {len(found)} blocks: indented, or one not closed"
    outside = FENCE.sub("", text)
    skips = len(re.findall("<!-- not run", outside))
    if skips != sum(block.reason is not None for block in found):
        yield f"{page.name}: a `not run` without a reason, or not right above its block"


@each_page
def test_pages_are_well_formed(page):
    assert "\n".join(format_errors(page)) == ""


# ---------------------------------------------------------------------- links

LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def broken_links(page: Path, root: Path) -> Iterator[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))
    for match in LINK.finditer(text):
        target = match["target"]
        if re.match(r"(https?|mailto):", target):
            continue
        file, _, anchor = unquote(target).partition("#")
        target_path = (page.parent / file).resolve() if file else page
        if file.startswith("/") or not target_path.is_relative_to(root) or not target_path.exists():
            yield f"{page.name}: {target} leads nowhere"
        elif anchor and anchor not in anchors(target_path):
            yield f"{page.name}: {target}: no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_page_links_resolve(page):
    assert "\n".join(broken_links(page, ROOT)) == ""


def test_every_page_can_be_reached_from_the_readme():
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        targets = LINK.findall(page.read_text(encoding="utf-8"))
        found = [(page.parent / target.partition("#")[0]).resolve() for target in targets if "://" not in target]
        todo += [target_path for target_path in found if target_path.is_file()]
    assert set(PAGES) <= seen


# ------------------------------------------------------------- the checker can fail

PYTHON, TEXT, END = "```python\n", "```text\n", "```\n"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PYTHON + "1 / 0\n" + END, "ZeroDivisionError"),
        ("\n\n" + PYTHON + "x = 1\nx / 0\n" + END, "line 5"),
        (PYTHON + "print(1)\n" + END, "does not show"),
        (PYTHON + "print(1)\n" + END + "\n" + TEXT + "2\n" + END, "but it prints"),
        (PYTHON + "x = 1\n" + END + TEXT + "2\n" + END, "but it prints"),
        (PYTHON + "import warnings; warnings.warn('old')\n" + END, "UserWarning: old"),
        (PYTHON + "import threading as t; a = t.Thread(target=lambda: 1 / 0)\na.start(); a.join()\n" + END, "ZeroDiv"),
        (PYTHON + "import logging; logging.error('oh')\n" + END, "logged: oh"),
        (PYTHON + "import leasehold\na = leasehold.Client('memory://').lock('a').acquire()\n" + END, "dropped without"),
        (PYTHON + "import os; os._exit(3)\n" + END, "ended the process"),
        pytest.param(
            *("```python pytest\ndef test_a():\n    assert 1 == 2\n" + END, "assert 1 == 2"), marks=pytest.mark.extended
        ),
    ],
    ids=["raises", "line", "unshown", "differs", "silent", "warns", "thread", "logs", "drops", "exits", "test"],
)
def test_failing_snippet_is_reported(tmp_path, text, complaint):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert complaint in "\n".join(run_page(page, tmp_path))


VALID_PAGE = """
```python
x = 1
print("token", id(x), "with 29.9 s left")
```

```text
token ... with 30.0 s left
```

Prose stands between, so that the next block is no output:

```text
anything
```

```python
x += 1
```

<!-- not run: it would fail -->
```python
x / 0
```
"""


def test_valid_snippets_are_not_reported(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(VALID_PAGE)
    assert list(run_page(page, tmp_path)) == list(format_errors(page)) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```py\n" + END, "a block of 'py'"),
        ("- a\n\n  ```python\n  x\n  ```\n", "2 fences make 0 blocks"),
        (PYTHON + "x = 1\n", "1 fences make 0 blocks"),
        ("<!-- not run -->\n" + PYTHON + END, "without a reason"),
        ("<!-- not run: later -->\n\n" + PYTHON + END, "not right above"),
    ],
    ids=["language", "indented", "open", "reason", "apart"],
)
def test_malformed_page_is_reported(tmp_path, text, complaint):
    page = tmp_path / "page.md"
    page.write_text(text)
    assert complaint in "\n".join(format_errors(page))


@pytest.mark.parametrize("target", ["other.md", "#no", "page.md#no", "/page.md", "../outside.md"])
def test_broken_link_is_reported(tmp_path, target):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.md").touch()
    page = root / "page.md"
    page.write_text(f"# Yes, it is\n[a](page.md#yes-it-is), `[b](none.md)`, [c](https://example.org), [d]({target})")
    assert len(list(broken_links(page, root))) == 1
