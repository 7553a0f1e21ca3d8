"""Many workers that contend for one name: grants per second, fairness, and how often a worker is overtaken.

`python -m bench contention`: workers are threads of several processes. Each acquires again right after its release, so
every grant is a hand-off; two workers pass the lock back and forth. Leasehold is compared with another lock for the
same engine (`PEERS`), and on Redis also with a bare baton, the lower bound. Rounds are interleaved; each ratio is taken
within one round.

CPU time of a grant on Redis, compared with the baton: the server runs three scripts and sends a message, 4 times
the cost of the baton's two commands; a third of that is in the kernel and most of the rest in Lua. The clients send
three requests where the baton sends two, get the message on the listener thread, and wake the waiter from there: twice
the baton's cost.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Final

from bench.cases import Aim, Aims, Notes, Part
from bench.lock_adapters import ADAPTERS, BATON, REQUIRED_PACKAGES, Acquire
from bench.server_setups import SETUPS
from harness.servers.redis import RedisServer

WORKER_COUNTS: Final = (2, 10, 50)
OTHER_WORKER_COUNTS: Final = (2, 10)  # for all engines except Redis
MANY_WORKERS: Final = 200  # on Redis only, without the other packages: they poll
AIMED_WORKERS: Final = 10  # measured in more rounds
REDIS_PEERS: Final = ("redis-py Lock", "python-redis-lock")
PEERS: Final = {
    "memory": ("threading.Lock",),
    "sqlite": ("filelock",),
    "postgresql": ("leasehold, durable=no", "advisory lock"),
    "mysql": ("GET_LOCK",),
    "etcd": ("etcd's lock service",),
    "zookeeper": ("kazoo's Lock",),
}
# Of a crowd of ten: what is compared with what, and the least ratio of their grants a second.
AIMS: Final = {
    "sqlite": (("leasehold", "filelock", 0.2),),
    "postgresql": (("leasehold", "advisory lock", 0.15), ("leasehold, durable=no", "advisory lock", 0.35)),
    "etcd": (("leasehold", "etcd's lock service", 4.0),),
}
PROCESSES: Final = 4
SECONDS: Final = 1.0  # at least, for one case in one round
LONGER_SECONDS: Final = 1.5  # if a hand-off takes several milliseconds
SECONDS_PER_WORKER: Final = 0.02  # so that each worker gets enough grants for a fair comparison
OVERTAKE_MARGIN: Final = 0.005  # seconds: a worker that asked this much later but was granted first has overtaken

Grants = list[tuple[int, float, float]]  # worker, time of the request, time of the grant: one clock for all processes


@dataclass(frozen=True)
class RoundResult:
    """The results of one round of one case."""

    grants: float  # per second
    most_to_fewest: float
    overtaken: int
    wait: float  # median seconds from request to grant
    requests: float = 0.0  # counted by the server, per grant, including the warm-up


def summarize(grants: Grants, begin: float, end: float, workers: int) -> RoundResult:
    """Ignore the first tenth of the round: all workers start at once, so those requests have no order."""
    warm_up_end = begin + (end - begin) / 10
    served = sorted((grant for grant in grants if warm_up_end <= grant[2] < end), key=lambda grant: grant[2])
    counts = Counter(worker for worker, _, _ in served)
    fewest = min(counts[worker] for worker in range(workers))
    overtaken, latest = 0, 0.0  # the latest request among the grants so far
    for _, asked, _ in served:
        overtaken += warm_up_end < asked and asked + OVERTAKE_MARGIN < latest
        latest = max(latest, asked)
    ratio = max(counts.values()) / fewest if fewest else float("inf")
    waits = [got - asked for _, asked, got in served] or [float("inf")]  # no worker was granted
    return RoundResult(len(served) / (end - warm_up_end), ratio, overtaken, statistics.median(waits))


Results = dict[str, list[RoundResult]]  # by kind: one result per round


# ---------------------------------------------------- in the child processes


def run_process(pipe: Connection, url: str, workers: Sequence[int]) -> None:
    """Run rounds as commanded over the pipe: kind, start, end. None ends the process."""
    pipe.send("ready")
    while (command := pipe.recv()) is not None:
        kind, begin, end = command
        grants: Grants = []
        with ADAPTERS[kind](url) as acquire:
            threads = [threading.Thread(target=work, args=(number, acquire, begin, end, grants)) for number in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        pipe.send(grants)


def work(number: int, acquire: Acquire, begin: float, end: float, grants: Grants) -> None:
    time.sleep(max(0.0, begin - time.monotonic()))
    while (asked := time.monotonic()) < end:
        held = acquire()
        grants.append((number, asked, time.monotonic()))
        held.release()


# ------------------------------------------------------------ in the parent


@contextmanager
def contenders(
    url: str, workers: int, seconds: float, processes: int, count: Callable[[], int]
) -> Iterator[Callable[[str], RoundResult]]:
    """Yield a function that runs a round of one kind. `count` returns the number of requests the server has handled."""
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for number in range(min(processes, workers)):
            here, there = context.Pipe()
            numbers = range(number, workers, min(processes, workers))
            child = context.Process(target=run_process, args=(there, url, numbers))
            child.start()
            stack.callback(child.join)
            stack.callback(here.send, None)
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()

        def round_(kind: str) -> RoundResult:
            before, begin = count(), time.monotonic() + 0.5  # all workers have connected by then
            for pipe in pipes:
                pipe.send((kind, begin, begin + seconds))
            grants = [grant for pipe in pipes for grant in pipe.recv()]
            requests = (count() - before) / max(1, len(grants))
            return replace(summarize(grants, begin, begin + seconds, workers), requests=requests)

        yield round_


def compare(
    url: str,
    kinds: Sequence[str],
    rounds: int,
    workers: int,
    seconds: float = SECONDS,
    processes: int = PROCESSES,
    count: Callable[[], int] = int,
) -> Results:
    found: Results = {kind: [] for kind in kinds}
    with contenders(url, workers, max(seconds, SECONDS_PER_WORKER * workers), processes, count) as play:
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                result = play(kind)
                if number:  # the first round is a warm-up
                    found[kind].append(result)
    return found


def installed(kinds: Sequence[str]) -> list[str]:
    """The kinds whose package is installed; the others are reported."""
    missing = [kind for kind in kinds if find_spec(REQUIRED_PACKAGES[kind]) is None]
    for kind in missing:
        print(f"left out: {kind} ({REQUIRED_PACKAGES[kind]} is not installed)", file=sys.stderr)
    return [kind for kind in kinds if kind not in missing]


def median(found: Sequence[RoundResult], of: Callable[[RoundResult], float]) -> float:
    return statistics.median(of(result) for result in found)


def throughput_ratio(mine: Sequence[RoundResult], other: Sequence[RoundResult]) -> float:
    """The median over the rounds of the ratio of grants per second; infinite if the other had none."""
    return statistics.median(
        a.grants / b.grants if b.grants else float("inf") for a, b in zip(mine, other, strict=True)
    )


def format_lines(workers: int, found: Results, more: str = "") -> list[str]:
    text_lines = []
    for kind, rounds in found.items():
        text = f"{workers:>4} workers, {kind + ':':<20} {median(rounds, lambda c: c.grants):>9,.0f} grants a second"
        if not kind.startswith("leasehold"):
            text += f" (ours: {throughput_ratio(found['leasehold'], rounds):.2f} x)"
        text += f"; a turn after {median(rounds, lambda c: c.wait) * 1000:.2f} ms"
        text += f"; most to fewest {median(rounds, lambda c: c.most_to_fewest):.2f}"
        text += f"; overtaken {sum(result.overtaken for result in rounds)}"
        text_lines.append(text + (more if kind == "leasehold" else ""))
    return text_lines


def redis_parts(rounds: int) -> Iterator[Part]:
    server, text_lines, aims = RedisServer().start(), [], list[Aim]()
    try:
        url = f"redis://127.0.0.1:{server.port}"
        server.ask("LPUSH", BATON, "1")
        for workers in (*WORKER_COUNTS, MANY_WORKERS):
            peers = installed(REDIS_PEERS) if workers < MANY_WORKERS else []
            found = compare(
                url,
                ("leasehold", "a bare baton", *peers),
                fewer_rounds(rounds) if workers == MANY_WORKERS else rounds // 2 + 1,
                workers,
                count=lambda: server.calls().get("evalsha", 0),
            )
            asked = median(found["leasehold"], lambda c: c.requests)
            text_lines += format_lines(workers, found, f"; {asked:.2f} requests a grant")
            if "python-redis-lock" in found:
                aims.append(crowd_aim("redis", workers, found, "leasehold", "python-redis-lock", 1.15))
            if workers >= AIMED_WORKERS:
                aims.append(crowd_aim("redis", workers, found, "leasehold", "a bare baton", 0.5))
    finally:
        server.stop()
    yield Notes("redis: a crowd on one name", text_lines)
    yield Aims("redis: aims of crowds", aims)


def crowd_aim(engine: str, workers: int, found: Results, mine: str, other: str, least: float) -> Aim:
    crowd = "relay of 2" if workers == 2 else f"crowd of {workers}"
    name = engine if mine == "leasehold" else f"{engine}, {mine.removeprefix('leasehold, ')}"
    measured = throughput_ratio(found[mine], found[other])
    return Aim(f"{name}: {crowd}, grants a second against {other}", measured, least, at_least=True)


def fewer_rounds(rounds: int) -> int:
    return max(2, rounds // 4)


def parts(rounds: int) -> Iterator[Part]:
    yield from redis_parts(rounds)
    for engine, others in PEERS.items():
        with SETUPS[engine]() as url:
            kinds, processes = ("leasehold", *installed(others)), 1 if engine == "memory" else PROCESSES
            found = {}
            for workers in OTHER_WORKER_COUNTS:
                more = rounds // 2 if workers == AIMED_WORKERS else 0
                found[workers] = compare(
                    url, kinds, max(more, fewer_rounds(rounds)), workers, LONGER_SECONDS, processes
                )
        text_lines = [text for workers, results in found.items() for text in format_lines(workers, results)]
        yield Notes(f"{engine}: a crowd on one name", text_lines)
        crowd = found[AIMED_WORKERS]
        aims = [
            crowd_aim(engine, AIMED_WORKERS, crowd, mine, other, least)
            for mine, other, least in AIMS.get(engine, ())
            if other in crowd
        ]
        if aims:
            yield Aims(f"{engine}: aims of crowds", aims)
