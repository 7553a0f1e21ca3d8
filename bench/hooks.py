"""What hooks cost: acquire and release, three events, with a hook against none. `python -m bench hooks`

OpenTelemetry's instruments and spans have a cost of their own, which is not ours to cut: its rows have no aim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from bench.cases import Part, Table
from harness.servers.redis import RedisServer
from leasehold import Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure
from leasehold.events import Hook
from leasehold.telemetry import Metrics, otel

TITLE_MEMORY = "memory: acquire + release with a hook, against none (aims: no-op 1.25, metrics 1.6)"
TITLE_REDIS = "redis: acquire + release with a hook, against none (aims: no-op 1.05, metrics 1.10)"


def hooks() -> dict[str, Hook | None]:
    return {
        "no hook": None,
        "a hook that does nothing": lambda _event: None,
        "telemetry.Metrics, telemetry.Prometheus": Metrics(),
        "telemetry.otel.Hook, metrics": otel.Hook(meter_provider=MeterProvider([InMemoryMetricReader()])),
        "telemetry.otel.Hook, metrics and spans": otel.Hook(TracerProvider(), MeterProvider([InMemoryMetricReader()])),
    }


def run(url: str, times: int, rounds: int) -> list[BenchResult]:
    def case(client: Client) -> Callable[[int], None]:
        lock = client.lock("orders/42")

        def pair(times: int) -> None:
            for _ in range(times):
                lock.acquire().release()

        return pair

    with ExitStack() as stack:
        clients = {name: stack.enter_context(Client(url, on_event=hook)) for name, hook in hooks().items()}
        return measure([BenchCase(name, case(client), times) for name, client in clients.items()], rounds)


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE_MEMORY, run("memory://", 1_000, rounds))
    server = RedisServer().start()
    try:
        yield Table(TITLE_REDIS, run(f"redis://127.0.0.1:{server.port}", 300, rounds))
    finally:
        server.stop()
