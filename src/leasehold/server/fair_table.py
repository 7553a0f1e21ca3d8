"""A table with a bound that namespaces share: one tenant cannot push out what is known of another.

Every step takes constant time, however many namespaces there are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")


class Tally:
    """How many of something each namespace has."""

    def __init__(self) -> None:
        self.total = 0
        self.most = 0  # that any namespace has
        self._counts: dict[str, int] = {}
        self._by_count: dict[int, dict[str, None]] = {}  # the namespaces that have so many

    def __getitem__(self, namespace: str) -> int:
        return self._counts.get(namespace, 0)

    def add(self, namespace: str, more: int) -> None:
        before = self._counts.pop(namespace, 0)
        if before:
            del self._by_count[before][namespace]
            if not self._by_count[before]:
                del self._by_count[before]
        self.total += more
        if before + more:
            self._counts[namespace] = before + more
            self._by_count.setdefault(before + more, {})[namespace] = None
            self.most = max(self.most, before + more)
        while self.most and self.most not in self._by_count:
            self.most -= 1

    def largest(self) -> str:
        """A namespace that has the most."""
        return next(iter(self._by_count[self.most]))


class TableRow(NamedTuple, Generic[V]):
    namespace: str
    key: str
    value: V


class FairTable(Generic[V]):
    """Values by namespace and key."""

    def __init__(self) -> None:
        self._rows: dict[str, OrderedDict[str, V]] = {}  # by namespace, the one put in last at the end
        self._tally = Tally()

    def __len__(self) -> int:
        return self._tally.total

    def get(self, namespace: str, key: str) -> V | None:
        rows = self._rows.get(namespace)
        return None if rows is None else rows.get(key)

    def put(self, namespace: str, key: str, value: V, most: int) -> TableRow[V] | None:
        """Add or replace a row. If there are more than `most` then, the namespace with the most rows loses the one that
        was put in least recently: it is returned."""
        rows = self._rows.setdefault(namespace, OrderedDict())
        if key not in rows:
            self._tally.add(namespace, 1)
        rows[key] = value
        rows.move_to_end(key)
        return self.pop_oldest(self._tally.largest()) if self._tally.total > most else None

    def oldest(self, namespace: str) -> TableRow[V]:
        """The row of a namespace that was put in least recently."""
        key, value = next(iter(self._rows[namespace].items()))
        return TableRow(namespace, key, value)

    def pop_oldest(self, namespace: str) -> TableRow[V]:
        found = self.oldest(namespace)
        del self._rows[namespace][found.key]
        if not self._rows[namespace]:
            del self._rows[namespace]
        self._tally.add(namespace, -1)
        return found
