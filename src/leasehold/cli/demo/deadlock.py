"""Two processes acquire two locks in opposite order, and wait for each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner
from leasehold.errors import NotAcquired

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "two transfers lock two accounts in opposite order"
FIX: Final = "one lock order: both lock the accounts in sorted order"

_STUCK_WAIT: Final = 1.5  # without a limit they would wait for ever, because each lease is renewed


def transfer(worker: Worker) -> None:
    client = worker.client()
    first, second = worker.names
    lock = client.lock(first).acquire(wait=30)
    worker.report("one", f"holds {first}, wants {second}")
    worker.wait_go()
    try:
        other = client.lock(second).acquire(wait=worker.wait)
        worker.report("done", f"holds {second}, too: done", stuck=False)
        time.sleep(0.1)
        other.release()
    except NotAcquired as busy:
        worker.report("done", f"is stuck: {busy}", stuck=True)
        worker.wait_go()  # release nothing before both have reported
    lock.release()
    client.close()


ROLES: Final = {"transfer": transfer}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    wants = {"A": ["account/1", "account/2"], "B": ["account/2", "account/1"]}
    wait = 30.0 if fixed else _STUCK_WAIT
    orders = {who: sorted(names) if fixed else names for who, names in wants.items()}
    workers = [runner.start("transfer", who, names=names, wait=wait) for who, names in orders.items()]
    if not fixed:  # with one order, the second process waits for its first lock
        runner.wait_for_all(workers, "one")
    for worker in workers:
        worker.send_go()
    stuck = [message["stuck"] for message in runner.wait_for_all(workers, "done")]
    for worker in workers:
        worker.send_go()
    text = "both wait for each other" if all(stuck) else "both finished" if not any(stuck) else "only one finished"
    return DemoResult(not any(stuck) if fixed else all(stuck), text, {"stuck": sum(stuck)})
