"""The lease check inside a transaction of your own, for engines that live in the same database as your data.

    with client.lock("orders/42") as lease, connection.transaction():
        leasehold.transaction.check(lease, connection)
        connection.execute("update orders set ...")

When `check` has returned, nobody else is granted the name before your transaction has ended, also if the lease runs out
meanwhile: "still the holder" and the write commit together, or not at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from leasehold import engines
from leasehold.client.lease import BaseLease
from leasehold.errors import ConfigError, LeaseLost

__all__ = ["check", "check_async"]


def check(lease: BaseLease, connection: object) -> None:
    """Raise `LeaseLost` unless the lease is held now; else keep the name until the transaction has ended.

    `connection` is a psycopg or PyMySQL connection or cursor, or any other of the DB-API that writes parameters as
    %(name)s, or an SQLAlchemy `Session` or `Connection`. It must reach the database that keeps the lease, and be in a
    transaction: `ConfigError` if it is not. Errors of the connection itself are raised as they are.

    Not promised: that the lease is still held when the transaction has committed. A transaction that stays open keeps
    the name from everybody, whatever the ttl: be quick.
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
    """The same for asyncio: a psycopg `AsyncConnection` or its cursor, an aiomysql `Connection` or its cursor, an
    SQLAlchemy `AsyncSession` or `AsyncConnection`."""
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
        raise ConfigError("this connection is not in a transaction: the check would be out of date before your write")


def _is_sqlalchemy(connection: object) -> bool:
    return any(base.__module__.partition(".")[0] == "sqlalchemy" for base in type(connection).__mro__)


def _sqlalchemy_queries(lease: BaseLease) -> tuple[str, str]:
    return engines.lease_check_sql(lease._core.config, (":namespace", ":name", ":token"), (":", "\\:"))


def _execute(lease: BaseLease, connection: Any, statement: str) -> Any:
    """Whatever driver SQLAlchemy has beneath: it puts the parameters in that one's style."""
    parameters = _parameters(lease) if ":name" in statement else {}
    return connection.execute(import_module("sqlalchemy").text(statement), parameters)


def _cursor_queries(lease: BaseLease) -> tuple[str, str]:
    return engines.lease_check_sql(lease._core.config, ("%(namespace)s", "%(name)s", "%(token)s"), ("%", "%%"))


def _parameters(lease: BaseLease) -> dict[str, object]:
    return {"namespace": lease._claim.namespace, "name": lease.name, "token": lease.token}


def _new_cursor(connection: Any) -> Any:
    """A new cursor of a connection; of a cursor, another one of the same."""
    return getattr(connection, "connection", connection).cursor()
