"""Many callers compete for one lock: by polling, later callers overtake earlier ones; in a fair queue, they cannot."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any, Final

from leasehold.aio import AsyncClient
from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "hundreds of callers poll for one lock"
FIX: Final = "a fair queue: waiters are granted in order, and woken instead of polling"

_WAITERS: Final = 200
_HOLD_SECONDS: Final = 0.02
_ARRIVAL_SHARE: Final = 0.5  # they arrive spread over half of the time it takes to serve them, so that many wait
_POLL_SECONDS: Final = 0.05
_STALL_LIMIT: Final = 0.7  # the engine passes over a waiter that does not respond for one to three seconds
_TTL: Final = 120.0
_CALL_TIMEOUT: Final = 60.0  # hundreds of pollers keep a SQLite file busy
_MAX_RUNS: Final = 3
_OVERTAKEN_SHARE: Final = 0.5  # of that: a caller that arrived this much later and was served first has overtaken


def crowd(worker: Worker) -> None:
    worker.report("done", "all its callers have been served", **asyncio.run(_run_crowd(worker)))


async def _run_crowd(worker: Worker) -> dict[str, Any]:
    async with AsyncClient(
        worker.url, namespace=worker.namespace, holder=worker.who, ttl=_TTL, call_timeout=_CALL_TIMEOUT
    ) as client:
        lock, served, asked = client.lock("door"), [], [0]

        async def poller() -> None:
            await asyncio.sleep(random.random() * worker.arrival)  # noqa: S311  # a pause
            arrived = time.monotonic()
            while True:
                asked[0] += 1
                if worker.fixed:
                    lease = await lock.acquire()
                elif (found := await lock.try_acquire()) is None:
                    await asyncio.sleep(_POLL_SECONDS * (0.5 + random.random()))  # noqa: S311  # a pause
                    continue
                else:
                    lease = found
                served.append((arrived, time.monotonic()))
                await asyncio.sleep(_HOLD_SECONDS)
                await lease.release()
                return

        monitor = asyncio.create_task(_measure_stalls(longest_stall := [0.0]))
        await asyncio.gather(*(poller() for _ in range(worker.many)))
        monitor.cancel()
    return {"served": served, "asked": asked[0], "stalled": longest_stall[0]}


async def _measure_stalls(longest_stall: list[float]) -> None:
    """Keep the longest time that this process could not run."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(_POLL_SECONDS)
        longest_stall[0] = max(longest_stall[0], time.monotonic() - before - _POLL_SECONDS)


ROLES: Final = {"crowd": crowd}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    stall_limit = min(_STALL_LIMIT, _arrival(runner) * _OVERTAKEN_SHARE)
    for _ in range(_MAX_RUNS):
        result, stalled = _run_once(runner, fixed)
        if result.as_expected or (fixed and stalled < stall_limit):
            break
        if fixed:
            runner.log(f"a process did not run for {stalled:.1f} s, so its callers were late: starting again")
        else:
            runner.log("by chance no caller was overtaken: starting again")
    return result


def _arrival(runner: DemoRunner) -> float:
    """Seconds within which the callers arrive."""
    return (runner.size or _WAITERS) * _HOLD_SECONDS * _ARRIVAL_SHARE


def _run_once(runner: DemoRunner, fixed: bool) -> tuple[DemoResult, float]:
    size, names = runner.size or _WAITERS, "ABCDE"
    arrival = _arrival(runner)
    runner.log(f"{size} callers arrive within {arrival:g} s; each needs the lock for {1000 * _HOLD_SECONDS:g} ms")
    shares = [size // len(names) + (index < size % len(names)) for index in range(len(names))]
    workers = [
        runner.start("crowd", who, many=many, arrival=arrival, fixed=fixed)
        for who, many in zip(names, shares, strict=True)
    ]
    messages = runner.wait_for_all(workers, "done")
    served = [times for message in messages for times in message["served"]]
    asked = sum(message["asked"] for message in messages)
    overtaken = sum(_count_overtaken(message["served"], arrival * _OVERTAKEN_SHARE) for message in messages)
    longest = max(acquired - arrived for arrived, acquired in served)
    text = f"{asked} calls for {len(served)} grants; {overtaken} callers overtaken; longest wait {longest:.1f} s"
    facts = {"served": len(served), "asked": asked, "overtaken": overtaken, "longest": round(longest, 3)}
    stalled: float = max(message["stalled"] for message in messages)
    return DemoResult((overtaken == 0) if fixed else overtaken > 0, text, facts), stalled


def _count_overtaken(served: list[tuple[float, float]], by: float) -> int:
    """How many callers of one process were served after a caller that arrived much later.

    Only within a process: there, calls are sent in order of arrival, while another process may send its calls late.
    """
    count, latest = 0, 0.0
    for arrived, _ in sorted(served, key=lambda times: times[1]):
        count += latest - arrived > by
        latest = max(latest, arrived)
    return count
