"""One twin's connection to the file: opened when first needed, one transaction at a time, its errors mapped (E9).

No connection is carried across a fork. SQLite has its POSIX locks per process but its idea of them in memory, per file:
a child that inherits a connection, even if it never uses it and opens its own, believes in locks it does not have; once
the parent closes, the log is removed beneath the child, and the two go on in worlds of their own (ran: each saw writes
the other did not). So every connection is closed just before a fork, between transactions, and both sides open anew.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar
from weakref import WeakSet

from leasehold.engines.sqlite import place
from leasehold.engines.sqlite.host import Host
from leasehold.errors import ConfigError, LeaseholdError, Reentered, Unavailable
from leasehold.runtime.base import Guard, Runtime

_log = logging.getLogger("leasehold.sqlite")

T = TypeVar("T")

_TO_FINISH: Final = 5.0  # how long a fork waits for another thread's transaction
_LOOK_EVERY: Final = 0.1
_OCCUPIED: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_BROKEN: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_DENIED: Final = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)

_KEPT: list[sqlite3.Connection] = []  # for ever: closing these could remove files that others use
_TORN: set[str] = set()  # files with a connection inherited from a parent: SQLite cannot be trusted with them here


class Occupied(Exception):
    """Another process is inside its transaction: ask again. Never leaves the engine."""


class Moved(Exception):
    """The file belongs to another clock than when it was opened: open it anew. Never leaves the engine."""


class File:
    def __init__(self, path: str, durable: bool, host: Host, runtime: Runtime) -> None:
        self._db: sqlite3.Connection | None = None
        self.path, self.durable, self.host = path, durable, host
        self._runtime = runtime
        self._nodes: list[tuple[int, int]] = []  # which files were opened: their paths may name others by now
        self._synced: bool | None = None  # whether the connection waits for the disk at each commit
        self._look_at = 0.0
        self._frozen = False
        self._guard: Guard = runtime.guard()
        _FILES.add(self)

    def once(self, job: Callable[[sqlite3.Connection], T], write: bool = True, sync: bool = True) -> T:
        """Run `job` as one transaction, all or nothing. Raises Occupied rather than wait.

        `sync=False`: a power cut may undo it (the next that syncs keeps it too), so it does not wait for the disk.
        """
        if self._guard.mine():  # a finaliser or signal handler, in the midst of this very thread's transaction:
            raise Reentered  # to wait for that would keep the whole machine waiting, and in vain
        with self._guard:
            try:
                db = self._ready()
                self._sync(db, sync and self.durable)
                return self._transaction(db, job, write)
            except sqlite3.Error as error:
                raise self._meaning(error) from error
            except (OverflowError, UnicodeError) as error:
                raise ConfigError(f"SQLite cannot store what was asked for: {error}") from error
            except Moved:
                self._let_go()
                raise Occupied from None

    def _transaction(self, db: sqlite3.Connection, job: Callable[[sqlite3.Connection], T], write: bool) -> T:
        try:
            if db.in_transaction:  # Ctrl-C came once more, before the rollback below
                db.execute("rollback")
            db.execute("begin immediate" if write else "begin")
            answer = job(db)
            db.execute("commit")
        finally:
            if db.in_transaction:  # also when Ctrl-C came in between
                with suppress(sqlite3.Error):
                    db.execute("rollback")
        return answer

    def open(self) -> None:
        """See that the file is there and ours. Done by every transaction anyway."""
        if self._guard.mine():
            raise Reentered
        with self._guard:
            try:
                self._ready()
            except sqlite3.Error as error:
                raise self._meaning(error) from error

    def _ready(self) -> sqlite3.Connection:
        if self.path in _TORN:
            raise ConfigError("this process was forked inside a transaction of its parent: it cannot use SQLite locks")
        now = self.host.clock()
        if self._db is not None:
            if now < self._look_at or self._still_there():
                return self._db
            # Removed or replaced by somebody: locks in the old file would exclude nobody any more.
            _log.warning("%s was replaced: leases in the old file are gone", self.path)
        if _FORKING:
            raise Occupied  # the child could not use what is opened now
        self._abandon()
        try:
            place.prepare(self.path)
            self._db = self._opened()
        except (BlockingIOError, FileNotFoundError) as error:  # being made, or removed, at this very moment
            raise Occupied from error
        self._look_at = now + _LOOK_EVERY
        return self._db

    def _still_there(self) -> bool:
        """Do the paths still name the files that were opened? SQLite removes none of them while one has them open."""
        self._look_at = self.host.clock() + _LOOK_EVERY
        return place.same(self.path, self._nodes)

    def _abandon(self) -> None:
        """Close every connection of this process whose files others no longer find: one opened beside it would share
        the memory of its log. Raises Occupied while another thread is inside one."""
        for file in _all():
            if file.path != self.path or file._db is None or place.same(self.path, file._nodes):
                continue
            acquire = getattr(file._guard, "acquire", None)
            if acquire is None or (file is not self and file._guard.mine()) or not acquire(blocking=False):
                self._look_at = 0.0
                raise Occupied
            try:
                file._let_go(replaced=not place.same(self.path, file._nodes[:1]))
            finally:
                file._guard.__exit__(None, None, None)

    def _opened(self) -> sqlite3.Connection:
        # timeout=0: SQLite's own waiting knows no deadline of ours. check_same_thread: the guard sees to that.
        db = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            db.execute("pragma page_size = 1024")  # of a new file: whole pages are written, and a verb changes two rows
            if db.execute("pragma journal_mode = wal").fetchone()[0] != "wal":
                raise ConfigError(f"{self.path} is on a file system that cannot share memory, which SQLite's WAL needs")
            self._synced = None
            self._sync(db, self.durable)
            stamp = self._stamp(db)
            if stamp != self.host.stamp:
                db.execute("begin immediate")
                place.move_in(db, self.path, self.host)
                db.execute("commit")
            self._nodes = place.nodes(self.path)
        except BaseException:
            db.close()
            raise
        return db

    def _sync(self, db: sqlite3.Connection, wanted: bool) -> None:
        if self._synced is not wanted:
            db.execute(f"pragma synchronous = {'full' if wanted else 'normal'}")
            self._synced = wanted

    def _stamp(self, db: sqlite3.Connection) -> str:
        """Whose clock the file has; empty if it is new or of another version. Most openings write nothing."""
        try:
            row = db.execute("select version, stamp from lh_meta").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return ""
        return str(row[1]) if row is not None and row[0] == place.VERSION else ""

    def _meaning(self, error: sqlite3.Error) -> LeaseholdError | Occupied:
        """The one mapping of what SQLite raises (E9)."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _OCCUPIED:
            return Occupied()
        if code in _BROKEN:
            return ConfigError(f"{self.path} is not a sound SQLite file ({error}): move it away to start anew")
        if code in _DENIED and not place.writable(self.path):
            return ConfigError(f"{self.path} cannot be written ({error}): choose another path or mend its permissions")
        return Unavailable(f"{self.path}: {error}", engine="sqlite")

    def _let_go(self, replaced: bool = False) -> None:
        db, self._db = self._db, None
        if db is not None and replaced:  # closing it could remove the log of the new file, which has the same name
            _KEPT.append(db)
        elif db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def close(self) -> None:
        with self._guard:
            self._let_go()

    def __del__(self) -> None:
        self._let_go()

    # ------------------------------------------------------------------ fork

    def freeze(self) -> None:
        """Before a fork: finish, close, and let nobody begin until it is over."""
        acquire = getattr(self._guard, "acquire", None)
        if self._guard.mine() or acquire is None or not acquire(timeout=_TO_FINISH):
            return  # the forking thread itself is inside a transaction, or another is stuck in one
        self._frozen = True
        self._let_go()

    def thaw(self) -> None:
        if self._frozen and self._guard.mine():  # else frozen by another thread, which forks as well
            self._frozen = False
            self._guard.__exit__(None, None, None)

    def after_fork(self) -> None:
        """In the child."""
        if self._db is not None:
            _KEPT.append(self._db)
            _TORN.add(self.path)
            self._db = None
        self._frozen = False
        self._guard = self._runtime.guard()


_FILES: WeakSet[File] = WeakSet()
_FORKING: list[bool] = []  # one for each fork under way


def _all() -> list[File]:
    while True:
        try:
            return list(_FILES)
        except RuntimeError:  # another thread made one meanwhile
            continue


def _freeze_all() -> None:
    _FORKING.append(True)  # first: a file that is made from here on is not among those frozen, and may not be opened
    for file in sorted(_all(), key=id):  # in one order: two threads that fork would wait for each other
        file.freeze()


def _thaw_all() -> None:
    for file in _all():
        file.thaw()
    _FORKING.pop()


def _after_fork_in_child() -> None:
    _FORKING.clear()
    for file in _all():
        file.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_freeze_all, after_in_parent=_thaw_all, after_in_child=_after_fork_in_child)
