"""Metrics for Prometheus, as a hook:

    client = leasehold.Client(url, on_event=Prometheus())

One hook serves all clients and fences of a process. What is under way (leases held, at risk, the oldest token) is
computed when Prometheus asks, from the leases that are live then, so no gauge drifts. docs/operations/metrics.md says
what each metric means.
"""

from __future__ import annotations

import os
import platform
import time
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Final, NamedTuple

from leasehold import __version__
from leasehold.errors import ConfigError
from leasehold.events import Event, hook_failures
from leasehold.telemetry.groups import Groups, group_of

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise ConfigError('metrics need prometheus-client: pip install "leasehold[prometheus]"') from error

_ACQUIRE_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_RENEW_BUCKETS: Final = tuple(seconds for seconds in _ACQUIRE_BUCKETS if seconds <= 5)
_HOLD_BUCKETS: Final = (0.001, 0.01, 0.1, 0.5, 1, 5, 15, 30, 60, 300, 900, 3600, 14400, 86400)
_MARGIN_BUCKETS: Final = (0.05, 0.1, 0.2, 0.33, 0.4, 0.5, 0.6, 0.7, 1)

_LABELS: Final = ("engine", "namespace", "group")
_CANCELLED: Final = frozenset({"CancelledError", "KeyboardInterrupt", "SystemExit", "GeneratorExit"})
_MAX_NAMES = 8192  # remembered with their row
_MAX_ENDED = 1024

_HOOKS: weakref.WeakSet[Prometheus] = weakref.WeakSet()  # for the handler at fork

_Labels = tuple[str, str, str]
_new_tuple: Final = tuple.__new__  # a fraction of the cost of calling the class, for what every grant builds


class _Live(NamedTuple):
    """A lease that is held."""

    labels: _Labels
    since: float


class _Row:
    """The metrics of one group that every acquire and release needs, so that no labels are looked up for them. Each is
    made on first use: a group that only sees refused tokens has no histograms of acquires."""

    def __init__(self, hook: Prometheus, labels: _Labels) -> None:
        self._hook, self.labels = hook, labels

    @property
    def acquires(self) -> bool:
        """Whether an acquire of this group was ever seen."""
        return "acquiring" in vars(self)

    @cached_property
    def acquiring(self) -> Gauge:
        return self._hook._acquiring.labels(*self.labels)

    @cached_property
    def direct(self) -> tuple[Counter, Histogram]:
        return self._granted("direct")

    @cached_property
    def queued(self) -> tuple[Counter, Histogram]:
        return self._granted("queued")

    @cached_property
    def held(self) -> Histogram:
        return self._hook._hold_seconds.labels(*self.labels, "released")

    def _granted(self, path: str) -> tuple[Counter, Histogram]:
        hook = self._hook
        counter = hook._acquires.labels(*self.labels, "granted", path)
        return counter, hook._acquire_seconds.labels(*self.labels, path)


class Prometheus:
    """A hook that keeps metrics, and the collector that a registry asks for them.

    registry    where the metrics are registered; by default prometheus_client.REGISTRY
    group       function from a lock's name to the label `group`; by default the name without its ids
    max_groups  after this many pairs of namespace and group, new ones are counted as `other`
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        group: Callable[[str], str] = group_of,
        max_groups: int = 30,
    ) -> None:
        self._rule, self._max_groups = group, max_groups
        self._failures_before = hook_failures()
        self._start()
        try:
            registry.register(self)
        except ValueError as error:
            raise ConfigError(
                "this registry already has the metrics of leasehold: pass one hook to all clients, or another registry"
            ) from error
        _HOOKS.add(self)

    def _start(self) -> None:
        """Count from zero. Also in a forked child: what is held and counted so far is the parent's, and a thread of the
        parent may have had the lock of a metric."""
        self._groups = Groups(self._rule, self._max_groups)
        self._acquires = _counter("acquires", "Acquires that ended.", "outcome", "path")
        self._acquire_seconds = _histogram("acquire_seconds", "Seconds until the grant.", _ACQUIRE_BUCKETS, "path")
        self._acquiring = Gauge("leasehold_acquiring", "Acquires under way.", _LABELS, registry=None)
        self._hold_seconds = _histogram("hold_seconds", "Seconds that ended leases were held.", _HOLD_BUCKETS, "end")
        self._renewals = _counter("renewals", "Renewals that were sent.", "outcome")
        self._renew_seconds = _histogram("renew_seconds", "Seconds until a renewal was confirmed.", _RENEW_BUCKETS)
        self._margin = _histogram(
            "renew_margin_ratio", "Share of the ttl that was left when a renewal was confirmed.", _MARGIN_BUCKETS
        )
        self._lost = _counter("leases_lost", "Leases lost.", "reason")
        self._pending = _counter("releases_owed", "Releases that got no answer and are retried.")
        self._stale = _counter("stale_tokens", "Tokens that a fence refused.", "fence")
        self._breaks = Counter("leasehold_breaks", "Locks broken by operators.", _LABELS[:2], registry=None)
        self._once = _counter("once", "Calls of once.", "outcome")
        self._conflicts = _counter("conflicts", "Optimistic updates that met another writer.")
        self._metrics: list[Counter | Gauge | Histogram] = [
            *(self._acquires, self._acquire_seconds, self._acquiring, self._hold_seconds, self._renewals),
            *(self._renew_seconds, self._margin, self._lost, self._pending, self._stale, self._breaks, self._once),
            self._conflicts,
        ]
        self._rows: dict[_Labels, _Row] = {}
        self._by_name: dict[tuple[Any, ...], _Row] = {}  # by engine, namespace and name
        self._live: dict[str | None, _Live] = {}  # by fingerprint
        self._at_risk: set[str | None] = set()  # fingerprints; an event may come late, so only those in `_live` count
        self._ended: set[str | None] = set()  # lost before `granted` arrived, which comes from another thread
        self._handlers: dict[str, Callable[[Event, _Row], None]] = {
            "attempted": self._on_attempted,
            "granted": self._on_granted,
            "busy": self._on_not_granted,
            "failed": self._on_not_granted,
            "unguaranteed": self._on_not_granted,
            "renewed": self._on_renewed,
            "renew_failed": self._on_renew_failed,
            "at_risk": self._on_at_risk,
            "lost": self._on_lost,
            "released": self._on_released,
            "release_pending": lambda _, row: self._pending.labels(*row.labels).inc(),
            "broken": lambda _, row: self._breaks.labels(*row.labels[:2]).inc(),
            "stale_token": lambda event, row: self._stale.labels(*row.labels, event.fence).inc(),
            "ran": lambda event, row: self._once.labels(*row.labels, event.kind).inc(),
            "replayed": lambda event, row: self._once.labels(*row.labels, event.kind).inc(),
            "conflict": lambda _, row: self._conflicts.labels(*row.labels).inc(),
        }

    def __call__(self, event: Event) -> None:
        """Count an event. Never waits for I/O."""
        handler = self._handlers.get(event.kind)
        if handler is not None:
            handler(event, self._by_name.get(event[1:4]) or self._find_row(event))

    def _find_row(self, event: Event) -> _Row:
        labels = (event.engine, *self._groups.find(event.namespace, event.name))
        row = self._rows.setdefault(labels, _Row(self, labels))
        if len(self._by_name) >= _MAX_NAMES:  # names without end: forget them, the rows stay
            self._by_name.clear()
        self._by_name[event[1:4]] = row
        return row

    # ------------------------------------------------------------- acquiring

    def _on_attempted(self, _event: Event, row: _Row) -> None:
        row.acquiring.inc()

    def _on_granted(self, event: Event, row: _Row) -> None:
        row.acquiring.dec()
        counter, histogram = row.queued if event.queued else row.direct
        counter.inc()
        histogram.observe(event.seconds or 0.0)
        self._live[event.fingerprint] = _new_tuple(_Live, (row.labels, event.at))
        if self._ended and event.fingerprint in self._ended:
            self._ended.discard(event.fingerprint)
            self._live.pop(event.fingerprint, None)

    def _on_not_granted(self, event: Event, row: _Row) -> None:
        row.acquiring.dec()
        if event.kind == "busy":
            outcome = "timeout" if event.queued else "busy"
        elif event.kind == "unguaranteed" or event.error == "Unavailable":
            outcome = "unavailable"
        else:
            outcome = "cancelled" if event.error in _CANCELLED else "error"
        self._acquires.labels(*row.labels, outcome, "queued" if event.queued else "direct").inc()

    # --------------------------------------------------------------- leases

    def _on_renewed(self, event: Event, row: _Row) -> None:
        self._renewals.labels(*row.labels, "ok").inc()
        self._renew_seconds.labels(*row.labels).observe(event.seconds or 0.0)
        if event.left is not None and event.ttl:
            self._margin.labels(*row.labels).observe(event.left / event.ttl)
        self._at_risk.discard(event.fingerprint)

    def _on_renew_failed(self, _event: Event, row: _Row) -> None:
        self._renewals.labels(*row.labels, "failed").inc()

    def _on_at_risk(self, event: Event, _row: _Row) -> None:
        self._at_risk.add(event.fingerprint)

    def _on_lost(self, event: Event, row: _Row) -> None:
        self._lost.labels(*row.labels, event.reason).inc()
        live = self._end(event)
        if live is not None:
            self._hold_seconds.labels(*row.labels, "lost").observe(_held_seconds(event, live))
        else:
            if len(self._ended) >= _MAX_ENDED:
                self._ended.clear()
            self._ended.add(event.fingerprint)

    def _on_released(self, event: Event, row: _Row) -> None:
        live = self._end(event)
        if live is not None:  # else it was lost before
            row.held.observe(_held_seconds(event, live))

    def _end(self, event: Event) -> _Live | None:
        if self._at_risk:
            self._at_risk.discard(event.fingerprint)
        return self._live.pop(event.fingerprint, None)

    # ------------------------------------------------------------ collecting

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry."""
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        """All metrics, computed now. Without the `_created` series, one more for each counter and histogram."""
        for metric in self._metrics:
            for family in metric.collect():
                family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
                yield family
        yield from self._collect_live()
        build_info = GaugeMetricFamily("leasehold_build_info", "The version.", labels=("version", "python"))
        build_info.add_metric((__version__, platform.python_version()), 1)
        yield build_info
        failures = hook_failures() - self._failures_before
        yield CounterMetricFamily("leasehold_hook_errors", "Calls of event hooks that failed.", failures)
        yield CounterMetricFamily("leasehold_groups_overflowed", "Names counted as other.", self._groups.overflowed)

    def _collect_live(self) -> Iterable[Metric]:
        held = GaugeMetricFamily("leasehold_held", "Leases held.", labels=_LABELS)
        at_risk = GaugeMetricFamily("leasehold_at_risk", "Leases held that are at risk.", labels=_LABELS)
        age = GaugeMetricFamily("leasehold_token_age_seconds", "Age of the oldest token in use.", labels=_LABELS)
        now, leases = time.time(), self._live.copy()
        for fingerprint in self._at_risk.copy():
            if fingerprint not in leases:  # released or lost
                self._at_risk.discard(fingerprint)
        for labels in [row.labels for row in list(self._rows.values()) if row.acquires]:
            own = [fingerprint for fingerprint, live in leases.items() if live.labels == labels]
            held.add_metric(labels, len(own))
            at_risk.add_metric(labels, sum(fingerprint in self._at_risk for fingerprint in own))
            if own:
                oldest = min(leases[fingerprint].since for fingerprint in own)
                age.add_metric(labels, max(0.0, now - oldest))
        yield from (held, at_risk, age)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return Counter(f"leasehold_{name}", text, (*_LABELS, *labels), registry=None)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    return Histogram(f"leasehold_{name}", text, (*_LABELS, *labels), buckets=buckets, registry=None)


def _held_seconds(event: Event, live: _Live) -> float:
    return max(0.0, event.at - live.since) if event.seconds is None else event.seconds


def _after_fork_in_child() -> None:
    for hook in list(_HOOKS):
        hook._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
