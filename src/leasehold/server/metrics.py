"""The metrics of the server: requests, calls of the engine, waiters, refusals, the breaker; and of the locks that are
acquired through it, which only callers see that may read every name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, get_args

from leasehold.events import Event
from leasehold.model import HoldingState
from leasehold.server.keys import ANY_NAMESPACE
from leasehold.server.messages import Request, Response, known_arguments
from leasehold.server.picture import Picture
from leasehold.telemetry.families import CONTENT_TYPE, Counter, Family, Histogram, Source, counter, gauge, metrics_text
from leasehold.telemetry.groups import Group, Groups
from leasehold.telemetry.metrics import ACQUIRE_BUCKETS, LABELS, outcome_of

if TYPE_CHECKING:
    from leasehold.server.app import App

_MAX_GROUPS: Final = 100  # pairs of namespace and group; names of others are counted as `other`
_MAX_GROUPS_PER_NAMESPACE: Final = 30  # one tenant's names must not hide those of others
_PICTURE_SECONDS: Final = 2.0  # that a scrape waits for the engine
CALL_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class LockMetrics:
    """What the server sees of acquires and leases, named as in `telemetry.Metrics`. That one also counts leases held,
    which a server cannot: it does not see that a grant expires."""

    def __init__(self) -> None:
        self.groups = Groups(limit=_MAX_GROUPS, per_namespace=_MAX_GROUPS_PER_NAMESPACE)
        self._acquires = Counter("leasehold_acquires", "Acquires that ended.", (*LABELS, "outcome", "path"))
        self._acquire_seconds = Histogram(
            "leasehold_acquire_seconds", "Seconds until the grant.", ACQUIRE_BUCKETS, (*LABELS, "path")
        )
        self._renewals = Counter("leasehold_renewals", "Renewals that were sent.", (*LABELS, "outcome"))
        self._lost = Counter("leasehold_leases_lost", "Leases lost.", (*LABELS, "reason"))
        self._stale = Counter("leasehold_stale_tokens", "Tokens that a fence refused.", (*LABELS, "fence"))
        self._breaks = Counter("leasehold_breaks", "Locks broken by operators.", LABELS[:2])

    def count(self, event: Event) -> None:
        labels = (event.engine, *self.groups.find(event.namespace, event.name))
        path = "queued" if event.queued else "direct"
        match event.kind:
            case "granted" | "busy" | "failed":
                self._acquires.inc(*labels, outcome_of(event), path)
                if event.kind == "granted":
                    self._acquire_seconds.series(*labels, path).observe(event.seconds or 0.0)
            case "renewed" | "renew_failed":
                self._renewals.inc(*labels, "ok" if event.kind == "renewed" else "failed")
            case "lost":
                self._lost.inc(*labels, event.reason or "")
            case "stale_token":
                self._stale.inc(*labels, event.fence or "")
            case "broken":
                self._breaks.inc(*labels[:2])

    def families(self) -> Iterable[Family]:
        for metric in (self._acquires, self._acquire_seconds, self._renewals, self._lost, self._stale, self._breaks):
            yield metric.family()
        overflowed = self.groups.overflowed
        yield counter("leasehold_groups_overflowed", "Names counted as other.", ({}, overflowed))


class ServerMetrics:
    """What `/metrics` shows. Gauges are computed when it is read."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.requests = Counter("leasehold_server_requests", "Requests answered.", ("route", "method", "code"))
        self.request_seconds = Histogram(
            "leasehold_server_request_seconds",
            "Seconds to answer, without waiting in a queue.",
            CALL_BUCKETS,
            ("route",),
        )
        self.call_seconds = Histogram(
            "leasehold_engine_call_seconds",
            "Seconds per call of the engine.",
            CALL_BUCKETS,
            ("engine", "call", "outcome"),
        )
        self._engine = app.service.config.scheme
        self.locks = LockMetrics()
        self.sources: list[Source] = []  # that are shown, too
        app.service.measure = self._measure

    def _measure(self, call: str, outcome: str, seconds: float) -> None:
        self.call_seconds.series(self._engine, call, outcome).observe(seconds)

    def families(self) -> Iterable[Family]:
        service, limits, engine = self._app.service, self._app.limits, {"engine": self._engine}
        yield self.requests.family()
        yield self.request_seconds.family()
        yield self.call_seconds.family()
        yield gauge(
            "leasehold_server_in_flight",
            "Calls of the engine, waiters and streams now.",
            ({"kind": "call"}, limits.calls),
            ({"kind": "parked"}, service.waiters),
            ({"kind": "stream"}, len(service.streams) + len(self._app.feed) + len(self._app.dashboard.streams)),
        )
        resyncs = self._app.dashboard.streams.resyncs
        yield counter("leasehold_server_stream_resyncs", "Tabs of the dashboard that were too slow.", ({}, resyncs))
        refused = [({"reason": reason}, count) for reason, count in limits.refused.items()]
        yield counter("leasehold_server_shed", "Requests refused by a limit.", *refused)
        failures = [({"reason": reason}, count) for reason, count in self._app.authenticator.failures.items()]
        yield counter("leasehold_server_auth_failures", "Requests refused for lack of a key or right.", *failures)
        yield gauge("leasehold_server_breaker_state", "0 closed, 2 open.", (engine, 2 if service.breaker.open else 0))
        results = [({"result": result}, self._app.pictures.results[result]) for result in ("hit", "miss", "stale")]
        yield counter("leasehold_server_cache_requests", "Reads of pictures of locks.", *results)
        yield gauge("leasehold_server_draining", "1 while the server is shutting down.", ({}, int(service.draining)))
        for source in self.sources:
            yield from source.families()


class PictureMetrics:
    """What the pictures of the namespaces in use show: all locks of the engine, whichever server they went through."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._pictures: list[Picture] = []
        self._namespaces: list[str] = []

    @classmethod
    async def take(cls, app: App) -> PictureMetrics:
        """Take the pictures that are too old. While the engine is silent there are none: what the server itself counts
        is needed most then, and a scrape must not wait for the engine."""
        made = cls(app)
        made._namespaces = app.pictures.latest_namespaces()
        with suppress(TimeoutError):
            async with asyncio.timeout(_PICTURE_SECONDS):
                made._pictures = await app.pictures.get_many(made._namespaces)
        return made

    def families(self) -> Iterable[Family]:
        engine = {"engine": self._app.service.config.scheme}
        states = [
            (
                {**engine, "namespace": picture.namespace, "state": state.replace(" ", "_")},
                picture.snapshot.states[state],
            )
            for picture in self._pictures
            for state in get_args(HoldingState)
        ]
        yield gauge("leasehold_locks", "Claims by state, of the whole engine.", *states)
        hold, wait, longest = self._by_group()
        for name, text, values in (
            ("leasehold_oldest_hold_seconds", "Seconds since the oldest grant.", hold),
            ("leasehold_oldest_wait_seconds", "Seconds that the first of all waiters has waited.", wait),
            ("leasehold_line_longest", "Waiters in the longest queue.", longest),
        ):
            samples = [({**engine, **group._asdict()}, value) for group, value in values.items()]
            yield gauge(name, text, *samples)
        deadlocks = sum(self._app.history.deadlocks(picture.namespace) for picture in self._pictures)
        yield gauge("leasehold_deadlocks", "Cycles of owners that wait for each other.", (engine, deadlocks))
        ages = self._app.pictures.ages()
        shown = [({"namespace": name}, ages[name]) for name in self._namespaces if name in ages]
        yield gauge("leasehold_server_picture_age_seconds", "Age of the picture of the namespace.", *shown)

    def _by_group(self) -> tuple[dict[Group, float], dict[Group, float], dict[Group, float]]:
        hold: dict[Group, float] = {}
        wait: dict[Group, float] = {}
        longest: dict[Group, float] = {}
        for lock in (lock for picture in self._pictures for lock in picture.locks):
            group = self._app.metrics.locks.groups.find(lock.namespace, lock.name)
            ages = [holder.age for holder in lock.holders if holder.state == "held"]
            hold[group] = max(hold.get(group, 0.0), *ages, 0.0)
            wait[group] = max(wait.get(group, 0.0), lock.oldest_wait)
            longest[group] = max(longest.get(group, 0.0), len(lock.queue))
        return hold, wait, longest


async def metrics(app: App, request: Request) -> Response:
    known_arguments(request)
    async with app.limits.listing(request.caller, app.deadline(request) - app.service.runtime.now()):
        sources: list[Source] = [app.metrics]
        if request.caller.may("read", ANY_NAMESPACE, ""):  # labels show namespaces and parts of names
            sources += [app.metrics.locks, await PictureMetrics.take(app)]
        return Response(200, CONTENT_TYPE, metrics_text(*sources).encode())
