"""A job that runs once per tick in the whole fleet, even if clocks differ.

Each tick is a key of `once`: its record decides that it runs once. The schedule's one lock keeps runs from overlapping.
If a client finds the lock busy, the tick's record tells why. If another client runs this very tick, there is nothing to
do but to check again soon, because that client may die. Otherwise the lock is held for another tick, as happens with
clocks that are minutes apart; then the client retries for as long as its own tick is due.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from typing import Any, Final

from leasehold.client.lock import BaseLock
from leasehold.config import Duration, check_seconds
from leasehold.core import timing
from leasehold.core.record_fields import is_time, is_whole_number, load_fields
from leasehold.core.ticks import IntervalTicks, Missed, Ticks
from leasehold.errors import ConfigError, LeaseLost, NotAcquired, RunFailed, Unavailable
from leasehold.records.access import RecordAccess
from leasehold.records.once import Once, OnceOptions, OnFailure
from leasehold.records.store import Record
from leasehold.runtime.base import Signal

_log = logging.getLogger("leasehold.schedule")

KIND: Final = "schedule"

_TICK_KIND: Final = "tick"
_IS_VALID: Final = {"settled": is_whole_number, "time": lambda value: value is None or is_time(value)}
_PAUSE: Final = 0.05  # between attempts while the lock is held for another tick
_MAX_PAUSE: Final = 1.0
_MAX_CLOCK_DIFFERENCE: Final = 3600.0  # between clocks, in seconds: records of ticks are kept this much longer


def make_ticks(
    every: Duration | None,
    offset: Duration,
    cron: str | None,
    tz: str | tzinfo | None,
    missed: Missed,
    late: Duration | None,
    most: int,
) -> Ticks:
    offset = check_seconds("offset", offset)
    late = None if late is None else check_seconds("late", late, allow_zero=False)
    if missed not in ("skip", "last", "all"):
        raise ConfigError(f"missed must be 'skip', 'last' or 'all', not {missed!r}")
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise ConfigError(f"most must be a whole number of at least 1, not {most!r}")
    if cron is not None and every is None:
        if offset:
            raise ConfigError("offset goes with every: write the minute and hour into the cron expression")
        from leasehold.records.cron import make_cron_ticks  # needs CronSim

        return make_cron_ticks(cron, tz, missed, late, most)
    if every is None or cron is not None:
        raise ConfigError("pass either every=SECONDS or cron='MINUTE HOUR DAY MONTH WEEKDAY'")
    if tz is not None:
        raise ConfigError("tz goes with cron: multiples of every are counted in UTC; pass offset= to shift them")
    every = check_seconds("every", every, allow_zero=False)
    return IntervalTicks(missed, most, every, offset, every / 2 if late is None else late)


class BaseSchedule:
    """What `Schedule` and `AsyncSchedule` share."""

    def __init__(
        self, lock: BaseLock[Any], records: RecordAccess, name: str, ticks: Ticks, on_failure: OnFailure
    ) -> None:
        self.name, self.ticks = name, ticks
        self._lock, self._records = lock, records
        self._zone: tzinfo = getattr(ticks, "zone", UTC)  # of a cron expression
        self._options = OnceOptions(on_failure=on_failure, max_result=0)
        self._record_key = records.key(KIND, name)
        self._last_completed = -1  # the last tick that this process knows to be completed
        self._stopped = self._stop_seen = False
        self._signal: Signal | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.ticks}>"

    def stop(self) -> None:
        """Make `run` return when its current tick is done; at once if it has not begun. May be called from any
        thread."""
        self._stopped = True
        if self._signal is not None:
            self._signal.set()

    async def _run(self, fn: Callable[..., Any]) -> None:
        runtime = self._records.core.runtime
        self._signal = runtime.signal()
        if self._stop_seen:  # a stop that no `run` has seen is meant for this one: it came before its thread or task
            self._stopped = self._stop_seen = False
        try:
            while not self._stopped:
                try:
                    _, retry_soon = await self._run_due(fn)
                except (Unavailable, LeaseLost) as error:  # a retry may be answered before the tick is over
                    _log.warning("the schedule %s could not be checked; retrying: %s", self.name, error)
                    retry_soon = True
                now = runtime.wall()
                next_time = self.ticks.next_time(now)
                seconds = next_time - now
                if retry_soon:
                    seconds = min(seconds, (next_time - self.ticks.time_of(self.ticks.current_number(now))) / 4)
                # Never sleep for long: the wall clock may be set meanwhile, and sleeps do not count suspend.
                await self._signal.wait(min(seconds, timing.MAX_SLEEP))
        finally:  # also if its task is cancelled right after the stop
            self._stop_seen = self._stopped

    async def _run_due(self, fn: Callable[..., Any]) -> tuple[list[datetime], bool]:
        """Run the ticks that are due. Returns those that ran here, and whether to check again before the next one."""
        now = self._records.core.runtime.wall()
        last_completed = await self._read_completed(now)
        ran: list[datetime] = []
        for number in self.ticks.due(now, last_completed):
            tick = datetime.fromtimestamp(self.ticks.time_of(number), self._zone)
            try:
                once = await self._run_tick(fn, number, tick)
            except (
                NotAcquired
            ):  # another client runs it, or did not end with another tick; no later tick may overtake it
                return ran, True
            if once.ran:
                ran.append(tick)
                if not once.finished:  # lost, or to be retried: the next process that checks runs it
                    return ran, True
            await self._mark_completed(number, now)
            if self._stopped:
                break
        return ran, False

    async def _run_tick(self, fn: Callable[..., Any], number: int, tick: datetime) -> Once:
        """Run a tick, unless it has run. Raises `NotAcquired` if another client is running it, or is running another
        tick for as long as this one is due."""
        runtime, tries = self._records.core.runtime, 0
        retry_until = runtime.now() + self.ticks.due_until(number, runtime.wall()) - runtime.wall()
        options = replace(self._options, keep=self.ticks.due_for(number) + _MAX_CLOCK_DIFFERENCE)
        while True:
            once = Once(self._lock, self._records, f"{self.name}@{number}", options, _TICK_KIND)
            try:
                await once.run(fn, (), {}, tick=tick)
            except BaseException as error:
                if not (isinstance(error, Exception) or runtime.is_stray_cancellation(error)):
                    raise
                if once.ran:
                    _log.exception("the tick %s of %s failed", tick.isoformat(), self.name)
                elif isinstance(error, NotAcquired):
                    pause = timing.backoff(tries, _PAUSE, _MAX_PAUSE, 0.5 + runtime.random() / 2)
                    if self._stopped or runtime.now() + pause > retry_until or await once.is_running():
                        raise
                    await runtime.sleep(pause)
                    tries += 1
                    continue
                elif not isinstance(error, RunFailed):  # RunFailed: it failed in an earlier run
                    raise
            return once

    async def _read_completed(self, now: float) -> int:
        """The last tick that needs no more work. It is not stored if missed ticks are skipped."""
        if not self._is_possible(self._last_completed, now):
            self._last_completed = -1
        if self.ticks.missed == "skip":
            return self._last_completed
        found = await self._records.read(self._record_key)
        while found is None:  # a new schedule: nothing was missed before it existed
            found = await self._write_completed(None, self.ticks.initial_completed(now)) or await self._records.read(
                self._record_key
            )
        number = self._completed_number(found)
        if not self._is_possible(number, now):
            ahead = self.ticks.time_of(number) - now
            _log.warning(
                "%s is recorded as completed for the next %.0f seconds, so a clock was wrong; ignoring that record",
                self.name,
                ahead,
            )
            number = self.ticks.initial_completed(now)
        return max(self._last_completed, number)

    def _is_possible(self, number: int, now: float) -> bool:
        """Whether any machine's clock can have reached this tick. If not, a clock was wrong, or ours is. The number is
        then ignored, so that the fleet does not stop for years: the record of each tick decides whether it ran."""
        return self.ticks.time_of(number) - now <= _MAX_CLOCK_DIFFERENCE

    async def _mark_completed(self, number: int, now: float) -> None:
        if not self._records.in_caller_transaction:
            self._last_completed = number
        if self.ticks.missed == "skip":
            return
        found = await self._records.read(self._record_key)
        while (
            found is None
            or (completed := self._completed_number(found)) < number
            or not self._is_possible(completed, now)
        ):
            found = await self._write_completed(found, number) or await self._records.read(self._record_key)

    async def _write_completed(self, expected: Record | None, number: int) -> Record | None:
        data = json.dumps({"settled": number, "time": self.ticks.time_of(number)}).encode()
        return await self._records.swap(self._record_key, data, expected, None)

    def _completed_number(self, record: Record) -> int:
        """The number of the recorded tick. If the schedule had other times then, that of the last tick before it."""
        data = load_fields(record.data, "the record of a schedule", _IS_VALID, {"time"})
        number, time = data["settled"], data.get("time")
        return number if time in (None, self.ticks.time_of(number)) else self.ticks.current_number(time)
