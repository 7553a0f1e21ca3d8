"""The SQLite engine compared with two bare transactions of equal durability and with file locks; then hand-offs.

`python -m bench sqlite`. Packages that are not installed are left out: filelock, sherlock.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.cases import Notes, Part, Table, repeat_with, usable_peers
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "sqlite: acquire + release, against two bare immediate transactions of equal durability (aim: at most 1.5)"
TITLE_QUICK = "sqlite with durable=no: the same, the bare ones with synchronous=NORMAL too"
TITLE_HAND_OFF = "sqlite hand-off: released in one process until held in another, against filelock"


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
    yield BenchCase("leasehold sqlite://, with", repeat_with(ours), times)

    def awaited(times: int) -> None:
        import asyncio

        async def main() -> None:
            async with AsyncClient(f"sqlite://{folder}/ours.db{options}") as client:
                lock = client.lock("bench")
                for _ in range(times):
                    async with lock:
                        pass

        asyncio.run(main())

    yield BenchCase("leasehold sqlite://, async with", awaited, times)
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

    yield from usable_peers({"filelock: no lease, no token, no queue": filelock, "sherlock's file lock": sherlock})


# ------------------------------------------------------------------ hand-off


def lock_of(kind: str, folder: str) -> Any:
    if kind == "filelock":
        from filelock import FileLock

        return FileLock(f"{folder}/hand-off", poll_interval=0.05)  # filelock's default
    return Client(f"sqlite://{folder}/{kind}.db{'?durable=no' if kind == 'quick' else ''}").lock("bench")


def waiter_process(kind: str, folder: str, pipe: Any) -> None:
    lock = lock_of(kind, folder)
    while pipe.recv():
        with lock:
            pipe.send(time.clock_gettime(time.CLOCK_BOOTTIME))


def hand_offs(kind: str, folder: str) -> Callable[[int], float]:
    """Return a function that hands over a given number of times and returns how long each took."""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=waiter_process, args=(kind, folder, there), daemon=True).start()
    lock = lock_of(kind, folder)

    def run(times: int) -> float:
        durations = []
        for _ in range(times):
            with lock:
                here.send(True)
                time.sleep(0.02)  # the other process is queued by now
                began = time.clock_gettime(time.CLOCK_BOOTTIME)
            durations.append(here.recv() - began)
        return sorted(durations)[len(durations) // 2]

    run(3)
    return run


def hand_off_table(rounds: int) -> Notes:
    with tempfile.TemporaryDirectory() as folder:
        kinds = ["ours", "quick"]
        with contextlib.suppress(ImportError):
            import filelock  # noqa: F401

            kinds.append("filelock")
        runs = {kind: hand_offs(kind, folder) for kind in kinds}
        medians: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                medians[kind].append(runs[kind](5))
    lines = []
    names = {"ours": "leasehold sqlite://", "quick": "leasehold sqlite://?durable=no", "filelock": "filelock (polls)"}
    for kind, found in medians.items():
        base = medians.get("filelock", found)
        ratio = sorted(mine / its for mine, its in zip(found, base, strict=True))[len(found) // 2]
        lines.append(f"{names[kind]:<44} {sorted(found)[len(found) // 2] * 1e6:>7.0f} us {ratio:>8.3f}")
    return Notes(TITLE_HAND_OFF, lines)


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield Table(TITLE_QUICK, run_quick(rounds))
    yield hand_off_table(rounds)
