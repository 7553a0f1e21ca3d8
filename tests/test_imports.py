"""The source tree's structure: which parts may import which, how deep folders go, how long a file gets.

Imports point one way, so that the safety argument of a lock can be read without the APIs, the engines or the threads
around it. The tables list what is allowed; everything else fails. A new module or package needs a row.
"""

import ast
import graphlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "leasehold"
HARNESS = ROOT / "harness"

ANY_PART = {"*"}

_STANDARD = sys.stdlib_module_names | {"_sha2"}  # `_sha2` since 3.12

# A part of leasehold (a module or package at the top) -> the parts it may import, apart from itself.
# "runtime.base" allows just that module of a package.
ALLOWED = {
    "_version": set(),  # written when the package is built
    # values
    "model": set(),
    "errors": {"model"},
    # files that other users may try to swap
    "files": {"errors"},
    "events": {"model", "errors"},
    # pure decisions
    "core": {"errors", "model"},
    # passwords that change, and connection pools as a source of settings
    "credentials": {"errors", "files", "runtime.base"},
    "pools": {"credentials", "errors"},
    "config": {"core", "credentials", "errors", "events", "model"},
    # the trace of a call, and the log lines of events
    "tracing": set(),
    "log_lines": {"core.texts", "events", "tracing"},
    # the only home of threads and event loops
    "runtime": {"core", "errors", "model"},
    # the engine interface and the engines: never the client
    "engines": {
        "config",
        "core",
        "credentials",
        "errors",
        "files",
        "model",
        "runtime.base",
        "runtime.net",
        "runtime.polling",
        "tracing",
    },
    # SQL through drivers that the caller chose
    "dbapi": {"errors", "runtime.base"},
    # what both APIs share: of the engines, only the interface
    "client": {
        "config",
        "core",
        "credentials",
        "engines.base",
        "engines.registry",
        "errors",
        "events",
        "log_lines",
        "model",
        "pools",
        "runtime.base",
    },
    # decided by records, not by locks
    "records": {
        "client",
        "config",
        "core",
        "credentials",
        "dbapi",
        "engines.base",
        "engines.etcd",  # stores use the connections of the engines
        "engines.mysql",
        "engines.postgresql.relay",
        "engines.redis",
        "engines.sqlite.location",  # both resolve file paths the same way
        "engines.zookeeper",
        "errors",
        "events",
        "model",
        "runtime.base",
        "runtime.net.host_names",
    },
    # the two APIs combine clients, records and engines
    "blocking": {"client", "config", "core", "engines", "errors", "events", "model", "records", "runtime"},
    "aio": {"client", "config", "core", "engines", "errors", "events", "model", "records", "runtime"},
    "transaction": {"client", "dbapi", "engines", "errors", "runtime.base"},
    # HTTP: idempotency keys, fences for services
    "http": {
        "aio",
        "blocking",
        "client",
        "config",
        "core",
        "errors",
        "fences.rules",
        "fences.token_file",
        "fences.urllib_client",
        "files",
        "records",
        "runtime.base",
    },
    # adapters on the event hook: they know events, not the client
    "telemetry": {
        "__init__",
        "config",
        "core.texts",
        "engines",
        "errors",
        "events",
        "files",
        "log_lines",
        "model",
        "runtime",
        "tracing",
    },
    # the engine over HTTP: of what clients use, only the engines
    "server": {
        "config",
        "core",
        "engines",
        "__init__",
        "errors",
        "events",
        "fences.token_file",
        "files",
        "model",
        "runtime",
        "telemetry",
        "tracing",
    },
    # checks at the protected resource: of the client they know only the lease they are given.
    # Exception: lock fences need to know where the engine keeps the lock's key.
    "fences": {
        "config",
        "core",
        "dbapi",
        "engines.etcd.messages",
        "engines.etcd.queue",
        "engines.zookeeper.nodes",
        "errors",
        "events",
        "files",
        "log_lines",
        "runtime.base",
        "runtime.net.http_client",
    },
    "environment": {"aio", "blocking", "client", "config", "core", "errors"},
    # short public paths to names defined elsewhere
    "asgi": {"http"},
    "stores": {"records"},
    "wsgi": {"http"},
    "versioned": {"aio", "blocking", "records"},
    "__init__": ANY_PART,
    # frameworks: each module imports its own
    "integrations": {
        "__init__",
        "aio",
        "blocking",
        "cli",
        "client",
        "config",
        "core",
        "errors",
        "http",
        "runtime.base",
        "versioned",
    },
    # the command line, on top of everything
    "cli": {
        "__init__",
        "aio",
        "blocking",
        "client",
        "config",
        "core",
        "engines",
        "errors",
        "events",
        "fences",
        "files",
        "model",
        "runtime.base",
        "runtime.net",
        "server",
        "telemetry",
    },
    "__main__": {"cli"},
    "testing": ANY_PART,
}

THREADS = {"_thread", "asyncio", "concurrent", "multiprocessing", "queue", "threading"}
CLOCKS_AND_RANDOMNESS = {"datetime", "random", "secrets", "time", "uuid"}
IO_MODULES = {
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

# A part -> standard library modules that it must not import: it gets a runtime or plain values instead.
FORBIDDEN = {
    "core": THREADS | CLOCKS_AND_RANDOMNESS | IO_MODULES,
    "client": THREADS,
    "engines": THREADS,
    "records": THREADS,
    "cli": THREADS,
}

# Separate programs that a command starts: they may use threads and event loops.
PROGRAMS = ("cli.bench", "cli.demo")

# A package whose __init__ also offers, lazily, names of parts above it.
FACADES = {"fences"}

# Parts that may import third-party packages. `import leasehold` loads none of them.
THIRD_PARTY = {"cli", "engines", "fences", "integrations", "pools", "records", "server", "telemetry", "testing"}

MAX_FOLDERS = 3  # below leasehold/: engines/etcd/grpc/frames.py is as deep as it gets
DJANGO_COMMANDS = "management/commands"  # where Django looks for the commands of an application
MAX_LINES = 700  # a longer file has two ideas in it


@dataclass(frozen=True)
class Import:
    line: int
    module: str  # full dotted name: leasehold.core.timing


def modules(source: Path) -> dict[str, Path]:
    """Every module below `source`, keyed by its name within leasehold: "core.timing", or "core" for a package."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def imports(path: Path, known: dict[str, Path], source: Path) -> Iterator[Import]:
    """All imports of a file, including those in functions and for the type checker only."""
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
    """Why this part must not import that module, or None if it may."""
    top, _, inner = imported.partition(".")
    if top == "leasehold":
        allowed = ALLOWED.get(part, ANY_PART) | {part}
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
        for imported in imports(path, known, source):
            if name in FACADES and imported.module.startswith("leasehold."):
                continue
            if name.startswith(PROGRAMS) and imported.module.partition(".")[0] in THREADS:
                continue
            if why := verdict(part, imported.module):
                found.append(f"{where}:{imported.line}: {why}")
        if len(where.parts) - 1 > MAX_FOLDERS and DJANGO_COMMANDS not in str(where):
            found.append(f"{where}: more than {MAX_FOLDERS} folders deep")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES:
            found.append(f"{where}: {lines} lines, more than {MAX_LINES}: split it by idea")
    return found


def test_source_tree_obeys_the_import_rules():
    assert modules(SOURCE), f"no source at {SOURCE}"
    assert "\n".join(breaches(SOURCE)) == ""


def test_import_rules_have_no_cycles():
    graph = {
        part: {allowed_part.partition(".")[0] for allowed_part in allowed - ANY_PART}
        for part, allowed in ALLOWED.items()
    }
    assert set().union(*graph.values()) <= set(ALLOWED)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("core/timing.py", "import time", "core/timing.py:1: core may not import time"),
        ("core/timing.py", "def f():\n    from os import path", "core/timing.py:2: core may not import os"),
        (
            "core/timing.py",
            "import leasehold.engines.base",
            "core/timing.py:1: core may not import leasehold.engines.base",
        ),
        ("core/timing.py", "from leasehold import Client", "core/timing.py:1: core may not import leasehold"),
        (
            "core/timing.py",
            "from leasehold.engines import base",
            "core/timing.py:1: core may not import leasehold.engines.base",
        ),
        ("client/lock.py", "import threading", "client/lock.py:1: client may not import threading"),
        ("client/lock.py", "from asyncio import sleep", "client/lock.py:1: client may not import asyncio"),
        (
            "client/lock.py",
            "import concurrent.futures as f",
            "client/lock.py:1: client may not import concurrent",
        ),
        (
            "client/lock.py",
            "from leasehold.engines.memory import open",
            "client/lock.py:1: client may not import leasehold.engines.memory",
        ),
        (
            "client/lock.py",
            "from leasehold.runtime import threads",
            "client/lock.py:1: client may not import leasehold.runtime.threads",
        ),
        (
            "engines/memory.py",
            "if TYPE_CHECKING:\n    from ..client import lock",
            "engines/memory.py:2: engines may not import leasehold.client.lock",
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
        ("engines/a/b/c/d.py", "", "engines/a/b/c/d.py: more than 3 folders deep"),
        ("core/long.py", "x = 1\n" * 701, "core/long.py: 701 lines, more than 700: split it by idea"),
    ],
)
def test_rule_breach_is_reported(tmp_path, file, text, complaint):
    make_source_tree(tmp_path, file, text)
    assert breaches(tmp_path) == [complaint]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/timing.py", "import math\nfrom leasehold.core import names\nfrom leasehold.model import Claim"),
        ("client/lock.py", "from leasehold.runtime import base\nfrom leasehold.runtime.base import Runtime"),
        ("engines/memory.py", "import redis\nfrom leasehold import model\nfrom leasehold.engines import base"),
        ("engines/redis/engine.py", "from leasehold.engines.redis import connections"),
        ("runtime/loop.py", "import asyncio\nimport threading\nimport time"),
        ("testing/rig.py", "import pytest\nfrom leasehold import Client\nfrom leasehold.client import lock"),
        ("core/long.py", "x = 1\n" * 700),
    ],
)
def test_allowed_import_is_not_reported(tmp_path, file, text):
    make_source_tree(tmp_path, file, text)
    assert breaches(tmp_path) == []


def unlisted(package: Path) -> list[str]:
    """The files and packages in a package that the docstring of its `__init__.py` does not name."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    names = [path.name for path in package.iterdir() if path.suffix in (".py", ".lua", ".sql")]
    names += [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    listed = set(re.findall(r"\w+(?:\.\w+|/)", docstring))
    return [f"{package.name}/: {name}" for name in sorted(names) if name[:2] != "__" and name not in listed]


def test_docstring_of_each_package_lists_its_modules():
    packages = [path.parent for path in (*SOURCE.glob("*/**/__init__.py"), *HARNESS.rglob("__init__.py"))]
    assert len(packages) > 30
    found = [name for package in packages if "management" not in package.parts for name in unlisted(package)]
    assert "\n".join(found) == ""


def test_module_that_its_package_does_not_list_is_reported(tmp_path):
    (tmp_path / "__init__.py").write_text('"""A package.\n\nlisted.py  a module\n"""')
    for name in ("listed.py", "unlisted.py", "script.lua", "__main__.py"):
        (tmp_path / name).touch()
    assert unlisted(tmp_path) == [f"{tmp_path.name}/: script.lua", f"{tmp_path.name}/: unlisted.py"]


def make_source_tree(source: Path, file: str, text: str) -> None:
    """Create a tree with the names that the tests above import, and one file to check."""
    for name in (
        "aio",
        "errors",
        "model",
        "client/lock",
        "core/names",
        "engines/base",
        "runtime/base",
        "runtime/threads",
    ):
        path = source / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    (source / file).parent.mkdir(parents=True, exist_ok=True)
    (source / file).write_text(text)


def test_nothing_in_the_wheel_imports_the_harness():
    known = modules(SOURCE)
    assert [
        f"{name}:{imported.line}"
        for name, path in known.items()
        for imported in imports(path, known, SOURCE)
        if imported.module.partition(".")[0] in {"harness", "tests", "bench", "comparison"}
    ] == []


def test_import_leasehold_loads_standard_library_only():
    code = "import sys; before = set(sys.modules); import leasehold; print(*sorted(set(sys.modules) - before))"
    # A tracer that follows child processes imports its own modules, which do not count.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "leasehold" in loaded
    assert loaded - _STANDARD == {"leasehold"}


# What a program that only locks names, in blocking mode, does without.
NOT_FOR_LOCKS = {
    "asyncio",
    "concurrent.futures",
    "dataclasses",  # loads inspect, and generates the code of each class at every start
    "hashlib",  # loads OpenSSL
    "importlib.metadata",
    "inspect",  # loads ast, dis and tokenize
    "secrets",  # loads hashlib
    "ssl",
    "subprocess",
    "tempfile",
    "leasehold.aio",
    "leasehold.blocking.groups",
    "leasehold.blocking.records",
    "leasehold.client.any_of",
    "leasehold.client.election",
    "leasehold.client.lease_document",
    "leasehold.client.multilock",
    "leasehold.core.once",
    "leasehold.dbapi",
    "leasehold.fences",
    "leasehold.pools",
    "leasehold.records",
    "leasehold.server",
    "leasehold.telemetry.metrics",
}


def loaded_by(code: str, *arguments: str) -> set[str]:
    """The modules that a new interpreter has loaded after this code."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(done.stdout.split())


def test_import_leasehold_loads_only_what_locks_need():
    loaded = loaded_by("import leasehold")
    assert "leasehold.blocking.locks" in loaded
    needless = {"leasehold.core.lock_state", "json", "selectors", "socket", "urllib.parse"}
    assert loaded & (NOT_FOR_LOCKS | needless) == set()


@pytest.mark.skipif(sys.platform == "win32", reason="the program needs Linux or macOS")
def test_run_on_sqlite_loads_only_what_run_needs(tmp_path):
    """A cron job starts it every minute."""
    code = "from leasehold.cli.app import start\nassert start(sys.argv[1:]) == 0"
    loaded = loaded_by(code, "-u", f"sqlite://{tmp_path}/locks.db", "run", "job", "--", "true")
    assert "leasehold.engines.sqlite.engine" in loaded
    needless = NOT_FOR_LOCKS - ({"subprocess"} if sys.platform == "darwin" else set())  # which starts sysctl there
    assert loaded & (needless | {"click"}) == set()
    commands = {path.stem for path in (SOURCE / "cli").glob("*.py")} | {"bench", "demo", "doctor", "top"}
    commands -= {"__init__", "app", "console", "exit_codes", "option", "options", "quick", "render"}
    assert loaded & {f"leasehold.cli.{name}" for name in commands} == set()


def test_names_that_are_loaded_late_are_found_like_all_others():
    code = "import leasehold, leasehold.blocking\nbefore = set(dir(leasehold))"
    code += "\nfrom leasehold import *\nfrom leasehold.blocking import *"
    code += "\nassert set(leasehold.__all__) <= before\nassert MultiLock is leasehold.blocking.groups.MultiLock"
    code += "\nassert Schedule is leasehold.Schedule is leasehold.blocking.records.Schedule"
    assert "leasehold.aio" in loaded_by(code)


def test_tests_run_against_the_installed_wheel():
    import leasehold

    assert not Path(leasehold.__file__).is_relative_to(SOURCE), "this ran on ./src, not on the wheel: use `make test`"
