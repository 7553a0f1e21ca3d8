"""Spans and metrics for OpenTelemetry, with its real SDK: the trees of spans, exactly."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import SpanKind, StatusCode

import leasehold
from leasehold import AsyncClient, Client, Event, NotAcquired, StaleToken, Unavailable, fences, telemetry, tracing
from leasehold.telemetry import otel
from tests.support import probe, probe_telemetry
from tests.support.spans import Spans


def traceparent(context: trace.SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def hook(spans, reader):
    return otel.Hook(spans.provider, MeterProvider([reader]))


@pytest.fixture
def holding_hook(spans, reader):
    return otel.Hook(spans.provider, MeterProvider([reader]), hold=True)


# ---------------------------------------------------------------- acquiring


def test_acquire_is_a_client_span_below_the_current_one(spans, hook):
    client = Client("memory://", namespace="shop", holder="web-3", on_event=hook)
    with client, spans.tracer.start_as_current_span("order"), client.lock("orders/42") as lease:
        token, fingerprint = lease.token, lease.fingerprint
    assert spans.tree() == [("order", ["leasehold.acquire"])]
    span = spans.only("leasehold.acquire")
    assert span.kind is SpanKind.CLIENT
    assert span.status.status_code is StatusCode.UNSET
    assert dict(span.attributes) == {
        "leasehold.lock.name": "orders/42",
        "leasehold.lock.group": "orders/*",
        "leasehold.namespace": "shop",
        "leasehold.engine": "memory",
        "leasehold.mode": "exclusive",
        "leasehold.fingerprint": fingerprint,
        "leasehold.holder": "web-3",
        "leasehold.token": token,
        "leasehold.outcome": "granted",
        "leasehold.queued": False,
    }


def test_busy_acquire_is_an_answer_and_a_failed_one_an_error(spans, hook, bench):
    lease = bench.client().lock("a").acquire()
    client = bench.client(on_event=hook)
    with pytest.raises(NotAcquired):
        client.lock("a", wait=0).acquire()
    bench.transport.silent = True
    with pytest.raises(Unavailable):
        client.lock("b").acquire()
    bench.transport.silent = False
    busy, failed = spans.ended
    assert (busy.attributes["leasehold.outcome"], busy.status.status_code) == ("busy", StatusCode.UNSET)
    assert (failed.attributes["leasehold.outcome"], failed.status.status_code) == ("unavailable", StatusCode.ERROR)
    assert failed.attributes["error.type"] == "Unavailable"
    assert failed.status.description == "Unavailable: silence"
    lease.release()


def test_spans_of_the_engine_are_children_of_the_acquire(spans, hook, bench):
    """As those of an instrumented driver. Afterwards the caller's span is the current one again."""
    client, real_call, seen = bench.client(on_event=hook), bench.transport.call, []

    def traced_call(*arguments):
        seen.append(tracing.current.get())
        with spans.tracer.start_as_current_span("EVALSHA"):
            return real_call(*arguments)

    bench.transport.call = traced_call
    with spans.tracer.start_as_current_span("order") as order:
        lease = client.lock("a").acquire()
        assert trace.get_current_span() is order
        assert tracing.current.get() is None
        lease.release()
    assert spans.tree() == [("order", [("leasehold.acquire", ["EVALSHA"]), "EVALSHA"])]
    acquire = spans.only("leasehold.acquire").context
    assert seen[0] == traceparent(acquire)


def test_threads_have_trees_of_their_own(spans, hook, url):
    def work(name: str) -> None:
        with spans.tracer.start_as_current_span(name), client.lock("shared", wait=30):
            pass

    with Client(url, on_event=hook) as client:
        with client.lock("shared"):
            threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
            for thread in threads:
                thread.start()
        for thread in threads:
            thread.join(30)
    trees = sorted(spans.tree(), key=str)
    assert trees == [("first", ["leasehold.acquire"]), ("second", ["leasehold.acquire"]), "leasehold.acquire"]


def test_tasks_have_trees_of_their_own(spans, hook, url):
    async def work(client: AsyncClient, name: str) -> None:
        with spans.tracer.start_as_current_span(name):
            async with client.lock("shared", wait=30):
                await asyncio.sleep(0)

    async def main() -> None:
        async with AsyncClient(url, on_event=hook) as client:
            with spans.tracer.start_as_current_span("main"):
                await asyncio.gather(*(work(client, name) for name in ("first", "second", "third")))
            assert tracing.current.get() is None

    asyncio.run(main())
    (tree,) = spans.tree()
    assert tree == ("main", [(name, ["leasehold.acquire"]) for name in ("first", "second", "third")])
    acquires = [span.attributes for span in spans.ended if span.name == "leasehold.acquire"]
    queued = [(each["leasehold.queued"], each.get("leasehold.position")) for each in acquires]
    assert sorted(queued, key=str) == [(False, None), (True, 0), (True, 1)]


def test_cancelled_acquire_ends_its_span_as_an_error(spans, hook, url, caplog):
    async def main() -> None:
        async with AsyncClient(url, on_event=hook) as client, client.lock("a"):
            with spans.tracer.start_as_current_span("order") as order:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await AsyncClient(url, on_event=hook).lock("a").acquire()
                assert trace.get_current_span() is order

    asyncio.run(main())
    span = [span for span in spans.ended if span.name == "leasehold.acquire"][-1]
    assert (span.attributes["leasehold.outcome"], span.status.status_code) == ("cancelled", StatusCode.ERROR)
    assert "detach" not in caplog.text


def test_acquire_that_ends_in_another_context_ends_its_span(spans, hook, caplog):
    """As when the garbage collector closes a coroutine."""
    attempted = Event("attempted", "memory", "", "a", 1.0, fingerprint="f")
    threading_context = threading.Thread(target=hook, args=(attempted,))
    threading_context.start()
    threading_context.join(60)
    hook(Event("failed", "memory", "", "a", 2.0, fingerprint="f", error="GeneratorExit", reason="GeneratorExit: "))
    assert spans.only("leasehold.acquire").attributes["leasehold.outcome"] == "cancelled"
    assert not probe_telemetry.open_acquires(hook)
    assert "detach" not in caplog.text


def test_acquire_that_got_a_new_id_has_one_span(spans, hook, bench):
    """After an unanswered attempt, the client retries under another id."""
    client, tries = bench.client(on_event=hook), []
    real_call = bench.transport.call

    def answers_late(verb, *arguments):
        if verb == "attempt" and not tries:
            tries.append(verb)
            raise Unavailable("silence")
        return real_call(verb, *arguments)

    bench.transport.call = answers_late
    lease = client.lock("a", on_unavailable="wait", wait=None)
    done = threading.Thread(target=lambda: lease.acquire().release())
    done.start()
    while done.is_alive():  # the pause before the next try is on the manual clock
        bench.clock.advance(0.1)
        for _, waiter in list(probe.registry(client).waiting.items()):
            waiter.signal.set()
        done.join(0.01)
    assert spans.tree() == ["leasehold.acquire"]
    assert spans.only("leasehold.acquire").attributes["leasehold.outcome"] == "granted"
    assert not probe_telemetry.open_acquires(hook)


# ------------------------------------------------------------------ leases


def test_hold_span_lasts_until_the_release(spans, holding_hook):
    client = Client("memory://", on_event=holding_hook)
    with client, spans.tracer.start_as_current_span("order"), client.lock("a") as lease:
        assert [span.name for span in spans.ended] == ["leasehold.acquire"]
        token = lease.token
    assert spans.tree() == [("order", ["leasehold.acquire", "leasehold.hold"])]
    span = spans.only("leasehold.hold")
    assert span.kind is SpanKind.INTERNAL
    assert (span.attributes["leasehold.token"], span.status.status_code) == (token, StatusCode.UNSET)


def lose_a_lease(spans, bench, hook, wait_until) -> None:
    client = bench.client(on_event=hook)
    with spans.tracer.start_as_current_span("order"):
        lease = client.lock("a", ttl=30).acquire()
        bench.transport.silent = True
        bench.clock.advance(11)
        wait_until(lambda: lease.state is leasehold.LeaseState.AT_RISK)
        bench.clock.advance(30)
        wait_until(lambda: not tracing.find(lease.fingerprint))
        ended = threading.Event()
        probe.core(client).callbacks.submit(ended.set)  # after the events
        assert ended.wait(60)


def test_events_of_the_watchdog_are_on_the_hold_span(spans, holding_hook, bench, wait_until):
    lose_a_lease(spans, bench, holding_hook, wait_until)
    assert spans.tree() == [("order", ["leasehold.acquire", "leasehold.hold"])]
    span = spans.only("leasehold.hold")
    assert list(dict.fromkeys(event.name for event in span.events)) == [
        "leasehold.renew_failed",
        "leasehold.at_risk",
        "leasehold.lost",
    ]
    assert span.attributes["leasehold.lost_reason"] == "unreachable"
    assert span.status.status_code is StatusCode.ERROR


def test_events_of_the_watchdog_are_else_on_the_span_of_the_grant(spans, hook, bench, wait_until):
    lose_a_lease(spans, bench, hook, wait_until)
    assert spans.tree() == [("order", ["leasehold.acquire"])]
    names = [event.name for event in spans.only("order").events]
    assert names[-1] == "leasehold.lost"
    assert "leasehold.at_risk" in names


def test_lease_that_is_lost_before_its_grant_is_reported_has_a_span(spans, holding_hook):
    about = {"engine": "memory", "namespace": "", "name": "a", "at": 1.0, "fingerprint": "f"}
    holding_hook(Event("attempted", **about))
    holding_hook(Event("lost", **about, reason="unknown"))
    holding_hook(Event("granted", **about, token=1, seconds=0.1))
    assert spans.only("leasehold.hold").status.status_code is StatusCode.ERROR
    holding_hook(Event("released", **about))
    assert not probe_telemetry.open_holds(holding_hook)
    assert not probe_telemetry.early_ends(holding_hook)


def test_run_of_once_is_a_span(spans, hook):
    with Client("memory://", on_event=hook) as client, spans.tracer.start_as_current_span("job"):
        for _ in range(2):
            client.once("rollup", lambda: 7)
    assert spans.tree() == [("job", ["leasehold.acquire", "leasehold.once"])]


def test_token_refused_by_an_http_middleware_is_on_the_request_span(spans, hook):
    """The span that the program's own instrumentation made for the request."""

    async def application(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def request(token: int) -> int:
        answers: list[dict[str, object]] = []

        async def send(message) -> None:
            answers.append(message)

        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(b"lease-token", str(token).encode())]
        scope = {"type": "http", "method": "POST", "path": "/stock/7", "headers": headers, "query_string": b""}
        with spans.tracer.start_as_current_span(f"POST {token}"):
            await app(scope, receive, send)
        return answers[0]["status"]

    app = fences.ASGIFence(application)
    fences.on_event(hook)
    try:
        assert asyncio.run(request(9)) == 204
        assert asyncio.run(request(4)) == 409
    finally:
        fences.on_event(None)
    assert not spans.only("POST 9").events
    (event,) = spans.only("POST 4").events
    assert event.name == "leasehold.stale_token"
    assert (event.attributes["leasehold.token"], event.attributes["leasehold.highest_token"]) == (4, 9)


def test_token_that_a_fence_refuses_is_on_the_hold_span(spans, holding_hook):
    value = fences.Local("stock", 0)
    value.claim(2**53 - 1)
    client = Client("memory://", on_event=holding_hook)
    with client, client.lock("a") as lease, spans.tracer.start_as_current_span("write"), pytest.raises(StaleToken):
        value.write(lease, 1)
    assert [event.name for event in spans.only("leasehold.hold").events] == ["leasehold.stale_token"]
    assert not spans.only("write").events


def test_forked_child_ends_no_span_of_its_parent(spans, holding_hook):
    with Client("memory://", on_event=holding_hook) as client, client.lock("a"):
        child = os.fork()
        if child == 0:
            os._exit(0 if not probe_telemetry.open_holds(holding_hook) else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert [span.name for span in spans.ended] == ["leasehold.acquire", "leasehold.hold"]


# -------------------------------------------------------- across processes


def test_environment_of_a_child_names_the_hold_span(spans, holding_hook):
    with Client("memory://", on_event=holding_hook) as client, client.lock("a") as lease:
        environment = holding_hook.environment(lease.fingerprint)
        assert holding_hook.environment("unknown") == {}
    assert environment == {"TRACEPARENT": traceparent(spans.only("leasehold.hold").context)}


# ------------------------------------------------------------------ metrics


def points(reader) -> dict[str, list]:
    data = reader.get_metrics_data()
    found = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            found |= {metric.name: metric.data.data_points for metric in scope.metrics}
    return found


def test_metrics_have_the_names_buckets_and_attributes_of_the_page(hook, reader, bench, wait_until):
    client = bench.client(on_event=hook, namespace="shop")
    lease = client.lock("orders/42", ttl=30).acquire()
    assert client.lock("orders/42").try_acquire() is None
    bench.clock.advance(10)
    wait_until(lambda: "leasehold.renew.margin" in points(reader))
    client.lock("orders/43", group="checkout").acquire().release()
    found = points(reader)
    labels = {"engine": "own", "namespace": "shop", "group": "orders/*"}
    assert {tuple(sorted(p.attributes.items())): p.value for p in found["leasehold.acquires"]} == {
        tuple(sorted({**labels, **more}.items())): 1
        for more in (
            {"outcome": "granted", "path": "direct"},
            {"outcome": "busy", "path": "direct"},
            {"outcome": "granted", "path": "direct", "group": "checkout"},
        )
    }
    durations = {point.attributes["group"]: point for point in found["leasehold.acquire.duration"]}
    assert durations["orders/*"].count == durations["checkout"].count == 1
    assert durations["orders/*"].explicit_bounds[6] == 0.05
    assert {point.attributes["group"]: point.value for point in found["leasehold.held"]} == {
        "orders/*": 1,
        "checkout": 0,
    }
    (margin,) = found["leasehold.renew.margin"]
    assert 0.6 < margin.sum < 0.7
    (held,) = found["leasehold.hold.duration"]
    assert held.attributes["end"] == "released"
    lease.release()
    assert set(found) <= {
        *probe_telemetry.otel_counters.values(),
        *(name for name, _ in probe_telemetry.otel_gauges.values()),
    } | {
        "leasehold.acquire.duration",
        "leasehold.hold.duration",
        "leasehold.renew.duration",
        "leasehold.renew.margin",
    }


def test_every_counter_and_gauge_has_a_name_in_opentelemetry():
    families = {family.name: family.kind for family in telemetry.Metrics().families()}
    assert {name for name, kind in families.items() if kind == "counter"} == set(probe_telemetry.otel_counters)
    assert {name for name, kind in families.items() if kind == "gauge"} == {
        *probe_telemetry.otel_gauges,
        "leasehold_build_info",
    }


def test_released_lease_that_was_lost_before_is_counted_once(hook, reader):
    about = {"engine": "memory", "namespace": "", "name": "a", "at": 1.0, "fingerprint": "f"}
    for kind in ("attempted", "granted", "lost", "released"):
        hook(Event(kind, **about, seconds=1.0, reason="unknown"))
    (held,) = points(reader)["leasehold.hold.duration"]
    assert (held.count, held.attributes["end"]) == (1, "lost")
