"""The ticks of a cron expression in a time zone. The number of a tick is its time, in seconds since 1970.

CronSim finds the local times that match an expression; this module finds the moments at which clocks in the zone show
them. On the days on which these clocks are changed it follows Debian's cron:

- If neither minute nor hour begins with `*`, the job is meant for a time of day. A time that the clocks skip is due
  when they are set forward. A time that they show twice is due the first time.
- Otherwise the job is meant to run again and again: it is due whenever the clocks show a time that matches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import islice, takewhile
from typing import Final
from zoneinfo import ZoneInfo

try:
    from cronsim import CronSim, CronSimError
except ImportError as error:
    from leasehold.errors import ConfigError

    raise ConfigError('cron= needs CronSim, which is not installed: pip install "leasehold[cron]"') from error

from leasehold.core.ticks import Missed, Ticks
from leasehold.errors import ConfigError

_ALIASES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EPOCH: Final = datetime(1970, 1, 1)  # local times have no zone
_MINUTE: Final = 60
_DAY: Final = 86_400
_MAX_DUE: Final = 10 * 366 * _DAY  # records of ticks are not kept for longer


@dataclass(frozen=True)
class CronTicks(Ticks):
    cron: str
    zone: tzinfo
    late: float | None  # None: until half-way to the next tick
    # A tick and the next one: the clock stays between them for long.
    _span: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)], repr=False, compare=False)

    def __str__(self) -> str:
        return f"at {self.cron!r} ({self.zone})"

    def current_number(self, now: float) -> int:
        current, following = self._span[0]
        if not current <= now < following:
            current = next(iter(self._last(now, 1, after=-1)), -1)
            self._span[0] = current, next(self._times(current))
        return current

    def next_number(self, number: int) -> int:
        current, following = self._span[0]
        return following if number == current else next(self._times(number))

    def time_of(self, number: int) -> float:
        return float(number)

    def late_for(self, number: int) -> float:
        return (self.next_number(number) - number) / 2 if self.late is None else self.late

    def due_for(self, number: int) -> float:
        later = number
        for later in islice(self._times(number), self.most + 1 if self.missed == "all" else 1):
            if later - number > _MAX_DUE:
                break
        return later - number + self.late_for(number)

    def latest(self, now: float, after: int) -> Sequence[int]:
        return self._last(now, self.most, after)

    def _last(self, now: float, most: int, after: int) -> Sequence[int]:
        """The last `most` ticks until now, but none until `after`. Looks back further and further."""
        seconds = _MINUTE
        while True:
            start = max(after, int(now) - seconds)
            found = list(takewhile(lambda time: time <= now, self._times(start)))
            if len(found) >= most or start == after:
                return found[-most:]
            seconds *= 2

    def _times(self, after: int) -> Iterator[int]:
        """The ticks after this second, in order."""
        minute, hour, *_ = self.cron.split()
        return self._repeatedly(after) if "*" in (minute[0], hour[0]) else self._times_of_day(after)

    def _times_of_day(self, after: int) -> Iterator[int]:
        for local in CronSim(self.cron, _local(after + self._offset(after))):
            time = self._first_moment(local)
            if time > after:  # not again when clocks show it twice, or when several skipped times are due at once
                yield time
                after = time

    def _repeatedly(self, after: int) -> Iterator[int]:
        start = after + 1
        while True:  # until the clocks are changed: then again, with another offset
            offset = self._offset(start)
            for local in CronSim(self.cron, _local(start - 1 + offset)):
                time = _seconds(local) - offset
                if (change := self._change(start, time)) is not None:
                    start = change
                    break
                yield time
                start = time

    def _first_moment(self, local: datetime) -> int:
        """When clocks first show this local time, or when they skip it."""
        first, second = (_seconds(local) - self._offset_of(local.replace(fold=fold)) for fold in (0, 1))
        change = self._change(second, first) if second < first else None  # PEP 495: only if they skip it
        return first if change is None else change

    def _change(self, start: int, end: int) -> int | None:
        """The first second after `start`, until `end`, in which the clocks have another offset."""
        offset = self._offset(start)
        while start < end:
            stop = min(start + _DAY, end)
            if self._offset(stop) != offset:
                seconds = range(start + 1, stop + 1)
                return seconds[bisect_left(seconds, True, key=lambda second: self._offset(second) != offset)]
            start = stop
        return None

    def _offset(self, second: int) -> int:
        return self._offset_of(datetime.fromtimestamp(second, UTC).astimezone(self.zone))

    def _offset_of(self, moment: datetime) -> int:
        offset = moment.replace(tzinfo=self.zone).utcoffset() or timedelta()
        return int(offset.total_seconds())


def make_cron_ticks(cron: str, tz: str | tzinfo | None, missed: Missed, late: float | None, most: int) -> CronTicks:
    """Raises `ConfigError` if the expression or the time zone is not valid, or if no date matches."""
    example = "such as '30 4 * * 1-5' (minute hour day month weekday)"
    if not isinstance(cron, str):
        raise ConfigError(f"cron must be a string {example}, not {cron!r}")
    fields = _ALIASES.get(cron.strip().lower(), cron).split()
    if len(fields) != 5:
        raise ConfigError(f"cron must have five fields, {example}, not {cron!r}")
    expression = " ".join(fields)
    try:
        first = next(CronSim(expression, _EPOCH), None)
    except CronSimError as error:
        raise ConfigError(f"the cron expression {cron!r} is not valid: {error}; write one {example}") from None
    if first is None:
        raise ConfigError(f"the cron expression {cron!r} is never due: no date matches")
    return CronTicks(missed, most, expression, _zone(tz), late)


def _zone(tz: str | tzinfo | None) -> tzinfo:
    if tz is None:
        return UTC
    if isinstance(tz, tzinfo):
        return tz
    try:
        return ZoneInfo(tz)
    except (KeyError, OSError, TypeError, ValueError):
        raise ConfigError(
            f"the time zone {tz!r} is not known here: pass a name such as 'Europe/Berlin'; if the name is right, this "
            "system has no time zones: pip install tzdata"
        ) from None


def _local(seconds: int) -> datetime:
    return _EPOCH + timedelta(seconds=seconds)


def _seconds(local: datetime) -> int:
    return int((local.replace(fold=0) - _EPOCH).total_seconds())
