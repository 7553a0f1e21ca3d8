"""Processes read, compute and write without a lock, so updates are lost."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "four processes increment one counter without a lock"
FIX: Final = 'a lock: with client.lock("counter")'

_ROUNDS: Final = 25
_THINK_SECONDS: Final = 0.002


def adder(worker: Worker) -> None:
    client = worker.client()
    worker.report("ready")
    worker.wait_go()
    for _ in range(worker.rounds):
        with client.lock("counter") if worker.fixed else nullcontext():
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
    path = runner.path(f"counter-{fixed}")
    with open(path, "w") as file:
        file.write("0")
    workers = [runner.start("adder", who, file=path, rounds=_ROUNDS, fixed=fixed) for who in "ABCD"]
    runner.wait_for_all(workers, "ready")
    for worker in workers:
        worker.send_go()
    runner.wait_for_all(workers, "done")
    with open(path) as file:
        counted = int(file.read())
    added = _ROUNDS * len(workers)
    as_expected = (counted == added) if fixed else (counted < added)
    text = f"{added} increments, the counter is at {counted}: {added - counted} lost"
    return DemoResult(as_expected, text, {"added": added, "counted": counted, "lost": added - counted})
