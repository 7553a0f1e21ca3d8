"""No output of a full run of clients contains a claim's secret id or the engine's password: events, logs, metrics,
spans, audit records. tests/server/test_secrets.py does the same with a server, tests/cli/test_secrets.py with the
command line."""

from __future__ import annotations

import io
import logging
import os
from contextlib import suppress

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import leasehold
from harness.servers.redis import RedisServer
from leasehold import Client, Event, LeaseholdError, fences
from leasehold.client import lock as lock_module
from leasehold.telemetry import AuditFile, EngineHealth, JSONFormatter, Metrics, fan, metrics_text, otel
from leasehold.telemetry.text_file import TextFile
from leasehold.testing.conformance.rig import Absent
from tests.support.client_fixtures import poll_until

PASSWORD = "s3cr3tMARK"


@pytest.fixture
def server():
    try:
        server = RedisServer(password=PASSWORD)
    except Absent as absent:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(absent))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def secret_ids(monkeypatch):
    """The ids of all claims that this test makes: what follows the owner."""
    found: list[str] = []
    make_claim_id = lock_module.make_claim_id

    def remember(owner: str, secret: str) -> tuple[str, str]:
        found.append(secret)
        return make_claim_id(owner, secret)

    monkeypatch.setattr(lock_module, "make_claim_id", remember)
    return found


@pytest.fixture
def logs():
    """All log lines of every level: as text with tracebacks, and as JSON."""
    output = io.StringIO()
    handlers = [logging.StreamHandler(output), logging.StreamHandler(output)]
    handlers[1].setFormatter(JSONFormatter())
    logger = logging.getLogger("leasehold")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    for handler in handlers:
        logger.addHandler(handler)
    yield output
    for handler in handlers:
        logger.removeHandler(handler)
    logger.setLevel(before)


def full_run(server: RedisServer, url: str, hook: leasehold.events.Hook) -> None:
    """Every kind of event that locks, fences and `once` have, with answers and without."""
    options = {"call_timeout": 1.5, "on_event": hook, "breaker": True}
    with Client(url, holder="web-1", **options) as first, Client(url, holder="web-2", **options) as second:
        with first.lock("orders/42", ttl=30, purpose="settle", group="checkout") as lease:
            assert second.lock("orders/42").try_acquire() is None
            with suppress(LeaseholdError):
                second.lock("orders/42").acquire(wait=0.5)
            lease.renew()
        with suppress(LeaseholdError), first.rwlock("table").read(), second.semaphore("table", 2):
            pass
        broken = first.lock("report").acquire()
        assert second.break_lock("report", token=broken.token, why="a test")
        poll_until(lambda: not broken.held)
        for _ in range(2):
            first.once("rollup", lambda: 7, store="memory://")
        value = fences.Local("stock", 0)
        value.claim(2**53 - 1)
        for token in (4, broken):
            with suppress(LeaseholdError):
                value.write(token, 1)
        held = first.lock("nightly", ttl=3.0).acquire()
        server.pause()
        for _ in range(7):
            with suppress(LeaseholdError):
                second.lock("other").acquire(wait=0)
        with suppress(LeaseholdError):
            second.lock("other", on_unavailable="run").acquire().release()
        poll_until(lambda: not held.held, 60)
        pending = first.lock("later", on_unavailable="run").acquire()
        pending.release()
        server.resume()


def test_no_output_of_a_full_run_has_a_secret(server, secret_ids, logs, tmp_path):
    url = f"redis://:{PASSWORD}@127.0.0.1:{server.port}"
    exporter, reader, events = InMemorySpanExporter(), InMemoryMetricReader(), list[Event]()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics, text_file = Metrics(), TextFile(str(tmp_path / "x.prom"), Metrics())
    tracing = otel.Hook(provider, MeterProvider([reader]), hold=True)
    audit = AuditFile(tmp_path / "audit.jsonl")
    hook = fan(events.append, metrics, text_file, audit, tracing)
    fences.on_event(hook)
    health = EngineHealth(url, interval=0.2, timeout=0.2)
    try:
        full_run(server, url, hook)
        audit.close()
        poll_until(lambda: health.health is not None)
        outputs = {
            "events": "\n".join(map(repr, events)),
            "logs": logs.getvalue(),
            "metrics": metrics_text(metrics, health),
            "metrics file": (tmp_path / "x.prom").read_text(),
            "audit": (tmp_path / "audit.jsonl").read_text(),
            "spans": "\n".join(span.to_json() for span in exporter.get_finished_spans()),
            "OpenTelemetry's metrics": reader.get_metrics_data().to_json(),
            "reprs": f"{hook!r}{metrics!r}{tracing!r}{health!r}",
        }
    finally:
        fences.on_event(None)
        health.close()
    kinds = {event.kind for event in events}
    assert {
        "granted",
        "busy",
        "failed",
        "unguaranteed",
        "lost",
        "broken",
        "stale_token",
        "ran",
        "breaker_opened",
    } <= kinds
    assert all(len(output) > 100 for output in outputs.values()), {name: len(text) for name, text in outputs.items()}
    assert len(secret_ids) > 10
    leaks = [
        (name, secret) for name, output in outputs.items() for secret in (PASSWORD, *secret_ids) if secret in output
    ]
    assert leaks == []
