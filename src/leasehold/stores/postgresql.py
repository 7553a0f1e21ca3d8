"""Records in a table of PostgreSQL: `postgresql://user:password@host/database`, with options as libpq knows them."""

from __future__ import annotations

import time
from typing import Any, Final
from urllib.parse import urlencode

import psycopg
from psycopg import pq

from leasehold.config import EngineConfig
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.stores.sql import TABLE, Dialect, SqlStore, Table, Within

# Ours to decide: deadlines are per call, and text is UTF-8.
OPTIONS: Final = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults()) - {
    "client_encoding",
    "connect_timeout",
}

DIALECT: Final = Dialect(
    name="postgresql",
    schema=(
        f'create table if not exists {TABLE} (name text collate "C" primary key, edition text not null, '
        "data bytea not null, until double precision)",
        f"create index if not exists {TABLE}_until on {TABLE} (until) where until is not null",
    ),
    now="cast(extract(epoch from clock_timestamp()) as double precision)",
    paramstyle=r"%(\1)s",
    lock=" for update",
    absent=lambda error: isinstance(error, psycopg.errors.UndefinedTable),
)
_REFUSED: Final = ("08P01", "0A", "22", "28", "3D", "42")  # classes of SQLSTATE: asking again would change nothing


class Bounded(psycopg.Connection[Any]):
    """A connection on which nothing waits past a deadline. The driver knows none of its own."""

    deadline = 0.0

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        return super().wait(gen, interval, max(0.0, self.deadline - time.monotonic()))


class PostgresqlStore(SqlStore):
    table = Table(DIALECT)

    def __init__(self, conninfo: str, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._conninfo = conninfo

    def connect(self, seconds: float) -> Bounded:
        # libpq counts whole seconds, and no less than two.
        return Bounded.connect(self._conninfo, autocommit=True, connect_timeout=max(2, round(seconds)))

    def bound(self, connection: Any, seconds: float) -> None:
        connection.deadline = time.monotonic() + seconds

    def meaning(self, error: Exception) -> LeaseholdError | None:
        if not isinstance(error, psycopg.Error):
            return None
        kind = ConfigError if (error.sqlstate or "").startswith(_REFUSED) else Unavailable
        return kind(f"the store in PostgreSQL: {str(error) or 'no answer in time'}")


def open(config: EngineConfig, runtime: Runtime) -> PostgresqlStore:
    options = config.accept(**dict.fromkeys(OPTIONS, str))
    conninfo = config.url.partition("?")[0] + (f"?{urlencode(options)}" if options else "")
    try:
        psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise ConfigError("this postgresql:// URL cannot be read") from None  # its text would show the password
    return PostgresqlStore(conninfo, runtime)


def within(connection: Any) -> Within:
    return Within(PostgresqlStore.table, connection, _check)


def _check(connection: Any) -> None:
    if connection.autocommit and connection.info.transaction_status == pq.TransactionStatus.IDLE:
        raise ConfigError("within() needs a transaction: this connection commits every statement by itself")
