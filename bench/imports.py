"""The cost of `import`: a new interpreter that imports the package, compared with one that imports nothing.

`python -m bench imports`. A driver is imported with the first client of its engine, not with the package.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory

from bench.cases import Aim, Aims, Part, Table, ratio_of
from leasehold.cli.bench.measurement import BenchCase, measure

TITLE = "import: a fresh interpreter, against one that imports nothing"
_RUN = "leasehold run NAME -- true, SQLite"
PEERS = ("redis", "redis.asyncio", "kazoo.client", "psycopg", "filelock", "sqlalchemy")


def import_in_new_interpreter(statement: str) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            subprocess.run([sys.executable, "-c", statement], check=True)

    return run


def run_true(times: int) -> None:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "leasehold", "-u", f"sqlite://{folder}/locks.db", "run", "job", "--", "true"]
        for _ in range(times):
            subprocess.run(command, check=True)


def parts(rounds: int) -> Iterator[Part]:
    cases = [
        BenchCase("nothing", import_in_new_interpreter("pass"), 3),
        BenchCase("asyncio", import_in_new_interpreter("import asyncio"), 3),
    ]
    cases += [BenchCase("leasehold", import_in_new_interpreter("import leasehold"), 3)]
    cases += [BenchCase(_RUN, run_true, 3)]
    for name in PEERS:
        if subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, check=False).returncode == 0:
            cases.append(BenchCase(name, import_in_new_interpreter(f"import {name}"), 3))
    results = measure(cases, rounds)
    yield Table(TITLE, results)
    (milliseconds,) = [result.micros / 1000 for result in results if result.name == "leasehold"]
    yield Aims(
        "import: aims",
        [
            Aim("import leasehold, in a fresh interpreter", milliseconds, 45.0, unit=" ms"),
            Aim(
                "leasehold run NAME -- true, against an interpreter that imports nothing",
                ratio_of(results, _RUN, "nothing"),
                4,
            ),
        ],
    )
