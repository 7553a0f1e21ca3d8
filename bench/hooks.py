"""What hooks cost: acquire and release, three events, with a hook against none. `python -m bench hooks`

A hook costs a few microseconds, far less than other load on the machine does. So each case runs in many short rounds,
interleaved with the others, and its fastest round counts: one that nothing disturbed. In memory that is the thread's
CPU time; on Redis it is time on the clock, because waiting for the server is part of it. The range shows how sure that
is: the ratios of every other round alone.

OpenTelemetry's instruments and spans have a cost of their own, which is not ours to cut: its rows have no aim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from bench.cases import Part, Table
from harness.servers.redis import RedisServer
from leasehold import Client
from leasehold.cli.bench.measurement import BenchResult
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


def run(url: str, clock: Callable[[], float], times: int, rounds: int) -> list[BenchResult]:
    def case(client: Client) -> Callable[[int], None]:
        lock = client.lock("orders/42")

        def pair(times: int) -> None:
            for _ in range(times):
                lock.acquire().release()

        return pair

    with ExitStack() as stack:
        clients = {name: stack.enter_context(Client(url, on_event=hook)) for name, hook in hooks().items()}
        return fastest({name: case(client) for name, client in clients.items()}, clock, times, rounds)


def fastest(
    cases: Mapping[str, Callable[[int], None]], clock: Callable[[], float], times: int, rounds: int
) -> list[BenchResult]:
    """Each case by its fastest round, against the first case. At least ten rounds for each half."""
    names, seconds = list(cases), {name: list[float]() for name in cases}
    for number in range(max(20, rounds)):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = clock()
            cases[name](times)
            seconds[name].append((clock() - began) / times)
    base = seconds[names[0]]
    results = []
    for name, own in seconds.items():
        halves = sorted(min(own[half::2]) / min(base[half::2]) for half in (0, 1))
        results.append(BenchResult(name, min(own) * 1e6, min(own) / min(base), *halves))
    return results


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE_MEMORY, run("memory://", time.thread_time, 200, 10 * rounds))
    server = RedisServer().start()
    try:
        yield Table(TITLE_REDIS, run(f"redis://127.0.0.1:{server.port}", time.perf_counter, 20, 30 * rounds))
    finally:
        server.stop()
