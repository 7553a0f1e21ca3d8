"""How databases differ: how to raise the highest token, begin a transaction, and write a parameter.

Statements here use `:name` parameters, which are rewritten in the driver's own style.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.errors import ConfigError

DialectName: TypeAlias = Literal["sqlite", "postgresql", "mysql"]
Values: TypeAlias = Mapping[str, Any]

TABLE: Final = "leasehold_fence"
NO_SLOT: Final = -1
IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")

_PARAMETER = re.compile(r":([a-z][a-z0-9_]*)")
_IN_TRANSACTION: Final = 1  # bits of MySQL's server status
_AUTOCOMMIT: Final = 2


class FenceDialect(NamedTuple):
    name: DialectName
    style: Literal["?", "%s"]
    resource_type: str  # the type of the column `resource`, compared byte by byte
    table_suffix: str  # the end of the `create table` statement
    raise_token: str  # raises the highest token, or inserts it on first use; never lowers it
    zero_rows_means_stale: bool  # raise_token counts 0 rows only if stale; MySQL counts 0 if nothing changes, too
    select_token: str  # with a suffix, reads the current highest token instead of the transaction's older snapshot
    lock_row: str  # suffix: no other transaction changes the row before this one ends
    share_row: str


_UPSERT = """insert into {table} (resource, slot, token) values (:resource, :slot, :token)
on conflict (resource, slot) do update set token = excluded.token where {table}.token <= excluded.token"""
_UPSERT_MYSQL = """insert into {table} (resource, slot, token) values (:resource, :slot, :token)
on duplicate key update token = greatest(token, values(token))"""
_SELECT = "select token from {table} where resource = :resource and slot = :slot"

_DIALECTS: Final[dict[DialectName, FenceDialect]] = {
    "sqlite": FenceDialect("sqlite", "?", "text", "", _UPSERT, True, _SELECT, "", ""),
    "postgresql": FenceDialect(
        "postgresql", "%s", 'varchar(255) collate "C"', "", _UPSERT, True, _SELECT, " for update", " for share"
    ),
    # At repeatable read, a plain read shows the highest token of an older snapshot: only a locking read is current. The
    # table must be InnoDB, whatever the server's default: other engines do not keep rows locked for a transaction.
    "mysql": FenceDialect(
        "mysql",
        "%s",
        "varbinary(255)",
        " engine=InnoDB",
        _UPSERT_MYSQL,
        False,
        _SELECT,
        " for update",
        " lock in share mode",
    ),
}

_MODULES: Final[dict[str, DialectName]] = {
    "sqlite3": "sqlite",
    "aiosqlite": "sqlite",
    "psycopg": "postgresql",
    "pymysql": "mysql",
    "aiomysql": "mysql",
}


def dialect_by_name(name: str) -> FenceDialect:
    alias = "mysql" if name == "mariadb" else name
    if alias not in _DIALECTS:
        raise ConfigError(f"unknown SQL dialect {name!r}: use sqlite, postgresql or mysql (mariadb)")
    return _DIALECTS[alias]


def dialect_of(connection: Any, name: str | None) -> FenceDialect:
    """The dialect `name`, or else the one of the driver module that defines the connection's class or a base class."""
    if name is not None:
        return dialect_by_name(name)
    for kind in type(connection).__mro__:
        if found := _MODULES.get(kind.__module__.partition(".")[0]):
            return _DIALECTS[found]
    raise ConfigError(
        f"unknown database driver {type(connection).__module__!r} (known: {', '.join(_MODULES)}): "
        "pass dialect= sqlite, postgresql or mysql"
    )


def sql_schema(dialect: str, table: str = TABLE) -> str:
    """The statement that creates the table of fence rows, for your migrations."""
    chosen = dialect_by_name(dialect)
    return (
        f"create table if not exists {check_identifier(table)} (resource {chosen.resource_type} not null, "
        f"slot integer not null, token bigint not null, primary key (resource, slot)){chosen.table_suffix}"
    )


def check_identifier(identifier: str) -> str:
    """Refuse a table or column name that is not a plain identifier: it is put into statements without quotes."""
    if not isinstance(identifier, str) or not IDENTIFIER.fullmatch(identifier):
        raise ConfigError(f"{identifier!r} is not a plain table or column name: use letters, digits and _")
    return identifier


def render(statement: str, values: Values, style: str) -> tuple[str, Sequence[Any]]:
    """The statement with its `:name` parameters in the driver's style, and their values in order."""
    order: list[Any] = []

    def substitute(match: re.Match[str]) -> str:
        order.append(values[match[1]])
        return style

    return _PARAMETER.sub(substitute, statement), order


def in_transaction(dialect: FenceDialect, connection: Any) -> bool:
    """Whether this connection has statements that are neither committed nor rolled back."""
    if dialect.name == "sqlite":
        # Python 3.12 with autocommit=False: a transaction is always open, even an empty one.
        always = getattr(connection, "autocommit", None) is False
        return bool(connection.in_transaction) and not always
    if dialect.name == "postgresql":
        return bool(connection.info.transaction_status)
    return bool(connection.server_status & _IN_TRANSACTION)


def is_autocommit(dialect: FenceDialect, connection: Any) -> bool:
    """Whether the next statement would be a transaction of its own."""
    if dialect.name == "sqlite":
        mode = getattr(connection, "autocommit", None)  # Python 3.12; isolation_level decides if it is LEGACY
        return not connection.in_transaction and (
            mode is True or (mode is not False and connection.isolation_level is None)
        )
    if dialect.name == "postgresql":
        return bool(connection.autocommit) and not connection.info.transaction_status
    return connection.server_status & (_AUTOCOMMIT | _IN_TRANSACTION) == _AUTOCOMMIT  # type: ignore[no-any-return]


def begin_statement(dialect: FenceDialect, connection: Any) -> str | None:
    """The statement that begins a transaction; None if the driver or an open transaction makes it unnecessary."""
    if dialect.name == "sqlite":
        return None if connection.in_transaction else "begin immediate"
    if dialect.name == "postgresql":
        return "begin" if connection.autocommit else None
    return "start transaction" if connection.server_status & _AUTOCOMMIT else None


def refresh_status(dialect: FenceDialect, connection: Any) -> Any:
    """Await the result before reading `server_status`. MySQL drivers do not update it when rows are read, and without
    autocommit a query is enough to open a transaction."""
    if dialect.name == "mysql" and not connection.server_status & _AUTOCOMMIT:
        return connection.ping(reconnect=False)
    return None
