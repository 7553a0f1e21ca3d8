"""A job that runs once per tick in the whole fleet, though clocks differ.

Each tick is a key of `once`: its record decides that it runs once. The schedule's one lock only saves work: a run never
overlaps the next, and who finds it busy looks again in a moment, for its holder may die.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from leasehold.client.lock import BaseLock
from leasehold.config import check_seconds
from leasehold.core import timing
from leasehold.core.ticks import Missed, Ticks
from leasehold.errors import ConfigError, LeaseLost, NotAcquired, RunFailed, Unavailable
from leasehold.records.access import RecordAccess
from leasehold.records.once import Once, OnceOptions, OnFailure
from leasehold.records.store import Record
from leasehold.runtime.base import Signal

_log = logging.getLogger("leasehold.schedule")

KIND: Final = "schedule"

_TICK_KIND: Final = "tick"
_MAX_CLOCK_DIFFERENCE: Final = (
    3600.0  # so much clocks may differ: records of ticks are kept so long after they may be asked for
)


def make_ticks(every: float, offset: float, missed: Missed, late: float | None, most: int) -> Ticks:
    check_seconds("every", every, allow_zero=False)
    check_seconds("offset", offset)
    if late is not None:
        check_seconds("late", late, allow_zero=False)
    if missed not in ("skip", "last", "all"):
        raise ConfigError(f"missed is 'skip', 'last' or 'all', not {missed!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"most is a whole number of at least 1, not {most!r}")
    return Ticks(every, offset, missed, every / 2 if late is None else late, most)


class BaseSchedule:
    """The schedule of both faces."""

    def __init__(
        self, lock: BaseLock[Any], records: RecordAccess, name: str, ticks: Ticks, on_failure: OnFailure
    ) -> None:
        self.name, self.ticks = name, ticks
        self._lock, self._records = lock, records
        keep = ticks.every * (ticks.most + 2) + ticks.late + _MAX_CLOCK_DIFFERENCE
        self._options = OnceOptions(keep=keep, on_failure=on_failure, max_result=0)
        self._record_key = records.key(KIND, name)
        self._last_completed = -1  # the last tick settled as far as this process knows
        self._stopped = False
        self._signal: Signal | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} every {self.ticks.every} s>"

    def stop(self) -> None:
        """Have `run` return once the tick it is in is done. From any thread."""
        self._stopped = True
        if self._signal is not None:
            self._signal.set()

    async def _run(self, fn: Callable[..., Any]) -> None:
        runtime = self._records.core.runtime
        self._signal, self._stopped = runtime.signal(), False
        while not self._stopped:
            try:
                _, retry_soon = await self._run_due(fn)
            except (Unavailable, LeaseLost) as error:  # what is silent now may answer before the tick is over
                _log.warning("the schedule %s could not be looked at: %s", self.name, error)
                retry_soon = True
            now = runtime.wall()
            seconds = self.ticks.time_of(self.ticks.current_number(now) + 1) - now
            if retry_soon:
                seconds = min(seconds, self.ticks.every / 4)
            # Never long: a wall clock may be set meanwhile, and sleeps do not count suspend.
            await self._signal.wait(min(seconds, timing.MAX_SLEEP))

    async def _run_due(self, fn: Callable[..., Any]) -> tuple[list[datetime], bool]:
        """Run what is due. Gives the ticks that ran here, and whether to look again before the next one."""
        now = self._records.core.runtime.wall()
        last_completed = await self._read_completed(now)
        ran: list[datetime] = []
        for number in self.ticks.due(now, last_completed):
            tick = datetime.fromtimestamp(self.ticks.time_of(number), UTC)
            once = Once(self._lock, self._records, f"{self.name}@{number}", self._options, _TICK_KIND)
            try:
                await once.run(fn, (), {}, tick=tick)
            except Exception as error:
                if once.ran:
                    _log.exception("the tick %s of %s failed", tick.isoformat(), self.name)
                elif isinstance(error, NotAcquired):  # somebody else is at it; in order: nothing overtakes it
                    return ran, True
                elif not isinstance(error, RunFailed):  # elsewhere, before
                    raise
            if once.ran:
                ran.append(tick)
                if not once.finished:  # lost, or to be retried: by whoever looks next
                    return ran, True
            await self._mark_completed(number, now)
            if self._stopped:
                break
        return ran, False

    async def _read_completed(self, now: float) -> int:
        """The last tick that needs nothing more. Where missed ones are skipped nobody has to remember it."""
        if not self._is_possible(self._last_completed, now):
            self._last_completed = -1
        if self.ticks.missed == "skip":
            return self._last_completed
        found = await self._records.read(self._record_key)
        while found is None:  # met for the first time: nothing was missed before it existed
            found = await self._write_completed(None, self.ticks.initial_completed(now)) or await self._records.read(
                self._record_key
            )
        number = _completed_number(found)
        if not self._is_possible(number, now):
            when = datetime.fromtimestamp(self.ticks.time_of(number), UTC).isoformat()
            _log.warning("%s is settled until %s, by a clock that was wrong: that is ignored", self.name, when)
            number = self.ticks.initial_completed(now)
        return max(self._last_completed, number)

    def _is_possible(self, number: int, now: float) -> bool:
        """Whether this tick can have come on any machine. If not, its clock was wrong, or is here: the records of the
        single ticks decide what ran, and a fleet must not stand still for years."""
        return self.ticks.time_of(number) - now <= _MAX_CLOCK_DIFFERENCE

    async def _mark_completed(self, number: int, now: float) -> None:
        self._last_completed = number
        if self.ticks.missed == "skip":
            return
        found = await self._records.read(self._record_key)
        while (
            found is None or _completed_number(found) < number or not self._is_possible(_completed_number(found), now)
        ):
            found = await self._write_completed(found, number) or await self._records.read(self._record_key)

    async def _write_completed(self, expected: Record | None, number: int) -> Record | None:
        return await self._records.swap(self._record_key, json.dumps({"settled": number}).encode(), expected, None)


def _completed_number(record: Record) -> int:
    return int(json.loads(record.data)["settled"])
