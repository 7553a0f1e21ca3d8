"""Metrics from events, as a hook:

    metrics = leasehold.telemetry.Metrics()
    client = leasehold.Client(url, on_event=metrics)
    page = leasehold.telemetry.metrics_text(metrics)

One hook serves all clients and fences of a process. What is under way (leases held, at risk, the oldest token) is
computed when the metrics are read, from the leases that are live then, so no gauge drifts. docs/operations/metrics.md
says what each metric means. `Prometheus` registers the same metrics with prometheus-client.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final, NamedTuple

from leasehold import __version__
from leasehold.events import Event, dropped_events, hook_failures
from leasehold.model import fast_tuple
from leasehold.telemetry.families import Counter, Family, Histogram, Series, counter, gauge
from leasehold.telemetry.groups import Group, Groups, group_of

ACQUIRE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
RENEW_BUCKETS: Final = tuple(seconds for seconds in ACQUIRE_BUCKETS if seconds <= 5)
HOLD_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 15, 30, 60, 300, 900, 3600, 14400, 86400)
MARGIN_BUCKETS: Final = (0.05, 0.1, 0.2, 0.33, 0.4, 0.5, 0.6, 0.7, 1)

LABELS: Final = ("engine", "namespace", "group")
_CANCELLED: Final = frozenset({"CancelledError", "KeyboardInterrupt", "SystemExit", "GeneratorExit"})
_MAX_NAMES = 8192  # remembered with their group
_MAX_ENDED = 1024

_HOOKS: weakref.WeakSet[Metrics] = weakref.WeakSet()  # for the handler at fork

_Labels = tuple[str, str, str]


class _HeldLease(NamedTuple):
    """A lease that is held."""

    labels: _Labels
    since: float


class _GroupSeries:
    """The series of one group that every acquire and release needs, so that no labels are looked up for them. Each is
    made on first use: a group that only sees refused tokens has no histograms of acquires."""

    def __init__(self, hook: Metrics, labels: _Labels) -> None:
        self._hook, self.labels = hook, labels
        self.attempts = self.ended_without_grant = 0
        self.mutex = threading.RLock()  # reentrant: a signal handler may acquire a lock

    @cached_property
    def direct(self) -> Series:
        return self._hook._acquire_seconds.series(*self.labels, "direct")

    @cached_property
    def queued(self) -> Series:
        return self._hook._acquire_seconds.series(*self.labels, "queued")

    @cached_property
    def released(self) -> Series:
        return self._hook._hold_seconds.series(*self.labels, "released")

    def granted(self, path: str) -> int:
        """How many acquires were granted."""
        series = self._hook._acquire_seconds.find(*self.labels, path)
        return 0 if series is None else series.count

    @property
    def acquiring(self) -> int:
        """Acquires under way. The ends are read first: an acquire that ends meanwhile must not make this negative."""
        ended = self.granted("direct") + self.granted("queued") + self.ended_without_grant
        return self.attempts - ended

    @cached_property
    def labels_by_name(self) -> dict[str, str]:
        return dict(zip(LABELS, self.labels, strict=True))


class Metrics:
    """A hook that keeps metrics.

    group       function from a lock's name to the label `group`; by default the name without its ids. A lock that was
                built with `group=` has that one
    max_groups  after this many pairs of namespace and group, new ones are counted as `other`
    """

    def __init__(self, *, group: Callable[[str], str] = group_of, max_groups: int = 30) -> None:
        self._rule, self._max_groups = group, max_groups
        self._failures_before, self._dropped_before = hook_failures(), dropped_events()
        self._start()
        _HOOKS.add(self)

    def _start(self) -> None:
        """Count from zero. Also in a forked child: what is held and counted so far is the parent's, and a thread of the
        parent may have had the lock of a metric."""
        self._groups = Groups(self._rule, self._max_groups)
        self._not_granted = _counter("acquires", "Acquires that ended.", "outcome", "path")
        self._acquire_seconds = _histogram("acquire_seconds", "Seconds until the grant.", ACQUIRE_BUCKETS, "path")
        self._hold_seconds = _histogram("hold_seconds", "Seconds that ended leases were held.", HOLD_BUCKETS, "end")
        self._renewals = _counter("renewals", "Renewals that were sent.", "outcome")
        self._renew_seconds = _histogram("renew_seconds", "Seconds until a renewal was confirmed.", RENEW_BUCKETS)
        self._margin = _histogram(
            "renew_margin_ratio", "Share of the ttl that was left when a renewal was confirmed.", MARGIN_BUCKETS
        )
        self._lost = _counter("leases_lost", "Leases lost.", "reason")
        self._pending = _counter("releases_owed", "Releases that got no answer and are retried.")
        self._stale = _counter("stale_tokens", "Tokens that a fence refused.", "fence")
        self._breaks = Counter("leasehold_breaks", "Locks broken by operators.", LABELS[:2])
        self._once = _counter("once", "Calls of once.", "outcome")
        self._conflicts = _counter("conflicts", "Optimistic updates that met another writer.")
        self._by_labels: dict[_Labels, _GroupSeries] = {}
        self._by_name: dict[tuple[Any, ...], _GroupSeries] = {}  # by engine, namespace and name
        self._live: dict[str | None, _HeldLease] = {}  # by fingerprint
        self._at_risk: set[str | None] = set()  # fingerprints; an event may come late, so only those in `_live` count
        self._ended: set[str | None] = set()  # lost before `granted` arrived, which comes from another thread
        self._handlers: dict[str, Callable[[Event, _GroupSeries], None]] = {
            "attempted": self._on_attempted,
            "granted": self._on_granted,
            "busy": self._on_not_granted,
            "failed": self._on_not_granted,
            "unguaranteed": self._on_not_granted,
            "renewed": self._on_renewed,
            "renew_failed": lambda _, group: self._renewals.inc(*group.labels, "failed"),
            "at_risk": lambda event, _: self._at_risk.add(event.fingerprint),
            "lost": self._on_lost,
            "released": self._on_released,
            "release_pending": lambda _, group: self._pending.inc(*group.labels),
            "broken": lambda _, group: self._breaks.inc(*group.labels[:2]),
            "stale_token": lambda event, group: self._stale.inc(*group.labels, event.fence or ""),
            "ran": lambda event, group: self._once.inc(*group.labels, event.kind),
            "replayed": lambda event, group: self._once.inc(*group.labels, event.kind),
            "conflict": lambda _, group: self._conflicts.inc(*group.labels),
        }

    def __call__(self, event: Event) -> None:
        """Count an event. Never waits for I/O."""
        handler = self._handlers.get(event[0])
        if handler is not None:
            group = self._by_name.get(event[1:4])
            if group is None or event.group is not None:
                group = self._find_series(event)
            handler(event, group)

    def remember_groups(self, groups: Iterable[Group]) -> None:
        """These were counted before, by another process: they count for the cap."""
        self._groups.remember(groups)

    def labels(self, event: Event) -> dict[str, str]:
        """The labels of an event."""
        group = self._by_name.get(event[1:4]) if event.group is None else None
        return (group or self._find_series(event)).labels_by_name

    def _find_series(self, event: Event) -> _GroupSeries:
        labels = (event.engine, *self._groups.find(event.namespace, event.name, event.group))
        group = self._by_labels.get(labels) or self._by_labels.setdefault(labels, _GroupSeries(self, labels))
        if event.group is None:
            if len(self._by_name) >= _MAX_NAMES:  # very many names: forget them, and keep the groups
                self._by_name.clear()
            self._by_name[event[1:4]] = group
        return group

    # ------------------------------------------------------------- acquiring

    def _on_attempted(self, _event: Event, group: _GroupSeries) -> None:
        with group.mutex:
            group.attempts += 1

    def _on_granted(self, event: Event, group: _GroupSeries) -> None:
        (group.queued if event.queued else group.direct).observe(event.seconds or 0.0)
        self._live[event.fingerprint] = fast_tuple(_HeldLease, (group.labels, event.at))
        if self._ended and event.fingerprint in self._ended:
            self._ended.discard(event.fingerprint)
            self._live.pop(event.fingerprint, None)

    def _on_not_granted(self, event: Event, group: _GroupSeries) -> None:
        with group.mutex:
            group.ended_without_grant += 1
        self._not_granted.inc(*group.labels, outcome_of(event), "queued" if event.queued else "direct")

    # --------------------------------------------------------------- leases

    def _on_renewed(self, event: Event, group: _GroupSeries) -> None:
        self._renewals.inc(*group.labels, "ok")
        self._renew_seconds.series(*group.labels).observe(event.seconds or 0.0)
        if event.left is not None and event.ttl:
            self._margin.series(*group.labels).observe(event.left / event.ttl)
        self._at_risk.discard(event.fingerprint)

    def _on_lost(self, event: Event, group: _GroupSeries) -> None:
        self._lost.inc(*group.labels, event.reason or "")
        live = self._end(event)
        if live is not None:
            self._hold_seconds.series(*group.labels, "lost").observe(_held_seconds(event, live))
        else:
            if len(self._ended) >= _MAX_ENDED:
                self._ended.clear()
            self._ended.add(event.fingerprint)

    def _on_released(self, event: Event, group: _GroupSeries) -> None:
        live = self._end(event)
        if live is not None:  # else it was lost before
            group.released.observe(_held_seconds(event, live))

    def _end(self, event: Event) -> _HeldLease | None:
        if self._at_risk:
            self._at_risk.discard(event.fingerprint)
        return self._live.pop(event.fingerprint, None)

    # -------------------------------------------------------------- reading

    def families(self) -> Iterable[Family]:
        """All metrics, computed now."""
        groups = [group for group in list(self._by_labels.values()) if group.attempts]
        yield self._acquires(groups)
        yield self._acquire_seconds.family()
        acquiring = [(group.labels_by_name, group.acquiring) for group in groups]
        yield gauge("leasehold_acquiring", "Acquires under way.", *acquiring)
        for metric in (
            *(self._hold_seconds, self._renewals, self._renew_seconds, self._margin, self._lost, self._pending),
            *(self._stale, self._breaks, self._once, self._conflicts),
        ):
            yield metric.family()
        yield from self._live_families(groups)
        build_info = {"version": __version__, "python": platform.python_version()}
        yield gauge("leasehold_build_info", "The version.", (build_info, 1))
        failures, dropped = hook_failures() - self._failures_before, dropped_events() - self._dropped_before
        yield counter("leasehold_hook_errors", "Calls of event hooks that failed.", ({}, failures))
        yield counter("leasehold_events_dropped", "Events dropped because a hook is too slow.", ({}, dropped))
        yield counter("leasehold_groups_overflowed", "Names counted as other.", ({}, self._groups.overflowed))

    def _acquires(self, groups: list[_GroupSeries]) -> Family:
        """Every grant is in the histogram `acquire_seconds`, so it is not counted a second time."""
        name, _, text, refused = self._not_granted.family()
        granted = [
            ({**group.labels_by_name, "outcome": "granted", "path": path}, count)
            for group in groups
            for path in ("direct", "queued")
            if (count := group.granted(path))
        ]
        return counter(name, text, *granted, *((sample.labels, sample.value) for sample in refused))

    def _live_families(self, groups: list[_GroupSeries]) -> Iterable[Family]:
        held, at_risk, age = [], [], []
        now, leases = time.time(), self._live.copy()
        for fingerprint in self._at_risk.copy():
            if fingerprint not in leases:  # released or lost
                self._at_risk.discard(fingerprint)
        by_labels: dict[_Labels, list[str | None]] = {group.labels: [] for group in groups}
        for fingerprint, live in leases.items():
            by_labels.setdefault(live.labels, []).append(fingerprint)
        for labels, own in by_labels.items():
            named = dict(zip(LABELS, labels, strict=True))
            held.append((named, len(own)))
            at_risk.append((named, sum(fingerprint in self._at_risk for fingerprint in own)))
            if own:
                age.append((named, max(0.0, now - min(leases[fingerprint].since for fingerprint in own))))
        yield gauge("leasehold_held", "Leases held.", *held)
        yield gauge("leasehold_at_risk", "Leases held that are at risk.", *at_risk)
        yield gauge("leasehold_token_age_seconds", "Age of the oldest token in use.", *age)


def outcome_of(event: Event) -> str:
    """The label `outcome` of the end of an acquire."""
    if event.kind == "granted":
        return "granted"
    if event.kind == "busy":
        return "timeout" if event.queued else "busy"
    if event.kind == "unguaranteed" or event.error == "Unavailable":
        return "unavailable"
    return "cancelled" if event.error in _CANCELLED else "error"


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"leasehold_{name}", text, (*LABELS, *labels))


def _histogram(name: str, text: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"leasehold_{name}", text, bounds, (*LABELS, *labels))


def _held_seconds(event: Event, live: _HeldLease) -> float:
    return max(0.0, event.at - live.since) if event.seconds is None else event.seconds


def _after_fork_in_child() -> None:
    for hook in list(_HOOKS):
        hook._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
