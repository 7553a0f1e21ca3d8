"""A fence row: any statements of a transaction, fenced by its first one.

Raising the mark changes the row, and the database keeps a changed row locked until the transaction ends. So between
this check and the commit nobody with another token comes in, whatever the statements touch.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from leasehold.errors import ConfigError
from leasehold.fences.rules import NEVER, Pass, Shown, check_resource, refuse, to_read, to_write
from leasehold.fences.sql.dialect import NO_SLOT, TABLE, Dialect, alone, checked, sql_schema
from leasehold.fences.sql.link import Link
from leasehold.runtime.base import settle, step


async def show(run: Any, dialect: Dialect, table: str, resource: str, lease: Shown, shown: Pass) -> None:
    """Compare and raise the mark in the transaction that `run` works in. Raises `StaleToken`; then roll back."""
    values = {"resource": resource, "slot": NO_SLOT if shown.slot is None else shown.slot, "token": shown.token}
    if not shown.shared:
        count, _ = await run(dialect.raise_mark.format(table=table), values)
        if dialect.counts and count > 0:
            return
    suffix = dialect.share_row if shown.shared else dialect.lock_row
    _, rows = await run(dialect.look.format(table=table) + suffix, values)
    mark = int(rows[0][0]) if rows else NEVER
    if mark > shown.token:
        refuse(lease, shown, mark, resource)


class _Base:
    def __init__(self, connection: Any, resource: str, *, table: str = TABLE, dialect: str | None = None) -> None:
        """`connection`: of sqlite3, psycopg or PyMySQL (asyncio: aiosqlite, psycopg, aiomysql). `table`: made once, by
        `create()` or by `sql_schema()` in your migrations."""
        self.resource = check_resource(resource)
        self._table = checked(table)
        self._link = Link(connection, dialect)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.resource}>"

    async def _create(self) -> None:
        link = self._link
        await link.whole(link.run(sql_schema(link.dialect.name, self._table), {}))

    async def _show(self, lease: Shown, shown: Pass) -> None:
        await show(self._link.run, self._link.dialect, self._table, self.resource, lease, shown)

    async def _claim(self, lease: Shown) -> None:
        shown = to_write(lease)
        if alone(self._link.dialect, self._link.connection):
            raise ConfigError(
                "there is no transaction on this connection, and none begins by itself: a claim would be over before "
                "what it is to guard. Begin one first, or use write() or transaction()"
            )
        await self._show(lease, shown)

    async def _write(self, lease: Shown, statement: str, parameters: Any) -> int:
        shown = to_write(lease)

        async def work() -> int:
            await self._show(lease, shown)
            cursor = await self._link.execute(statement, parameters)
            count: int = cursor.rowcount
            await settle(cursor.close())
            return count

        return await self._link.whole(work())

    async def _read(self, lease: Shown, statement: str, parameters: Any) -> list[Any]:
        shown = to_read(lease)

        async def work() -> list[Any]:
            await self._show(lease, shown)
            cursor = await self._link.execute(statement, parameters)
            rows = list(await settle(cursor.fetchall()))
            await settle(cursor.close())
            return rows

        return await self._link.whole(work())


class _Transaction:
    """One transaction that begins with the fence."""

    def __init__(self, fence: _Base, lease: Shown) -> None:
        self._fence, self._lease, self._link = fence, lease, fence._link

    async def _enter(self) -> Any:
        shown = to_write(self._lease)
        await self._link.begin()
        try:
            await self._fence._show(self._lease, shown)
            self._cursor = await settle(self._link.connection.cursor())
        except BaseException:
            await self._link.rollback()
            raise
        return self._cursor

    async def _leave(self, failed: bool) -> None:
        if failed:
            await self._link.rollback()
            return
        await settle(self._cursor.close())
        await self._link.commit()


class Transaction(_Transaction):
    def __enter__(self) -> Any:
        return step(self._enter())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        step(self._leave(kind is not None))


class AsyncTransaction(_Transaction):
    async def __aenter__(self) -> Any:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(kind is not None)


class SQLFence(_Base):
    """A row in a table of marks, for whatever a transaction of a blocking DB-API connection does."""

    def create(self) -> None:
        """Make the table of marks, if it is not there."""
        step(self._create())

    def claim(self, lease: Shown) -> None:
        """Raise the mark in your own transaction, as its first statement; committed with it. After `StaleToken` roll
        back. (MySQL at repeatable read shows what was read before once more: hence the first.)"""
        step(self._claim(lease))

    def read(self, lease: Shown, statement: str, parameters: Any = None) -> list[Any]:
        """The rows of a query, to decide a write by: older holders write no more. A transaction of its own."""
        return step(self._read(lease, statement, parameters))

    def write(self, lease: Shown, statement: str, parameters: Any = None) -> int:
        """Run a statement, and give the number of rows it touched. A transaction of its own, committed."""
        return step(self._write(lease, statement, parameters))

    def transaction(self, lease: Shown) -> Transaction:
        """`with fence.transaction(lease) as cursor:` any statements; committed at the end, rolled back on an error."""
        return Transaction(self, lease)


class AsyncSQLFence(_Base):
    """As `SQLFence`, for connections of psycopg's asyncio side, aiomysql and aiosqlite."""

    async def create(self) -> None:
        """Make the table of marks, if it is not there."""
        await self._create()

    async def claim(self, lease: Shown) -> None:
        """Raise the mark in your own transaction, as its first statement; see `SQLFence.claim`."""
        await self._claim(lease)

    async def read(self, lease: Shown, statement: str, parameters: Any = None) -> list[Any]:
        """The rows of a query, to decide a write by: older holders write no more. A transaction of its own."""
        return await self._read(lease, statement, parameters)

    async def write(self, lease: Shown, statement: str, parameters: Any = None) -> int:
        """Run a statement, and give the number of rows it touched. A transaction of its own, committed."""
        return await self._write(lease, statement, parameters)

    def transaction(self, lease: Shown) -> AsyncTransaction:
        """`async with fence.transaction(lease) as cursor:` any statements; committed at the end, or rolled back."""
        return AsyncTransaction(self, lease)
