"""From the release in one process until the lock is held in another that waits for it, on every engine.

`python -m bench hand_offs`. Each engine is compared with what a user would pick instead (`PEERS`). The waiter is queued
long before the release, so only the hand-off is measured. The kinds of an engine take turns within a round, and each
ratio is taken within one round. The grant is written to the disk by PostgreSQL and MariaDB, and so is the release: an
advisory lock writes nothing. So their base is that lock plus two commits.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final
from urllib.parse import urlsplit

from bench.cases import Aim, Aims, Part, Table
from bench.contention import installed
from bench.lock_adapters import ADAPTERS, BATON
from bench.server_setups import SETUPS
from leasehold import Client
from leasehold.cli.bench.measurement import BenchResult

PEERS: Final = {
    "memory": ("leasehold", "threading.Lock"),
    "sqlite": ("leasehold", "filelock"),
    "redis": ("leasehold", "python-redis-lock", "a bare baton"),
    "postgresql": ("leasehold", "leasehold, durable=no", "advisory lock"),
    "mysql": ("leasehold", "GET_LOCK"),
    "etcd": ("leasehold", "etcd's lock service", "etcdctl lock"),
    "zookeeper": ("leasehold", "kazoo's Lock"),
}
HAND_OFFS: Final = 5  # in each round
QUEUED_AFTER: Final = 0.02  # seconds in which the waiter is queued
_HOLDER: Final = """
import sys
import leasehold
client = leasehold.Client(sys.argv[1], ttl=30)
lease = client.lock("killed").acquire()
print("held", flush=True)
sys.stdin.read()
"""
_WAITER: Final = """
import sys
import leasehold
leasehold.Client(sys.argv[1]).lock("killed", wait=None).acquire()
"""


def wait_in_process(pipe: Connection, url: str, kind: str) -> None:
    """Acquire and release once for each message. None ends the process."""
    with ADAPTERS[kind](url) as acquire:
        acquire().release()
        pipe.send(None)
        while pipe.recv() is not None:
            held = acquire()
            pipe.send(time.monotonic())
            held.release()
            pipe.send(None)


@contextmanager
def relay(url: str, kind: str) -> Iterator[Callable[[], float]]:
    """Yield a function that hands over once, from this process to another, and returns how long that took."""
    context = get_context("spawn")
    here, there = context.Pipe()
    if kind in ("threading.Lock",) or url.startswith("memory:"):
        with ADAPTERS[kind](url) as acquire:
            yield lambda: hand_over_to_thread(acquire)
        return
    child = context.Process(target=wait_in_process, args=(there, url, kind))
    child.start()
    try:
        with ADAPTERS[kind](url) as acquire:
            here.recv()

            def hand_over() -> float:
                held = acquire()
                here.send(True)
                time.sleep(QUEUED_AFTER * (5 if kind == "etcdctl lock" else 1))
                began = time.monotonic()
                held.release()
                took: float = here.recv() - began
                here.recv()
                return took

            yield hand_over
    finally:
        here.send(None)
        child.join()


def hand_over_to_thread(acquire: Callable[[], Any]) -> float:
    held, granted_at = acquire(), list[float]()

    def wait() -> None:
        next_held = acquire()
        granted_at.append(time.monotonic())
        next_held.release()

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(QUEUED_AFTER)
    began = time.monotonic()
    held.release()
    thread.join()
    return granted_at[0] - began


def two_commits(engine: str, url: str) -> Callable[[], float]:
    """Write a row and delete it, both durable: what a grant and its release add to a lock without either."""
    if engine == "postgresql":
        import psycopg

        execute: Callable[[str], object] = psycopg.connect(url, autocommit=True).execute
    else:
        import pymysql

        parts = urlsplit(url)
        db = pymysql.connect(host=parts.hostname, port=parts.port or 3306, user=parts.username, autocommit=True)
        execute = db.cursor().execute
        execute("create database if not exists bench")
        execute("use bench")
    execute("create table bare_hand_off (name varchar(20) primary key)")

    def run() -> float:
        began = time.monotonic()
        execute("insert into bare_hand_off values ('job')")
        execute("delete from bare_hand_off where name = 'job'")
        return time.monotonic() - began

    return run


def measure_engine(engine: str, rounds: int) -> tuple[Table, list[Aim]]:
    found: dict[str, list[float]] = {}
    with SETUPS[engine]() as url, ExitStack() as stack:
        if engine == "redis":
            import redis

            redis.Redis.from_url(url).lpush(BATON, "1")
        cases = {kind: stack.enter_context(relay(url, kind)) for kind in ("leasehold", *installed(PEERS[engine][1:]))}
        if engine in ("postgresql", "mysql"):
            cases["two bare commits"] = two_commits(engine, url)
        for number in range(rounds + 1):
            for kind, run in cases.items():
                took = statistics.median(run() for _ in range(HAND_OFFS))
                if number:  # the first round is a warm-up
                    found.setdefault(kind, []).append(took)
    ours = found["leasehold"]
    results = [result(kind, took, ours) for kind, took in found.items()]
    return Table(f"{engine}: released until held by the next, against ours", results), aims_of(engine, found)


def result(kind: str, took: list[float], base: list[float]) -> BenchResult:
    ratios = [mine / other for mine, other in zip(took, base, strict=True)]
    low, *_, high = statistics.quantiles(ratios, n=10)
    return BenchResult(kind, statistics.median(took) * 1e6, statistics.median(ratios), low, high)


def aims_of(engine: str, found: dict[str, list[float]]) -> list[Aim]:
    def ratio(*bases: str) -> float:
        sums = [sum(parts) for parts in zip(*(found[base] for base in bases), strict=True)]
        return statistics.median(mine / base for mine, base in zip(found["leasehold"], sums, strict=True))

    if engine == "memory":
        micros = statistics.median(found["leasehold"]) * 1e6
        return [Aim("memory: hand-off between two threads", micros, 160, unit=" us")]
    if engine == "sqlite" and "filelock" in found:
        return [Aim("SQLite: hand-off, against filelock", ratio("filelock"), 1 / 35)]
    if engine in ("postgresql", "mysql"):
        other = "advisory lock" if engine == "postgresql" else "GET_LOCK"
        name = "PostgreSQL" if engine == "postgresql" else "MariaDB"
        what = f"{name}: hand-off, against a blocked {other} plus two bare commits"
        return [Aim(what, ratio(other, "two bare commits"), 1.5)]
    return []


def after_kill(times: int) -> Aim:
    """From kill -9 of a holder until a waiter of another process holds the name, with a ttl of 30 s."""
    durations = []
    with SETUPS["sqlite"]() as url, Client(url) as client:
        for _ in range(times):
            holder = subprocess.Popen(
                [sys.executable, "-c", _HOLDER, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert holder.stdout is not None
            holder.stdout.readline()
            wait_granted = start_waiter(client, 1)
            began = time.monotonic()
            holder.send_signal(signal.SIGKILL)
            durations.append(wait_granted() - began)
            holder.communicate()
    return Aim("SQLite: kill -9 of a holder until the next holds", statistics.median(durations), 0.1, unit=" s")


def behind_dead_waiter(times: int) -> Aim:
    """From a release until the second waiter holds the name, if the first one was killed just before."""
    durations = []
    with SETUPS["etcd"]() as url, Client(url) as client, Client(url) as other:
        for _ in range(times):
            lease = client.lock("killed", ttl=60).acquire()
            dead = subprocess.Popen([sys.executable, "-c", _WAITER, url])
            wait_queued(client, 1)
            wait_granted = start_waiter(other, 2)
            dead.send_signal(signal.SIGKILL)
            dead.wait()
            began = time.monotonic()
            lease.release()
            durations.append(wait_granted() - began)
    return Aim("etcd: hand-off behind a waiter that was killed", max(durations), 5.0, unit=" s")


def start_waiter(client: Client, number: int) -> Callable[[], float]:
    """Start a thread that acquires the name, and wait until `number` claims are queued. Returns a function that waits
    until it was granted, and returns when that was."""
    granted_at: list[float] = []

    def wait() -> None:
        with client.lock("killed", wait=60):
            granted_at.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    wait_queued(client, number)

    def wait_granted() -> float:
        thread.join()
        return granted_at[0]

    return wait_granted


def wait_queued(client: Client, number: int) -> None:
    while sum(holding.state == "waiting" for holding in client.inspect("killed")) < number:
        time.sleep(0.02)


def parts(rounds: int) -> Iterator[Part]:
    aims = []
    for engine in PEERS:
        table, found = measure_engine(engine, rounds)
        yield table
        aims += found
    yield Aims("hand-offs: aims", [*aims, after_kill(5), behind_dead_waiter(3)])
