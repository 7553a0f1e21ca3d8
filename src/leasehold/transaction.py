"""Checks a lease inside your own SQL transaction, for engines that keep leases in the same database as your data.

    with client.lock("orders/42") as lease, connection.transaction():
        leasehold.transaction.check(lease, connection)
        connection.execute("update orders set ...")

After `check` has returned, the engine grants the name to no other claim before your transaction has ended, even if the
lease expires in the meantime: "still the holder" and the write commit together, or not at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from leasehold import engines
from leasehold.client.lease import BaseLease
from leasehold.errors import ConfigError, LeaseLost

__all__ = ["check", "check_async"]


def check(lease: BaseLease, connection: object) -> None:
    """Raise `LeaseLost` unless the lease is held now; otherwise keep the name until the transaction has ended.

    `connection` is a psycopg or PyMySQL connection or cursor, any other DB-API connection or cursor whose parameter
    style is %(name)s, or an SQLAlchemy `Session` or `Connection`. It must be connected to the database that keeps the
    lease. If it is not in a transaction, `check` raises `ConfigError`. The driver's own errors are raised unchanged.

    Not promised: that the lease is still held when the transaction has committed. An open transaction keeps the name
    from all other clients, whatever the ttl, so keep it short.
    """
    lease.check()
    if _is_sqlalchemy(connection):
        _raise_unless_held(
            lease, *(_execute(lease, connection, query).fetchall() for query in _sqlalchemy_queries(lease))
        )
        return
    with _new_cursor(connection) as cursor:
        held_query, transaction_query = _cursor_queries(lease)
        cursor.execute(held_query, _parameters(lease))
        held_rows = cursor.fetchall()
        cursor.execute(transaction_query, {})
        _raise_unless_held(lease, held_rows, cursor.fetchall())


async def check_async(lease: BaseLease, connection: object) -> None:
    """`check` for asyncio. `connection` is a psycopg `AsyncConnection` or its cursor, an aiomysql `Connection` or its
    cursor, or an SQLAlchemy `AsyncSession` or `AsyncConnection`."""
    lease.check()
    if _is_sqlalchemy(connection):
        results: list[Any] = [await _execute(lease, connection, query) for query in _sqlalchemy_queries(lease)]
        _raise_unless_held(lease, *(result.fetchall() for result in results))
        return
    async with _new_cursor(connection) as cursor:
        held_query, transaction_query = _cursor_queries(lease)
        await cursor.execute(held_query, _parameters(lease))
        held_rows = await cursor.fetchall()
        await cursor.execute(transaction_query, {})
        _raise_unless_held(lease, held_rows, await cursor.fetchall())


def _raise_unless_held(lease: BaseLease, held_rows: list[object], transaction_rows: list[object]) -> None:
    if not held_rows:
        raise LeaseLost(lease.name, token=lease.token)
    if not transaction_rows:
        raise ConfigError("the connection is not in a transaction: begin one, or the check is stale before your write")


def _is_sqlalchemy(connection: object) -> bool:
    return any(base.__module__.partition(".")[0] == "sqlalchemy" for base in type(connection).__mro__)


def _sqlalchemy_queries(lease: BaseLease) -> tuple[str, str]:
    return engines.lease_check_sql(lease._core.config, (":namespace", ":name", ":token"), (":", "\\:"))


def _execute(lease: BaseLease, connection: Any, statement: str) -> Any:
    """SQLAlchemy converts the parameters to the style of its driver."""
    parameters = _parameters(lease) if ":name" in statement else {}
    return connection.execute(import_module("sqlalchemy").text(statement), parameters)


def _cursor_queries(lease: BaseLease) -> tuple[str, str]:
    return engines.lease_check_sql(lease._core.config, ("%(namespace)s", "%(name)s", "%(token)s"), ("%", "%%"))


def _parameters(lease: BaseLease) -> dict[str, object]:
    return {"namespace": lease._claim.namespace, "name": lease.name, "token": lease.token}


def _new_cursor(connection: Any) -> Any:
    """A new cursor of a connection, or of a cursor's connection."""
    return getattr(connection, "connection", connection).cursor()
