"""The shape of the source tree: who may import whom, how deep folders go, how long a file gets.

Imports point one way, so that the safety argument of a lock can be read without the faces, the engines or the threads
around it. The tables say what is allowed; everything else is a breach. A new module or package needs a row.
"""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "leasehold"

ANYTHING = {"*"}

_STANDARD = sys.stdlib_module_names | {"_sha2"}  # that since 3.12

# A part of leasehold (a module or a package at the top) -> the parts it may import, besides itself.
# "runtime.base" opens that one module of a package.
ALLOWED = {
    # values
    "model": set(),
    "errors": {"model"},
    "events": {"model", "errors"},
    # pure decisions
    "core": {"errors", "model"},
    "config": {"core", "errors", "events", "model"},
    # the only home of threads and event loops
    "runtime": {"core", "errors", "model"},
    # what the two twins of an engine share, and the seam
    "book": {"core", "errors", "model", "runtime.base"},
    "engine": {"book", "config", "errors", "model", "runtime.base"},
    # the second seam
    "store": set(),
    # the two sides of a seam never meet
    "recipes": {"book", "config", "core", "engine", "errors", "events", "model", "runtime.base", "store"},
    "engines": {
        "book",
        "config",
        "core",
        "engine",
        "errors",
        "model",
        "runtime.base",
        "runtime.loopscatter",
        "runtime.loopstream",
        "runtime.scatter",
        "runtime.streams",
    },
    "stores": {"config", "core", "engines.sqlite.place", "errors", "runtime.base", "store"},  # files have one rule
    # the faces, recipe by recipe
    "locks_blocking": {"config", "errors", "recipes", "runtime.base"},
    "locks_aio": {"config", "recipes"},
    "many_blocking": {"config", "locks_blocking", "model", "recipes", "runtime.base"},
    "many_aio": {"config", "locks_aio", "model", "recipes"},
    "once_blocking": {"core", "events", "model", "recipes", "runtime", "store", "stores"},
    "once_aio": {"core", "events", "model", "recipes", "runtime", "store", "stores"},
    # the clients put them together with the engines
    "blocking": {
        "config",
        "core",
        "engines",
        "locks_blocking",
        "many_blocking",
        "model",
        "once_blocking",
        "recipes",
        "runtime",
    },
    "aio": {"config", "core", "engines", "locks_aio", "many_aio", "model", "once_aio", "recipes", "runtime"},
    "asgi": {"aio", "config", "errors", "recipes", "store"},
    "inside": {"engines", "errors", "recipes"},
    # checks at the protected resource: of the client they know only the lease they are shown
    # but for where the engine of the lock keeps its own keys, if that is to be compared
    "fences": {
        "core",
        "engines.etcd.line",
        "engines.etcd.wire",
        "engines.zookeeper.nodes",
        "errors",
        "runtime.base",
    },
    # values that change by compare-and-set: a face of their own, without a client
    "versioned": {"config", "errors", "events", "fences.gateway", "recipes", "runtime"},
    "current": {"errors"},
    "__init__": ANYTHING,
    # over them, for the shell
    "tie": set(),
    "stories": {"aio", "blocking", "errors", "fences", "tie"},
    "speed": {"blocking", "runtime.base"},
    "cli": {
        "__init__",
        "blocking",
        "config",
        "core",
        "engines",
        "errors",
        "model",
        "recipes",
        "runtime.base",
        "speed",
        "stories",
        "tie",
    },
    "__main__": {"cli"},
    "testing": ANYTHING,
}

THREADS = {"_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
CLOCKS_AND_CHANCE = {"datetime", "random", "secrets", "time", "uuid"}
OUTSIDE = {
    "fcntl",
    "io",
    "os",
    "pathlib",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
}

# A part -> modules of the standard library that it must not import: it gets a runtime, or plain values, instead.
FORBIDDEN = {
    "core": THREADS | CLOCKS_AND_CHANCE | OUTSIDE,
    "recipes": THREADS,
    "engines": THREADS,
    "stores": THREADS,
    "cli": THREADS,
}

# Parts that may import packages from outside the standard library. `import leasehold` loads none of them.
THIRD_PARTY = {"cli", "engines", "fences", "stores", "testing", "versioned"}

MAX_FOLDERS = 2  # below leasehold/: engines/redis/line.py is as deep as it gets
MAX_LINES = 400  # past that, split by idea


@dataclass(frozen=True)
class Import:
    line: int
    module: str  # dotted, in full: leasehold.core.timing


def modules(source: Path) -> dict[str, Path]:
    """Every module below `source`, by its name within leasehold: "core.timing"; a package by its own: "core"."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], source: Path) -> Iterator[Import]:
    """What a file imports, wherever in the file: in functions and for the type checker alone too."""
    package = ("leasehold", *path.relative_to(source).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, node.module) if node.module else above)
            for alias in node.names:
                # `from leasehold.core import timing` imports a module, `from leasehold.core.timing import life` a name.
                module = f"{base}.{alias.name}"
                is_module = module.startswith("leasehold.") and module.removeprefix("leasehold.") in known
                yield Import(node.lineno, module if is_module else base)


def prefixes(module: str) -> list[str]:
    """For "runtime.base": "runtime" and "runtime.base"; a row may name either."""
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def verdict(part: str, imported: str) -> str | None:
    """Why this part must not import that module, or None."""
    top, _, inner = imported.partition(".")
    if top == "leasehold":
        allowed = ALLOWED.get(part, ANYTHING) | {part}
        if allowed.isdisjoint(["*", *prefixes(inner or "__init__")]):
            return f"{part} may not import {imported}"
    elif top in FORBIDDEN.get(part, ()):
        return f"{part} may not import {top}"
    elif top not in _STANDARD and part not in THIRD_PARTY:
        return f"{part} may import only leasehold and the standard library, not {top}"
    return None


def breaches(source: Path) -> list[str]:
    known = modules(source)
    found = []
    for name, path in known.items():
        part = name.partition(".")[0]
        where = path.relative_to(source)
        if part not in ALLOWED:
            found.append(f"{where}: {part} has no row in ALLOWED of tests/test_imports.py")
        for one in imports(path, known, source):
            if why := verdict(part, one.module):
                found.append(f"{where}:{one.line}: {why}")
        if len(where.parts) - 1 > MAX_FOLDERS:
            found.append(f"{where}: more than {MAX_FOLDERS} folders deep")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES:
            found.append(f"{where}: {lines} lines, more than {MAX_LINES}: split it by idea")
    return found


def test_the_source_keeps_the_rules():
    assert modules(SOURCE), f"no source at {SOURCE}"
    assert "\n".join(breaches(SOURCE)) == ""


def test_the_rules_point_one_way():
    graph = {part: {one.partition(".")[0] for one in allowed - ANYTHING} for part, allowed in ALLOWED.items()}
    assert set().union(*graph.values()) <= set(ALLOWED)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/timing.py", "import time", "core/timing.py:1: core may not import time"),
        ("core/timing.py", "def f():\n    from os import path", "core/timing.py:2: core may not import os"),
        ("core/timing.py", "import leasehold.engine", "core/timing.py:1: core may not import leasehold.engine"),
        ("core/timing.py", "from leasehold import Client", "core/timing.py:1: core may not import leasehold"),
        ("core/timing.py", "from leasehold import engine", "core/timing.py:1: core may not import leasehold.engine"),
        ("recipes/lock.py", "import threading", "recipes/lock.py:1: recipes may not import threading"),
        ("recipes/lock.py", "from asyncio import sleep", "recipes/lock.py:1: recipes may not import asyncio"),
        (
            "recipes/lock.py",
            "import concurrent.futures as f",
            "recipes/lock.py:1: recipes may not import concurrent",
        ),
        (
            "recipes/lock.py",
            "from leasehold.engines.memory import open",
            "recipes/lock.py:1: recipes may not import leasehold.engines.memory",
        ),
        (
            "recipes/lock.py",
            "from leasehold.runtime import threads",
            "recipes/lock.py:1: recipes may not import leasehold.runtime.threads",
        ),
        (
            "engines/memory.py",
            "if TYPE_CHECKING:\n    from ..recipes import lock",
            "engines/memory.py:2: engines may not import leasehold.recipes.lock",
        ),
        ("engines/memory.py", "import _thread", "engines/memory.py:1: engines may not import _thread"),
        ("runtime/base.py", "from .. import aio", "runtime/base.py:1: runtime may not import leasehold.aio"),
        ("model.py", "from leasehold import errors", "model.py:1: model may not import leasehold.errors"),
        (
            "aio.py",
            "import redis.asyncio",
            "aio.py:1: aio may import only leasehold and the standard library, not redis",
        ),
        ("extra.py", "", "extra.py: extra has no row in ALLOWED of tests/test_imports.py"),
        ("engines/a/b/c.py", "", "engines/a/b/c.py: more than 2 folders deep"),
        ("core/long.py", "x = 1\n" * 401, "core/long.py: 401 lines, more than 400: split it by idea"),
    ],
)
def test_a_breach_is_found(tmp_path, file, text, complaint):
    plant(tmp_path, file, text)
    assert breaches(tmp_path) == [complaint]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/timing.py", "import math\nfrom leasehold.core import names\nfrom leasehold.model import Claim"),
        ("recipes/lock.py", "from leasehold.runtime import base\nfrom leasehold.runtime.base import Runtime"),
        ("engines/memory.py", "import redis\nfrom leasehold import engine, model"),
        ("engines/redis/line.py", "from leasehold.engines.redis import wire"),
        ("runtime/loop.py", "import asyncio\nimport threading\nimport time"),
        ("testing/rig.py", "import pytest\nfrom leasehold import Client\nfrom leasehold.recipes import lock"),
        ("core/long.py", "x = 1\n" * 400),
    ],
)
def test_what_is_allowed_passes(tmp_path, file, text):
    plant(tmp_path, file, text)
    assert breaches(tmp_path) == []


def plant(source: Path, file: str, text: str) -> None:
    """A tree with the names the tests above import, and one file of interest."""
    for each in ("aio", "engine", "errors", "model", "core/names", "recipes/lock", "runtime/base", "runtime/threads"):
        path = source / f"{each}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (source / file).parent.mkdir(parents=True, exist_ok=True)
    (source / file).write_text(text)


def test_importing_leasehold_loads_the_standard_library_only():
    code = "import sys; before = set(sys.modules); import leasehold; print(*sorted(set(sys.modules) - before))"
    # A tracer that follows child processes imports modules of its own: not ours to answer for.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "leasehold" in loaded
    assert loaded - _STANDARD == {"leasehold"}


def test_the_tests_meet_the_installed_wheel():
    import leasehold

    assert not Path(leasehold.__file__).is_relative_to(SOURCE), "this ran on ./src, not on the wheel: use `make test`"
