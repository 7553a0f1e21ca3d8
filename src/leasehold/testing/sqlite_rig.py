"""The rig of the SQLite engine: a real file, real sockets, and a clock that jumps.

There is no server to part a client from, so `cut` and `pause` keep transactions from beginning, as a process that is
stopped inside its own does (that very fault, with real processes, is in tests/engines/test_sqlite_processes.py).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from typing import ClassVar

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.sqlite.engine import SqliteEngine
from leasehold.engines.sqlite.file import File, Occupied
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.mail import Mail
from leasehold.runtime.base import Runtime
from leasehold.runtime.threads import boot_clock
from leasehold.testing.rig import Machine, Rig

_QUICK = "/dev/shm"  # noqa: S108  # a disk on which FULL durability costs nothing


class SqliteRig(Rig):
    scheme = "sqlite"
    ttl: ClassVar[float] = 10.0  # travelled, not waited for
    can_cut = can_pause = can_kill = can_travel = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.mkdtemp(prefix="leasehold-", dir=_QUICK if os.path.isdir(_QUICK) else None)
        self.path = os.path.join(self._folder, "locks.db")
        self._offset = 0.0
        self.paused = False
        here = Host.here()
        self.host = Host(here.machine, here.boot, here.namespace, self.clock)

    def machine(self) -> Machine:
        return SqliteMachine(self)

    def machines(self) -> list[SqliteMachine]:
        return [machine for _, machine in self._machines if isinstance(machine, SqliteMachine)]

    def clock(self) -> float:
        return boot_clock() + self._offset

    def travel(self, seconds: float) -> None:
        self._offset += seconds
        for machine in self.machines():
            machine.stir()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def restart(self) -> None:
        """Every connection is gone, and the file is opened anew."""
        for machine in self.machines():
            for file in machine.files:
                file.close()

    def residue(self, namespace: str) -> int:
        if not os.path.exists(self.path):
            return 0
        db = sqlite3.connect(self.path)
        try:
            counts = (
                db.execute(f"select count(*) from {table} where namespace = ?", (namespace,)).fetchone()[0]  # noqa: S608
                for table in ("lh_grant", "lh_waiter", "lh_line")
            )
            return sum(counts)
        finally:
            db.close()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RigFile(File):
    """A file whose transactions can be kept from beginning."""

    def __init__(self, machine: SqliteMachine, runtime: Runtime) -> None:
        super().__init__(machine.rig.path, True, machine.rig.host, runtime)
        self._machine = machine

    def _ready(self) -> sqlite3.Connection:
        if self._machine.silent:
            raise Occupied
        return super()._ready()


class SqliteMachine(Machine):
    """One client: its twins' connections, and its mailbox."""

    def __init__(self, rig: SqliteRig) -> None:
        super().__init__(f"sqlite://{rig.path}", self._open)
        self.rig = rig
        self.severed = False
        self.files: list[RigFile] = []
        self._mails: dict[Book, Mail] = {}

    @property
    def silent(self) -> bool:
        return self.severed or self.rig.paused

    def _open(self, config: EngineConfig, runtime: Runtime, book: Book) -> SqliteEngine:
        config.accept()
        if book not in self._mails:
            self._mails[book] = Mail(self.rig.path, runtime, book)
            heard = book.deliver
            book.deliver = lambda *word: None if self.silent else heard(*word)  # type: ignore[method-assign]
        self.files.append(RigFile(self, runtime))
        return SqliteEngine(runtime, book, self.files[-1], self._mails[book])

    def cut(self) -> None:
        self.severed = True

    def mend(self) -> None:
        self.severed = False

    def kill_session(self) -> None:
        for mail in self._mails.values():
            mail.lose()

    def stir(self) -> None:
        """The clock has jumped: whoever sleeps on it looks at it again."""
        for book in self._mails:
            book.stir(0.0)
            for waiter in list(book.waiting.values()):
                waiter.signal.set()

    def close(self) -> None:
        for file in self.files:
            file.close()
        for mail in self._mails.values():
            mail.close()
