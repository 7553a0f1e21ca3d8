"""What the benchmarks of the SQL engines share."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from bench.cases import Aim, Aims, Notes, repeat_with
from leasehold import Client

PAIRS: Final = 200


def server_counts(name: str, url: str, statements: Callable[[], dict[str, int]], other: str) -> Notes:
    """Statements by the server's count: of a pair, and of hand-offs in several queues. `other`: a line for a blocked
    session."""
    with Client(url) as client:
        client.inspect()
        before = statements()
        repeat_with(client.lock("warm"))(PAIRS)
    after = statements()
    pair = sum(after[verb] - before.get(verb, 0) for verb in ("attempt", "release")) / PAIRS
    lines = [f"a pair: {pair:.2f} statements (aim: 2.0); hand-offs among queued waiters (aim: at most 2.1):"]
    lines += [hand_offs(url, statements, waiters) for waiters in (2, 10, 100)]
    return Notes(f"{name}: what the server counts", [*lines, other])


def hand_offs(url: str, statements: Callable[[], dict[str, int]], waiters: int) -> str:
    """Queue a number of waiters and release: milliseconds and statements per hand-off.

    A queue of its own comes first: a session plans each query of a procedure when it first runs it, which takes longer
    than several hand-offs."""
    with Client(url, call_timeout=60) as client, Client(url) as other:
        drain_queue(client, other, 2)
        before = statements()
        took = drain_queue(client, other, waiters)
        after = statements()
    increase = {verb: after[verb] - before.get(verb, 0) for verb in after}
    # Without what queued the claims, and the release of the last one.
    calls = (increase["attempt"] + increase["release"] - waiters - 2) / waiters
    heartbeats = increase.get("heartbeat", 0) + increase.get("renew", 0)
    woken = f", {increase['listen'] / waiters:.2f} wake-ups" if "listen" in increase else ""
    each = f"{calls:.2f} statements{woken} each, {heartbeats} heart-beats and renewals"
    return f"{waiters:>4} waiters: {took / waiters * 1000:6.2f} ms and {each}"


def few_against_many(name: str, url: str, rounds: int) -> Aims:
    """A hand-off among 2 waiters against one among 100. Each round measures 20 short queues and one long one."""
    ratios = []
    with Client(url, call_timeout=60) as client, Client(url) as other:
        for number in range(rounds + 1):
            few = statistics.median(drain_queue(client, other, 2) / 2 for _ in range(20))
            many = drain_queue(client, other, 100) / 100
            if number:  # the first round opens sessions and plans their queries
                ratios.append(few / many)
    what = f"{name}: hand-off among 2 waiters, against one among 100"
    return Aims(f"{name}: hand-offs in short and long queues", [Aim(what, statistics.median(ratios), 1.3)])


def drain_queue(client: Client, other: Client, waiters: int) -> float:
    """Seconds from the release of `other` until the last of the waiters of `client` is granted the name."""
    lock = client.lock("line", wait=600, ttl=60)
    lease = other.lock("line", ttl=60).acquire()

    granted_at: list[float] = []

    def work() -> None:
        with lock:
            granted_at.append(time.perf_counter())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(waiters)]
    for thread in threads:
        thread.start()
    while len(other.inspect("line")) < waiters + 1:
        time.sleep(0.01)
    began = time.perf_counter()
    lease.release()
    for thread in threads:
        thread.join()
    return granted_at[-1] - began


def blocked_hand_off(first: Any, second: Any, take: str, give: str, times: int) -> float:
    """Seconds from the release in one session to the grant in another that was blocked. Both execute statements."""
    durations = []
    for _ in range(times):
        first.execute(take)
        got: list[float] = []

        def wait(got: list[float] = got) -> None:
            second.execute(take)
            got.append(time.perf_counter())
            second.execute(give)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.02)
        began = time.perf_counter()
        first.execute(give)
        thread.join()
        durations.append(got[0] - began)
    return sorted(durations)[len(durations) // 2]
