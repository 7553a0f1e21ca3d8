"""What differs between databases: how a mark is raised, how a transaction begins, how a parameter is written.

Statements are written with `:name` and turned into the driver's own style.
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
    resource_type: str  # the type of a resource's name: compared byte by byte
    table_suffix: str  # what the statement that makes the table ends with
    raise_token: str  # in one statement, insert on first use; never lowers
    zero_rows_means_stale: bool  # a count of 0 rows after it means stale; MySQL also counts 0 when nothing changes
    select_token: str  # with its suffix, the mark as it is now, not as an older snapshot of the transaction has it
    lock_row: str  # suffix: nobody else changes it before the transaction ends
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
    # Repeatable read would show the mark of an older snapshot: only a locking read sees the newest. And only InnoDB has
    # transactions that keep a row locked, whatever the server's usual engine is.
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
        raise ConfigError(f"fences know the SQL of sqlite, postgresql and mysql (mariadb), not of {name}")
    return _DIALECTS[alias]


def dialect_of(connection: Any, name: str | None) -> FenceDialect:
    """By the module that the connection's class, or one above it, comes from; or as said."""
    if name is not None:
        return dialect_by_name(name)
    for kind in type(connection).__mro__:
        if found := _MODULES.get(kind.__module__.partition(".")[0]):
            return _DIALECTS[found]
    raise ConfigError(
        f"{type(connection).__module__} is not known: pass dialect= sqlite, postgresql or mysql. "
        f"Known: {', '.join(_MODULES)}"
    )


def sql_schema(dialect: str, table: str = TABLE) -> str:
    """The statement that makes the table of fence rows, for your migrations."""
    chosen = dialect_by_name(dialect)
    return (
        f"create table if not exists {check_identifier(table)} (resource {chosen.resource_type} not null, "
        f"slot integer not null, token bigint not null, primary key (resource, slot)){chosen.table_suffix}"
    )


def check_identifier(identifier: str) -> str:
    """A name of a table or column goes into the statement as it is, so it must be a plain one."""
    if not isinstance(identifier, str) or not IDENTIFIER.fullmatch(identifier):
        raise ConfigError(f"{identifier!r} is no plain name of a table or column")
    return identifier


def render(statement: str, values: Values, style: str) -> tuple[str, Sequence[Any]]:
    """A statement with `:name` in the driver's own style, with its parameters in order."""
    order: list[Any] = []

    def substitute(match: re.Match[str]) -> str:
        order.append(values[match[1]])
        return style

    return _PARAMETER.sub(substitute, statement), order


def in_transaction(dialect: FenceDialect, connection: Any) -> bool:
    """Whether statements have been run on this connection that are neither committed nor rolled back."""
    if dialect.name == "sqlite":
        always = getattr(connection, "autocommit", None) is False  # of Python 3.12: one is always open, if empty
        return bool(connection.in_transaction) and not always
    if dialect.name == "postgresql":
        return bool(connection.info.transaction_status)
    return bool(connection.server_status & _IN_TRANSACTION)


def is_autocommit(dialect: FenceDialect, connection: Any) -> bool:
    """Whether a statement run now would be a transaction of its own, over before the next one."""
    if dialect.name == "sqlite":
        mode = getattr(connection, "autocommit", None)  # of Python 3.12, where it may leave all to isolation_level
        return not connection.in_transaction and (
            mode is True or (mode is not False and connection.isolation_level is None)
        )
    if dialect.name == "postgresql":
        return bool(connection.autocommit) and not connection.info.transaction_status
    return connection.server_status & (_AUTOCOMMIT | _IN_TRANSACTION) == _AUTOCOMMIT  # type: ignore[no-any-return]


def begin_statement(dialect: FenceDialect, connection: Any) -> str | None:
    """What to say before the first statement, if the driver does not."""
    if dialect.name == "sqlite":
        return None if connection.in_transaction else "begin immediate"
    if dialect.name == "postgresql":
        return "begin" if connection.autocommit else None
    return "start transaction" if connection.server_status & _AUTOCOMMIT else None


def refresh_status(dialect: FenceDialect, connection: Any) -> Any:
    """Whatever has to be awaited before the server's status is as it is now. Drivers of MySQL do not note it when rows
    were read, and a query is enough to open a transaction where nothing is committed by itself."""
    if dialect.name == "mysql" and not connection.server_status & _AUTOCOMMIT:
        return connection.ping(reconnect=False)
    return None
