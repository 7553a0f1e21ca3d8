"""The lease check inside a transaction of your own, for engines that live in the same database as your data.

    with client.lock("orders/42") as lease, connection.transaction():
        leasehold.inside.check(lease, connection)
        connection.execute("update orders set ...")

When `check` has returned, nobody else is granted the name before your transaction has ended, also if the lease runs out
meanwhile: "still the holder" and the write commit together, or not at all.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from leasehold import engines
from leasehold.errors import ConfigError, LeaseLost
from leasehold.recipes.lease import BaseLease

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
        _judge(lease, *(_execute(lease, connection, each).fetchall() for each in _for_sqlalchemy(lease)))
        return
    with _cursor(connection) as cursor:
        held, open_ = _for_a_cursor(lease)
        cursor.execute(held, _values(lease))
        found = cursor.fetchall()
        cursor.execute(open_, {})
        _judge(lease, found, cursor.fetchall())


async def check_async(lease: BaseLease, connection: object) -> None:
    """The same for asyncio: a psycopg `AsyncConnection` or its cursor, an aiomysql `Connection` or its cursor, an
    SQLAlchemy `AsyncSession` or `AsyncConnection`."""
    lease.check()
    if _is_sqlalchemy(connection):
        results: list[Any] = [await _execute(lease, connection, each) for each in _for_sqlalchemy(lease)]
        _judge(lease, *(result.fetchall() for result in results))
        return
    async with _cursor(connection) as cursor:
        held, open_ = _for_a_cursor(lease)
        await cursor.execute(held, _values(lease))
        found = await cursor.fetchall()
        await cursor.execute(open_, {})
        _judge(lease, found, await cursor.fetchall())


def _judge(lease: BaseLease, held: list[object], open_: list[object]) -> None:
    if not held:
        raise LeaseLost(lease.name, token=lease.token)
    if not open_:
        raise ConfigError("this connection is not in a transaction: the check would be out of date before your write")


def _is_sqlalchemy(connection: object) -> bool:
    return any(base.__module__.partition(".")[0] == "sqlalchemy" for base in type(connection).__mro__)


def _for_sqlalchemy(lease: BaseLease) -> tuple[str, str]:
    return engines.inside(lease._desk.config, (":namespace", ":name", ":token"), (":", "\\:"))


def _execute(lease: BaseLease, connection: Any, statement: str) -> Any:
    """Whatever driver SQLAlchemy has beneath: it puts the parameters in that one's style."""
    values = _values(lease) if ":name" in statement else {}
    return connection.execute(import_module("sqlalchemy").text(statement), values)


def _for_a_cursor(lease: BaseLease) -> tuple[str, str]:
    return engines.inside(lease._desk.config, ("%(namespace)s", "%(name)s", "%(token)s"), ("%", "%%"))


def _values(lease: BaseLease) -> dict[str, object]:
    return {"namespace": lease._claim.namespace, "name": lease.name, "token": lease.token}


def _cursor(connection: Any) -> Any:
    """A new cursor of a connection; of a cursor, another one of the same."""
    return getattr(connection, "connection", connection).cursor()
