"""When a schedule is due. Ticks are numbered, so that every machine uses the same number for the same tick.

Tick n is at `offset + n * every` seconds since 1970, by each machine's wall clock. Clocks differ, so machines reach a
tick at different moments; they agree on its number.
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
    late: float  # with missed="skip": a tick is still run up to this many seconds after its time
    most: int  # with missed="all": the number of latest ticks that may still run

    def current_number(self, now: float) -> int:
        """The last tick whose time has come."""
        return int((now - self.offset) // self.every)

    def time_of(self, number: int) -> float:
        return self.offset + number * self.every

    def on_time(self, number: int, now: float) -> bool:
        return now - self.time_of(number) <= self.late

    def initial_completed(self, now: float) -> int:
        """The last completed tick of a new schedule: it has missed nothing before it existed."""
        current = self.current_number(now)
        return current - 1 if self.on_time(current, now) else current

    def due_until(self, number: int, now: float) -> float:
        """Until when this tick, which is due now, may begin: then it is skipped, or the next one is due."""
        next_at = self.time_of(self.current_number(now) + 1)
        return min(next_at, self.time_of(number) + self.late) if self.missed == "skip" else next_at

    def due(self, now: float, last_completed: int) -> range:
        """The ticks to run, in order. `last_completed` is the last tick that is known to need no run."""
        current = self.current_number(now)
        if self.missed == "all":
            return range(max(last_completed + 1, current - self.most + 1), current + 1)
        if current <= last_completed or (self.missed == "skip" and not self.on_time(current, now)):
            return range(0)
        return range(current, current + 1)
