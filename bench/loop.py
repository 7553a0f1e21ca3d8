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
from bench.places import PLACES
from bench.takers import BATON, NEEDS, TAKERS, Take
from leasehold.testing.servers.redis import RedisServer

CROWDS: Final = (2, 10, 50, 200)
OTHER_CROWDS: Final = (2, 10, 50)  # of all engines but Redis
REDIS_PEERS: Final = ("redis-py Lock", "python-redis-lock")
BESIDE: Final = {
    "memory": "threading.Lock",
    "sqlite": "filelock",
    "postgresql": "advisory lock",
    "mysql": "GET_LOCK",
    "etcd": "etcd's lock service",
    "zookeeper": "kazoo's Lock",
}
PROCESSES: Final = 4
SECONDS: Final = 1.0  # of one case in one round, at least
LONGER: Final = 3.0  # where a turn takes several milliseconds
EACH: Final = 0.02  # seconds for each worker: who had two turns beside one who had three tells nothing
LATER: Final = 0.005  # seconds: who asked so much later, and was served before, has overtaken

Turns = list[tuple[int, float, float]]  # worker, when it asked, when it was served: one clock for all processes


@dataclass(frozen=True)
class Crowd:
    """What one round of one case showed."""

    grants: float  # a second
    most_to_fewest: float
    overtaken: int
    wait: float  # median seconds from asking to being served
    requests: float = 0.0  # that the server counted, for each turn of the round, the first ones too


def judged(turns: Turns, begin: float, end: float, workers: int) -> Crowd:
    """The first turns find everybody standing there at once: no order among those."""
    settled = begin + (end - begin) / 10
    served = sorted((turn for turn in turns if settled <= turn[2] < end), key=lambda turn: turn[2])
    counts = Counter(worker for worker, _, _ in served)
    fewest = min(counts[worker] for worker in range(workers))
    overtaken, latest = 0, 0.0  # the latest to have asked among those served so far
    for _, asked, _ in served:
        overtaken += settled < asked and asked + LATER < latest
        latest = max(latest, asked)
    ratio = max(counts.values()) / fewest if fewest else float("inf")
    waits = [got - asked for _, asked, got in served] or [float("inf")]  # nobody had a turn
    return Crowd(len(served) / (end - settled), ratio, overtaken, statistics.median(waits))


Crowds = dict[str, list[Crowd]]  # by kind: a crowd of each round


# ---------------------------------------------------------- in the processes


def process(pipe: Connection, place: str, workers: Sequence[int]) -> None:
    """Does what it is told: which kind, from when, until when; None ends it."""
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        kind, begin, end = order
        turns: Turns = []
        with TAKERS[kind](place) as take:
            threads = [threading.Thread(target=work, args=(number, take, begin, end, turns)) for number in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        pipe.send(turns)


def work(number: int, take: Take, begin: float, end: float, turns: Turns) -> None:
    time.sleep(max(0.0, begin - time.monotonic()))
    while (asked := time.monotonic()) < end:
        held = take()
        turns.append((number, asked, time.monotonic()))
        held.release()


# ------------------------------------------------------------------ outside


@contextmanager
def crowd(
    place: str, workers: int, seconds: float, processes: int, count: Callable[[], int]
) -> Iterator[Callable[[str], Crowd]]:
    """Plays a round of one kind. `count`: the requests that the server had so far."""
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for number in range(min(processes, workers)):
            here, there = context.Pipe()
            share = range(number, workers, min(processes, workers))
            one = context.Process(target=process, args=(there, place, share))
            one.start()
            stack.callback(one.join)
            stack.callback(here.send, None)
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()

        def round_(kind: str) -> Crowd:
            before, begin = count(), time.monotonic() + 0.5  # all are connected by then
            for pipe in pipes:
                pipe.send((kind, begin, begin + seconds))
            turns = [turn for pipe in pipes for turn in pipe.recv()]
            requests = (count() - before) / max(1, len(turns))
            return replace(judged(turns, begin, begin + seconds, workers), requests=requests)

        yield round_


def compared(
    place: str,
    kinds: Sequence[str],
    rounds: int,
    workers: int,
    seconds: float = SECONDS,
    processes: int = PROCESSES,
    count: Callable[[], int] = int,
) -> Crowds:
    found: Crowds = {kind: [] for kind in kinds}
    with crowd(place, workers, max(seconds, EACH * workers), processes, count) as play:
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                one = play(kind)
                if number:  # the first is to warm up
                    found[kind].append(one)
    return found


def usable(kinds: Sequence[str]) -> list[str]:
    """Those whose package is installed; the others are named."""
    missing = [kind for kind in kinds if find_spec(NEEDS[kind]) is None]
    for kind in missing:
        print(f"left out: {kind} ({NEEDS[kind]} is not installed)", file=sys.stderr)
    return [kind for kind in kinds if kind not in missing]


def middle(found: Sequence[Crowd], of: Callable[[Crowd], float]) -> float:
    return statistics.median(of(one) for one in found)


def against(mine: Sequence[Crowd], other: Sequence[Crowd]) -> float:
    """Grants a second, as a ratio of each round; of nothing, none."""
    return statistics.median(
        a.grants / b.grants if b.grants else float("inf") for a, b in zip(mine, other, strict=True)
    )


def lines(workers: int, found: Crowds, more: str = "") -> list[str]:
    said = []
    for kind, rounds in found.items():
        text = f"{workers:>4} workers, {kind + ':':<20} {middle(rounds, lambda c: c.grants):>9,.0f} grants a second"
        if kind != "leasehold":
            text += f" (ours: {against(found['leasehold'], rounds):.2f} x)"
        text += f"; a turn after {middle(rounds, lambda c: c.wait) * 1000:.2f} ms"
        text += f"; most to fewest {middle(rounds, lambda c: c.most_to_fewest):.2f}"
        text += f"; overtaken {sum(one.overtaken for one in rounds)}"
        said.append(text + (more if kind == "leasehold" else ""))
    return said


def on_redis(rounds: int) -> Notes:
    server, said = RedisServer().start(), []
    try:
        place = f"redis://127.0.0.1:{server.port}"
        server.ask("LPUSH", BATON, "1")
        for workers in CROWDS:
            ours = ("leasehold", "a bare baton")
            found = compared(place, ours, rounds, workers, count=lambda: server.calls().get("evalsha", 0))
            asked = middle(found["leasehold"], lambda c: c.requests)
            said += lines(workers, found, f"; {asked:.2f} requests a grant")
            if workers <= 10:
                said += lines(workers, compared(place, ("leasehold", *usable(REDIS_PEERS)), few(rounds), workers))[1:]
    finally:
        server.stop()
    aims = "aims: 0.6 x a bare baton with 10 to 200, 0.77 x with two; 3 requests; most to fewest 1.1; 0 overtaken"
    return Notes(f"redis: a crowd on one name ({aims})", said)


def few(rounds: int) -> int:
    return max(2, rounds // 3)


def parts(rounds: int) -> Iterator[Part]:
    yield on_redis(rounds)
    for engine, other in BESIDE.items():
        with PLACES[engine]() as place:
            kinds, processes = ("leasehold", *usable((other,))), 1 if engine == "memory" else PROCESSES
            found = {many: compared(place, kinds, few(rounds), many, LONGER, processes) for many in OTHER_CROWDS}
        said = [text for many, crowds in found.items() for text in lines(many, crowds)]
        yield Notes(f"{engine}: a crowd on one name", said)
