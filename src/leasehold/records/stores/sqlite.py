"""Records in a table of any SQLite file: `sqlite:///path`, next to an application's own tables or in a separate file.

Each call opens and closes a connection, so none is ever carried across a fork. Nothing in the file is changed except
our table: the journal mode is up to the file's owner.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any, Final

from leasehold.config import EngineConfig, parse_yes_no
from leasehold.core.texts import server_text
from leasehold.dbapi import SQLITE
from leasehold.engines.sqlite import location
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.stores.sql import TABLE, SqlStore, StoreDialect, Table
from leasehold.runtime.base import Runtime

OPTIONS: Final = frozenset({"trust_folder"})

DIALECT: Final = StoreDialect(
    database=SQLITE,
    schema=(
        f"create table if not exists {TABLE} (name text primary key, version text not null, data blob not null, "
        "until real) without rowid",
        f"create index if not exists {TABLE}_until on {TABLE} (until) where until is not null",
    ),
    now="((julianday('now') - 2440587.5) * 86400.0)",
    is_missing_table=lambda error: "no such table" in str(error),
)
_RECORDS_SUFFIX: Final = ".records"  # the file of an engine contains only locks: records go into a file next to it
_CONFIG_ERRORS: Final = (
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
)


class SqliteStore(SqlStore):
    table = Table(DIALECT)
    max_idle = 0

    def __init__(self, path: str, runtime: Runtime, *, trust_folder: bool = False) -> None:
        super().__init__(runtime)
        self._path, self._trust_folder = path, trust_folder

    def connect(self, seconds: float) -> sqlite3.Connection:
        try:
            return location.connect(self._path, timeout=seconds, trust_folder=self._trust_folder)
        except BlockingIOError as error:
            raise Unavailable(f"another process is creating {self._path}", engine="sqlite") from error

    def set_timeout(self, connection: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds  # for a statement that never ends, such as one on a planted view
        connection.set_progress_handler(lambda: time.monotonic() >= deadline, 20_000)
        connection.execute(f"pragma busy_timeout = {int(seconds * 1000)}")

    def map_error(self, error: Exception) -> LeaseholdError | None:
        if not isinstance(error, sqlite3.Error):
            return None
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_AUTH:  # only in a folder that a group shares
            return ConfigError(
                f"SQLite store {self._path}: another program has put a trigger or a view on the table {TABLE}, which "
                "is not used in a folder that a group shares: remove it, or use a file in a folder of your own"
            )
        error_type = ConfigError if code in _CONFIG_ERRORS else Unavailable
        return error_type(f"SQLite store {self._path}: {server_text(error)}")


def open(config: EngineConfig, runtime: Runtime, suffix: str = "") -> SqliteStore:
    options = config.accept(trust_folder=parse_yes_no)
    return SqliteStore(location.resolve_path(config.target) + suffix, runtime, **options)


def open_for_engine(config: EngineConfig, runtime: Runtime) -> SqliteStore:
    """The store of a client whose locks are in the file that this URL names."""
    return open(config, runtime, _RECORDS_SUFFIX)
