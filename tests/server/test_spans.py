"""Spans of `serve --otel`, and the trace of each request in logs and audit records."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from contextlib import asynccontextmanager

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from leasehold import Client, tracing
from leasehold.config import EngineConfig
from leasehold.errors import ConfigError, Unavailable
from leasehold.events import Event
from leasehold.server.app import App
from leasehold.server.auth import Authenticator
from leasehold.server.limits import Limits
from leasehold.server.messages import Request
from leasehold.server.run import check
from leasehold.server.service import Service
from leasehold.server.settings import LimitSettings, Settings, read
from leasehold.server.spans import Spans
from leasehold.telemetry import otel
from tests.support import probe_logs, probe_server
from tests.support import spans as support
from tests.support.running_server import poll, running

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
OTHER = f"00-{'1' * 32}-{'2' * 16}-01"


@pytest.fixture
def spans():
    return support.Spans()


@asynccontextmanager
async def serving(spans: support.Spans | None):
    service = Service(EngineConfig.parse("memory://", 5.0))
    made = Spans(None if spans is None else otel.RequestSpans("memory", spans.provider))
    app = App(service, Authenticator(None), Limits(LimitSettings()), spans=made)
    await service.start()
    try:
        yield app
    finally:
        await service.stop()


class Refusal(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(400, "not\x1b[31mthis")

    def log_message(self, *_):
        """To no log."""


async def ask(app: App, method: str, path: str, body: object = None, **headers: str) -> int:
    async def read_body() -> bytes:
        return json.dumps(body).encode()

    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    answer = await app.answer(Request(method, path, sent, read_body=read_body))
    return getattr(answer, "status", 200)


def attempt(number: int, **more: object) -> dict[str, object]:
    claim = {"namespace": "shop", "name": f"orders/{number}", "id": f"{number:032}", "ttl": 30, "queue": False}
    return {"do": "attempt", "claim": claim, **more}


def test_request_is_a_server_span_below_its_traceparent(spans):
    async def main() -> None:
        async with serving(spans) as app:
            body = {"namespace": "shop", "name": "orders/42", "holder": "web-3"}
            assert await ask(app, "POST", "/v1/acquire", body, traceparent=PARENT) == 200
            assert tracing.current.get() is None

    asyncio.run(main())
    assert spans.tree() == [("POST /v1/acquire", [("leasehold.acquire", ["leasehold.engine.attempt"])])]
    span = spans.only("POST /v1/acquire")
    assert (span.kind, f"{span.context.trace_id:032x}") == (SpanKind.SERVER, TRACE)
    assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/acquire",
        "http.response.status_code": 200,
    }
    call = spans.only("leasehold.engine.attempt")
    assert call.kind is SpanKind.CLIENT
    assert {name: call.attributes[name] for name in call.attributes if name != "leasehold.fingerprint"} == {
        "leasehold.lock.name": "orders/42",
        "leasehold.namespace": "shop",
        "leasehold.engine": "memory",
        "leasehold.mode": "exclusive",
        "leasehold.holder": "web-3",
        "leasehold.outcome": "granted",
        "leasehold.token": call.attributes["leasehold.token"],
    }


@pytest.mark.parametrize(
    ("state", "passed_on"),
    [
        ("congo=t61rcWkgMzE, rojo=00f067aa0ba902b7", {"congo": "t61rcWkgMzE", "rojo": "00f067aa0ba902b7"}),
        ("tenant@system=a b,,x=1", {"tenant@system": "a b", "x": "1"}),
        ("a=b\x9b31m", {}),
        ("a" * 8000, {}),
        (f"a=b{' ' * 8000},c=d", {}),
        (",".join(f"a{number}=b" for number in range(33)), {}),
        ("A=b", {}),
    ],
)
def test_tracestate_that_is_not_well_formed_is_neither_used_nor_logged(spans, caplog, state, passed_on):
    """OpenTelemetry logged all of it, for callers without a key, too."""

    async def main() -> None:
        async with serving(spans) as app:
            body = {"name": "orders/42"}
            sent = {"traceparent": PARENT, "tracestate": state}
            headers = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]

            async def read_body() -> bytes:
                return json.dumps(body).encode()

            await app.answer(Request("POST", "/v1/acquire", headers, read_body=read_body))

    asyncio.run(main())
    span = spans.only("POST /v1/acquire")
    assert (f"{span.context.trace_id:032x}", dict(span.context.trace_state)) == (TRACE, passed_on)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_refusal_of_a_collector_is_a_line_of_the_log(tmp_path):
    refused = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusal)
    thread = threading.Thread(target=refused.serve_forever)
    thread.start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{refused.server_port}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    try:
        with running("--otel", environment=environment) as server:
            assert server.post("/v1/acquire", {"name": "orders/42"}).status == 200
            line = poll(lambda: next((line for line in server.lines if "opentelemetry" in line), ""))
            assert json.loads(line)["level"] == "ERROR"
    finally:
        refused.shutdown()
        thread.join()
        refused.server_close()


def test_waiting_request_has_spans_for_each_attempt_and_wait(spans):
    async def main() -> None:
        async with serving(spans) as app:
            await ask(app, "POST", "/v1/calls", [attempt(1)])
            body = {"namespace": "shop", "name": "orders/1", "id": "b" * 32, "wait": 30}
            waiting = asyncio.create_task(ask(app, "POST", "/v1/acquire", body))
            while not probe_server.waiting(app.service):
                await asyncio.sleep(0)
            claim = {**attempt(1)["claim"], "ttl": 30}
            await ask(app, "POST", "/v1/calls", [{"do": "release", "claim": claim}])
            assert await waiting == 200

    asyncio.run(main())
    (found,) = spans.tree()
    assert found[0] == "POST /v1/acquire"
    name, calls = found[1][0]
    kinds = [call.rpartition(".")[2] for call in calls]
    assert (name, kinds[:2], kinds[-1]) == ("leasehold.acquire", ["attempt", "wait"], "attempt")
    first = next(span for span in spans.ended if span.name == "leasehold.engine.attempt")
    assert (first.attributes["leasehold.outcome"], first.attributes["leasehold.position"]) == ("busy", 0)


def test_calls_of_one_request_belong_to_their_own_traces(spans):
    """Tasks of an asyncio client share requests. Calls of clients without traces have no spans."""

    async def main() -> None:
        async with serving(spans) as app:
            calls = [
                attempt(1, traceparent=PARENT),
                attempt(2, traceparent=OTHER),
                attempt(3),
                attempt(4, traceparent=5),
            ]
            assert await ask(app, "POST", "/v1/calls", calls) == 200

    asyncio.run(main())
    assert spans.tree() == [("POST /v1/calls", ["leasehold.engine.attempt"])] * 2
    found = [span for span in spans.ended if span.name == "POST /v1/calls"]
    assert {f"{span.context.trace_id:032x}" for span in found} == {TRACE, "1" * 32}


@pytest.mark.parametrize(("header", "parent"), [(f"00-{TRACE}-{'9' * 16}-01", "9" * 16), (OTHER, "00f067aa0ba902b7")])
def test_header_decides_if_it_is_of_the_same_trace(spans, header, parent):
    """Then a proxy on the way has put its own span there."""

    async def main() -> None:
        async with serving(spans) as app:
            await ask(app, "POST", "/v1/calls", [attempt(1, traceparent=PARENT)], traceparent=header)

    asyncio.run(main())
    assert f"{spans.only('POST /v1/calls').parent.span_id:016x}" == parent


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-zz-01", "ÿ"])
def test_request_without_a_valid_traceparent_begins_a_trace(spans, header):
    async def main() -> None:
        async with serving(spans) as app:
            with spans.tracer.start_as_current_span("other"):
                assert await ask(app, "GET", "/v1/locks", traceparent=header) == 200

    asyncio.run(main())
    assert spans.only("GET /v1/locks").parent is None


def test_renewals_and_probes_have_no_spans_unless_asked_for(spans):
    async def main() -> None:
        async with serving(spans) as app:
            for path in ("/healthz", "/readyz", "/metrics"):
                assert await ask(app, "GET", path) == 200
            lease = {"name": "a", "id": "c" * 32, "token": 1, "ttl": 5}
            await ask(app, "POST", "/v1/renew", lease)
            assert spans.tree() == []
            await ask(app, "POST", "/v1/renew", lease, traceparent=PARENT)
            await ask(app, "GET", "/elsewhere/orders/42")
            await ask(app, "GET", "/elsewhere/orders/42", traceparent=PARENT)

    asyncio.run(main())
    assert spans.tree() == ["POST /v1/renew", "GET other"]


def test_engine_that_does_not_answer_is_an_error_without_its_address(spans):
    async def main() -> None:
        async with serving(spans) as app:

            async def no_answer(_claim: object, _deadline: float) -> None:
                raise Unavailable("no reply from 10.0.0.5:6379")

            app.service.engine.attempt = no_answer
            assert await ask(app, "POST", "/v1/acquire", {"name": "a"}) == 503

    asyncio.run(main())
    assert all(span.status.status_code is StatusCode.ERROR for span in spans.ended)
    assert "10.0.0.5" not in "".join(span.to_json() for span in spans.ended)


def test_trace_of_a_grant_is_known_until_its_release():
    """Also without --otel: for the dashboard, and for the audit record of a release that is in no trace."""
    found: list[tuple[str, str | None]] = []

    async def main() -> None:
        async with serving(None) as app:
            passes_on = getattr(*probe_server.PASS_ON.of(app))

            def note(event: Event, request: Request) -> None:
                found.append((event.kind, tracing.find(event.fingerprint)))
                passes_on(event, request)

            setattr(*probe_server.PASS_ON.of(app), note)
            await ask(app, "POST", "/v1/calls", [attempt(1, traceparent=PARENT)])
            for _ in range(2):
                await ask(app, "POST", "/v1/calls", [{**attempt(1), "do": "release"}])
            await ask(app, "POST", "/v1/calls", [attempt(1)])

    asyncio.run(main())
    assert found == [("granted", TRACE), ("released", TRACE), ("granted", None)]


@pytest.mark.parametrize("url", [None, "https://tempo/trace/{trace}?from=<lock>"])
def test_dashboard_links_a_grant_to_its_trace(url):
    async def main() -> str:
        async with serving(None) as app:
            app.dashboard.trace_url = url
            await ask(app, "POST", "/v1/calls", [attempt(1, traceparent=PARENT)])
            answer = await app.answer(Request("GET", "/lock", query=b"namespace=shop&name=orders/1"))
            return answer.body.decode()

    page = asyncio.run(main())
    assert TRACE in page
    assert (f'href="https://tempo/trace/{TRACE}?from=&lt;lock&gt;"' in page) == (url is not None)


def test_leases_whose_trace_is_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(*probe_logs.TRACED_LEASES, {})
    monkeypatch.setattr(*probe_logs.MAX_TRACED_LEASES, 3)
    for number in range(10):
        tracing.remember(f"f{number}", TRACE)
    assert list(getattr(*probe_logs.TRACED_LEASES)) == ["f7", "f8", "f9"]


def is_whole(spans: list[support.Received]) -> bool:
    """Whether the acquire was granted, and all spans around its attempts and waits have arrived."""
    names, known = [span.name for span in spans], {span.own_id for span in spans}
    calls = [span for span in spans if span.name.startswith("leasehold.engine.")]
    granted = any(span.attributes.get("leasehold.outcome") == "granted" for span in calls)
    return granted and names.count("leasehold.engine.wait") > 0 and all(span.parent_id in known for span in calls)


@pytest.mark.extended
def test_trace_crosses_client_server_and_engine_over_otlp(tmp_path):
    """A real server, and a real exporter in both processes."""
    audit, name = tmp_path / "audit.jsonl", "orders/42"
    with support.Receiver() as receiver:
        with running(
            *("--otel", "--audit-file", str(audit)), environment=receiver.environment, url="memory://"
        ) as server:
            url = f"http://127.0.0.1:{server.port}"
            provider = TracerProvider()
            exporter = OTLPSpanExporter(f"{receiver.environment['OTEL_EXPORTER_OTLP_ENDPOINT']}/v1/traces")
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            hook = otel.Hook(provider, MeterProvider(), hold=True)
            with Client(url) as holder, Client(url, on_event=hook, holder="web-3") as client:
                lease = holder.lock(name).acquire()

                def order() -> None:
                    with provider.get_tracer("test").start_as_current_span("order"), client.lock(name, wait=60):
                        pass

                ordering = threading.Thread(target=order)
                ordering.start()
                poll(lambda: any(each.state == "waiting" for each in holder.inspect(name)))
                lease.release()
                ordering.join(60)
            provider.shutdown()
            poll(lambda: is_whole(receiver.spans))  # at its end, a server waits 2 s at most
        found = [span for span in receiver.spans if span.name != "GET /v1/traits"]
    ((root, (acquire, hold)),) = support.tree(found)
    assert (root, acquire[0], hold) == ("order", "leasehold.acquire", "leasehold.hold")
    first, *queued, last = acquire[1]
    assert first == last == ("POST /v1/calls", ["leasehold.engine.attempt"])
    assert queued
    assert set(map(str, queued)) == {
        str(("POST /v1/calls", ["leasehold.engine.attempt", "leasehold.engine.wait"]))
    }  # on a slow machine the waiter rechecks
    assert len({span.trace for span in found}) == 1
    assert {span.service for span in found if span.kind == "SERVER"} == {"leasehold"}
    (acquired,) = [span for span in found if span.name == "leasehold.acquire"]
    assert (acquired.attributes["leasehold.queued"], acquired.attributes["leasehold.position"]) == (True, 0)
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    traced = [(each["action"], each["trace"]) for each in records if each.get("trace")]
    assert traced == [("grant", found[0].trace), ("release", found[0].trace)]


def test_otel_without_its_exporter_is_refused_before_the_server_serves(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "no-such")
    with pytest.raises(ConfigError, match="there is no exporter 'no-such' for --otel"):
        check(Settings(engine="memory://", otel=True))


@pytest.mark.parametrize(
    "url", ["tempo/{trace}", "https://tempo/", "https://tempo/{trace}/{trace}", "javascript:{trace}"]
)
def test_trace_url_that_is_no_address_of_a_trace_is_refused(url):
    with pytest.raises(ConfigError, match="trace_url must be an http"):
        read({"trace_url": url}, {}, None)
