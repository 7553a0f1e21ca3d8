"""Processes read, compute and write without a lock, or with one that checks first and sets then: updates are lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "four processes increment one counter, without a lock and with a naive one"
FIX: Final = 'a lock that is acquired in one step: with client.lock("counter")'

_ROUNDS: Final = 25
_THINK_SECONDS: Final = 0.002
_ROUND_TRIP: Final = 0.001  # between the check and the set of the naive lock, as to a server

NONE: Final = "no lock"
NAIVE: Final = "naive lock"
OURS: Final = "leasehold"


@contextmanager
def _naive_lock(path: str) -> Iterator[None]:
    """Wait until the file is gone, then create it: two processes that check at the same time both go on."""
    while os.path.exists(path):
        time.sleep(_ROUND_TRIP)
    time.sleep(_ROUND_TRIP)
    with open(path, "w"):
        pass
    try:
        yield
    finally:
        with suppress(FileNotFoundError):  # the other process that got it has removed it
            os.remove(path)


def adder(worker: Worker) -> None:
    client = worker.client()

    def lock() -> AbstractContextManager[object]:
        if worker.lock == OURS:
            return client.lock("counter")
        return _naive_lock(f"{worker.file}.lock") if worker.lock == NAIVE else nullcontext()

    worker.report("ready")
    worker.wait_go()
    for _ in range(worker.rounds):
        with lock():
            with open(worker.file) as file:
                count = int(file.read() or 0)
            time.sleep(_THINK_SECONDS)
            with open(f"{worker.file}.{worker.who}", "w") as file:
                file.write(str(count + 1))
            os.replace(f"{worker.file}.{worker.who}", worker.file)  # atomic, so that no process reads half a number
    worker.report("done", f"incremented the counter {worker.rounds} times")
    client.close()


ROLES: Final = {"adder": adder}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    if fixed:
        added, counted = _count(runner, OURS)
        facts = {"added": added, "counted": counted, "lost": added - counted}
        return DemoResult(counted == added, f"{added} increments, {added - counted} lost", facts)
    runner.log("no lock at all:")
    added, counted = _count(runner, NONE)
    runner.log("a naive lock, which checks whether a file exists, and then creates it:")
    _, naively = _count(runner, NAIVE)
    lost, naively_lost = added - counted, added - naively
    text = f"{added} increments, {lost} lost without a lock, {naively_lost} lost with a naive lock"
    facts = {"added": added, "counted": counted, "lost": lost, "naively_counted": naively, "naively_lost": naively_lost}
    return DemoResult(lost > 0 and naively_lost > 0, text, facts)


def _count(runner: DemoRunner, lock: str) -> tuple[int, int]:
    """How often the processes incremented the counter, and what it says afterwards."""
    path = runner.path(f"counter under {lock}")
    with open(path, "w") as file:
        file.write("0")
    workers = [runner.start("adder", who, file=path, rounds=_ROUNDS, lock=lock) for who in "ABCD"]
    runner.wait_for_all(workers, "ready")
    for worker in workers:
        worker.send_go()
    runner.wait_for_all(workers, "done")
    with open(path) as file:
        return _ROUNDS * len(workers), int(file.read())
