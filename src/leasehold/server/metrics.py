"""The metrics of the server itself: requests, calls of the engine, waiters, refusals, the breaker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from leasehold.server.messages import Request, Response, known_arguments
from leasehold.telemetry.families import CONTENT_TYPE, Counter, Family, Histogram, Source, counter, gauge, metrics_text

if TYPE_CHECKING:
    from leasehold.server.app import App

_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class ServerMetrics:
    """What `/metrics` shows. Gauges are computed when it is read."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.requests = Counter("leasehold_server_requests", "Requests answered.", ("route", "method", "code"))
        self.request_seconds = Histogram(
            "leasehold_server_request_seconds", "Seconds to answer, without waiting in a queue.", _BUCKETS, ("route",)
        )
        self._call_seconds = Histogram(
            "leasehold_engine_call_seconds", "Seconds per call of the engine.", _BUCKETS, ("engine", "call", "outcome")
        )
        self._engine = app.service.config.scheme
        self.sources: list[Source] = []  # that are shown, too
        app.service.measure = self._measure

    def _measure(self, call: str, outcome: str, seconds: float) -> None:
        self._call_seconds.series(self._engine, call, outcome).observe(seconds)

    def families(self) -> Iterable[Family]:
        service, limits, engine = self._app.service, self._app.limits, {"engine": self._engine}
        yield self.requests.family()
        yield self.request_seconds.family()
        yield self._call_seconds.family()
        yield gauge(
            "leasehold_server_in_flight",
            "Calls of the engine, waiters and streams now.",
            ({"kind": "call"}, limits.calls),
            ({"kind": "parked"}, service.waiters),
            ({"kind": "stream"}, len(service.streams) + len(self._app.feed)),
        )
        refused = [({"reason": reason}, count) for reason, count in limits.refused.items()]
        yield counter("leasehold_server_shed", "Requests refused by a limit.", *refused)
        yield gauge("leasehold_server_breaker_state", "0 closed, 2 open.", (engine, 2 if service.breaker.open else 0))
        yield gauge("leasehold_server_draining", "1 while the server is about to end.", ({}, int(service.draining)))
        for source in self.sources:
            yield from source.families()


async def metrics(app: App, request: Request) -> Response:
    known_arguments(request)
    return Response(200, CONTENT_TYPE, metrics_text(app.metrics).encode())
