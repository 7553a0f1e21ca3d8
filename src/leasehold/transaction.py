"""A lease inside your own SQL transaction, for engines that keep leases in the same database as your data.

    with client.lock("orders/42") as lease, connection.transaction():
        leasehold.transaction.check(lease, connection)
        connection.execute("update orders set ...")
        leasehold.transaction.release_on_commit(lease, connection)

After `check` has returned, the engine grants the name to no other claim before your transaction has ended, even if the
lease expires in the meantime: "still the holder" and the write commit together, or not at all. After
`release_on_commit`, so does the release.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from leasehold import dbapi, engines
from leasehold.client.lease import BaseLease
from leasehold.errors import ConfigError, LeaseholdError, LeaseLost, Unavailable
from leasehold.runtime.base import run_sync

__all__ = ["check", "check_async", "release_on_commit", "release_on_commit_async"]

# What a server says if Leasehold's functions are missing, or not granted: PostgreSQL's SQLSTATEs and MySQL's numbers.
_MISSING: Final = frozenset({"42883", "3F000", "42501", 1049, 1305, 1370})
_NO_TRANSACTION: Final = "the connection is not in a transaction: begin one, or {consequence}"


def check(lease: BaseLease, connection: object) -> None:
    """Raise `LeaseLost` unless the lease is held now; otherwise keep the name until the transaction has ended.

    `connection` is a psycopg or PyMySQL connection or cursor, any other DB-API connection or cursor whose parameter
    style is %s, or an SQLAlchemy `Session` or `Connection`. It must be connected to the database that keeps the lease.
    If it is connected to another one, or is not in a transaction, `check` raises `ConfigError`. The driver's other
    errors are raised unchanged.

    Rolled back to a savepoint before the check, the transaction does not keep the name any more: check again.

    Not promised: that the lease is still held when the transaction has committed. An open transaction keeps the name
    from all other clients, whatever the ttl, so keep it short.
    """
    run_sync(_check(lease, connection))


async def check_async(lease: BaseLease, connection: object) -> None:
    """`check` for asyncio. `connection` is a psycopg `AsyncConnection` or its cursor, an aiomysql `Connection` or its
    cursor, or an SQLAlchemy `AsyncSession` or `AsyncConnection`."""
    await _check(lease, connection)


def release_on_commit(lease: BaseLease, connection: object) -> None:
    """Release the lease when the transaction of `connection` commits: with the commit, neither before nor after it. If
    the transaction is rolled back, also to a savepoint before this call, the lease stays held.

    Raises `LeaseLost` unless the lease is held now. If it is, the engine grants the name to no other claim before the
    transaction has ended, as after `check`. Make it the last statement of the transaction: on MySQL, renewals do not
    extend the lease from then on, and a later `check` in this transaction finds no lease. `connection` and errors are
    those of `check`; on PostgreSQL the transaction must also be READ COMMITTED, the default, or `ConfigError` is
    raised.

    After the commit, leave the `with` block of the lock, or call `lease.release()`: that ends the lease here, too, and
    on MySQL it wakes the next waiter. It is no error that there is nothing left to release. Do no work under the lease
    after the commit: until then, or until the next renewal, `lease.held` does not know of it.
    """
    run_sync(_release_on_commit(lease, connection))


async def release_on_commit_async(lease: BaseLease, connection: object) -> None:
    """`release_on_commit` for asyncio, with the connections of `check_async`."""
    await _release_on_commit(lease, connection)


async def _check(lease: BaseLease, connection: object) -> None:
    _require_lease(lease)
    held_query, transaction_query = engines.lease_check_sql(lease._core.config)
    statements = _Statements(lease, connection)
    held = await statements.run(held_query)
    in_transaction = await statements.run(transaction_query)
    if not held.rows:
        raise await _refusal(lease)
    if not in_transaction.rows:
        raise ConfigError(_NO_TRANSACTION.format(consequence="the check is stale before your write"))


async def _release_on_commit(lease: BaseLease, connection: object) -> None:
    _require_lease(lease)
    *first, last = engines.release_on_commit_sql(lease._core.config)
    statements = _Statements(lease, connection)
    for statement in first:
        await statements.run(statement)
    # Before the call: if its answer is lost, the server may have carried it out. From now on, a missing grant means
    # that the transaction has committed.
    repeated, lease._release_on_commit = lease._release_on_commit, True
    lease._core.registry.add_released_on_commit(lease._claim.id_hash)
    ((answer,),) = (await statements.run(last)).rows
    if answer == "held":
        return
    lease._release_on_commit = repeated
    if answer == "not held":
        raise await _refusal(lease)
    if answer == "isolation":
        raise ConfigError(
            "on PostgreSQL release_on_commit needs READ COMMITTED: at a higher isolation level the commit would fail "
            "if the lease was renewed meanwhile; use transaction.check, and release the lease after the commit"
        )
    raise ConfigError(_NO_TRANSACTION.format(consequence="the lease would end at once"))


def _require_lease(lease: object) -> None:
    if not isinstance(lease, BaseLease):
        raise ConfigError(f"pass the lease that acquire() or `with` gave you, not a {type(lease).__name__}")


class _Statements:
    """Runs statements about a lease that is held on the caller's connection."""

    def __init__(self, lease: BaseLease, connection: object) -> None:
        lease.check()
        claim = lease._claim
        self._values = {
            "namespace": claim.namespace,
            "name": claim.name,
            "namespace_hex": claim.namespace.encode().hex(),
            "name_hex": claim.name.encode().hex(),
            "token": lease.token,
            "id_hash": dbapi.Hidden(claim.id_hash),
        }
        self._database = dbapi.database_by_name(lease._core.config.scheme)
        if dbapi.is_alchemy(connection):
            found: dbapi.Database | None = dbapi.alchemy_database(connection)
            self._run = partial(dbapi.run_alchemy, connection)
        else:
            connection = getattr(connection, "connection", connection)  # a cursor has a connection
            found = dbapi.database_of(connection)  # None: of a driver that is not known
            self._run = partial(dbapi.run, connection, self._database)
        if found is not None and found is not self._database:
            raise ConfigError(
                f"the connection is to {found.name}, and the lock is in {self._database.name}: pass a connection to "
                "the database of the client's URL"
            )

    async def run(self, statement: str) -> dbapi.Result:
        try:
            return await self._run(statement, self._values)
        except Exception as error:
            if _MISSING.isdisjoint(_codes(error)):
                raise
            raise ConfigError(
                "the database of this connection has no functions of Leasehold, or not for this account: pass a "
                "connection to the database of the client's URL, and grant the account what `leasehold schema "
                f"{self._database.name} --role ACCOUNT` prints"
            ) from error


def _codes(error: Any) -> list[object]:
    """What may be the server's code in a driver's error."""
    original = getattr(error, "orig", None) or error  # an error of SQLAlchemy has the driver's inside
    return [getattr(original, "sqlstate", None), *original.args[:1]]


async def _refusal(lease: BaseLease) -> LeaseholdError:
    """Why the connection does not see the lease as held."""
    try:
        await lease._renew(None)
    except LeaseLost as lost:
        return lost
    except Unavailable:
        return LeaseLost(lease.name, token=lease.token)
    return ConfigError(
        f"the engine still has the lease of {lease.name}, but the connection does not see it: the connection is to "
        "another database than that of the client's URL; or, in REPEATABLE READ, its transaction began before the lock "
        "was acquired"
    )
