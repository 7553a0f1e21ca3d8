"""The ZooKeeper engine beside bare requests and kazoo's own Lock, on one server of this machine; then hand-offs.

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

from bench.cases import Notes, Part, Table, repeated
from leasehold import AsyncClient, Client
from leasehold.speed.rounds import Case, Result, measure
from leasehold.testing.zookeeper_rig import alone

TITLE = "zookeeper: acquire + release, against a bare create and a bare delete by kazoo (aim: at most 1.30)"
TITLE_HAND_OFF = "zookeeper hand-off: released by one until held by the next, N waiters on two clients"
SIZES = (2, 10, 50, 200)


def run(rounds: int) -> list[Result]:
    port = alone().port
    kazoo = KazooClient(f"127.0.0.1:{port}")
    kazoo.start()
    try:
        with Client(f"zookeeper://127.0.0.1:{port}") as client:
            return measure(list(pairs(port, kazoo, client)), rounds)
    finally:
        kazoo.stop()
        kazoo.close()


def pairs(port: int, kazoo: KazooClient, client: Client) -> Iterator[Case]:
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

    yield Case("kazoo: create, delete", bare, 100)
    yield Case("leasehold zookeeper://, with", repeated(client.lock("bench")), 100)
    yield Case("leasehold zookeeper://, async with", awaited, 100)
    yield Case("kazoo's Lock: no lease, no token", repeated(kazoo.Lock("/kazoo-lock", "bench")), 100)


# ------------------------------------------------------------------ hand-off


def hand_offs(locks: list[Any], size: int) -> list[float]:
    """How long each hand-off took among so many threads that all stood in line before the first."""
    lasted: list[float] = []
    released = [0.0]
    first = locks[0]()
    first.acquire()
    in_line = threading.Barrier(size + 1)

    def work(number: int) -> None:
        lock = locks[number % len(locks)]()
        in_line.wait()
        lock.acquire()
        lasted.append(time.perf_counter() - released[0])
        released[0] = time.perf_counter()
        lock.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    in_line.wait()
    time.sleep(0.3 + size * 0.01)  # all stand in line by now
    released[0] = time.perf_counter()
    first.release()
    for thread in threads:
        thread.join(60)
    return lasted


class Held:
    """Ours with the shape of kazoo's: the lease kept in between."""

    def __init__(self, client: Client) -> None:
        self._lock, self._lease = client.lock("hand-off", ttl=60), None

    def acquire(self) -> None:
        self._lease = self._lock.acquire()

    def release(self) -> None:
        self._lease.release()


def hand_off_table(rounds: int) -> Notes:
    port = alone().port
    ours = [Client(f"zookeeper://127.0.0.1:{port}") for _ in range(2)]
    theirs = [KazooClient(f"127.0.0.1:{port}") for _ in range(2)]
    for each in theirs:
        each.start()
    kinds = {
        "leasehold zookeeper://": [lambda client=client: Held(client) for client in ours],
        "kazoo's Lock": [lambda client=client: client.Lock("/kazoo-hand-off", "bench") for client in theirs],
    }
    lines = [f"{'':<28} {'N':>4} {'median':>10} {'99 %':>10}"]
    for size in SIZES:
        for name, locks in kinds.items():
            lasted = sorted(one for _ in range(rounds) for one in hand_offs(locks, size))
            middle, most = statistics.median(lasted), lasted[int(len(lasted) * 0.99)]
            lines.append(f"{name:<28} {size:>4} {middle * 1e3:>7.2f} ms {most * 1e3:>7.2f} ms")
    for client in ours:
        client.close()
    for each in theirs:
        each.stop()
        each.close()
    return Notes(TITLE_HAND_OFF, lines)


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield hand_off_table(max(2, rounds // 3))
