"""The health of a SQLite file: whether it can be written now, how long that takes, and the room that is left.

The write leaves no trace: one transaction inserts a row and deletes it. Without it a full disk would go unnoticed,
because SQLite still reads then.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from leasehold.config import EngineConfig, parse_yes_no
from leasehold.core.timing import backoff
from leasehold.engines.probe import Health, MemberHealth, Storage, WeakSetting, filesystem
from leasehold.engines.sqlite import location
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.connection import DatabaseLocked, SqliteConnection
from leasehold.engines.sqlite.schema import write_nothing
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime

_RETRY_BASE: Final = 0.001
_LONGEST_RETRY: Final = 0.05
_ENGINE: Final = "sqlite"


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    options = config.accept(durable=parse_yes_no, trust_folder=parse_yes_no)
    path, durable = location.resolve_path(config.target), options.get("durable", True)
    trust_folder = options.get("trust_folder", False)
    connection = SqliteConnection(path, durable, BootClock.of_this_machine(), runtime, trust_folder=trust_folder)
    error: str | None = None
    read_seconds = write_seconds = None
    try:
        read_seconds = await _timed(connection, _read, runtime, deadline, write=False)
        write_seconds = await _timed(connection, write_nothing, runtime, deadline, write=True)
    except LeaseholdError as failure:
        error = str(failure)
    finally:
        await runtime.call(connection.close)
    member = MemberHealth(
        path,
        up=read_seconds is not None,
        error=error,
        round_trip=read_seconds,
        role="standalone",
        version=sqlite3.sqlite_version,
        storage=await runtime.call(_storage, path),
        disk_seconds=write_seconds,
        findings=(*(() if durable else (_NOT_DURABLE,)), *await runtime.call(_readable, path)),
    )
    up = write_seconds is not None
    return Health(_ENGINE, up, (member,), has_leader=True, voting=1, reachable=int(up), error=error)


_NOT_DURABLE: Final = WeakSetting(
    "synchronous", "OFF", "a power cut may free locks: remove durable=no from the URL to wait for the disk"
)


def _readable(path: str) -> tuple[WeakSetting, ...]:
    """Leasehold makes no such file, but the application that the file belongs to may have. SQLite gives its mode to the
    shared memory, and a lock there needs no more than the right to read it."""
    try:
        file = Path(path).resolve(strict=True)  # a link may lead to another folder
        mode = stat.S_IMODE(file.stat().st_mode)
        reachable = all(folder.stat().st_mode & stat.S_IXOTH for folder in file.parents)
    except OSError:
        return ()
    if not (reachable and mode & stat.S_IROTH):
        return ()
    advice = "any user of this machine can see the locks and keep all others from locking: chmod o-r the file"
    return (WeakSetting("mode of the file", f"{mode:04o}", advice),)


def _read(db: sqlite3.Connection) -> None:
    db.execute("pragma schema_version").fetchone()


async def _timed(
    connection: SqliteConnection,
    job: Callable[[sqlite3.Connection], None],
    runtime: Runtime,
    deadline: float,
    *,
    write: bool,
) -> float:
    """The seconds that the transaction took, without the time that other processes had the file locked."""
    tries = 0
    while True:
        began = runtime.now()
        try:
            await runtime.call(connection.run_transaction, job, deadline, write=write, sync=write)
        except DatabaseLocked:
            left, tries = deadline - runtime.now(), tries + 1
            if left <= 0:
                raise Unavailable(f"{connection.path} was locked until the deadline", engine=_ENGINE) from None
            pause = backoff(min(tries, 6), _RETRY_BASE, _LONGEST_RETRY, 0.5 + runtime.random() / 2)
            await runtime.sleep(min(pause, left))
        else:
            return runtime.now() - began


def _storage(path: str) -> tuple[Storage, ...]:
    found = [filesystem(os.path.dirname(path))]
    for store, suffix in (("database", ""), ("wal", "-wal")):
        try:
            found.append(Storage(store, os.stat(path + suffix).st_size))
        except OSError:
            found.append(None)  # the log exists only while a process has the file open
    return tuple(each for each in found if each is not None)
