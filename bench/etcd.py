"""The etcd engine beside two bare Puts of grpcio and beside other clients; then hand-offs.

`python -m bench etcd`, or `python bench/etcd.py` for this table and the hand-offs. Starts a member of its own. Packages
that are not installed are left out: grpcio (then our own wire is the base), etcd3gw, aetcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from leasehold import AsyncClient, Client
from leasehold.config import EngineConfig
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls, Login
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.speed.rounds import Case, Result, measure, table
from leasehold.testing.servers.etcd import Cluster, Etcd

TITLE = "etcd: acquire + release, against two Puts (aim: at most 1.20)"
TITLE_HAND_OFF = "hand-off: N workers of four clients ask again at once; from release to the next grant"


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


def puts() -> Iterator[Case]:
    put = wire.Put(b"bench/lh1/q/bench", b"v" * 150)
    body = wire.encode(put)
    with contextlib.suppress(ImportError):
        import grpc

        channel = grpc.insecure_channel(f"127.0.0.1:{member().port}")
        call = channel.unary_unary("/etcdserverpb.KV/Put", None, lambda data: wire.decode(wire.PutDone, data))

        def with_grpcio(times: int) -> None:
            for _ in range(2 * times):
                call(body, timeout=5)

        yield Case("two Puts, grpcio", with_grpcio, 60)
    runtime = Threads()
    calls = Calls(address(EngineConfig.parse(url(), 5.0)), runtime, Login())
    method = wire.Method("/etcdserverpb.KV/Put", wire.PutDone)

    def with_ours(times: int) -> None:
        for _ in range(2 * times):
            step(calls.ask(method, put, runtime.now() + 5))

    yield Case("two Puts, our own wire", with_ours, 60)


def others() -> Iterator[Case]:
    """What else can be imported; each of them leaves leases behind, which end by themselves."""
    with contextlib.suppress(ImportError):
        import etcd3gw

        gateway = etcd3gw.client(port=member().port, api_path="/v3/")

        def through_json(times: int) -> None:
            for _ in range(times):
                lock = gateway.lock("bench", ttl=30)
                lock.acquire()
                lock.release()

        yield Case("etcd3gw", through_json, 20)
    with contextlib.suppress(ImportError):
        import aetcd

        def with_aetcd(times: int) -> None:
            async def main() -> None:
                async with aetcd.Client(port=member().port) as client:
                    for _ in range(times):
                        async with client.lock(b"bench", ttl=30):
                            pass

            asyncio.run(main())

        yield Case("aetcd", with_aetcd, 20)
    if ctl := shutil.which("etcdctl"):
        words = [ctl, "--endpoints", f"127.0.0.1:{member().port}", "lock", "ctl-bench", "true"]

        def with_etcdctl(times: int) -> None:
            for _ in range(times):
                subprocess.run(words, env={**os.environ, "ETCDCTL_API": "3"}, check=True, capture_output=True)

        yield Case("etcdctl lock, a process each", with_etcdctl, 2)


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


def hand_off_table(grants: int) -> str:
    lines = [TITLE_HAND_OFF, f"  {'N':>4} {'p50':>9} {'p99':>9} {'grants/s':>9}   (aim: p99 at most 10 ms)"]
    for workers in (2, 10, 50):
        took = hand_offs(workers, grants)
        middle, late = took[len(took) // 2], took[len(took) * 99 // 100]
        rate = len(took) / sum(took)
        lines.append(f"  {workers:>4} {middle * 1e3:>6.2f} ms {late * 1e3:>6.2f} ms {rate:>9.0f}")
    return "\n".join(lines)


def main() -> None:
    rounds = int(os.environ.get("ROUNDS", "9"))
    print(table(TITLE, run(rounds)))
    print(hand_off_table(int(os.environ.get("GRANTS", "1000"))))


if __name__ == "__main__":
    main()
