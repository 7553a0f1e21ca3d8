"""The SQLite engine compared with two bare transactions of equal durability and with file locks.

`python -m bench sqlite`. Packages that are not installed are left out: filelock, sherlock.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.cases import Aim, Aims, Part, Table, ratio_of, repeat_with, usable_peers
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "sqlite: acquire + release, against two bare immediate transactions of equal durability (aim: at most 1.5)"
TITLE_QUICK = "sqlite with durable=no: the same, the bare ones with synchronous=NORMAL too"
_OURS, _OURS_ASYNC = "leasehold sqlite://, with", "leasehold sqlite://, async with"
_FILELOCK = "filelock: no lease, no token, no queue"


def run(rounds: int) -> list[BenchResult]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(list(pairs(folder, "", "normal", 300)), rounds)  # a plain grant does not wait for the disk


def run_quick(rounds: int) -> list[BenchResult]:
    with tempfile.TemporaryDirectory() as folder:
        return measure(list(pairs(folder, "?durable=no", "normal", 300)), rounds)


def pairs(folder: str, options: str, synchronous: str, times: int) -> Iterator[BenchCase]:
    db = sqlite3.connect(f"{folder}/bare.db", isolation_level=None)
    db.execute("pragma journal_mode = wal")
    db.execute(f"pragma synchronous = {synchronous}")
    db.execute("create table held (name text primary key, until real) without rowid")

    def bare(times: int) -> None:
        for _ in range(times):
            db.execute("begin immediate")
            db.execute("insert into held values ('bench', 1)")
            db.execute("commit")
            db.execute("begin immediate")
            db.execute("delete from held where name = 'bench'")
            db.execute("commit")

    yield BenchCase("two bare immediate transactions", bare, times)
    ours = Client(f"sqlite://{folder}/ours.db{options}").lock("bench")
    yield BenchCase(_OURS, repeat_with(ours), times)

    def awaited(times: int) -> None:
        import asyncio

        async def main() -> None:
            async with AsyncClient(f"sqlite://{folder}/ours.db{options}") as client:
                lock = client.lock("bench")
                for _ in range(times):
                    async with lock:
                        pass

        asyncio.run(main())

    yield BenchCase(_OURS_ASYNC, awaited, times)
    for name, lock in peers(folder):
        yield BenchCase(name, repeat_with(lock), 300)


def peers(folder: str) -> Iterator[tuple[str, Any]]:
    def filelock() -> Any:
        from filelock import FileLock

        return FileLock(f"{folder}/filelock")

    def sherlock() -> Any:
        import sherlock

        sherlock.configure(backend=sherlock.backends.FILE, expire=60)
        return sherlock.FileLock("bench", client=Path(folder))

    yield from usable_peers({_FILELOCK: filelock, "sherlock's file lock": sherlock})


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    yield Table(TITLE_QUICK, run_quick(rounds))
    yield Aims(
        "sqlite: aims",
        [
            Aim("SQLite: pair, against filelock", ratio_of(results, _OURS, _FILELOCK), 0.9),
            Aim("SQLite: asyncio pair, against the blocking one", ratio_of(results, _OURS_ASYNC, _OURS), 1.4),
        ],
    )
