"""The memory engine compared with `threading.Lock`: the cost of the library itself, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from prometheus_client import CollectorRegistry

from bench.cases import Part, Table
from leasehold import AsyncClient, Client, telemetry
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "memory: acquire + release, against threading.Lock (aim: at most 80)"
HOOKS_TITLE = "memory: acquire + release with a hook, against none (aims: no-op 1.25, Prometheus 1.6)"


def run(rounds: int) -> list[BenchResult]:
    plain = threading.Lock()
    with Client("memory://") as client:
        ours = client.lock("bench")

        def base(times: int) -> None:
            for _ in range(times):
                with plain:
                    pass

        def pair(times: int) -> None:
            for _ in range(times):
                with ours:
                    pass

        def by_hand(times: int) -> None:
            for _ in range(times):
                ours.acquire().release()

        def awaited(times: int) -> None:
            async def main() -> None:
                async with AsyncClient("memory://") as other:
                    lock = other.lock("bench")
                    for _ in range(times):
                        async with lock:
                            pass

            asyncio.run(main())

        return measure(
            [
                BenchCase("threading.Lock, with", base, 200_000),
                BenchCase("leasehold memory://, with", pair, 5_000),
                BenchCase("leasehold memory://, acquire() and release()", by_hand, 5_000),
                BenchCase("leasehold memory://, async with", awaited, 5_000),
            ],
            rounds,
        )


def run_hooks(rounds: int) -> list[BenchResult]:
    hooks = {
        "no hook": None,
        "a hook that does nothing": lambda _event: None,
        "telemetry.Prometheus": telemetry.Prometheus(CollectorRegistry()),
    }

    def case(client: Client) -> Callable[[int], None]:
        lock = client.lock("orders/42")

        def pair(times: int) -> None:
            for _ in range(times):
                lock.acquire().release()

        return pair

    with ExitStack() as stack:
        clients = {name: stack.enter_context(Client("memory://", on_event=hook)) for name, hook in hooks.items()}
        return measure([BenchCase(name, case(client), 2_000) for name, client in clients.items()], rounds)


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield Table(HOOKS_TITLE, run_hooks(rounds))
