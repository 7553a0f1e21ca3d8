"""One interface to blocking and asyncio DB-API connections: run a statement, run a transaction."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from leasehold.errors import ConfigError
from leasehold.fences.sql import dialect as dialects
from leasehold.fences.sql.dialect import Values
from leasehold.runtime.base import maybe_await

T = TypeVar("T")


class DbApiConnection:
    def __init__(self, connection: Any, dialect: str | None) -> None:
        self.connection = connection
        self.dialect = dialects.dialect_of(connection, dialect)

    async def run(self, statement: str, values: Values) -> tuple[int, list[Any]]:
        """Run a statement of the fence. Returns the row count, and the rows as lists of columns."""
        text, parameters = dialects.render(statement, values, self.dialect.style)
        cursor = await self.execute(text, parameters)
        rows = [_columns(row) for row in await maybe_await(cursor.fetchall())] if cursor.description else []
        count = cursor.rowcount
        await maybe_await(cursor.close())
        return count, rows

    async def execute(self, statement: str, parameters: Any) -> Any:
        """Run the caller's statement. Returns its cursor."""
        cursor = await maybe_await(self.connection.cursor())
        # If there are parameters, even an empty list, drivers read a % as a placeholder.
        await maybe_await(cursor.execute(statement) if parameters is None else cursor.execute(statement, parameters))
        return cursor

    async def begin(self) -> None:
        """Begin a transaction of the fence's own, so that its reads are not older than its check."""
        await maybe_await(dialects.refresh_status(self.dialect, self.connection))
        if dialects.in_transaction(self.dialect, self.connection):
            raise ConfigError(
                "this connection already has an open transaction: commit it first. To fence your own transaction, "
                "make claim(lease) its first statement"
            )
        if statement := dialects.begin_statement(self.dialect, self.connection):
            try:
                await maybe_await((await self.execute(statement, None)).close())
            except BaseException:  # if cancelled, it may have begun anyway, and would keep its locks
                await self.rollback()
                raise

    async def commit(self) -> None:
        try:
            await maybe_await(self.connection.commit())
        except BaseException:
            await self.rollback()
            raise

    async def rollback(self) -> None:
        with suppress(Exception):  # the connection is lost, and so the transaction: the first error is the one to raise
            await maybe_await(self.connection.rollback())

    async def run_in_transaction(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` as one transaction: committed at its end, rolled back after any error."""
        try:
            await self.begin()
        except BaseException:
            work.close()
            raise
        try:
            result = await work
        except BaseException:
            await self.rollback()
            raise
        await self.commit()
        return result


def _columns(row: Any) -> list[Any]:
    return list(row.values()) if isinstance(row, Mapping) else list(row)
