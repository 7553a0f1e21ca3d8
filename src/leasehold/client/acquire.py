"""Attempt, wait, attempt again: the only such loop in the tree, so that E6 and E8 are kept in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from leasehold.core import timing
from leasehold.core.texts import server_text
from leasehold.engines.base import Engine
from leasehold.errors import NotAcquired, SelfDeadlock, Unavailable
from leasehold.model import Busy, Claim, Grant, Holder

if TYPE_CHECKING:
    from leasehold.client.core import ClientCore

L = TypeVar("L")

# Builds a named tuple from a tuple of all its fields, in a third of the time of calling the class, and a sixth of
# `_replace`. For values that every acquire builds.
fast_tuple: Final = tuple.__new__
_QUEUE_INDEX = Claim._fields.index("queue")
_MAX_LATE_GRANTS = 3  # an engine slower than the ttl stays slow: retrying for ever would only load it


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
    """Acquire the name within `wait` seconds of `began` and pass the grant to `register`, or raise and leave no claim
    behind (E6). Returns what `register` returns, and whether the claim had to wait in the queue.

    `get_engine` returns the engine, or raises once the client is closed. It is called after every wait, so waiters
    notice that too. `waiting_deadlocks`: the same thread or task already holds the name, so this claim is granted at
    once or never.
    """
    now, call_timeout = core.runtime.now, core.options.call_timeout
    deadline = timing.NEVER if wait is None else began + wait
    must_release, waited, late_grants = False, False, 0
    try:
        engine = get_engine()
        if wait != 0 and not waiting_deadlocks and engine.listening:
            claim = _with_queue(claim, deadline)
        while True:
            core.refuse_at_exit()
            # Read before the request leaves (E8).
            asked_at, loss_epoch, must_release = now(), core.registry.loss_epoch, True
            reply = await engine.attempt(claim, timing.call_deadline(asked_at, call_timeout, claim.ttl))
            if isinstance(reply, Grant):
                valid_until = timing.valid_until(asked_at, reply.ttl)
                if now() < valid_until:
                    return register(claim, reply, asked_at, valid_until, loss_epoch), waited
                engine.forget(without_min_hold(claim))  # granted too late to be trusted
                # A new id: the release just sent must not hit the next attempt.
                must_release, late_grants, claim = False, late_grants + 1, with_new_id(claim)
                if late_grants == _MAX_LATE_GRANTS or now() >= deadline:
                    raise Unavailable(
                        f"the engine took longer to grant {claim.name} than its ttl of {claim.ttl} s: "
                        "choose a longer ttl",
                        seconds=now() - asked_at,
                    )
                continue
            must_release = claim.queue  # answered busy and never queued: nothing to release
            if waiting_deadlocks and wait != 0:
                raise SelfDeadlock(
                    claim.name,
                    why="a writer is queued behind its read lock, so a second one would never be granted; "
                    "pass the lease down",
                )
            remaining = deadline - now()
            if remaining <= 0:
                raise NotAcquired(claim.name, waited=now() - began if wait else 0.0, **_shown(reply)._asdict())
            if claim.queue:
                waited = True
                # The claim stays queued meanwhile (E7).
                await engine.wait(claim, reply, min(remaining, timing.recheck_interval(reply.position)))
                engine = get_engine()
            else:
                claim = _with_queue(claim, deadline)
    except BaseException as error:  # timed out, cancelled, Ctrl-C, unreachable: leave no claim behind (E6)
        try:
            if must_release:
                engine.forget(without_min_hold(claim))  # sent at once, or retried by the watchdog; never a second wait
        finally:
            core.report_not_acquired(claim, began, waited, error)
        raise


def _shown(busy: Busy) -> Busy:
    """Safe to show: the holder's texts are as the engine has them, and another program may have written them there."""
    if (holder := busy.holder) is not None:
        pid = holder.pid if isinstance(holder.pid, int) else 0
        holder = Holder(server_text(holder.label), server_text(holder.host), pid, server_text(holder.purpose))
    return busy._replace(holder=holder, token=busy.token if isinstance(busy.token, int) else None)


def _with_queue(claim: Claim, wait_deadline: float) -> Claim:
    return fast_tuple(Claim, (*claim[:_QUEUE_INDEX], True, *claim[_QUEUE_INDEX + 1 : -1], wait_deadline))


def without_min_hold(claim: Claim) -> Claim:
    """The claim to release when no work was done under it: `min_hold` does not apply."""
    return claim._replace(min_hold=0.0) if claim.min_hold else claim
