"""When a schedule is due: ticks are numbered, so that every machine calls the same tick by the same number.

Tick n is at `offset + n * every` seconds since 1970, by whoever's wall clock. Clocks differ, so machines come to a tick
at different moments; the number is what they agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Missed: TypeAlias = Literal["skip", "last", "all"]


@dataclass(frozen=True, slots=True)
class Ticks:
    every: float
    offset: float
    missed: Missed
    late: float  # so long after its time a tick is still run, where missed ones are skipped
    most: int  # so many missed ticks are caught up with

    def current_number(self, now: float) -> int:
        """The last tick whose time has come."""
        return int((now - self.offset) // self.every)

    def time_of(self, number: int) -> float:
        return self.offset + number * self.every

    def on_time(self, number: int, now: float) -> bool:
        return now - self.time_of(number) <= self.late

    def initial_completed(self, now: float) -> int:
        """What counts as settled when a schedule is met for the first time: nothing was missed before it existed."""
        current = self.current_number(now)
        return current - 1 if self.on_time(current, now) else current

    def due(self, now: float, last_completed: int) -> range:
        """The ticks to see to, in order. `last_completed` is the last one that is known to need nothing more."""
        current = self.current_number(now)
        if self.missed == "all":
            return range(max(last_completed + 1, current - self.most + 1), current + 1)
        if current <= last_completed or (self.missed == "skip" and not self.on_time(current, now)):
            return range(0)
        return range(current, current + 1)
