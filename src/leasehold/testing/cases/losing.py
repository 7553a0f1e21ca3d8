"""How a lease is lost, as its holder learns it: broken, cut off, held for too long. Always told, and never too late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from leasehold.errors import LeaseLost, NotAcquired, Unavailable
from leasehold.events import Event
from leasehold.recipes.lease import LeaseState
from leasehold.testing.choosing import case
from leasehold.testing.faces import AnyLease, Caller
from leasehold.testing.trial import Trial

_LONG: Final = 30.0
_LATER: Final = 300.0  # the ttl of a lease that is not renewed while a case runs: what it learns, it was told
_GRACE: Final = 0.5  # what a call may take beyond its deadline, on every engine


async def _lost(caller: Caller, lease: AnyLease) -> str:
    """Lost in every way a holder can ask; gives the reason."""
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == lease.lost_reason
    assert (lease.state, lease.held, lease.remaining) == (LeaseState.LOST, False, 0.0)
    with pytest.raises(LeaseLost):
        await caller.renew(lease)
    return str(lease.lost_reason)


@case(shows=("E5",))
async def a_break_is_noticed_by_asking(t: Trial) -> None:
    holder, operator = t.caller(), t.caller()
    lease = await holder.acquire(ttl=_LONG)
    assert await operator.break_lock("job", lease.token)
    with pytest.raises(LeaseLost):
        await holder.renew(lease)
    assert await _lost(holder, lease) in ("broken", "unknown", "lapsed")
    assert not await operator.break_lock("job", lease.token)
    assert not await holder.release(lease)


@case(needs={"told"}, shows=("E5",))
async def a_break_is_told(t: Trial) -> None:
    holder, operator = t.caller(), t.caller()
    told: list[AnyLease] = []
    lease = await holder.acquire(ttl=_LATER)
    lease.on_lost(told.append)
    assert await operator.break_lock("job", lease.token)
    await t.until(lambda: lease.state is LeaseState.LOST, "the holder is told, though it renews nothing")
    assert await _lost(holder, lease) == "broken"
    await t.until(lambda: told == [lease], "the callback ran, once")


@case(needs={"told"}, shows=("E5",))
async def leaving_the_body_of_a_broken_lock_raises(t: Trial) -> None:
    holder, operator = t.caller(), t.caller()

    async def work() -> None:
        async with holder.inside(holder.lock(ttl=_LATER)) as lease:
            assert await operator.break_lock("job", lease.token)
            await t.until(lambda: not lease.held, "the holder is told")
            await t.runtime.sleep(0)  # where the body is cancelled, if it can be

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.reason == "broken"


@case(needs={"outlives", "told"}, shows=("E1",))
async def a_delay_covers_the_time_until_a_holder_is_told(t: Trial) -> None:
    holder, operator = t.caller(), t.caller()
    lease = await holder.acquire(ttl=_LATER, delay=t.rig.ttl)
    assert await operator.break_lock("job", lease.token)
    broken = operator.now()
    await t.until(lambda: not lease.held, "the holder is told")
    granted = await operator.try_acquire(operator.lock())
    assert granted is None or operator.now() >= broken + t.rig.ttl


@case(shows=("E8",))
async def max_hold_ends_a_lease(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    lease = await holder.acquire(ttl=_LONG, max_hold=0.3)
    assert lease.remaining <= 0.3
    await t.until(lambda: lease.state is LeaseState.LOST, "held for as long as max_hold allows")
    assert await _lost(holder, lease) == "max_hold"
    await holder.release(lease)  # nobody else may have it before: it still lives at the engine
    await other.release(await other.acquire(wait=_LONG))


@case(rig={"cut"}, shows=("E5", "E8"))
async def a_holder_cut_off_is_at_risk_then_lost_before_anybody_else(t: Trial) -> None:
    events: list[Event] = []
    holder, other = t.caller(call_timeout=t.rig.short_call, on_event=events.append), t.caller()
    await t.reached(holder)
    lease = await holder.acquire()
    successor = t.spawn(other.acquire(wait=_LONG))
    await t.until(lambda: _in_line(other), "the successor stands in line")
    t.rig.cut(holder.client)
    await t.pass_time(0.4 * t.rig.ttl)  # a renewal is due
    await t.until(lambda: "at_risk" in {event.kind for event in events}, "it is told that the renewal failed")
    assert lease.state in (LeaseState.AT_RISK, LeaseState.LOST)  # LOST already, if this machine is slow
    await t.pass_time(0.6 * t.rig.ttl)
    await t.until(lambda: not lease.held or successor.done(), "it reaches its local deadline")
    assert not lease.held, "somebody else holds the name, and this lease still says that it does"
    assert await _lost(holder, lease) == "unreachable"
    await t.until(lambda: "lost" in {event.kind for event in events}, "it is told that the lease is lost")
    next_lease = await successor.result(t.rig.ttl)
    assert await other.release(next_lease)


@case(rig={"cut"}, shows=("E9",))
async def calls_of_a_client_cut_off_end_in_time(t: Trial) -> None:
    caller, other = t.caller(call_timeout=t.rig.short_call), t.caller()
    await t.reached(caller)
    lease = await caller.acquire("held", ttl=_LONG)
    t.rig.cut(caller.client)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "acquire": lambda: caller.acquire(),
        "acquire for ever": lambda: caller.acquire(wait=None),
        "try": lambda: caller.try_acquire(caller.lock()),
        "renew": lambda: caller.renew(lease),
        "inspect": lambda: caller.inspect(),
        "break": lambda: caller.break_lock("held", lease.token),
        "ping": lambda: caller.ping(),
    }
    for verb, call in calls.items():
        await t.unavailable(call, t.rig.short_call + _GRACE, verb)
    assert lease.held, "no answer is no reason to give it up"
    assert not await caller.release(lease), "not confirmed, and not raised either"
    assert lease.state is LeaseState.RELEASED
    t.rig.mend(caller.client)
    await t.until(lambda: _empty(other), "what was owed is given back once the engine answers")


@case(rig={"pause"}, shows=("E6", "E8"))
async def a_grant_that_comes_too_late_is_not_handed_out(t: Trial) -> None:
    ttl = max(0.5, t.caller().traits.min_ttl)
    caller, other = t.caller(), t.caller()
    await caller.ping()
    t.rig.pause()
    with pytest.raises(Unavailable):
        await caller.acquire(ttl=ttl, wait=0)
    t.rig.resume()
    await t.until(lambda: _empty(other), "the attempt that landed late is given back", _LONG)


@case(rig={"pause"}, shows=("E4", "E6"))
async def waiters_outlast_a_pause_of_the_engine(t: Trial) -> None:
    holder, other = t.caller(call_timeout=_LONG), t.caller(call_timeout=_LONG)
    lease = await holder.acquire(ttl=_LONG)
    waiting = t.spawn(other.acquire(wait=_LONG, ttl=_LONG))
    await t.until(lambda: _in_line(holder), "the waiter stands in line")
    t.rig.pause()
    releasing = t.spawn(holder.release(lease))
    await t.runtime.sleep(0.05)
    assert not waiting.done()
    t.rig.resume()
    assert await releasing.result(_LONG)
    granted = await waiting.result(_LONG)
    assert granted.held


@case(needs={"push"}, rig={"cut"}, shows=("E4", "E6"))
async def a_waiter_cut_off_leaves_nothing_in_line(t: Trial) -> None:
    holder, other = t.caller(), t.caller(call_timeout=t.rig.short_call)
    await t.reached(other)
    lease = await holder.acquire(ttl=_LONG)
    waiting = t.spawn(other.acquire(wait=0.5))
    await t.until(lambda: _in_line(holder), "the waiter stands in line")
    t.rig.cut(other.client)
    with pytest.raises((NotAcquired, Unavailable)):
        await waiting.result()
    t.rig.mend(other.client)
    await holder.release(lease)
    await t.until(lambda: _empty(holder), "the place it could not give up is given back later", _LONG)


async def _in_line(caller: Caller) -> bool:
    return any(holding.state == "waiting" for holding in await caller.inspect())


async def _empty(caller: Caller) -> bool:
    return not await caller.inspect()
