"""An hour of what happened, in buckets of ten seconds, for charts and quantiles without a monitoring system.

Memory is bounded: 360 buckets, or 720 after the clock was set back, each with at most `MAX_ROWS` rows. A row is a
namespace or one of its groups. Namespaces and groups beyond that are not counted apart: their namespace still counts
them, if it has a row. When all rows are in use, a namespace with fewer rows than another takes one of that: one
tenant's groups do not hide another tenant.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from leasehold.events import Event
from leasehold.server.fair_table import Tally
from leasehold.server.past import Bucket, Counts, Quantiles, Stats, Summary
from leasehold.server.picture import Snapshot
from leasehold.telemetry import groups
from leasehold.telemetry.metrics import ACQUIRE_BUCKETS, HOLD_BUCKETS, outcome_of

BUCKET_SECONDS: Final = 10
BUCKETS: Final = 360
MAX_ROWS: Final = 100
MAX_GROUPS: Final = 20  # that are shown, the busiest

group_of = lru_cache(maxsize=4096)(groups.group_of)

Row: TypeAlias = tuple[str, str]  # namespace and group; no group: the whole namespace

_ERRORS: Final = ("unavailable", "error")


class _Column:
    """One bucket, all rows."""

    __slots__ = ("counts", "seen")

    def __init__(self) -> None:
        self.counts: dict[Row, Counts] = {}
        self.seen: dict[str, tuple[int, int]] = {}  # by namespace: holders and waiters of the last picture


class Hour:
    """Counts events. Every method is for the event loop's thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock  # Unix time
        self._columns: dict[int, _Column] = {}  # by Unix time in units of BUCKET_SECONDS
        self._rows: dict[Row, None] = {}
        self._tally = Tally()  # of the rows
        self._swept_at = 0  # the bucket in which rows without counts were last removed

    def count(self, event: Event, held: float | None = None) -> None:
        """`held`: for an event that ends a lease, the seconds since its grant."""
        for counts in self._find(event):
            _add(counts, event, held)

    def observe(self, snapshot: Snapshot) -> None:
        if (snapshot.namespace, "") in self._rows or self._admit((snapshot.namespace, "")):
            states = snapshot.states
            self._column(snapshot.as_of).seen[snapshot.namespace] = (
                states["held"],
                states["waiting"] + states["passed over"],
            )

    def read(self, namespace: str, now: float, seconds: float) -> Stats:
        """The last `seconds`, at most an hour."""
        last = _number(now)
        first = max(last - BUCKETS + 1, _number(now - seconds) + 1)
        columns = {number: column for number, column in self._columns.items() if first <= number <= last}
        since = max(now - seconds, first * float(BUCKET_SECONDS))
        found: dict[str, list[Counts | None]] = {}  # by group, one for each bucket
        for index, number in enumerate(range(first, last + 1)):
            for (of_namespace, group), counts in columns[number].counts.items() if number in columns else ():
                if of_namespace == namespace:
                    found.setdefault(group, [None] * (last - first + 1))[index] = counts
        activity = {
            group: [0 if counts is None else sum(counts.acquires.values()) for counts in row]
            for group, row in found.items()
        }

        def summary(group: str) -> Summary:
            none = [0] * (last - first + 1)
            return summarise(group, add_up(found.get(group, ())), activity.get(group, none), now - since)

        busiest = sorted((group for group in found if group), key=lambda group: -sum(activity[group]))[:MAX_GROUPS]
        return Stats(
            namespace=namespace,
            since=since,
            until=now,
            bounds=list(ACQUIRE_BUCKETS),
            hold_bounds=list(HOLD_BUCKETS),
            total=summary(""),
            groups=by_activity(map(summary, busiest)),
            buckets=[_bucket(number, columns.get(number), namespace) for number in range(first, last + 1)],
        )

    def _find(self, event: Event) -> Iterable[Counts]:
        counts = self._column(event.at).counts
        for row in ((event.namespace, ""), (event.namespace, event.group or group_of(event.name))):
            if row in self._rows or self._admit(row):
                yield counts.get(row) or counts.setdefault(row, Counts())

    def _admit(self, row: Row) -> bool:
        """A new row. If there are too many, those without counts make room; else the newest group of the namespace that
        has the most, if that has at least two more."""
        if len(self._rows) >= MAX_ROWS and self._swept_at != (latest := max(self._columns, default=0)):
            self._swept_at = latest
            used = {each for column in self._columns.values() for each in column.counts}
            for unused in self._rows.keys() - used:
                self._remove(unused)
        if len(self._rows) >= MAX_ROWS:
            if self._tally[row[0]] + 1 >= self._tally.most:
                return False
            largest = self._tally.largest()
            self._remove(next(each for each in reversed(self._rows) if each[0] == largest and each[1]))
        self._rows[row] = None
        self._tally.add(row[0], 1)
        return True

    def _remove(self, row: Row) -> None:
        del self._rows[row]
        self._tally.add(row[0], -1)
        for column in self._columns.values():
            column.counts.pop(row, None)

    def _column(self, at: float) -> _Column:
        """The bucket of an event, which may be late: it may come from another worker. Buckets an hour ahead of
        the clock are dropped, too: it has been set back."""
        number = _number(at)
        column = self._columns.get(number)
        if column is None:
            column = self._columns[number] = _Column()
            now = _number(self._clock())
            self._columns = {each: kept for each, kept in self._columns.items() if abs(each - now) < BUCKETS}
        return column


def _number(at: float) -> int:
    return int(at // BUCKET_SECONDS)


def _add(counts: Counts, event: Event, held: float | None) -> None:
    match event.kind:
        case "granted" | "busy" | "failed":
            path = "queued" if event.queued else "direct"
            _increase(counts.acquires, f"{outcome_of(event)} {path}")
            if event.kind == "granted":
                _observe(counts.queued if event.queued else counts.direct, ACQUIRE_BUCKETS, event.seconds or 0.0)
        case "renewed" | "renew_failed":
            _increase(counts.renewals, "ok" if event.kind == "renewed" else "failed")
        case "lost":
            _increase(counts.lost, event.reason or "unknown")
        case "stale_token":
            counts.refused += 1
        case "broken":
            counts.broken += 1
    if held is not None:
        _observe(counts.held, HOLD_BUCKETS, held)


def _increase(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _observe(histogram: list[int], bounds: Sequence[float], value: float) -> None:
    if not histogram:
        histogram.extend([0] * (len(bounds) + 1))
    histogram[bisect_left(bounds, value)] += 1


def _bucket(number: int, column: _Column | None, namespace: str) -> Bucket:
    counts = None if column is None else column.counts.get((namespace, ""))
    holding, waiting = (None, None) if column is None else column.seen.get(namespace, (None, None))
    at = number * float(BUCKET_SECONDS)
    return Bucket(at=at, counts=counts or Counts(), holding=holding, waiting=waiting)


# ------------------------------------------------------------- adding up


def add_up(many: Iterable[Counts | None]) -> Counts:
    """The sum. What it returns shares nothing with what it was given."""
    total = Counts()
    for counts in many:
        if counts is not None:
            for key, count in counts.acquires.items():
                total.acquires[key] = total.acquires.get(key, 0) + count
            for key, count in counts.renewals.items():
                total.renewals[key] = total.renewals.get(key, 0) + count
            for key, count in counts.lost.items():
                total.lost[key] = total.lost.get(key, 0) + count
            _add_histogram(total.direct, counts.direct)
            _add_histogram(total.queued, counts.queued)
            _add_histogram(total.held, counts.held)
            total.refused += counts.refused
            total.broken += counts.broken
    return total


def _add_histogram(total: list[int], more: list[int]) -> None:
    if not total:
        total.extend(more)
    else:
        for index, count in enumerate(more):
            if count:
                total[index] += count


def summarise(group: str, counts: Counts, activity: list[int], seconds: float) -> Summary:
    acquires = sum(counts.acquires.values())
    queued = sum(count for key, count in counts.acquires.items() if key.endswith(" queued"))
    refused = counts.acquires.get("busy direct", 0)
    errors = sum(count for key, count in counts.acquires.items() if key.split()[0] in _ERRORS)
    return Summary(
        group=group,
        counts=counts,
        activity=activity,
        rate=acquires / seconds if seconds > 0 else 0.0,
        errors=errors / acquires if acquires else 0.0,
        contention=(queued + refused) / acquires if acquires else 0.0,
        direct=quantiles(counts.direct, ACQUIRE_BUCKETS),
        queued=quantiles(counts.queued, ACQUIRE_BUCKETS),
        held=quantiles(counts.held, HOLD_BUCKETS),
    )


def by_activity(groups: Iterable[Summary]) -> list[Summary]:
    """The busiest, most first."""
    return sorted(groups, key=lambda group: (-sum(group.activity), group.group))[:MAX_GROUPS]


def quantiles(histogram: Sequence[int], bounds: Sequence[float]) -> Quantiles:
    """p50, p95 and p99, as if the values of a bucket were spread evenly over it. None without values."""
    total = sum(histogram)
    return None if not total else [_quantile(histogram, bounds, share * total) for share in (0.5, 0.95, 0.99)]


def _quantile(histogram: Sequence[int], bounds: Sequence[float], rank: float) -> float:
    below, low = 0, 0.0
    for count, bound in zip(histogram, bounds, strict=False):
        if below + count >= rank and count:
            return low + (bound - low) * (rank - below) / count
        below, low = below + count, bound
    return low  # above the last bound: at least that
