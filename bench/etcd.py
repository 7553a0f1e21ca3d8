"""The etcd engine beside two bare Puts of grpcio and beside other clients; then hand-offs.

`python -m bench etcd`. Starts a member of its own. Packages
that are not installed, or cannot lock here, are left out and named: etcd3gw, aetcd, etcd-client-py. Without grpcio our
own wire is the base.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

from bench.cases import Notes, Part, Table
from leasehold import AsyncClient, Client
from leasehold.config import EngineConfig
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls, Login
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.speed.rounds import Case, Result, measure
from leasehold.testing.servers.etcd import Cluster, Etcd
from leasehold.testing.servers.process import program

TITLE = "etcd: acquire + release, against two Puts (aim: at most 1.20)"
TITLE_HAND_OFF = "etcd hand-off: N workers of four clients ask again at once; from release to the next grant"


@cache
def member() -> Etcd:
    return Cluster(1).start().members[0]


def url() -> str:
    return f"etcd://127.0.0.1:{member().port}/bench-{os.urandom(4).hex()}"


def run(rounds: int) -> list[Result]:
    return measure(list(cases()), rounds)


def cases() -> Iterator[Case]:
    yield from puts()
    lock = Client(url()).lock("bench")

    def ours(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    yield Case("leasehold etcd://, with", ours, 60)
    where = url()

    def awaited(times: int) -> None:
        async def main() -> None:
            async with AsyncClient(where) as client:
                lock = client.lock("bench")
                for _ in range(times):
                    async with lock:
                        pass

        asyncio.run(main())

    yield Case("leasehold etcd://, async with, connecting too", awaited, 60)
    yield from others()


PUT = wire.Put(b"bench/lh1/q/bench", b"v" * 150)


def puts() -> Iterator[Case]:
    body = wire.encode(PUT)
    with contextlib.suppress(ImportError):
        import grpc

        channel = grpc.insecure_channel(f"127.0.0.1:{member().port}")
        call = channel.unary_unary("/etcdserverpb.KV/Put", None, lambda data: wire.decode(wire.PutDone, data))

        def with_grpcio(times: int) -> None:
            for _ in range(2 * times):
                call(body, timeout=5)

        yield Case("two Puts, grpcio", with_grpcio, 60)
    yield Case("two Puts, our own wire", two_puts(), 60)


def two_puts() -> Callable[[int], None]:
    runtime = Threads()
    calls = Calls(address(EngineConfig.parse(url(), 5.0)), runtime, Login())
    method = wire.Method("/etcdserverpb.KV/Put", wire.PutDone)

    def put(times: int) -> None:
        for _ in range(2 * times):
            step(calls.ask(method, PUT, runtime.now() + 5))

    return put


def others() -> Iterator[Case]:
    """What else can lock here; each leaves leases behind, which end by themselves. What cannot is named, with why."""
    for name, make, times in (
        ("etcd3gw", etcd3gw_pairs, 20),
        ("aetcd", aetcd_pairs, 20),
        ("etcd-client-py, connecting too", etcd_client_pairs, 20),
        ("etcdctl lock, a process each", etcdctl_pairs, 2),
    ):
        try:
            pairs = make()
            pairs(1)
        except Exception as error:
            print(f"left out: {name} ({type(error).__name__}: {error})", file=sys.stderr)
        else:
            yield Case(name, pairs, times)


def etcd3gw_pairs() -> Callable[[int], None]:
    import etcd3gw

    gateway = etcd3gw.client(port=member().port, api_path="/v3/")

    def pairs(times: int) -> None:
        for _ in range(times):
            lock = gateway.lock("gateway-bench", ttl=30)
            lock.acquire()
            lock.release()

    return pairs


def aetcd_pairs() -> Callable[[int], None]:
    import aetcd

    async def pairs(times: int) -> None:
        async with aetcd.Client(port=member().port) as client:
            for _ in range(times):
                async with client.lock(b"aetcd-bench", ttl=30):
                    pass

    return lambda times: asyncio.run(pairs(times))


def etcd_client_pairs() -> Callable[[int], None]:
    """Its lock is a connection of its own each time."""
    import etcd_client

    async def pairs(times: int) -> None:
        client = etcd_client.Client([f"http://127.0.0.1:{member().port}"])
        for _ in range(times):
            async with client.with_lock(etcd_client.EtcdLockOption(lock_name=b"client-bench", timeout=5.0, ttl=30)):
                pass

    return lambda times: asyncio.run(pairs(times))


def etcdctl_pairs() -> Callable[[int], None]:
    ctl = program("etcdctl", package="etcd-client")
    words = [ctl, "--endpoints", f"127.0.0.1:{member().port}", "lock", "ctl-bench", "true"]

    def pairs(times: int) -> None:
        for _ in range(times):
            subprocess.run(words, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True)

    return pairs


# ------------------------------------------------------------------ hand-off


def hand_offs(workers: int, grants: int) -> list[float]:
    """Seconds from each release to the next grant, sorted. A relay in which everybody asks again at once."""
    where = url()
    clients = [Client(where) for _ in range(min(4, workers))]
    took: list[float] = []
    released, left = [0.0], [grants]

    def work(client: Client) -> None:
        lock = client.lock("bench", ttl=30)
        while left[0] > 0:
            with lock:
                now = time.perf_counter()
                if released[0]:
                    took.append(now - released[0])
                left[0] -= 1
                released[0] = time.perf_counter()

    crowd = [threading.Thread(target=work, args=(clients[number % len(clients)],)) for number in range(workers)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    for client in clients:
        client.close()
    return sorted(took[workers:])


def least(times: int) -> list[float]:
    """What no hand-off can be faster than: a write that ends one grant and a write that begins the next."""
    put, took = two_puts(), []
    for _ in range(times):
        began = time.perf_counter()
        put(1)
        took.append(time.perf_counter() - began)
    return sorted(took)


def hand_off_table(grants: int) -> Notes:
    lines = [f"{'N':>8} {'p50':>9} {'p99':>9} {'a second':>9}   (aim: p99 at most 10 ms)"]
    for workers in (0, 2, 10, 50):
        took = hand_offs(workers, grants) if workers else least(grants)
        middle, late = took[len(took) // 2], took[len(took) * 99 // 100]
        name = workers or "two Puts"
        lines.append(f"{name:>8} {middle * 1e3:>6.2f} ms {late * 1e3:>6.2f} ms {len(took) / sum(took):>9.0f}")
    return Notes(TITLE_HAND_OFF, lines)


def parts(rounds: int) -> Iterator[Part]:
    yield Table(TITLE, run(rounds))
    yield hand_off_table(1000)
