"""Spans that a test keeps, and the trees that they form: of its own process, or received over OTLP."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """A tracer whose spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("test")

    @property
    def ended(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time)

    def only(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.ended if span.name == name]
        return span

    def tree(self) -> list[object]:
        return tree([_from_sdk(span) for span in self.ended])


class Received(NamedTuple):
    name: str
    kind: str
    began: int
    trace: str
    own_id: str
    parent_id: str
    attributes: dict[str, Any]
    service: str = ""


def tree(spans: Iterable[Received]) -> list[object]:
    """Names in the order in which spans began: a name, or (name, its children)."""
    ordered = sorted(spans, key=lambda span: span.began)
    known = {span.own_id for span in ordered}

    def below(parent: str) -> list[object]:
        found: list[object] = []
        for span in ordered:
            if (span.parent_id if span.parent_id in known else "") == parent:
                children = below(span.own_id)
                found.append((span.name, children) if children else span.name)
        return found

    return below("")


class Receiver:
    """A collector for OTLP over HTTP, which keeps the spans that it gets."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                receiver.spans += _from_otlp(sent) if self.path == "/v1/traces" else []
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _from_sdk(span: ReadableSpan) -> Received:
    parent = "" if span.parent is None else f"{span.parent.span_id:016x}"
    trace, own = f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"
    return Received(span.name, span.kind.name, span.start_time or 0, trace, own, parent, dict(span.attributes or {}))


def _from_otlp(sent: ExportTraceServiceRequest) -> list[Received]:
    return [
        Received(
            span.name,
            type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            span.start_time_unix_nano,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            _attributes(span.attributes),
            _attributes(resource.resource.attributes).get("service.name", ""),
        )
        for resource in sent.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
