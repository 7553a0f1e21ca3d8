"""The connection of one engine instance: opened when first needed, one transaction at a time, errors mapped (E9).

No connection is carried across a fork. POSIX locks belong to a process, but SQLite keeps its view of them in memory,
per file. So a child that inherits a connection believes it has locks that it does not have, even if it never uses that
connection and opens its own. When the parent closes, SQLite removes the log while the child still uses it, and parent
and child continue on separate data (tested: each saw writes that the other did not). So every connection is closed just
before a fork, between transactions, and both processes open new ones.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar
from weakref import WeakSet, ref

from leasehold.core.texts import server_text
from leasehold.engines.sqlite import location, schema
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.errors import ConfigError, LeaseholdError, Reentered, Unavailable
from leasehold.runtime.base import Mutex, Runtime

_log = logging.getLogger("leasehold.sqlite")

T = TypeVar("T")

_FORK_TIMEOUT: Final = 5.0  # how long a fork waits for another thread's transaction
_FILE_CHECK_INTERVAL: Final = 0.1
_CHECKPOINT_TIMEOUT: Final = 5.0
# In the log: 4 MiB, as with SQLite's own page size. A checkpoint syncs twice, and most transactions never. Beyond 4000
# pages, each reader would have to search a second index of the log.
_CHECKPOINT_PAGES: Final = 4000
_MAX_VALUE: Final = 1 << 20  # bytes of a row, also of the schema: an application may keep large tables in the same file
_STEPS_BETWEEN_CHECKS: Final = 20_000  # of SQLite's machine, about a millisecond: no usual statement has as many
_LOCKED_CODES: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_CORRUPT_CODES: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT)
_PERMISSION_CODES: Final = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)

_NEVER_CLOSED: list[sqlite3.Connection] = []  # closing these could remove files that other connections use
_UNUSABLE_PATHS: set[str] = set()  # a connection was inherited from the parent, so SQLite's view of its locks is wrong


class DatabaseLocked(Exception):
    """Another process is in a transaction: try again. Never leaves the engine."""


class NeedsSync(Exception):
    """The transaction has to wait for the disk: repeat it so. Never leaves the engine."""


class ClockChanged(Exception):
    """The file's clock is not the one it was opened with: reopen it. Never leaves the engine."""


class SqliteConnection:
    def __init__(
        self, path: str, durable: bool, boot_clock: BootClock, runtime: Runtime, *, trust_folder: bool = False
    ) -> None:
        self._db: sqlite3.Connection | None = None
        self._trust_folder = trust_folder
        self.path, self.durable, self.boot_clock = path, durable, boot_clock
        self._runtime = runtime
        self._inodes: list[tuple[int, int]] = []  # of the files that were opened: the paths may name others by now
        self._is_synchronous: bool | None = None  # whether each commit waits for the disk
        self._checked_schema: int | None = None  # the version of the schema that was last found to be ours
        self._file_check_at = 0.0
        self._deadline = 0.0  # of the current call
        self._frozen = False
        self.on_loop = False  # an event loop has the mutex, and must not wait
        self._mutex: Mutex = runtime.mutex()
        _CONNECTIONS.add(self)

    def run_transaction(
        self, job: Callable[[sqlite3.Connection], T], deadline: float, *, write: bool = True, sync: bool = False
    ) -> T:
        """Run `job` as one transaction, all or nothing. Raises DatabaseLocked instead of waiting, and Unavailable if a
        statement still runs at the deadline.

        `sync`: wait for the disk. Otherwise a power cut may undo the transaction, until a later one of any process
        syncs: the log is one sequence. A job that raises NeedsSync runs again, with the sync.
        """
        self._check_reentry()
        with self._mutex:
            try:
                self._deadline = deadline
                db = self._ensure_open()
                # Without a boot id, a restart of the machine goes unnoticed, and with it what a power cut has undone.
                sync = self.durable and (sync or not self.boot_clock.boot)
                if sync and self.on_loop:
                    raise NeedsSync
                self._set_synchronous(db, sync)
                try:
                    return self._transact(db, job, write)
                except NeedsSync:
                    if self.on_loop:
                        raise
                    self._set_synchronous(db, True)
                    return self._transact(db, job, write)
            except sqlite3.Error as error:
                raise self._map_error(error) from error
            except (OverflowError, UnicodeEncodeError) as error:
                raise ConfigError(f"SQLite cannot store a value of this call: {error}") from error
            # From decoding a row, or the text of an error: it says nothing about the claim (E5).
            except (LookupError, TypeError, UnicodeDecodeError) as error:
                raise Unavailable(
                    f"{self.path} has a row that Leasehold never writes: another program edited it; move the file away "
                    "to start a new one",
                    engine="sqlite",
                ) from error
            except ClockChanged:
                self._disconnect()
                raise DatabaseLocked from None

    def _transact(self, db: sqlite3.Connection, job: Callable[[sqlite3.Connection], T], write: bool) -> T:
        try:
            if db.in_transaction:  # the last call was interrupted by Ctrl-C before it could roll back
                db.execute("rollback")
            db.execute("begin immediate" if write else "begin")
            self._check_schema(db)
            answer = job(db)
            db.execute("commit")
        finally:
            if db.in_transaction:  # the job failed, or Ctrl-C came before the commit
                with suppress(sqlite3.Error):
                    db.execute("rollback")
        return answer

    def _check_schema(self, db: sqlite3.Connection) -> None:
        """Inside a transaction, before it uses the tables: any process that may write the file may change them while
        it is open here. SQLite reads them again only if their version is another one."""
        version = db.execute("pragma schema_version").fetchone()[0]
        if version != self._checked_schema:
            self._checked_schema = None  # or it would pass if it got the old number again
            schema.check_schema(db, self.path)
            self._checked_schema = version

    def open(self, deadline: float) -> None:
        """Open the file if it is not open, and check that it is usable. Every transaction does this anyway."""
        self._check_reentry()
        with self._mutex:
            try:
                self._deadline = deadline
                self._ensure_open()
            except sqlite3.Error as error:
                raise self._map_error(error) from error

    def _check_reentry(self) -> None:
        """A finaliser or signal handler that interrupts this thread's own transaction would wait for it for ever, with
        SQLite's write lock held."""
        if self._mutex.held_by_me() and (not self.on_loop or self._db is None or self._db.in_transaction):
            raise Reentered

    # ---------------------------------------------------------- event loops

    def enter_loop(self) -> bool:
        """Whether this event loop may run transactions itself until `leave_loop`: the file is open, and no thread uses
        it. What would have to wait for the disk raises NeedsSync meanwhile."""
        acquire = getattr(self._mutex, "acquire", None)
        if self._db is None or acquire is None or self._mutex.held_by_me() or not acquire(blocking=False):
            return False
        self.on_loop = True
        return True

    def leave_loop(self) -> None:
        self.on_loop = False
        self._mutex.__exit__(None, None, None)

    def checkpoint(self) -> None:
        """On a thread: move the log into the file, so that no commit of the event loop has to. The first write after
        that begins a new log and waits for the disk, so it is made here, too."""
        self._check_reentry()
        with self._mutex, suppress(sqlite3.Error):
            if self._db is not None:
                self._deadline = self._runtime.now() + _CHECKPOINT_TIMEOUT
                self._db.execute("pragma wal_checkpoint(passive)").fetchone()
                self._transact(self._db, schema.write_nothing, write=True)

    def _ensure_open(self) -> sqlite3.Connection:
        if self.path in _UNUSABLE_PATHS:
            raise ConfigError(
                "this process was forked inside a transaction of its parent, so it cannot use SQLite locks: "
                "fork outside of Leasehold calls, or start the process with exec"
            )
        now = self.boot_clock.now()
        if self._db is not None:
            if now < self._file_check_at or self._is_current():
                return self._db
            # The file was removed or replaced: other processes do not see locks in the old file any more.
            _log.warning("%s was removed or replaced; the leases in the old file are lost", self.path)
        if self.on_loop:
            raise NeedsSync  # opening waits for the disk
        if _FORKS_IN_PROGRESS:
            raise DatabaseLocked  # a connection opened now would be inherited by the child
        self._close_replaced()
        try:
            self._db = self._connect()
        except (BlockingIOError, FileNotFoundError) as error:  # another process is creating or removing the file
            raise DatabaseLocked from error
        except UnicodeDecodeError as error:  # of the text of an error, in which SQLite repeats a damaged schema
            raise ConfigError(f"{self.path} is not a valid SQLite file: move it away to start a new one") from error
        self._file_check_at = now + _FILE_CHECK_INTERVAL
        return self._db

    def _is_current(self) -> bool:
        """Whether the paths still name the files that were opened. SQLite removes none of them while they are open."""
        self._file_check_at = self.boot_clock.now() + _FILE_CHECK_INTERVAL
        return location.inodes_match(self.path, self._inodes)

    def _close_replaced(self) -> None:
        """Close every connection of this process to a file that was removed or replaced: a new connection would share
        the old one's shared memory of the log. Raises DatabaseLocked while another thread uses such a connection."""
        for connection in _all_connections():
            if (
                connection.path != self.path
                or connection._db is None
                or location.inodes_match(self.path, connection._inodes)
            ):
                continue
            acquire = getattr(connection._mutex, "acquire", None)
            if (
                acquire is None
                or (connection is not self and connection._mutex.held_by_me())
                or not acquire(blocking=False)
            ):
                self._file_check_at = 0.0
                raise DatabaseLocked
            try:
                connection._disconnect(replaced=not location.inodes_match(self.path, connection._inodes[:1]))
            finally:
                connection._mutex.__exit__(None, None, None)

    def _connect(self) -> sqlite3.Connection:
        # timeout=0: SQLite's own waiting ignores our deadlines. check_same_thread: the mutex ensures that instead.
        db = location.connect(self.path, timeout=0, trust_folder=self._trust_folder)
        try:
            # Of a weak reference: the connection would otherwise keep itself alive.
            db.set_progress_handler(partial(_is_overdue, ref(self)), _STEPS_BETWEEN_CHECKS)
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE)
            db.execute(f"pragma page_size = {location.PAGE_SIZE}")
            # An event loop calls `checkpoint` long before.
            pages = _CHECKPOINT_PAGES if self._runtime.blocking else 2 * _CHECKPOINT_PAGES
            db.execute(f"pragma wal_autocheckpoint = {pages}")
            if db.execute("pragma journal_mode = wal").fetchone()[0] != "wal":
                raise ConfigError(
                    f"{self.path} is on a file system without shared memory, which SQLite's WAL mode needs: "
                    "choose a path on a local disk"
                )
            self._is_synchronous = None
            self._set_synchronous(db, self.durable)
            self._checked_schema = None
            clock_id = self._transact(db, self._read_clock_id, False)
            if clock_id != self.boot_clock.clock_id:
                self._transact(db, partial(schema.prepare_schema, path=self.path, boot_clock=self.boot_clock), True)
            self._inodes = location.inodes(self.path)
        except BaseException:
            db.close()
            raise
        return db

    @property
    def synced(self) -> bool:
        """Inside a transaction: whether a power cut cannot undo it, or may, because of `durable=no`."""
        return self._is_synchronous is True or not self.durable

    def _set_synchronous(self, db: sqlite3.Connection, wanted: bool) -> None:
        if self._is_synchronous is not wanted:
            db.execute(f"pragma synchronous = {'full' if wanted else 'normal'}")
            self._is_synchronous = wanted

    def _read_clock_id(self, db: sqlite3.Connection) -> str:
        """The id of the file's clock; empty if the file is new or has another version. Most openings write nothing."""
        try:
            row = db.execute("select version, clock_id from lh_meta").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            return ""
        return str(row[1]) if row is not None and row[0] == schema.VERSION else ""

    def _map_error(self, error: sqlite3.Error) -> LeaseholdError | DatabaseLocked:
        """The only mapping of SQLite's errors (E9)."""
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _LOCKED_CODES:
            return DatabaseLocked()
        if code == sqlite3.SQLITE_INTERRUPT:
            return Unavailable(f"{self.path}: a statement was ended at the deadline of its call", engine="sqlite")
        if code in _CORRUPT_CODES:
            return ConfigError(
                f"{self.path} is not a valid SQLite file ({server_text(error)}): move it away to start a new one"
            )
        if code in _PERMISSION_CODES and not location.is_writable(self.path):
            return ConfigError(
                f"{self.path} is not writable ({server_text(error)}): choose another path or change its permissions"
            )
        return Unavailable(f"{self.path}: {server_text(error)}", engine="sqlite")

    def _disconnect(self, replaced: bool = False) -> None:
        db, self._db = self._db, None
        if db is not None and replaced:  # closing could remove the log of the new file, which has the same name
            _NEVER_CLOSED.append(db)
        elif db is not None:
            with suppress(sqlite3.Error):
                db.close()

    def close(self) -> None:
        with self._mutex:
            self._disconnect()

    def __del__(self) -> None:
        self._disconnect()

    # ------------------------------------------------------------------ fork

    def freeze(self) -> None:
        """Before a fork: wait for the running transaction, close, and block new ones until the fork is over."""
        acquire = getattr(self._mutex, "acquire", None)
        if self._mutex.held_by_me() or acquire is None or not acquire(timeout=_FORK_TIMEOUT):
            return  # the forking thread itself is in a transaction, or another thread is stuck in one
        self._frozen = True
        self._disconnect()

    def thaw(self) -> None:
        if self._frozen and self._mutex.held_by_me():  # else another thread, which forks as well, has frozen it
            self._frozen = False
            self._mutex.__exit__(None, None, None)

    def after_fork(self) -> None:
        """In the child: never use or close an inherited connection."""
        if self._db is not None:
            _NEVER_CLOSED.append(self._db)
            _UNUSABLE_PATHS.add(self.path)
            self._db = None
        self._frozen = False
        self._mutex = self._runtime.mutex()


def _is_overdue(connection_ref: ref[SqliteConnection]) -> bool:
    """Whether SQLite must end the current statement. Without this, a planted file could keep it busy for ever."""
    connection = connection_ref()
    return connection is None or connection._runtime.now() >= connection._deadline


_CONNECTIONS: WeakSet[SqliteConnection] = WeakSet()
_FORKS_IN_PROGRESS: list[bool] = []  # one item per fork


def _all_connections() -> list[SqliteConnection]:
    while True:
        try:
            return list(_CONNECTIONS)
        except RuntimeError:  # another thread created a connection meanwhile
            continue


def _freeze_all() -> None:
    # First, because a connection created from here on is not frozen below and must not open its file.
    _FORKS_IN_PROGRESS.append(True)
    # Sorted, because two threads that fork at once would deadlock if they froze in different orders.
    for connection in sorted(_all_connections(), key=id):
        connection.freeze()


def _thaw_all() -> None:
    for connection in _all_connections():
        connection.thaw()
    _FORKS_IN_PROGRESS.pop()


def _after_fork_in_child() -> None:
    _FORKS_IN_PROGRESS.clear()
    for connection in _all_connections():
        connection.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_freeze_all, after_in_parent=_thaw_all, after_in_child=_after_fork_in_child)
