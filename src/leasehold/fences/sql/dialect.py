"""How databases differ in what a fence needs: a row that is locked when its highest token is raised or read."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from leasehold.dbapi import Database, database_by_name
from leasehold.errors import ConfigError

TABLE: Final = "leasehold_fence"
NO_SLOT: Final = -1
IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)?")


class FenceDialect(NamedTuple):
    resource_type: str  # the type of the column `resource`, compared byte by byte
    table_suffix: str  # the end of the `create table` statement
    raise_token: str  # raises the highest token, or inserts it on first use; never lowers it
    zero_rows_means_stale: bool  # raise_token counts 0 rows only if stale; MySQL counts 0 if nothing changes, too
    lock_row: str  # suffix: no other transaction changes the row before this one ends
    share_row: str
    is_resource: str = "resource = :resource"  # the condition for the resource's rows


_UPSERT = """insert into {table} (resource, slot, token) values (:resource, :slot, :token)
on conflict (resource, slot) do update set token = excluded.token where {table}.token <= excluded.token"""
# Hex, because a database in SQL_ASCII stores the bytes that a text has in the encoding of the caller's connection.
_PG_RESOURCE: Final = "pg_catalog.convert_from(pg_catalog.decode(:resource_hex, 'hex'), 'UTF8')"
# Hex, because the column has bytes: those of a text depend on the character set of the caller's connection.
_UPSERT_MYSQL = """insert into {table} (resource, slot, token) values (unhex(:resource_hex), :slot, :token)
on duplicate key update token = greatest(token, values(token))"""
# With a limit of its own, a query does not have that of MySQL's sql_select_limit.
SELECT_HIGHEST: Final = "select token from {table} where {is_resource} and slot = :slot limit 1"

_DIALECTS: Final = {
    "sqlite": FenceDialect("text", "", _UPSERT, True, "", ""),
    "postgresql": FenceDialect(
        'varchar(255) collate "C"',
        "",
        _UPSERT.replace(":resource,", f"{_PG_RESOURCE},"),
        True,
        " for update",
        " for share",
        # PostgreSQL has no operator for varchar itself: without the schema, that of any role would fit better.
        f"resource operator(pg_catalog.=) {_PG_RESOURCE}",
    ),
    # At repeatable read, a plain read shows the highest token of an older snapshot: only a locking read is current. The
    # table must be InnoDB, whatever the server's default: other engines do not keep rows locked for a transaction.
    "mysql": FenceDialect(
        "varbinary(255)",
        " engine=InnoDB",
        _UPSERT_MYSQL,
        False,
        " for update",
        " lock in share mode",
        "resource = unhex(:resource_hex)",
    ),
}


def fence_dialect(database: Database) -> FenceDialect:
    return _DIALECTS[database.name]


def sql_schema(dialect: str, table: str = TABLE) -> str:
    """The statement that creates the table of fence rows, for your migrations."""
    chosen = fence_dialect(database_by_name(dialect))
    return (
        f"create table if not exists {check_identifier(table)} (resource {chosen.resource_type} not null, "
        f"slot integer not null, token bigint not null, primary key (resource, slot)){chosen.table_suffix}"
    )


def check_identifier(identifier: str) -> str:
    """Refuse a table or column name that is not a plain identifier: it is put into statements without quotes."""
    if not isinstance(identifier, str) or not IDENTIFIER.fullmatch(identifier):
        raise ConfigError(f"{identifier!r} is not a plain table or column name: use letters, digits and _")
    return identifier
