"""A client process of `leasehold bench --until-breaks`: `python -m leasehold.cli.bench.load_worker`.

It reads a step per line from stdin and answers with a line of results. Pairs of acquire and release start when they are
due, whether or not earlier ones are done (an open loop), and are timed from then on: a server that stops for a second
delays all pairs of that second, not only the ones that it was asked for.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from leasehold.aio import AsyncClient, AsyncLock
from leasehold.cli.run.parent_death import die_with_parent
from leasehold.errors import LeaseholdError

FACTS_VARIABLE: Final = "LEASEHOLD_BENCH_FACTS"
GRACE: Final = 1.0  # seconds after the step in which pairs may still be done; later ones count as not done

_DRAIN: Final = 5.0  # seconds after that in which pairs that have begun may end
_SIGNIFICANT_BITS: Final = 8  # of a latency
_MAX_ERROR_TEXTS: Final = 100  # different ones in a step: some contain the name
_HELD_SECONDS: Final = 40.0  # after a pair has failed, its name may be held for this long: more than the ttl
_MAX_RUNNING: Final = 500  # pairs at a time; the others wait, which counts as well
_PAUSE_AFTER_FAILURE: Final = 2.0  # seconds in which a failed pair still counts as one of these


@dataclass(slots=True)
class StepResult:
    """One process's share of a step."""

    due: int
    latencies: dict[int, int] = field(default_factory=dict)  # by microseconds, rounded: how many pairs took that long
    errors: dict[str, int] = field(default_factory=dict)
    cpu: float = 0.0  # share of one processor

    def __post_init__(self) -> None:
        self.latencies = {int(micros): count for micros, count in self.latencies.items()}  # JSON makes texts of them

    def add(self, micros: int) -> None:
        """Round to 0.4 %. A process that kept every latency would grow with the load, and `harness.lab soak` could not
        tell that from growth of the library."""
        unit = 1 << max(0, micros.bit_length() - _SIGNIFICANT_BITS)
        micros = micros // unit * unit + unit // 2
        self.latencies[micros] = self.latencies.get(micros, 0) + 1


class LoadGenerator:
    """Free names are used again, so that there are never more names than pairs at a time, and failures in
    40 seconds: clients and servers keep something for each name. A port that refuses connections would otherwise fail
    thousands of pairs a second, so a failed pair keeps its place for a while, as a caller waits before the next try."""

    def __init__(self, client: AsyncClient, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._free: list[AsyncLock] = []
        self._failed: deque[tuple[float, str]] = deque()  # names, and when each is free for certain
        self._count = 0

    async def run_step(self, rate: float, seconds: float, start: float) -> StepResult:
        """`start`: when the first pair is due, by `time.monotonic`, which all processes share."""
        result, room, running = StepResult(due=round(rate * seconds)), asyncio.Semaphore(_MAX_RUNNING), set()
        end, cpu, errors = start + seconds + GRACE, time.process_time(), Counter[str]()

        async def pair(due_at: float) -> None:
            lock = self._free_lock()
            try:
                await (await lock.acquire()).release()
                if (done_at := time.monotonic()) <= end:
                    result.add(int((done_at - due_at) * 1e6))
                self._free.append(lock)
            except LeaseholdError as error:
                self._failed.append((time.monotonic() + _HELD_SECONDS, lock.name))
                text = f"{type(error).__name__}: {error}"
                errors[text if text in errors or len(errors) < _MAX_ERROR_TEXTS else type(error).__name__] += 1
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
            finally:
                room.release()

        try:
            async with asyncio.timeout(end - time.monotonic()):
                for number in range(result.due):
                    due_at = start + number / rate
                    await asyncio.sleep(max(0.0, due_at - time.monotonic()))
                    await room.acquire()
                    running.add(task := asyncio.create_task(pair(due_at)))
                    task.add_done_callback(running.discard)
                while running:
                    await asyncio.wait(running)
            result.cpu = (time.process_time() - cpu) / (time.monotonic() - start)
        except TimeoutError:
            result.cpu = (time.process_time() - cpu) / (time.monotonic() - start)
            if running:  # what has begun is finished, so that it does not burden the next step
                await asyncio.wait(running, timeout=_DRAIN)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        result.errors = dict(errors)
        return result

    def _free_lock(self) -> AsyncLock:
        if self._free:
            return self._free.pop()
        if self._failed and self._failed[0][0] <= time.monotonic():
            return self._client.lock(self._failed.popleft()[1], wait=5)
        self._count += 1
        return self._client.lock(f"{self._prefix}{self._count}", wait=5)


def main() -> None:
    facts: dict[str, Any] = json.loads(os.environ.pop(FACTS_VARIABLE))
    die_with_parent(facts["parent"])
    with asyncio.Runner() as runner, suppress(KeyboardInterrupt):  # the parent interrupts a step
        client = AsyncClient(facts["url"], namespace=facts["namespace"])
        generator = LoadGenerator(client, facts["prefix"])
        try:
            runner.run(client.ping())
            _answer({"ready": True})
            for line in sys.stdin:
                _answer(asdict(runner.run(generator.run_step(**json.loads(line)))))
        except LeaseholdError as error:
            _answer({"failed": str(error)})
        finally:
            runner.run(client.close())  # which sends the releases that are still pending


def _answer(message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
