"""A crowd that asks for one name again and again: grants a second, who gets how many, and who is overtaken.

`python -m bench loop`: workers are threads of several processes. Each asks at once for the next turn, so every grant is
a hand-off; two workers are a relay to one steady waiter. Beside ours stands what else there is for the engine (see
`takers`), on Redis also a bare baton, the floor. Rounds are interleaved; a ratio is of one round.

Where a grant on Redis goes, beside a baton's, in CPU time: the server three scripts and two messages, 4 to 5 times the
baton's two commands, a third of that in the kernel and most of the rest in Lua; the clients three requests where the
baton has two, two messages to the thread that listens, and one hand-over from there to the waiter: twice the baton's.
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

from bench.cases import Notes, Part
from bench.lock_adapters import ADAPTERS, BATON, REQUIRED_PACKAGES, Acquire
from bench.server_setups import SETUPS
from harness.servers.redis import RedisServer

WORKER_COUNTS: Final = (2, 10, 50, 200)
OTHER_WORKER_COUNTS: Final = (2, 10, 50)  # of all engines but Redis
REDIS_PEERS: Final = ("redis-py Lock", "python-redis-lock")
PEERS: Final = {
    "memory": "threading.Lock",
    "sqlite": "filelock",
    "postgresql": "advisory lock",
    "mysql": "GET_LOCK",
    "etcd": "etcd's lock service",
    "zookeeper": "kazoo's Lock",
}
PROCESSES: Final = 4
SECONDS: Final = 1.0  # of one case in one round, at least
LONGER_SECONDS: Final = 3.0  # where a turn takes several milliseconds
SECONDS_PER_WORKER: Final = 0.02  # seconds for each worker: who had two turns beside one who had three tells nothing
OVERTAKE_MARGIN: Final = 0.005  # seconds: who asked so much later, and was served before, has overtaken

Grants = list[tuple[int, float, float]]  # worker, when it asked, when it was served: one clock for all processes


@dataclass(frozen=True)
class RoundResult:
    """What one round of one case showed."""

    grants: float  # a second
    most_to_fewest: float
    overtaken: int
    wait: float  # median seconds from asking to being served
    requests: float = 0.0  # that the server counted, for each turn of the round, the first ones too


def summarize(grants: Grants, begin: float, end: float, workers: int) -> RoundResult:
    """The first turns find everybody standing there at once: no order among those."""
    warm_up_end = begin + (end - begin) / 10
    served = sorted((grant for grant in grants if warm_up_end <= grant[2] < end), key=lambda grant: grant[2])
    counts = Counter(worker for worker, _, _ in served)
    fewest = min(counts[worker] for worker in range(workers))
    overtaken, latest = 0, 0.0  # the latest to have asked among those served so far
    for _, asked, _ in served:
        overtaken += warm_up_end < asked and asked + OVERTAKE_MARGIN < latest
        latest = max(latest, asked)
    ratio = max(counts.values()) / fewest if fewest else float("inf")
    waits = [got - asked for _, asked, got in served] or [float("inf")]  # nobody had a turn
    return RoundResult(len(served) / (end - warm_up_end), ratio, overtaken, statistics.median(waits))


Results = dict[str, list[RoundResult]]  # by kind: a crowd of each round


# ---------------------------------------------------------- in the processes


def run_process(pipe: Connection, url: str, workers: Sequence[int]) -> None:
    """Does what it is told: which kind, from when, until when; None ends it."""
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


# ------------------------------------------------------------------ outside


@contextmanager
def contenders(
    url: str, workers: int, seconds: float, processes: int, count: Callable[[], int]
) -> Iterator[Callable[[str], RoundResult]]:
    """Plays a round of one kind. `count`: the requests that the server had so far."""
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
            before, begin = count(), time.monotonic() + 0.5  # all are connected by then
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
                if number:  # the first is to warm up
                    found[kind].append(result)
    return found


def installed(kinds: Sequence[str]) -> list[str]:
    """Those whose package is installed; the others are named."""
    missing = [kind for kind in kinds if find_spec(REQUIRED_PACKAGES[kind]) is None]
    for kind in missing:
        print(f"left out: {kind} ({REQUIRED_PACKAGES[kind]} is not installed)", file=sys.stderr)
    return [kind for kind in kinds if kind not in missing]


def median(found: Sequence[RoundResult], of: Callable[[RoundResult], float]) -> float:
    return statistics.median(of(result) for result in found)


def throughput_ratio(mine: Sequence[RoundResult], other: Sequence[RoundResult]) -> float:
    """Grants a second, as a ratio of each round; of nothing, none."""
    return statistics.median(
        a.grants / b.grants if b.grants else float("inf") for a, b in zip(mine, other, strict=True)
    )


def format_lines(workers: int, found: Results, more: str = "") -> list[str]:
    text_lines = []
    for kind, rounds in found.items():
        text = f"{workers:>4} workers, {kind + ':':<20} {median(rounds, lambda c: c.grants):>9,.0f} grants a second"
        if kind != "leasehold":
            text += f" (ours: {throughput_ratio(found['leasehold'], rounds):.2f} x)"
        text += f"; a turn after {median(rounds, lambda c: c.wait) * 1000:.2f} ms"
        text += f"; most to fewest {median(rounds, lambda c: c.most_to_fewest):.2f}"
        text += f"; overtaken {sum(result.overtaken for result in rounds)}"
        text_lines.append(text + (more if kind == "leasehold" else ""))
    return text_lines


def redis_part(rounds: int) -> Notes:
    server, text_lines = RedisServer().start(), []
    try:
        url = f"redis://127.0.0.1:{server.port}"
        server.ask("LPUSH", BATON, "1")
        for workers in WORKER_COUNTS:
            ours = ("leasehold", "a bare baton")
            found = compare(url, ours, rounds, workers, count=lambda: server.calls().get("evalsha", 0))
            asked = median(found["leasehold"], lambda c: c.requests)
            text_lines += format_lines(workers, found, f"; {asked:.2f} requests a grant")
            if workers <= 10:
                text_lines += format_lines(
                    workers, compare(url, ("leasehold", *installed(REDIS_PEERS)), fewer_rounds(rounds), workers)
                )[1:]
    finally:
        server.stop()
    aims = "aims: 0.6 x a bare baton with 10 to 200, 0.77 x with two; 3 requests; most to fewest 1.1; 0 overtaken"
    return Notes(f"redis: a crowd on one name ({aims})", text_lines)


def fewer_rounds(rounds: int) -> int:
    return max(2, rounds // 3)


def parts(rounds: int) -> Iterator[Part]:
    yield redis_part(rounds)
    for engine, other in PEERS.items():
        with SETUPS[engine]() as url:
            kinds, processes = ("leasehold", *installed((other,))), 1 if engine == "memory" else PROCESSES
            found = {
                workers: compare(url, kinds, fewer_rounds(rounds), workers, LONGER_SECONDS, processes)
                for workers in OTHER_WORKER_COUNTS
            }
        text_lines = [text for workers, results in found.items() for text in format_lines(workers, results)]
        yield Notes(f"{engine}: a crowd on one name", text_lines)
