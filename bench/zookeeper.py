"""The ZooKeeper engine compared with bare requests and kazoo's own Lock, on one local server; then hand-offs.

`python -m bench zookeeper`.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

from kazoo.client import KazooClient

from bench.cases import Aim, Aims, Notes, Part, Table, ratio_of, repeat_with
from harness.rigs.zookeeper import shared_server
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure

TITLE = "zookeeper: acquire + release, against a bare create and a bare delete by kazoo (aim: at most 1.30)"
TITLE_HAND_OFF = "zookeeper hand-off: released by one until held by the next, N waiters on two clients"
SIZES = (2, 10, 50, 200)


def run(rounds: int) -> list[BenchResult]:
    port = shared_server().port
    kazoo = KazooClient(f"127.0.0.1:{port}")
    kazoo.start()
    try:
        with Client(f"zookeeper://127.0.0.1:{port}") as client:
            return measure(list(pairs(port, kazoo, client)), rounds)
    finally:
        kazoo.stop()
        kazoo.close()


def pairs(port: int, kazoo: KazooClient, client: Client) -> Iterator[BenchCase]:
    def bare(times: int) -> None:
        for _ in range(times):
            kazoo.create("/bare", b"{}", ephemeral=True)
            kazoo.delete("/bare")

    def awaited(times: int) -> None:
        async def main() -> None:
            async with AsyncClient(f"zookeeper://127.0.0.1:{port}") as other:
                lock = other.lock("awaited")
                for _ in range(times):
                    async with lock:
                        pass

        asyncio.run(main())

    yield BenchCase("kazoo: create, delete", bare, 100)
    yield BenchCase("leasehold zookeeper://, with", repeat_with(client.lock("bench")), 100)
    yield BenchCase("leasehold zookeeper://, async with", awaited, 100)
    yield BenchCase("kazoo's Lock: no lease, no token", repeat_with(kazoo.Lock("/kazoo-lock", "bench")), 100)


# ------------------------------------------------------------------ hand-off


def hand_offs(locks: list[Any], size: int) -> list[float]:
    """How long each hand-off took among `size` threads that were all queued before the first."""
    durations: list[float] = []
    released = [0.0]
    first = locks[0]()
    first.acquire()
    all_queued = threading.Barrier(size + 1)

    def work(number: int) -> None:
        lock = locks[number % len(locks)]()
        all_queued.wait()
        lock.acquire()
        durations.append(time.perf_counter() - released[0])
        released[0] = time.perf_counter()
        lock.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    all_queued.wait()
    time.sleep(0.3 + size * 0.01)  # all threads are queued by now
    released[0] = time.perf_counter()
    first.release()
    for thread in threads:
        thread.join(60)
    return durations


class KazooStyleLock:
    """Our lock with the interface of kazoo's: it keeps the lease between the calls."""

    def __init__(self, client: Client) -> None:
        self._lock, self._lease = client.lock("hand-off", ttl=60), None

    def acquire(self) -> None:
        self._lease = self._lock.acquire()

    def release(self) -> None:
        self._lease.release()


def hand_off_table(rounds: int) -> Notes:
    port = shared_server().port
    ours = [Client(f"zookeeper://127.0.0.1:{port}") for _ in range(2)]
    theirs = [KazooClient(f"127.0.0.1:{port}") for _ in range(2)]
    for kazoo in theirs:
        kazoo.start()
    kinds = {
        "leasehold zookeeper://": [lambda client=client: KazooStyleLock(client) for client in ours],
        "kazoo's Lock": [lambda client=client: client.Lock("/kazoo-hand-off", "bench") for client in theirs],
    }
    lines = [f"{'':<28} {'N':>4} {'median':>10} {'99 %':>10}"]
    for size in SIZES:
        for name, locks in kinds.items():
            durations = sorted(duration for _ in range(rounds) for duration in hand_offs(locks, size))
            median, p99 = statistics.median(durations), durations[int(len(durations) * 0.99)]
            lines.append(f"{name:<28} {size:>4} {median * 1e3:>7.2f} ms {p99 * 1e3:>7.2f} ms")
    for client in ours:
        client.close()
    for kazoo in theirs:
        kazoo.stop()
        kazoo.close()
    return Notes(TITLE_HAND_OFF, lines)


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    ours = ratio_of(results, "leasehold zookeeper://, with", results[0].name)
    yield Aims("zookeeper: aims", [Aim("ZooKeeper: pair, against a bare create and delete", ours, 1.3)])
    yield hand_off_table(max(2, rounds // 3))
