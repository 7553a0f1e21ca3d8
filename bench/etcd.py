"""The etcd engine compared with two bare Puts of grpcio and with other clients; then hand-offs.

`python -m bench etcd` starts its own member. Packages that are not installed or cannot lock here are left out and
reported: etcd3gw, aetcd, etcd-client-py. Without grpcio the base is our own client.
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

from bench.cases import Aim, Aims, Notes, Part, Table, ratio_of
from harness.servers.etcd import Cluster, Etcd
from harness.servers.process import program
from leasehold import AsyncClient, Client
from leasehold.cli.bench.measurement import BenchCase, BenchResult, measure
from leasehold.config import EngineConfig
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.rpc import ClusterMemory, RpcClient
from leasehold.engines.etcd.url import parse_url
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads

TITLE = "etcd: acquire + release, against two Puts (aim: at most 1.20)"
TITLE_HAND_OFF = "etcd hand-off: N workers of four clients ask again at once; from release to the next grant"


@cache
def member() -> Etcd:
    return Cluster(1).start().members[0]


def url() -> str:
    return f"etcd://127.0.0.1:{member().port}/bench-{os.urandom(4).hex()}"


def run(rounds: int) -> list[BenchResult]:
    return measure(list(cases()), rounds)


def cases() -> Iterator[BenchCase]:
    yield from puts()
    lock = Client(url()).lock("bench")

    def ours(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    yield BenchCase("leasehold etcd://, with", ours, 60)
    where = url()

    def awaited(times: int) -> None:
        async def main() -> None:
            async with AsyncClient(where) as client:
                lock = client.lock("bench")
                for _ in range(times):
                    async with lock:
                        pass

        asyncio.run(main())

    yield BenchCase("leasehold etcd://, async with, connecting too", awaited, 60)
    yield from peers()


PUT = messages.PutRequest(b"bench/lh1/q/bench", b"v" * 150)


def puts() -> Iterator[BenchCase]:
    body = messages.encode(PUT)
    with contextlib.suppress(ImportError):
        import grpc

        channel = grpc.insecure_channel(f"127.0.0.1:{member().port}")
        call = channel.unary_unary(
            "/etcdserverpb.KV/Put", None, lambda data: messages.decode(messages.PutResponse, data)
        )

        def with_grpcio(times: int) -> None:
            for _ in range(2 * times):
                call(body, timeout=5)

        yield BenchCase("two Puts, grpcio", with_grpcio, 60)
    yield BenchCase("two Puts, our own wire", two_puts(), 60)


def two_puts() -> Callable[[int], None]:
    runtime = Threads()
    calls = RpcClient(parse_url(EngineConfig.parse(url(), 5.0)), runtime, ClusterMemory())
    method = messages.RpcMethod("/etcdserverpb.KV/Put", messages.PutResponse)

    def put(times: int) -> None:
        for _ in range(2 * times):
            run_sync(calls.call(method, PUT, runtime.now() + 5))

    return put


def peers() -> Iterator[BenchCase]:
    """Other clients that can lock here. Each leaves leases behind, which expire. Those that fail are reported with
    the reason."""
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
            yield BenchCase(name, pairs, times)


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
    """Its lock opens a new connection each time."""
    import etcd_client

    async def pairs(times: int) -> None:
        client = etcd_client.Client([f"http://127.0.0.1:{member().port}"])
        for _ in range(times):
            async with client.with_lock(etcd_client.EtcdLockOption(lock_name=b"client-bench", timeout=5.0, ttl=30)):
                pass

    return lambda times: asyncio.run(pairs(times))


def etcdctl_pairs() -> Callable[[int], None]:
    ctl = program("etcdctl", package="etcd-client")
    command = [ctl, "--endpoints", f"127.0.0.1:{member().port}", "lock", "ctl-bench", "true"]

    def pairs(times: int) -> None:
        for _ in range(times):
            subprocess.run(command, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True)

    return pairs


# ------------------------------------------------------------------ hand-off


def hand_offs(workers: int, grants: int) -> list[float]:
    """Sorted seconds from each release to the next grant. Every worker acquires again right after its release."""
    where = url()
    clients = [Client(where) for _ in range(min(4, workers))]
    durations: list[float] = []
    released, left = [0.0], [grants]

    def work(client: Client) -> None:
        lock = client.lock("bench", ttl=30)
        while left[0] > 0:
            with lock:
                now = time.perf_counter()
                if released[0]:
                    durations.append(now - released[0])
                left[0] -= 1
                released[0] = time.perf_counter()

    threads = [threading.Thread(target=work, args=(clients[number % len(clients)],)) for number in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    return sorted(durations[workers:])


def two_puts_times(times: int) -> list[float]:
    """The lower bound of a hand-off: one write ends a grant and one write begins the next."""
    put, durations = two_puts(), []
    for _ in range(times):
        began = time.perf_counter()
        put(1)
        durations.append(time.perf_counter() - began)
    return sorted(durations)


def hand_off_table(grants: int) -> Notes:
    lines = [f"{'N':>8} {'p50':>9} {'p99':>9} {'a second':>9}   (aim: p99 at most 10 ms)"]
    for workers in (0, 2, 10, 50):
        durations = hand_offs(workers, grants) if workers else two_puts_times(grants)
        median, p99 = durations[len(durations) // 2], durations[len(durations) * 99 // 100]
        name = workers or "two Puts"
        lines.append(f"{name:>8} {median * 1e3:>6.2f} ms {p99 * 1e3:>6.2f} ms {len(durations) / sum(durations):>9.0f}")
    return Notes(TITLE_HAND_OFF, lines)


def parts(rounds: int) -> Iterator[Part]:
    results = run(rounds)
    yield Table(TITLE, results)
    ours = ratio_of(results, "leasehold etcd://, with", results[0].name)
    yield Aims("etcd: aims", [Aim("etcd: pair, against two Puts", ours, 1.2)])
    yield hand_off_table(1000)
