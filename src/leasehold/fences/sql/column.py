"""A fence column: each row has its own highest token, compared and raised by the statement that writes the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leasehold.dbapi import Connection
from leasehold.fences.rules import LeaseLike
from leasehold.fences.sql.column_ops import ColumnOperations
from leasehold.fences.sql.dialect import check_identifier, fence_dialect
from leasehold.runtime.base import run_sync


class _BaseSQLColumn(ColumnOperations):
    def __init__(
        self, connection: Any, table: str, *, key: str = "id", fence: str = "fence", dialect: str | None = None
    ) -> None:
        """`key`: the column that identifies a row. `fence`: the column of the highest token, a bigint; NULL or 0 before
        the first use."""
        self._table, self._key, self._fence = check_identifier(table), check_identifier(key), check_identifier(fence)
        self._db = Connection(connection, dialect)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._table}.{self._fence}>"

    def resource_of(self, key: Any) -> str:
        return f"{self._table}/{key}"

    def is_fence_column(self, column: str) -> bool:
        return column.lower() == self._fence.lower()

    async def update(self, key: Any, token: int, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        changes = [
            f"{self._fence} = :token",
            *(f"{check_identifier(column)} = :set{n}" for n, column in enumerate(sets)),
        ]
        changes += [f"{check_identifier(column)} = {column} - :take{n}" for n, column in enumerate(takes)]
        limits = [f"and {column} >= :take{n}" for n, column in enumerate(takes)]
        values = {f"set{n}": value for n, value in enumerate(sets.values())}
        values |= {f"take{n}": amount for n, amount in enumerate(takes.values())}
        result = await self._db.run(
            f"update {self._table} set {', '.join(changes)} where {self._key} = :key "  # noqa: S608  # checked names
            f"and ({self._fence} is null or {self._fence} <= :token) {' '.join(limits)}",
            values | {"key": key, "token": token},
        )
        return result.row_count

    async def read_locked(self, key: Any, columns: Sequence[str], shared: bool) -> Sequence[Any] | None:
        dialect = fence_dialect(self._db.database)
        names = ", ".join([self._fence, *map(check_identifier, columns)])
        suffix = dialect.share_row if shared else dialect.lock_row
        query = f"select {names} from {self._table} where {self._key} = :key{suffix}"  # noqa: S608  # checked names
        rows, _ = await self._db.run(query, {"key": key})
        return rows[0] if rows else None


class SQLColumn(_BaseSQLColumn):
    """Fences rows of a table with a column for the highest token. For blocking DB-API connections; each call is a
    transaction."""

    def claim(self, lease: LeaseLike, key: Any, /) -> None:
        """Only raise the row's highest token. Raises `StaleToken`, as all methods do, or `LookupError` if no row."""
        run_sync(self._db.run_in_transaction(lambda: self.claim_row(lease, key)))

    def read(self, lease: LeaseLike, key: Any, /, *columns: str) -> tuple[Any, ...]:
        """Columns of a row, to base a write on. Older holders are refused from now on."""
        return run_sync(self._db.run_in_transaction(lambda: self.read_row(lease, key, columns)))

    def write(self, lease: LeaseLike, key: Any, /, **values: Any) -> None:
        """Set columns of a row: `write(lease, "teapot", count=9)`."""
        run_sync(self._db.run_in_transaction(lambda: self.write_row(lease, key, values)))

    def take(self, lease: LeaseLike, key: Any, /, **amounts: Any) -> bool:
        """Subtract from columns: `take(lease, "teapot", quantity=1)`. False if not enough is left."""
        return run_sync(self._db.run_in_transaction(lambda: self.take_row(lease, key, amounts)))


class AsyncSQLColumn(_BaseSQLColumn):
    """Like `SQLColumn`, for asyncio connections of psycopg, aiomysql and aiosqlite."""

    async def claim(self, lease: LeaseLike, key: Any, /) -> None:
        """Only raise the row's highest token. Raises `StaleToken`, as all methods do, or `LookupError` if no row."""
        await self._db.run_in_transaction(lambda: self.claim_row(lease, key))

    async def read(self, lease: LeaseLike, key: Any, /, *columns: str) -> tuple[Any, ...]:
        """Columns of a row, to base a write on. Older holders are refused from now on."""
        return await self._db.run_in_transaction(lambda: self.read_row(lease, key, columns))

    async def write(self, lease: LeaseLike, key: Any, /, **values: Any) -> None:
        """Set columns of a row: `write(lease, "teapot", count=9)`."""
        await self._db.run_in_transaction(lambda: self.write_row(lease, key, values))

    async def take(self, lease: LeaseLike, key: Any, /, **amounts: Any) -> bool:
        """Subtract from columns: `take(lease, "teapot", quantity=1)`. False if not enough is left."""
        return await self._db.run_in_transaction(lambda: self.take_row(lease, key, amounts))
