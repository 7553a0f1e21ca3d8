"""Checks a lease inside your own SQL transaction, for engines that keep leases in the same database as your data.

    with client.lock("orders/42") as lease, connection.transaction():
        leasehold.transaction.check(lease, connection)
        connection.execute("update orders set ...")

After `check` has returned, the engine grants the name to no other claim before your transaction has ended, even if the
lease expires in the meantime: "still the holder" and the write commit together, or not at all.
"""

from __future__ import annotations

from functools import partial

from leasehold import dbapi, engines
from leasehold.client.lease import BaseLease
from leasehold.errors import ConfigError, LeaseLost
from leasehold.runtime.base import run_sync

__all__ = ["check", "check_async"]


def check(lease: BaseLease, connection: object) -> None:
    """Raise `LeaseLost` unless the lease is held now; otherwise keep the name until the transaction has ended.

    `connection` is a psycopg or PyMySQL connection or cursor, any other DB-API connection or cursor whose parameter
    style is %s, or an SQLAlchemy `Session` or `Connection`. It must be connected to the database that keeps the lease.
    If it is not in a transaction, `check` raises `ConfigError`. The driver's own errors are raised unchanged.

    Not promised: that the lease is still held when the transaction has committed. An open transaction keeps the name
    from all other clients, whatever the ttl, so keep it short.
    """
    run_sync(_check(lease, connection))


async def check_async(lease: BaseLease, connection: object) -> None:
    """`check` for asyncio. `connection` is a psycopg `AsyncConnection` or its cursor, an aiomysql `Connection` or its
    cursor, or an SQLAlchemy `AsyncSession` or `AsyncConnection`."""
    await _check(lease, connection)


async def _check(lease: BaseLease, connection: object) -> None:
    lease.check()
    held_query, transaction_query = engines.lease_check_sql(lease._core.config)
    if dbapi.is_alchemy(connection):
        run = partial(dbapi.run_alchemy, connection)
    else:  # a cursor has a connection
        database = dbapi.database_by_name(lease._core.config.scheme)
        run = partial(dbapi.run, getattr(connection, "connection", connection), database)
    held = await run(held_query, {"namespace": lease._claim.namespace, "name": lease.name, "token": lease.token})
    in_transaction = await run(transaction_query, {})
    if not held.rows:
        raise LeaseLost(lease.name, token=lease.token)
    if not in_transaction.rows:
        raise ConfigError("the connection is not in a transaction: begin one, or the check is stale before your write")
