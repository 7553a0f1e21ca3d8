"""A job loses its engine, goes on working, and meets its successor at work."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING, Final

from leasehold.errors import ConfigError, LeaseLost
from leasehold.stories import Outcome
from leasehold.stories.stage import Stage

if TYPE_CHECKING:
    from leasehold.stories.actor import Part

TITLE: Final = "a batch job is cut off from the engine, and works on after its lease"
CURE: Final = "it asks before each step: lease.check()"

_TTL: Final = 1.5
_STEP: Final = 0.05
_STEPS: Final = 20  # of the successor, a second; the job goes on until that is done


def job(part: Part) -> None:
    client = part.client(ttl=part.ttl, call_timeout=0.4)
    lease = client.lock("batch").acquire(wait=30)
    began = time.monotonic()
    part.say("began", f"holds batch with token {lease.token}, and begins")
    if part.cut:
        # A quota of nothing, for this process alone: no write of its reaches the engine's file any more.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        part.say("cut", "is cut off from the engine: its renewals fail from here on")
    steps: list[float] = []
    why = ""
    while len(steps) < part.steps and not part.called(_STEP):
        now = time.monotonic()  # before the check: what comes between the two, only a fence can see
        if part.cured:
            try:
                lease.check()
            except LeaseLost as lost:
                why = lost.reason
                part.say("stopped", f"stops: {lost}")
                break
        steps.append(now)
    part.say("done", f"worked {len(steps)} steps", began=began, steps=steps, why=why)
    os._exit(0)  # nothing can be released from here; it lapses, or has


ROLES: Final = {"job": job}


def play(stage: Stage, cured: bool) -> Outcome:
    if not stage.embedded:
        raise ConfigError("extender cuts a process off by a disk quota: it needs the embedded engine, so no --url")
    first = stage.start("job", "A", ttl=_TTL, steps=1_000_000, cut=True, cured=cured)
    first.hear("cut")
    second = stage.start("job", "B", ttl=30.0, steps=_STEPS, cut=False, cured=cured)
    said = list(second.listen("done"))
    successor = said[-1]
    first.go()
    said += first.listen("done")
    late = said[-1]
    stage.tell_all(said)
    overlap = sum(at > successor["began"] for at in late["steps"])
    text = f"{overlap} steps of A after B had begun"
    seen = (overlap == 0 and late["why"] != "") if cured else overlap > 0
    return Outcome(seen, text, {"overlap": overlap, "why": late["why"]})
