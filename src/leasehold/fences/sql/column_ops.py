"""The steps of a fence column, the same for DB-API connections and for SQLAlchemy.

The update that writes also compares: `... and fence <= :token`. If it changes no row, the row is locked and read. Then
the row is missing, or its highest token is higher and the token is stale. Otherwise the update is repeated under the
lock: another client has just inserted the row, or MySQL did not count a row that did not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from leasehold.errors import ConfigError
from leasehold.fences.rules import (
    NO_TOKEN,
    LeaseLike,
    TokenInfo,
    raise_stale,
    refuse_slot,
    token_for_read,
    token_for_write,
)

_FENCE_COLUMN = "a fence column"


class ColumnOperations(ABC):
    @abstractmethod
    def resource_of(self, key: Any) -> str:
        """The row's name in errors."""

    @abstractmethod
    def is_fence_column(self, column: str) -> bool:
        """Whether this is the fence column, in any spelling."""

    @abstractmethod
    async def update(self, key: Any, token: int, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        """If the highest token is not above `token`: raise it, set `sets`, and subtract `takes` where enough is left.
        Returns the row count."""

    @abstractmethod
    async def read_locked(self, key: Any, columns: Sequence[str], shared: bool) -> Sequence[Any] | None:
        """Lock a row and read its highest token and columns; None if the row is missing."""

    async def claim_row(self, lease: LeaseLike, key: Any) -> None:
        await self._update_row(lease, key, {}, {})

    async def write_row(self, lease: LeaseLike, key: Any, values: Mapping[str, Any]) -> None:
        if not values:
            raise ConfigError("write() needs columns to set, such as write(lease, key, count=9)")
        self._refuse_fence_column(values)
        await self._update_row(lease, key, values, {})

    async def take_row(self, lease: LeaseLike, key: Any, amounts: Mapping[str, Any]) -> bool:
        if not amounts or any(amount < 0 for amount in amounts.values()):
            raise ConfigError("take() needs columns and amounts of at least 0, such as take(lease, key, quantity=1)")
        self._refuse_fence_column(amounts)
        amounts = {column: amount for column, amount in amounts.items() if amount}
        # Without amounts a count of 0 is a success, too: MySQL does not count a row that did not change.
        if await self._update_row(lease, key, {}, amounts) or not amounts:
            return True
        await self._update_row(lease, key, {}, {})  # the caller may decide a write from "not enough": see rule 3
        return False

    async def read_row(self, lease: LeaseLike, key: Any, columns: Sequence[str]) -> tuple[Any, ...]:
        if not columns:
            raise ConfigError('read() needs columns to read, such as read(lease, key, "count")')
        token_info = refuse_slot(token_for_read(lease), _FENCE_COLUMN)
        if not token_info.shared:
            await self._update_row(lease, key, {}, {})
        return tuple((await self._read_checked(lease, token_info, key, columns))[1:])

    async def _update_row(self, lease: LeaseLike, key: Any, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        token_info = refuse_slot(token_for_write(lease), _FENCE_COLUMN)
        count = await self.update(key, token_info.token, sets, takes)
        if count < 1:  # -1: the driver does not know
            await self._read_checked(lease, token_info, key, ())
            count = await self.update(key, token_info.token, sets, takes)
        return count

    async def _read_checked(
        self, lease: LeaseLike, token_info: TokenInfo, key: Any, columns: Sequence[str]
    ) -> Sequence[Any]:
        row = await self.read_locked(key, columns, token_info.shared)
        if row is None:
            self._raise_missing(key)
        if (highest_token := row[0] or NO_TOKEN) > token_info.token:
            raise_stale(lease, token_info, int(highest_token), self.resource_of(key), "sql")
        return row

    def _refuse_fence_column(self, columns: Iterable[str]) -> None:
        if any(map(self.is_fence_column, columns)):
            raise ConfigError("the fence column cannot be written directly: lowering it would let stale holders write")

    def _raise_missing(self, key: Any) -> NoReturn:
        raise LookupError(f"{self.resource_of(key)} does not exist: insert the row first, with 0 in its fence column")
