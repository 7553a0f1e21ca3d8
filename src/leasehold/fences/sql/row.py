"""A fence row: the first statement of a transaction fences all others.

Raising the highest token changes the row, and the database keeps a changed row locked until the transaction ends. So
between the check and the commit no other token passes, whatever the statements change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, TypeAlias

from leasehold.dbapi import Connection, Database, Result, Values
from leasehold.errors import ConfigError
from leasehold.fences.rules import (
    NO_TOKEN,
    LeaseLike,
    TokenInfo,
    check_resource,
    raise_stale,
    token_for_read,
    token_for_write,
)
from leasehold.fences.sql.dialect import NO_SLOT, SELECT_HIGHEST, TABLE, check_identifier, fence_dialect, sql_schema
from leasehold.runtime.base import maybe_await, run_sync

Run: TypeAlias = Callable[[str, Values], Awaitable[Result]]


async def check_and_raise(
    run: Run, database: Database, table: str, resource: str, lease: LeaseLike, token_info: TokenInfo
) -> None:
    """Compare and raise the highest token in the transaction of `run`. After `StaleToken`, roll back."""
    dialect = fence_dialect(database)
    values = {
        "resource": resource,
        "resource_hex": resource.encode().hex(),
        "slot": NO_SLOT if token_info.slot is None else token_info.slot,
        "token": token_info.token,
    }
    if not token_info.shared:
        raised = await run(dialect.raise_token.format(table=table), values)
        if dialect.zero_rows_means_stale and raised.row_count > 0:
            return
    suffix = dialect.share_row if token_info.shared else dialect.lock_row
    rows, _ = await run(SELECT_HIGHEST.format(table=table, is_resource=dialect.is_resource) + suffix, values)
    if not rows and not token_info.shared:
        raise ConfigError(
            f"{table} does not show the token that was just written to it, so nothing is fenced: look for triggers, "
            "rules and policies of that table"
        )
    highest_token = int(rows[0][0]) if rows else NO_TOKEN
    if highest_token > token_info.token:
        raise_stale(lease, token_info, highest_token, resource, "sql")


class _BaseSQLFence:
    def __init__(self, connection: Any, resource: str, *, table: str = TABLE, dialect: str | None = None) -> None:
        """`connection`: of sqlite3, psycopg or PyMySQL (asyncio: aiosqlite, psycopg, aiomysql). `table`: create it
        once, by `create()` or with `sql_schema()` in your migrations."""
        self.resource = check_resource(resource)
        self._table = check_identifier(table)
        self._db = Connection(connection, dialect)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource}>"

    async def _create(self) -> None:
        statement = sql_schema(self._db.database.name, self._table)

        async def create() -> None:
            await self._db.run_in_transaction(lambda: self._db.run(statement, {}))

        try:
            await create()
        except Exception as error:
            # On PostgreSQL it fails if another transaction has just created the table, which is then found. Not under
            # an advisory lock: every role of the database could keep that.
            try:
                await create()
            except Exception:
                raise error from None

    async def _check_and_raise(self, lease: LeaseLike, token_info: TokenInfo) -> None:
        await check_and_raise(self._db.run, self._db.database, self._table, self.resource, lease, token_info)

    async def _claim(self, lease: LeaseLike) -> None:
        token_info = token_for_write(lease)
        if self._db.is_autocommit:
            raise ConfigError(
                "claim() needs an open transaction: in autocommit mode its lock would be released immediately. "
                "Begin a transaction first, or use write() or transaction()"
            )
        await self._check_and_raise(lease, token_info)

    async def _write(self, lease: LeaseLike, statement: str, parameters: Any) -> int:
        token_info = token_for_write(lease)

        async def work() -> int:
            await self._check_and_raise(lease, token_info)
            cursor = await self._db.execute(statement, parameters)
            count = self._db.database.matched_rows(cursor, statement)
            await maybe_await(cursor.close())
            return count

        return await self._db.run_in_transaction(work)

    @asynccontextmanager
    async def _transaction(self, lease: LeaseLike) -> AsyncIterator[Any]:
        token_info = token_for_write(lease)
        async with self._db.transaction():
            await self._check_and_raise(lease, token_info)
            cursor = await maybe_await(self._db.connection.cursor())
            yield cursor
            await maybe_await(cursor.close())

    async def _read(self, lease: LeaseLike, statement: str, parameters: Any) -> list[Any]:
        token_info = token_for_read(lease)

        async def work() -> list[Any]:
            await self._check_and_raise(lease, token_info)
            cursor = await self._db.execute(statement, parameters)
            rows = list(await maybe_await(cursor.fetchall()))
            await maybe_await(cursor.close())
            return rows

        return await self._db.run_in_transaction(work)


class _BlockingTransaction:
    """A transaction whose first statement is the fence."""

    def __init__(self, fence: _BaseSQLFence, lease: LeaseLike) -> None:
        self._context = fence._transaction(lease)

    def __enter__(self) -> Any:
        return run_sync(self._context.__aenter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_sync(self._context.__aexit__(kind, error, trace))


class SQLFence(_BaseSQLFence):
    """Fences any statements of a transaction with a row in a fence table, for blocking DB-API connections."""

    def create(self) -> None:
        """Create the fence table if it does not exist. Several processes may do so at once."""
        run_sync(self._create())

    def claim(self, lease: LeaseLike) -> None:
        """Raise the highest token as the first statement of your own transaction, which commits the token, too. After
        `StaleToken`, roll back. It must be the first, because MySQL at repeatable read repeats earlier reads."""
        run_sync(self._claim(lease))

    def read(self, lease: LeaseLike, statement: str, parameters: Any = None) -> list[Any]:
        """The rows of a query, to base a write on. Older holders are refused from now on. Runs its own transaction."""
        return run_sync(self._read(lease, statement, parameters))

    def write(self, lease: LeaseLike, statement: str, parameters: Any = None) -> int:
        """Run a statement in its own transaction, commit it, and return how many rows it matched."""
        return run_sync(self._write(lease, statement, parameters))

    def transaction(self, lease: LeaseLike) -> AbstractContextManager[Any]:
        """`with fence.transaction(lease) as cursor:` runs any statements; commits, or rolls back on an error."""
        return _BlockingTransaction(self, lease)


class AsyncSQLFence(_BaseSQLFence):
    """Like `SQLFence`, for asyncio connections of psycopg, aiomysql and aiosqlite."""

    async def create(self) -> None:
        """Create the fence table if it does not exist. Several processes may do so at once."""
        await self._create()

    async def claim(self, lease: LeaseLike) -> None:
        """Raise the highest token as the first statement of your own transaction; see `SQLFence.claim`."""
        await self._claim(lease)

    async def read(self, lease: LeaseLike, statement: str, parameters: Any = None) -> list[Any]:
        """The rows of a query, to base a write on. Older holders are refused from now on. Runs its own transaction."""
        return await self._read(lease, statement, parameters)

    async def write(self, lease: LeaseLike, statement: str, parameters: Any = None) -> int:
        """Run a statement in its own transaction, commit it, and return how many rows it matched."""
        return await self._write(lease, statement, parameters)

    def transaction(self, lease: LeaseLike) -> AbstractAsyncContextManager[Any]:
        """`async with fence.transaction(lease) as cursor:` runs any statements; commits, or rolls back on an error."""
        return self._transaction(lease)
