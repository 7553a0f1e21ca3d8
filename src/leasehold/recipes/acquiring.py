"""Attempt, wait, attempt again: the only such loop in the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from leasehold.core import timing
from leasehold.engine import Engine
from leasehold.errors import NotAcquired, SelfDeadlock, Unavailable
from leasehold.model import Claim, Grant

if TYPE_CHECKING:
    from leasehold.recipes.desk import Desk

L = TypeVar("L")

_new = tuple.__new__  # `_replace` costs six times as much, and a client that knows contention would pay it each time
_QUEUE = Claim._fields.index("queue")
_LATE_TRIES = 3  # an engine slower than the ttl will stay so: waiting for ever would only load it


async def acquire(
    desk: Desk,
    ready: Callable[[], Engine],
    claim: Claim,
    began: float,
    wait: float | None,
    alone: bool,
    admit: Callable[[Claim, Grant, float, float, object], L],
    renamed: Callable[[Claim], Claim],
) -> tuple[L, bool]:
    """Take the name within `wait` seconds of `began` and hand it to `admit`, or raise and leave no claim behind (E6).
    Also says whether it had to stand in line.

    `ready` gives the engine, or raises once the client is closed: also for those who stand in line then.
    `alone`: a claim beside one of the same owner, which can only be had at once or never.
    """
    now, call_timeout = desk.runtime.now, desk.options.call_timeout
    deadline = timing.NEVER if wait is None else began + wait
    engine = ready()
    if wait != 0 and not alone and engine.listening:
        claim = _queued(claim, deadline)
    owes, waited, late = False, False, 0
    try:
        while True:
            asked, doubted, owes = now(), desk.book.doubted, True  # before the request leaves (E8)
            reply = await engine.attempt(claim, timing.call_deadline(asked, call_timeout, claim.ttl))
            if isinstance(reply, Grant):
                until = timing.valid_until(asked, reply.ttl)
                if now() < until:
                    return admit(claim, reply, asked, until, doubted), waited
                engine.forget(bare(claim))  # granted too late to be trusted
                owes, late, claim = False, late + 1, renamed(claim)  # the late release must not hit the next attempt
                if late == _LATE_TRIES or now() >= deadline:
                    raise Unavailable(
                        f"the engine took longer to grant {claim.name} than its ttl of {claim.ttl} s lasts: "
                        "choose a longer ttl",
                        seconds=now() - asked,
                    )
                continue
            owes = claim.queue  # answered busy and never queued: nothing owed
            if alone and wait != 0:
                raise SelfDeadlock(claim.name, why="it reads already, and a writer stands in line between")
            remaining = deadline - now()
            if remaining <= 0:
                raise NotAcquired(claim.name, waited=now() - began if wait else 0.0, **reply._asdict())
            if claim.queue:
                waited = True
                await engine.wait(claim, reply, min(remaining, timing.look_after(reply.place)))  # stay in line (E7)
                engine = ready()
            else:
                claim = _queued(claim, deadline)
    except BaseException:  # waited out, cancelled, Ctrl-C, unreachable: leave no claim behind (E6)
        if owes:
            engine.forget(bare(claim))  # sent at once, or owed to the watchdog; never a second wait
        raise


def _queued(claim: Claim, until: float) -> Claim:
    return _new(Claim, (*claim[:_QUEUE], True, *claim[_QUEUE + 1 : -1], until))


def bare(claim: Claim) -> Claim:
    """The claim as it is given up by somebody who never worked under it: there is nothing to keep for min_hold."""
    return claim._replace(min_hold=0.0) if claim.min_hold else claim
