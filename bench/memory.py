"""The memory engine compared with `threading.Lock`: the cost of the library itself, without a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

from bench.cases import Aim, Aims, Part, Table, ratio_of
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "memory: acquire + release, against threading.Lock (aim: at most 80)"


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


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    ours = ratio_of(results, "leasehold memory://, with", "threading.Lock, with")
    yield Aims("memory: aims", [Aim("memory: pair, against threading.Lock", ours, 80)])
