"""When a schedule is due. Ticks are numbered, so that every machine uses the same number for the same tick.

Clocks differ, so machines reach a tick at different moments, each by its own wall clock; they agree on its number. Tick
n of an interval is at `offset + n * every` seconds since 1970. The ticks of cron expressions are in `records/cron.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Missed: TypeAlias = Literal["skip", "last", "all"]


@dataclass(frozen=True)
class Ticks(ABC):
    """What the two kinds of ticks share. Numbers rise with the times; they need not be consecutive."""

    missed: Missed
    most: int  # with missed="all": the number of latest ticks that may still run

    @abstractmethod
    def current_number(self, now: float) -> int:
        """The last tick whose time has come."""

    @abstractmethod
    def next_number(self, number: int) -> int:
        """The tick after this one."""

    @abstractmethod
    def time_of(self, number: int) -> float: ...

    @abstractmethod
    def late_for(self, number: int) -> float:
        """With missed="skip": this tick is still run up to this many seconds after its time."""

    @abstractmethod
    def due_for(self, number: int) -> float:
        """An upper limit of the seconds after its time for which this tick may be due."""

    @abstractmethod
    def latest(self, now: float, after: int) -> Sequence[int]:
        """The last `most` ticks whose time has come, in order, as far as they come after the tick `after`."""

    def next_time(self, now: float) -> float:
        return self.time_of(self.next_number(self.current_number(now)))

    def on_time(self, number: int, now: float) -> bool:
        return now - self.time_of(number) <= self.late_for(number)

    def initial_completed(self, now: float) -> int:
        """The last completed tick of a new schedule: it has missed nothing before it existed."""
        current = self.current_number(now)
        return current - 1 if self.on_time(current, now) else current

    def due_until(self, number: int, now: float) -> float:
        """Until when this tick, which is due now, may begin: then it is skipped, or the next one is due."""
        next_at = self.next_time(now)
        return min(next_at, self.time_of(number) + self.late_for(number)) if self.missed == "skip" else next_at

    def due(self, now: float, last_completed: int) -> Sequence[int]:
        """The ticks to run, in order. `last_completed` is the last tick that is known to need no run."""
        if self.missed == "all":
            return self.latest(now, last_completed)
        current = self.current_number(now)
        if current <= last_completed or (self.missed == "skip" and not self.on_time(current, now)):
            return ()
        return (current,)


@dataclass(frozen=True)
class IntervalTicks(Ticks):
    every: float
    offset: float
    late: float

    def __str__(self) -> str:
        return f"every {self.every} s"

    def current_number(self, now: float) -> int:
        return int((now - self.offset) // self.every)

    def next_number(self, number: int) -> int:
        return number + 1

    def time_of(self, number: int) -> float:
        return self.offset + number * self.every

    def late_for(self, number: int) -> float:  # noqa: ARG002
        return self.late

    def due_for(self, number: int) -> float:  # noqa: ARG002
        return self.every * (self.most + 2) + self.late

    def latest(self, now: float, after: int) -> Sequence[int]:
        current = self.current_number(now)
        return range(max(after + 1, current - self.most + 1), current + 1)
