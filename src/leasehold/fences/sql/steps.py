"""What a fence column does, step by step, whoever runs the statements: a DB-API connection or SQLAlchemy.

The update that writes also compares: `... and fence <= :token`. When it touches none, the row is locked and looked at.
It is not there; or its mark is higher: stale; or else the update is repeated, under the lock: another one has just
inserted the row, or MySQL did not count a row that did not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from leasehold.errors import ConfigError
from leasehold.fences.rules import NEVER, Pass, Shown, lacks_slots, refuse, to_read, to_write

_WHAT = "a fence column"


class ColumnSteps(ABC):
    @abstractmethod
    def resource_of(self, key: Any) -> str:
        """The row, for people."""

    @abstractmethod
    def is_mark(self, column: str) -> bool:
        """Whether it is the column of the mark, by whatever spelling."""

    @abstractmethod
    async def update(self, key: Any, token: int, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        """Where the mark is not higher: raise it, set columns, take off columns that have as much. Rows touched."""

    @abstractmethod
    async def look(self, key: Any, columns: Sequence[str], shared: bool) -> Sequence[Any] | None:
        """The mark and some columns of a row, locked; None: no such row."""

    async def claiming(self, lease: Shown, key: Any) -> None:
        await self._change(lease, key, {}, {})

    async def writing(self, lease: Shown, key: Any, values: Mapping[str, Any]) -> None:
        if not values:
            raise ConfigError("write() needs the columns to be written: write(lease, key, count=9)")
        self._spare_mark(values)
        await self._change(lease, key, values, {})

    async def taking(self, lease: Shown, key: Any, amounts: Mapping[str, Any]) -> bool:
        if not amounts or any(amount < 0 for amount in amounts.values()):
            raise ConfigError("take() needs columns and what to take off them: take(lease, key, quantity=1)")
        self._spare_mark(amounts)
        amounts = {column: amount for column, amount in amounts.items() if amount}
        if await self._change(lease, key, {}, amounts) or not amounts:  # MySQL does not count a row without a change
            return True
        await self._change(lease, key, {}, {})  # "not enough" is a read that may decide something
        return False

    async def reading(self, lease: Shown, key: Any, columns: Sequence[str]) -> tuple[Any, ...]:
        if not columns:
            raise ConfigError('read() needs the columns to be read: read(lease, key, "count")')
        shown = lacks_slots(to_read(lease), _WHAT)
        if not shown.shared:
            await self._change(lease, key, {}, {})
        return tuple((await self._seen(lease, shown, key, columns))[1:])

    async def _change(self, lease: Shown, key: Any, sets: Mapping[str, Any], takes: Mapping[str, Any]) -> int:
        shown = lacks_slots(to_write(lease), _WHAT)
        count = await self.update(key, shown.token, sets, takes)
        if count == 0:
            await self._seen(lease, shown, key, ())
            count = await self.update(key, shown.token, sets, takes)
        return count

    async def _seen(self, lease: Shown, shown: Pass, key: Any, columns: Sequence[str]) -> Sequence[Any]:
        row = await self.look(key, columns, shown.shared)
        if row is None:
            self._missing(key)
        if (mark := row[0] or NEVER) > shown.token:
            refuse(lease, shown, int(mark), self.resource_of(key))
        return row

    def _spare_mark(self, columns: Iterable[str]) -> None:
        if any(map(self.is_mark, columns)):
            raise ConfigError(
                "the column of the mark is the fence's own: it would fall, and let holders of the past in"
            )

    def _missing(self, key: Any) -> NoReturn:
        raise LookupError(f"{self.resource_of(key)} is not there: insert it first, with fence 0")
