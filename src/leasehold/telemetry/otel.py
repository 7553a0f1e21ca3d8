"""Metrics and spans for OpenTelemetry, as a hook. Needs its API package alone:

    client = leasehold.Client(url, on_event=otel.Hook())

Spans: `leasehold.acquire` for every acquire; with `hold=True` also `leasehold.hold` for the time a lease is held; and
`leasehold.once` for a run of `once`. Names of locks are attributes of spans, never part of a span's name. During an
acquire its span is the current one, so the spans of instrumented drivers are its children.

An acquire begins and ends in one thread or task, so its span is found by the context, or by the claim's fingerprint.
The watchdog's events come on another thread, so what happens to a lease is found by its fingerprint alone.

`RequestSpans` makes the spans of a lock server.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar, Token
from importlib.metadata import entry_points
from typing import Any, Final, NamedTuple

from leasehold import __version__, tracing
from leasehold.errors import ConfigError, LeaseholdError
from leasehold.events import Event
from leasehold.model import Busy, Claim, Grant
from leasehold.telemetry.groups import group_of
from leasehold.telemetry.metrics import (
    ACQUIRE_BUCKETS,
    HOLD_BUCKETS,
    MARGIN_BUCKETS,
    RENEW_BUCKETS,
    Metrics,
    outcome_of,
)

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError('traces need opentelemetry-api: pip install "leasehold[otel]"') from error

_SCOPE: Final = "leasehold"
_MAX_EARLY: Final = 1024
_EXPORT_SECONDS: Final = 2.0  # that the end of a command waits for its spans to be exported, at most

# Counters and gauges of `Metrics` -> their name in OpenTelemetry and unit.
_COUNTERS: Final = {
    "leasehold_acquires": "leasehold.acquires",
    "leasehold_renewals": "leasehold.renewals",
    "leasehold_leases_lost": "leasehold.leases.lost",
    "leasehold_releases_owed": "leasehold.releases.owed",
    "leasehold_stale_tokens": "leasehold.stale_tokens",
    "leasehold_breaks": "leasehold.breaks",
    "leasehold_once": "leasehold.once",
    "leasehold_conflicts": "leasehold.conflicts",
    "leasehold_hook_errors": "leasehold.hook.errors",
    "leasehold_events_dropped": "leasehold.events.dropped",
    "leasehold_groups_overflowed": "leasehold.groups.overflowed",
}
_GAUGES: Final = {
    "leasehold_acquiring": ("leasehold.acquiring", ""),
    "leasehold_held": ("leasehold.held", ""),
    "leasehold_at_risk": ("leasehold.at_risk", ""),
    "leasehold_token_age_seconds": ("leasehold.token.age", "s"),
}
_ON_LEASE: Final = frozenset({"at_risk", "renew_failed", "stale_token"})
_PROPAGATOR: Final = TraceContextTextMapPropagator()

_HOOKS: weakref.WeakSet[Hook] = weakref.WeakSet()  # for the handler at fork


class _Acquire(NamedTuple):
    """An acquire under way."""

    fingerprint: str | None
    span: Span
    context: Token[Context]
    traceparent: Token[str | None]
    outer: tuple[_Acquire, ...]  # of this context: a signal handler may acquire a lock during an acquire


_acquires: ContextVar[tuple[_Acquire, ...]] = ContextVar("leasehold_acquires", default=())


class Hook:
    """A hook that makes metrics and spans.

    tracer_provider, meter_provider   by default those that the program has set for OpenTelemetry
    hold        also make a span for the time that each lease is held
    group       function from a lock's name to the attribute `group`; by default the name without its ids
    max_groups  after this many pairs of namespace and group, new ones are counted as `other`
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        *,
        hold: bool = False,
        group: Callable[[str], str] = group_of,
        max_groups: int = 30,
    ) -> None:
        self._hold = hold
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        self._metrics = Metrics(group=group, max_groups=max_groups)
        self._make_instruments(metrics.get_meter(_SCOPE, __version__, meter_provider))
        self._start()
        _HOOKS.add(self)

    def _start(self) -> None:
        """Also in a forked child: the spans so far are the parent's."""
        self._acquiring: dict[str | None, _Acquire] = {}
        self._leases: dict[str | None, Span] = {}
        self._early: dict[str | None, Event] = {}  # lost before `granted` arrived, which comes from another thread

    def __call__(self, event: Event) -> None:
        self._metrics(event)
        kind = event.kind
        if kind == "attempted":
            self._on_attempted(event)
        elif kind == "granted":
            self._record(self._acquire_duration, event, event.seconds, path="queued" if event.queued else "direct")
            self._end_acquire(event)
            self._on_granted(event)
        elif kind in ("busy", "failed", "unguaranteed"):
            self._end_acquire(event)
        elif kind in ("released", "lost"):
            if event.fingerprint in self._leases:  # else it was lost before it was released
                self._record(self._hold_duration, event, event.seconds, end=kind)
            self._end_lease(event)
        elif kind in _ON_LEASE:
            span = self._leases.get(event.fingerprint) or trace.get_current_span()
            span.add_event(f"leasehold.{kind}", _event_attributes(event))
        elif kind == "renewed":
            self._record(self._renew_duration, event, event.seconds)
            self._record(self._renew_margin, event, event.left / event.ttl if event.left and event.ttl else None)
        elif kind == "ran":
            self._on_ran(event)

    # ------------------------------------------------------------ acquiring

    def _on_attempted(self, event: Event) -> None:
        span = self._tracer.start_span("leasehold.acquire", kind=SpanKind.CLIENT, attributes=self._attributes(event))
        outer = _acquires.get()
        context = trace.set_span_in_context(span)
        acquire = _Acquire(
            event.fingerprint,
            span,
            contexts.attach(context),
            tracing.current.set(_carrier(context).get(tracing.HEADER)),
            outer,
        )
        _acquires.set((*outer, acquire))
        self._acquiring[event.fingerprint] = acquire

    def _end_acquire(self, event: Event) -> None:
        """End the span. After an unanswered attempt the claim has a new fingerprint: then the context knows it."""
        under_way = _acquires.get()
        acquire = self._acquiring.pop(event.fingerprint, None) or (under_way[-1] if under_way else None)
        if acquire is None:
            return
        self._acquiring.pop(acquire.fingerprint, None)
        if under_way and under_way[-1] is acquire:  # else the coroutine was closed in another context
            _acquires.set(acquire.outer)
            tracing.current.reset(acquire.traceparent)
            contexts.detach(acquire.context)
        span = acquire.span
        span.set_attributes(_known({"leasehold.token": event.token, "leasehold.fingerprint": event.fingerprint}))
        span.set_attribute("leasehold.outcome", outcome_of(event))
        if event.queued is not None:
            span.set_attribute("leasehold.queued", event.queued)
        span.set_attributes(_known({"leasehold.position": event.position}))
        if event.queued and event.seconds is not None:
            span.set_attribute("leasehold.wait_seconds", event.seconds)
        if event.kind == "failed":
            span.set_attributes(_known({"error.type": event.error}))
            span.set_status(Status(StatusCode.ERROR, event.reason))
        span.end()

    # --------------------------------------------------------------- leases

    def _on_granted(self, event: Event) -> None:
        if self._hold:
            attributes = self._attributes(event) | _known({"leasehold.token": event.token})
            span = self._tracer.start_span("leasehold.hold", attributes=attributes)
        else:
            span = trace.get_current_span()
        self._leases[event.fingerprint] = span
        found = span.get_span_context()
        if event.fingerprint is not None and found.is_valid:
            tracing.remember(event.fingerprint, trace.format_trace_id(found.trace_id))
        if (lost := self._early.pop(event.fingerprint, None)) is not None:
            self._end_lease(lost)

    def _end_lease(self, event: Event) -> None:
        span = self._leases.pop(event.fingerprint, None)
        if event.fingerprint is not None:
            tracing.forget(event.fingerprint)
        if span is None:
            if event.kind == "lost":
                if len(self._early) >= _MAX_EARLY:
                    self._early.clear()
                self._early[event.fingerprint] = event
            return
        if event.kind == "lost":
            span.add_event("leasehold.lost", _event_attributes(event))
        if self._hold:
            if event.kind == "lost":
                span.set_attributes(_known({"leasehold.lost_reason": event.reason}))
                span.set_status(Status(StatusCode.ERROR, f"the lease was lost: {event.reason}"))
            span.end()

    def _on_ran(self, event: Event) -> None:
        end = int(event.at * 1e9)
        begin = end - int((event.seconds or 0.0) * 1e9)
        attributes = self._attributes(event) | _known({"leasehold.token": event.token})
        self._tracer.start_span("leasehold.once", attributes=attributes, start_time=begin).end(end)

    def environment(self, fingerprint: str) -> dict[str, str]:
        """The variables that make the span of a held lease the parent of a child process's spans."""
        span = self._leases.get(fingerprint)
        if span is None or not span.get_span_context().is_valid:
            return {}
        return {name.upper(): value for name, value in _carrier(trace.set_span_in_context(span)).items()}

    # -------------------------------------------------------------- metrics

    def _make_instruments(self, meter: Meter) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...], unit: str = "s") -> Histogram:
            bounds = [float(bound) for bound in buckets]
            return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=bounds)

        self._acquire_duration = histogram("leasehold.acquire.duration", "Time until the grant.", ACQUIRE_BUCKETS)
        self._hold_duration = histogram("leasehold.hold.duration", "Time that ended leases were held.", HOLD_BUCKETS)
        self._renew_duration = histogram(
            "leasehold.renew.duration", "Time until a renewal was confirmed.", RENEW_BUCKETS
        )
        self._renew_margin = histogram(
            "leasehold.renew.margin",
            "Share of the ttl that was left when a renewal was confirmed.",
            MARGIN_BUCKETS,
            "1",
        )
        for family, name in _COUNTERS.items():
            meter.create_observable_counter(name, [self._observe(family)])
        for family, (name, unit) in _GAUGES.items():
            meter.create_observable_gauge(name, [self._observe(family)], unit)

    def _observe(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        """Reads a counter or gauge of `Metrics`, which counts far faster than an instrument."""

        def observe(_options: CallbackOptions) -> Iterable[Observation]:
            for family in self._metrics.families():
                if family.name == name:
                    return [Observation(sample.value, dict(sample.labels)) for sample in family.samples]
            return []

        return observe

    def _record(self, histogram: Histogram, event: Event, value: float | None, **labels: str) -> None:
        if value is not None:
            histogram.record(value, self._metrics.labels(event) | labels)

    def _attributes(self, event: Event) -> dict[str, Any]:
        return _known(
            {
                "leasehold.lock.name": event.name,
                "leasehold.lock.group": self._metrics.labels(event)["group"],
                "leasehold.namespace": event.namespace,
                "leasehold.engine": event.engine,
                "leasehold.mode": event.mode,
                "leasehold.fingerprint": event.fingerprint,
                "leasehold.holder": event.holder,
            }
        )


class RequestSpans:
    """The spans of a lock server over `engine`."""

    def __init__(self, engine: str, tracer_provider: TracerProvider | None = None) -> None:
        self._engine = engine
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)

    @contextmanager
    def request(
        self, name: str, headers: Mapping[str, str], attributes: Mapping[str, str]
    ) -> Iterator[Callable[[int], None]]:
        """A span for a request: the child of the span that its headers `traceparent` and `tracestate` name, if they are
        well formed. `name` has a route's template, no lock's name. Call what this yields with the answer's status."""
        context = _PROPAGATOR.extract(headers, Context())
        with self._tracer.start_as_current_span(name, context, SpanKind.SERVER, attributes) as span:

            def answered(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))

            token = tracing.current.set(_carrier(contexts.get_current()).get(tracing.HEADER))
            try:
                yield answered
            finally:
                with suppress(ValueError):  # the handler was closed in another context
                    tracing.current.reset(token)

    def acquire(self, claim: Claim) -> AbstractContextManager[Callable[[Grant | Busy], None]]:
        return self._span("leasehold.acquire", SpanKind.INTERNAL, claim)

    def engine(self, verb: str, claim: Claim) -> AbstractContextManager[Callable[[Grant | Busy], None]]:
        return self._span(f"leasehold.engine.{verb}", SpanKind.CLIENT, claim)

    @contextmanager
    def _span(self, name: str, kind: SpanKind, claim: Claim) -> Iterator[Callable[[Grant | Busy], None]]:
        """Only within a request that has a span: waiters of untraced clients cause no traces."""
        if not trace.get_current_span().get_span_context().is_valid:
            yield lambda _reply: None
            return
        attributes = _known(
            {
                "leasehold.lock.name": claim.name,
                "leasehold.namespace": claim.namespace,
                "leasehold.engine": self._engine,
                "leasehold.mode": claim.mode,
                "leasehold.fingerprint": claim.fingerprint,
                "leasehold.holder": claim.holder.label,
            }
        )
        with self._tracer.start_as_current_span(
            name, kind=kind, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:

            def answered(reply: Grant | Busy) -> None:
                if isinstance(reply, Grant):
                    span.set_attributes({"leasehold.outcome": "granted", "leasehold.token": reply.token})
                else:
                    span.set_attribute("leasehold.outcome", "busy")
                    span.set_attributes(_known({"leasehold.position": reply.position}))

            try:
                yield answered
            except LeaseholdError as error:  # its text may have the engine's address: only its class is shown
                span.set_attribute("error.type", type(error).__name__)
                span.set_status(Status(StatusCode.ERROR))
                raise


def _event_attributes(event: Event) -> dict[str, Any]:
    return _known(
        {
            "leasehold.lock.name": event.name,
            "leasehold.token": event.token,
            "leasehold.fingerprint": event.fingerprint,
            "leasehold.reason": event.reason,
            "leasehold.fence": event.fence,
            "leasehold.highest_token": event.seen,
        }
    )


def _known(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _carrier(context: Context) -> dict[str, str]:
    found: dict[str, str] = {}
    _PROPAGATOR.inject(found, context)
    return found


def _after_fork_in_child() -> None:
    for hook in list(_HOOKS):
        hook._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


# ------------------------------------------------------ for the command line


@contextmanager
def export_from_environment(environ: Mapping[str, str], group: Callable[[str], str] = group_of) -> Iterator[Hook]:
    """A hook for one command, whose spans are exported as the variables `OTEL_*` say, and are children of the span in
    `TRACEPARENT`. At the end it waits up to 2 seconds for the export. If the program was started by
    `opentelemetry-instrument`, that has set up the export already."""
    headers = {name.lower(): environ[name] for name in tracing.VARIABLES[:2] if name in environ}
    with exported_spans(environ) as provider:
        token = contexts.attach(_PROPAGATOR.extract(headers, contexts.get_current()))
        try:
            yield Hook(provider, hold=True, group=group)
        finally:
            contexts.detach(token)


@contextmanager
def exported_spans(environ: Mapping[str, str]) -> Iterator[TracerProvider | None]:
    """A provider whose spans are exported as the variables `OTEL_*` say. None: the program's own, which has been set up
    already. Raises ConfigError if a package for that is missing."""
    provider, stop = _tracer_provider(environ)
    try:
        yield provider
    finally:
        stop()


def _tracer_provider(environ: Mapping[str, str]) -> tuple[TracerProvider | None, Callable[[], None]]:
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None, lambda: None
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    try:
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "--otel needs OpenTelemetry's SDK: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        ) from error
    names = ("otlp_proto_http", "otlp") if exporter == "otlp" else (exporter,)
    found = [each for name in names for each in entry_points(group="opentelemetry_traces_exporter", name=name)]
    if not found:
        raise ConfigError(
            f"there is no exporter {exporter!r} for --otel: install it (for otlp: "
            "pip install opentelemetry-exporter-otlp-proto-http), or choose another with OTEL_TRACES_EXPORTER"
        )
    named = "OTEL_SERVICE_NAME" in environ or "service.name=" in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "leasehold"})
    provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(found[0].load()()))

    def stop() -> None:
        # On another thread: an exporter that cannot reach its server may retry for longer than the caller can wait.
        thread = threading.Thread(target=provider.shutdown, name="leasehold-otel", daemon=True)
        thread.start()
        thread.join(_EXPORT_SECONDS)

    return provider, stop
