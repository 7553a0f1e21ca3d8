"""Attempt, wait, attempt again: the only such loop in the tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from leasehold.core import timing
from leasehold.engines.base import Engine
from leasehold.errors import NotAcquired, SelfDeadlock, Unavailable
from leasehold.model import Claim, Grant

if TYPE_CHECKING:
    from leasehold.client.core import ClientCore

L = TypeVar("L")

_new = tuple.__new__  # `_replace` costs six times as much, and a client that knows contention would pay it each time
_QUEUE_INDEX = Claim._fields.index("queue")
_MAX_LATE_GRANTS = 3  # an engine slower than the ttl will stay so: waiting for ever would only load it


async def acquire(
    core: ClientCore,
    get_engine: Callable[[], Engine],
    claim: Claim,
    began: float,
    wait: float | None,
    waiting_deadlocks: bool,
    register: Callable[[Claim, Grant, float, float, object], L],
    with_new_id: Callable[[Claim], Claim],
) -> tuple[L, bool]:
    """Take the name within `wait` seconds of `began` and hand it to `register`, or raise and leave no claim behind
    (E6). Also says whether it had to stand in line.

    `get_engine` gives the engine, or raises once the client is closed: also for those who stand in line then.
    `waiting_deadlocks`: a claim beside one of the same owner, which can only be had at once or never.
    """
    now, call_timeout = core.runtime.now, core.options.call_timeout
    deadline = timing.NEVER if wait is None else began + wait
    engine = get_engine()
    if wait != 0 and not waiting_deadlocks and engine.listening:
        claim = _with_queue(claim, deadline)
    must_release, waited, late_grants = False, False, 0
    try:
        while True:
            asked_at, loss_epoch, must_release = now(), core.registry.loss_epoch, True  # before the request leaves (E8)
            reply = await engine.attempt(claim, timing.call_deadline(asked_at, call_timeout, claim.ttl))
            if isinstance(reply, Grant):
                valid_until = timing.valid_until(asked_at, reply.ttl)
                if now() < valid_until:
                    return register(claim, reply, asked_at, valid_until, loss_epoch), waited
                engine.forget(without_min_hold(claim))  # granted too late to be trusted
                must_release, late_grants, claim = (
                    False,
                    late_grants + 1,
                    with_new_id(claim),
                )  # the late release must not hit the next attempt
                if late_grants == _MAX_LATE_GRANTS or now() >= deadline:
                    raise Unavailable(
                        f"the engine took longer to grant {claim.name} than its ttl of {claim.ttl} s lasts: "
                        "choose a longer ttl",
                        seconds=now() - asked_at,
                    )
                continue
            must_release = claim.queue  # answered busy and never queued: nothing owed
            if waiting_deadlocks and wait != 0:
                raise SelfDeadlock(claim.name, why="it reads already, and a writer stands in line between")
            remaining = deadline - now()
            if remaining <= 0:
                raise NotAcquired(claim.name, waited=now() - began if wait else 0.0, **reply._asdict())
            if claim.queue:
                waited = True
                await engine.wait(
                    claim, reply, min(remaining, timing.recheck_interval(reply.position))
                )  # stay in line (E7)
                engine = get_engine()
            else:
                claim = _with_queue(claim, deadline)
    except BaseException:  # waited out, cancelled, Ctrl-C, unreachable: leave no claim behind (E6)
        if must_release:
            engine.forget(without_min_hold(claim))  # sent at once, or owed to the watchdog; never a second wait
        raise


def _with_queue(claim: Claim, wait_deadline: float) -> Claim:
    return _new(Claim, (*claim[:_QUEUE_INDEX], True, *claim[_QUEUE_INDEX + 1 : -1], wait_deadline))


def without_min_hold(claim: Claim) -> Claim:
    """The claim as it is given up by somebody who never worked under it: there is nothing to keep for min_hold."""
    return claim._replace(min_hold=0.0) if claim.min_hold else claim
