"""A crowd that asks for one name again and again: grants a second, who gets how many, and who is overtaken.

`python -m bench.loop [ENGINE ...]`: workers are threads of several processes. Each asks at once for the next turn, so
every grant is a hand-off. On Redis a baton stands beside it, which is the floor: BLPOP to wait, LPUSH to hand on, and
neither lease, token nor holder. Rounds are interleaved; a ratio is of one round.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final

import redis

from leasehold import Client
from leasehold.testing.servers.redis import RedisServer

CROWDS: Final = (2, 10, 50, 200)
PROCESSES: Final = 4
SECONDS: Final = 1.0  # of one case in one round
LATER: Final = 0.005  # seconds: who asked so much later, and was served before, has overtaken
BATON: Final = "bench:baton"

Turns = list[tuple[int, float, float]]  # worker, when it asked, when it was served: one clock for all processes


@dataclass(frozen=True)
class Crowd:
    """What one round of one case showed."""

    grants: float  # a second
    most_to_fewest: float
    overtaken: int
    wait: float  # median seconds from asking to being served


def judged(turns: Turns, seconds: float, workers: int) -> Crowd:
    counts = [0] * workers
    for worker, _, _ in turns:
        counts[worker] += 1
    served = sorted(turns, key=lambda turn: turn[2])
    overtaken, latest = 0, 0.0  # the latest to have asked among those served so far
    for _, asked, _ in served:
        overtaken += asked + LATER < latest
        latest = max(latest, asked)
    fewest = min(counts)
    ratio = max(counts) / fewest if fewest else float("inf")
    return Crowd(len(turns) / seconds, ratio, overtaken, statistics.median(t[2] - t[1] for t in turns))


# ---------------------------------------------------------- in the processes


@contextmanager
def ours(place: str) -> Iterator[Callable[[], Any]]:
    with Client(place) as client:
        yield lambda: client.lock("hot", ttl=30).acquire()


class Baton:
    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def release(self) -> None:
        self._plain.lpush(BATON, "1")


@contextmanager
def baton(place: str) -> Iterator[Callable[[], Any]]:
    plain = redis.Redis.from_url(place)

    def take() -> Baton:
        while plain.blpop([BATON], timeout=5) is None:
            continue
        return Baton(plain)

    yield take
    plain.close()


KINDS: Final = {"leasehold": ours, "baton": baton}


def process(pipe: Connection, place: str, workers: Sequence[int]) -> None:
    """Does what it is told: which kind, from when, until when; None ends it."""
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        kind, begin, end = order
        turns: Turns = []
        with KINDS[kind](place) as take:
            threads = [threading.Thread(target=work, args=(number, take, begin, end, turns)) for number in workers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        pipe.send(turns)


def work(number: int, take: Callable[[], Any], begin: float, end: float, turns: Turns) -> None:
    time.sleep(max(0.0, begin - time.monotonic()))
    while (asked := time.monotonic()) < end:
        held = take()
        turns.append((number, asked, time.monotonic()))
        held.release()


# ------------------------------------------------------------------ outside


@contextmanager
def crowd(place: str, workers: int) -> Iterator[Callable[[str], Crowd]]:
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes = []
        for number in range(min(PROCESSES, workers)):
            here, there = context.Pipe()
            share = range(number, workers, min(PROCESSES, workers))
            one = context.Process(target=process, args=(there, place, share))
            one.start()
            stack.callback(one.join)
            stack.callback(here.send, None)
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()

        def round_(kind: str) -> Crowd:
            begin = time.monotonic() + 0.5  # all are connected by then
            for pipe in pipes:
                pipe.send((kind, begin, begin + SECONDS))
            turns = [turn for pipe in pipes for turn in pipe.recv()]
            # The first turns find everybody standing there at once: no order among those.
            return judged([turn for turn in turns if turn[1] > begin + SECONDS / 10], SECONDS * 0.9, workers)

        yield round_


def compared(place: str, kinds: Sequence[str], rounds: int, workers: int) -> dict[str, list[Crowd]]:
    found: dict[str, list[Crowd]] = {kind: [] for kind in kinds}
    with crowd(place, workers) as play:
        for number in range(rounds + 1):
            for kind in kinds if number % 2 else reversed(kinds):
                one = play(kind)
                if number:  # the first is to warm up
                    found[kind].append(one)
    return found


def line(workers: int, found: dict[str, list[Crowd]]) -> str:
    mine = found["leasehold"]

    def middle(of: Callable[[Crowd], float]) -> float:
        return statistics.median(of(one) for one in mine)

    text = f"{workers:>4} workers: {middle(lambda c: c.grants):>7,.0f} grants a second"
    if "baton" in found:
        ratio = statistics.median(a.grants / b.grants for a, b in zip(mine, found["baton"], strict=True))
        text += f", {ratio:.2f} of the baton (aim: 0.6)"
    text += f"; a turn after {middle(lambda c: c.wait) * 1000:.2f} ms"
    text += f"; most to fewest {middle(lambda c: c.most_to_fewest):.2f} (aim: 1.1)"
    return text + f"; overtaken {sum(one.overtaken for one in mine)} (aim: 0)"


def on_redis(rounds: int) -> Iterator[str]:
    server = RedisServer().start()
    try:
        place = f"redis://127.0.0.1:{server.port}"
        redis.Redis.from_url(place).lpush(BATON, "1")
        for workers in CROWDS:
            before = server.calls().get("evalsha", 0)
            found = compared(place, ("baton", "leasehold"), rounds, workers)
            grants = sum(one.grants for one in found["leasehold"]) * SECONDS * (rounds + 1) / rounds
            asked = (server.calls()["evalsha"] - before) / grants
            yield f"{line(workers, found)}; {asked:.2f} requests a grant (aim: 3)"
    finally:
        server.stop()


def main() -> None:
    print("redis: a crowd on one name, beside a bare baton")
    for text in on_redis(int(sys.argv[1]) if len(sys.argv) > 1 else 7):
        print(f"  {text}")


if __name__ == "__main__":
    main()
