"""What the benchmarks of the engines on SQL servers share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from leasehold import Client, NotAcquired


def repeated(lock: Any) -> Callable[[int], None]:
    def pair(times: int) -> None:
        for _ in range(times):
            with lock:
                pass

    return pair


def hand_offs(url: str, statements: Callable[[], dict[str, int]], waiters: int) -> str:
    """So many in line, each in turn: milliseconds and statements per hand-off."""
    with Client(url, call_timeout=60) as client, Client(url) as other:
        lock = client.lock("line", wait=600, ttl=60)
        lease = other.lock("line", ttl=60).acquire()
        with suppress(NotAcquired):  # from here on it is listened to
            client.lock("line", wait=1).acquire()

        def work() -> None:
            with lock:
                pass

        threads = [threading.Thread(target=work, daemon=True) for _ in range(waiters)]
        for thread in threads:
            thread.start()
        while len(other.inspect("line")) < waiters + 1:
            time.sleep(0.01)
        before, began = statements(), time.perf_counter()
        lease.release()
        for thread in threads:
            thread.join()
        took, after = time.perf_counter() - began, statements()
    grown = {verb: after[verb] - before.get(verb, 0) for verb in after}
    calls = (grown["attempt"] + grown["release"] - 1) / waiters
    beats = grown.get("beat", 0) + grown.get("renew", 0)
    woken = f", {grown['listen'] / waiters:.2f} wake-ups" if "listen" in grown else ""
    each = f"{calls:.2f} statements{woken} each, {beats} heart-beats and renewals"
    return f"  {waiters:>4} waiters: {took / waiters * 1000:6.2f} ms and {each}"


def blocked(one: Any, two: Any, take: str, give: str, times: int) -> float:
    """Released in one session until held in another that was blocked: seconds. Both execute statements."""
    lasted = []
    for _ in range(times):
        one.execute(take)
        got: list[float] = []

        def wait(got: list[float] = got) -> None:
            two.execute(take)
            got.append(time.perf_counter())
            two.execute(give)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.02)
        began = time.perf_counter()
        one.execute(give)
        thread.join()
        lasted.append(got[0] - began)
    return sorted(lasted)[len(lasted) // 2]
