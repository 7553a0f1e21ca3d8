"""The trace that each request belongs to, and its spans if `serve --otel` asks for them.

    POST /v1/acquire                    SERVER, below the span that the caller's `traceparent` names
      leasehold.acquire                 INTERNAL
        leasehold.engine.attempt        CLIENT, as is leasehold.engine.wait

A Python client sends verbs in batches, and those of one request may belong to several traces. So each attempt has a
SERVER span of its own, `POST /v1/calls`, if its client is traced; the engine's calls are right below that. Its `wait`
may outlast the span of its request. Renewals, probes and pages have spans only if they have a `traceparent`; streams
have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final, TypeAlias

from leasehold import tracing
from leasehold.model import Busy, Claim, Grant

if TYPE_CHECKING:
    from leasehold.server.messages import Request
    from leasehold.telemetry.otel import RequestSpans

Ended: TypeAlias = Callable[[Grant | Busy], None]

OTHER: Final = "other"  # a path that is no route of the API, such as a page of the dashboard
_CALLS: Final = "/v1/calls"
_UNTRACED: Final = frozenset({_CALLS, "/v1/events", "/v1/stream"})  # or traced call by call
_IF_ASKED: Final = frozenset({"/v1/renew", "/v1/renew-many", "/metrics", "/healthz", "/readyz", OTHER})


def _ignore(_answer: object) -> None: ...


_NOTHING: Final[AbstractContextManager[Callable[[object], None]]] = nullcontext(_ignore)


class Spans:
    """Without OpenTelemetry (`made` is None), log lines and audit records still name the trace of their request."""

    def __init__(self, made: RequestSpans | None = None) -> None:
        self._made = made

    @contextmanager
    def request(self, request: Request, route: str) -> Iterator[Callable[[int], None]]:
        """Around a request; call what it yields with the status of the answer."""
        if self._made is None or route in _UNTRACED or (route in _IF_ASKED and not request.trace):
            with _current(request.trace or None):
                yield _ignore
            return
        state = tracing.trace_state(request.header(b"tracestate").decode("latin-1"))
        headers = {tracing.HEADER: request.trace, "tracestate": state} if request.trace else {}
        attributes = {"http.request.method": request.method, "http.route": route}
        with self._made.request(f"{request.method} {route}", headers, attributes) as ended:
            yield ended

    @contextmanager
    def call(self, request: Request, verb: str, parent: object) -> Iterator[None]:
        """Around one call of a batch, whose `traceparent` is `parent`. If that of the request is in the same trace, a
        proxy's span lies between."""
        own = parent if isinstance(parent, str) and tracing.trace_id(parent) else ""
        if tracing.trace_id(request.trace) == tracing.trace_id(own) or not own:
            own = request.trace
        if self._made is None or not own:
            with _current(own or None):
                yield
            return
        attributes = {"http.request.method": "POST", "http.route": _CALLS, "leasehold.call": verb}
        with self._made.request(f"POST {_CALLS}", {tracing.HEADER: own}, attributes):
            yield

    def acquire(self, claim: Claim) -> AbstractContextManager[Ended]:
        """Around the attempts and waits of a request."""
        return _NOTHING if self._made is None else self._made.acquire(claim)

    def engine(self, verb: str, claim: Claim) -> AbstractContextManager[Ended]:
        """Around a call of the engine."""
        return _NOTHING if self._made is None else self._made.engine(verb, claim)


@contextmanager
def _current(traceparent: str | None) -> Iterator[None]:
    token = tracing.current.set(traceparent)
    try:
        yield
    finally:
        with suppress(ValueError):  # the handler was closed in another context
            tracing.current.reset(token)


@contextmanager
def from_environment(environ: Mapping[str, str], engine: str) -> Iterator[Spans]:
    """Spans that are exported as the variables `OTEL_*` say. Raises ConfigError if a package for that is missing."""
    from leasehold.telemetry import otel

    with otel.exported_spans(environ) as provider:
        yield Spans(otel.RequestSpans(engine, provider))
