"""A job is cut off from the engine and keeps working after its lease, at the same time as its successor."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING, Final

from leasehold.cli.demo import DemoResult
from leasehold.cli.demo.runner import DemoRunner
from leasehold.errors import LeaseLost

if TYPE_CHECKING:
    from leasehold.cli.demo.worker import Worker

TITLE: Final = "a batch job is cut off from the engine and keeps working after its lease has expired"
FIX: Final = "the job calls lease.check() before each step"

_TTL: Final = 1.5
_STEP: Final = 0.05
_STEPS: Final = 20  # of the successor: about a second; the first job works until they are done


def job(worker: Worker) -> None:
    client = worker.client(ttl=worker.ttl, call_timeout=0.4)
    lease = client.lock("batch").acquire(wait=30)
    began = time.monotonic()
    worker.report("began", f"acquires batch (token {lease.token}) and starts working")
    if worker.cut:
        # A file-size limit of 0 for this process only: none of its writes reaches the engine's file any more.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        worker.report("cut", "is cut off from the engine: its renewals fail from now on")
    steps: list[float] = []
    why = ""
    while len(steps) < worker.steps and not worker.go_within(_STEP):
        now = time.monotonic()  # before the check: only a fence can catch a pause between check and work
        if worker.fixed:
            try:
                lease.check()
            except LeaseLost as lost:
                why = lost.reason
                worker.report("stopped", f"stops: {lost}")
                break
        steps.append(now)
    worker.report("done", f"did {len(steps)} steps", began=began, steps=steps, why=why)
    os._exit(0)  # the lease cannot be released from here: it expires, or has expired


ROLES: Final = {"job": job}


def run(runner: DemoRunner, fixed: bool) -> DemoResult:
    # On its own SQLite file whatever the URL: a file-size limit cuts off a process only from a file.
    facts = {"url": runner.own_url, "fixed": fixed}
    first = runner.start("job", "A", ttl=_TTL, steps=1_000_000, cut=True, **facts)
    first.wait_for("cut")
    second = runner.start("job", "B", ttl=30.0, steps=_STEPS, cut=False, **facts)
    messages = list(second.messages_until("done"))
    successor = messages[-1]
    first.send_go()
    messages += first.messages_until("done")
    late = messages[-1]
    runner.log_messages(messages)
    overlap = sum(at > successor["began"] for at in late["steps"])
    text = f"A did {overlap} steps after B had started"
    as_expected = (overlap == 0 and late["why"] != "") if fixed else overlap > 0
    return DemoResult(as_expected, text, {"overlap": overlap, "why": late["why"]})
