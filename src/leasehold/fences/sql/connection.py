"""A DB-API connection, blocking or asyncio, seen as one: run a statement, make a transaction."""

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
        """One of our own statements: how many rows it touched, and those it gives, each as a list of columns."""
        text, parameters = dialects.render(statement, values, self.dialect.style)
        cursor = await self.execute(text, parameters)
        rows = [_columns(row) for row in await maybe_await(cursor.fetchall())] if cursor.description else []
        count = cursor.rowcount
        await maybe_await(cursor.close())
        return count, rows

    async def execute(self, statement: str, parameters: Any) -> Any:
        """A cursor that has run the caller's statement."""
        cursor = await maybe_await(self.connection.cursor())
        # Drivers take a % for a placeholder as soon as there are parameters, if only an empty list.
        await maybe_await(cursor.execute(statement) if parameters is None else cursor.execute(statement, parameters))
        return cursor

    async def begin(self) -> None:
        """A transaction of the fence's own, so that what it reads is not older than its mark."""
        await maybe_await(dialects.refresh_status(self.dialect, self.connection))
        if dialects.in_transaction(self.dialect, self.connection):
            raise ConfigError(
                "a transaction is open on this connection: commit it first. To fence a transaction of your own, "
                "make claim(lease) its first statement"
            )
        if statement := dialects.begin_statement(self.dialect, self.connection):
            try:
                await maybe_await((await self.execute(statement, None)).close())
            except BaseException:  # cancelled, it may have begun all the same, and would keep everybody out
                await self.rollback()
                raise

    async def commit(self) -> None:
        try:
            await maybe_await(self.connection.commit())
        except BaseException:
            await self.rollback()
            raise

    async def rollback(self) -> None:
        with suppress(Exception):  # the connection is lost, and the transaction with it: what went wrong before counts
            await maybe_await(self.connection.rollback())

    async def run_in_transaction(self, work: Coroutine[Any, Any, T]) -> T:
        """`work` as one transaction: committed, or after any error rolled back."""
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
