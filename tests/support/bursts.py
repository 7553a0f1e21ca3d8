"""The same call by many threads or tasks at the same moment."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

CALLERS = 20

_DEADLINE = 120.0  # seconds: then a call hangs


def in_threads(call: Callable[[int], object]) -> list[Any]:
    """What `call(number)` returned or raised in each thread that ended."""
    barrier, results = threading.Barrier(CALLERS), []

    def run(number: int) -> None:
        barrier.wait(_DEADLINE)
        try:
            results.append(call(number))
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_DEADLINE)
    return results


async def in_tasks(call: Callable[[int], Awaitable[object]]) -> list[Any]:
    """The same for tasks."""
    calls = asyncio.gather(*(call(number) for number in range(CALLERS)), return_exceptions=True)
    return await asyncio.wait_for(calls, _DEADLINE)


def failures(results: list[Any]) -> Counter[str]:
    """What the calls that did not return True did instead, and how many."""
    hanging = ["no answer"] * (CALLERS - len(results))
    return Counter(repr(result) for result in [*results, *hanging] if result is not True)
