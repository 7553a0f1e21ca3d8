"""How a holder learns that its lease is lost: broken, cut off, held for too long. Always, and never too late."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from leasehold.client.lease import LeaseState
from leasehold.errors import LeaseLost, NotAcquired, Unavailable
from leasehold.events import Event
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import AnyLease, UnifiedClient

_LONG: Final = 30.0
_UNRENEWED_TTL: Final = 300.0  # so long that no renewal falls into a case: its holder learns only from notifications
_GRACE: Final = 0.5  # what a call may take beyond its deadline, on every engine


async def _assert_lost(client: UnifiedClient, lease: AnyLease) -> str:
    """The lease is lost by every method a holder can call; returns the reason."""
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert caught.value.reason == lease.lost_reason
    assert (lease.state, lease.held, lease.remaining) == (LeaseState.LOST, False, 0.0)
    with pytest.raises(LeaseLost):
        await client.renew(lease)
    return str(lease.lost_reason)


@case(shows=("E5",))
async def broken_lease_is_detected_on_renew(t: CaseContext) -> None:
    holder, operator = t.client(), t.client()
    lease = await holder.acquire(ttl=_LONG)
    assert await operator.break_lock("job", lease.token)
    with pytest.raises(LeaseLost):
        await holder.renew(lease)
    assert await _assert_lost(holder, lease) in ("broken", "unknown", "expired")
    assert not await operator.break_lock("job", lease.token)
    assert not await holder.release(lease)


@case(needs={"break-notice"}, shows=("E5",))
async def holder_is_notified_of_break(t: CaseContext) -> None:
    holder, operator = t.client(), t.client()
    lost: list[AnyLease] = []
    lease = await holder.acquire(ttl=_UNRENEWED_TTL)
    lease.on_lost(lost.append)
    assert await operator.break_lock("job", lease.token)
    await t.until(lambda: lease.state is LeaseState.LOST, "the holder is notified without a renewal")
    assert await _assert_lost(holder, lease) == "broken"
    await t.until(lambda: lost == [lease], "the callback ran, once")


@case(needs={"break-notice"}, shows=("E5",))
async def broken_lease_raises_at_end_of_with_block(t: CaseContext) -> None:
    holder, operator = t.client(), t.client()

    async def work() -> None:
        async with holder.hold(holder.lock(ttl=_UNRENEWED_TTL)) as lease:
            assert await operator.break_lock("job", lease.token)
            await t.until(lambda: not lease.held, "the holder is notified")
            await t.runtime.sleep(0)  # where asyncio cancels the body

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.reason == "broken"


@case(shows=("E5", "E6"))
async def broken_lease_raises_when_body_ends_at_once(t: CaseContext) -> None:
    """No renewal and perhaps no notification has reported the break: the answer to the release does."""
    holder, operator = t.client(), t.client()

    async def work() -> None:
        async with holder.hold(holder.lock(ttl=_UNRENEWED_TTL)) as lease:
            assert await operator.break_lock("job", lease.token)
            await operator.release(await operator.acquire())

    with pytest.raises(LeaseLost):
        await work()


@case(shows=("E5", "E6"))
async def broken_multilock_raises_when_body_ends_at_once(t: CaseContext) -> None:
    holder, operator = t.client(), t.client()

    async def work() -> None:
        async with holder.hold_all(holder.multilock(["a", "b"], ttl=_UNRENEWED_TTL)) as leases:
            assert await operator.break_lock("b", leases["b"].token)

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "b"


@case(shows=("E5", "E6"))
async def release_of_a_broken_lease_reports_the_loss(t: CaseContext) -> None:
    events: list[Event] = []
    holder, operator = t.client(on_event=events.append), t.client()
    lease = await holder.acquire(ttl=_UNRENEWED_TTL)
    assert await operator.break_lock("job", lease.token)
    assert not await holder.release(lease)
    assert await _assert_lost(holder, lease) in ("broken", "unknown")
    await t.until(lambda: "lost" in {event.kind for event in events}, "an event reports that the lease is lost")
    assert "released" not in {event.kind for event in events}


@case(needs={"outlives", "break-notice"}, shows=("E1",))
async def delay_covers_the_time_until_holder_is_notified(t: CaseContext) -> None:
    holder, operator = t.client(), t.client()
    lease = await holder.acquire(ttl=_UNRENEWED_TTL, delay=t.rig.ttl)
    assert await operator.break_lock("job", lease.token)
    broken = operator.now()
    await t.until(lambda: not lease.held, "the holder is notified")
    granted = await operator.try_acquire(operator.lock())
    assert granted is None or operator.now() >= broken + t.rig.ttl


@case(shows=("E8",))
async def max_hold_ends_a_lease(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    lease = await holder.acquire(ttl=_LONG, max_hold=0.3)
    assert lease.remaining <= 0.3
    await t.until(lambda: lease.state is LeaseState.LOST, "held for as long as max_hold allows")
    assert await _assert_lost(holder, lease) == "max_hold"
    await holder.release(lease)  # until then the grant lives at the engine, and no other client can acquire the name
    await other.release(await other.acquire(wait=_LONG))


@case(rig={"cut"}, shows=("E5", "E8"))
async def cut_off_holder_is_at_risk_then_lost_before_next_grant(t: CaseContext) -> None:
    events: list[Event] = []
    holder, other = t.client(call_timeout=t.rig.short_call, on_event=events.append), t.client()
    await t.wait_until_connected(holder)
    lease = await holder.acquire()
    successor = t.spawn(other.acquire(wait=_LONG))
    await t.until(lambda: _has_waiters(other), "the successor is queued")
    t.rig.cut(holder.client)
    await t.pass_time(0.4 * t.rig.ttl)  # a renewal is due
    # LOST already, if this machine is slow.
    await t.until(
        lambda: any(event.kind in ("at_risk", "lost") for event in events), "an event reports that the renewal failed"
    )
    assert lease.state in (LeaseState.AT_RISK, LeaseState.LOST)
    await t.pass_time(0.6 * t.rig.ttl)
    await t.until(lambda: not lease.held or successor.done(), "the lease reaches its local deadline")
    assert not lease.held, "another client holds the name, and this lease still says that it is held"
    assert await _assert_lost(holder, lease) == "unreachable"
    await t.until(lambda: "lost" in {event.kind for event in events}, "an event reports that the lease is lost")
    next_lease = await successor.result(t.rig.ttl)
    assert await other.release(next_lease)


@case(rig={"cut"}, shows=("E5", "E8"))
async def strict_holder_is_lost_at_the_first_failed_renewal(t: CaseContext) -> None:
    events: list[Event] = []
    holder, other = t.client(call_timeout=t.rig.short_call, on_event=events.append), t.client()
    await t.wait_until_connected(holder)
    lease = await holder.acquire(strict=True)
    t.rig.cut(holder.client)
    await t.pass_time(0.4 * t.rig.ttl)  # a renewal is due
    await t.until(lambda: not lease.held, "the renewal fails or is overdue")
    assert await _assert_lost(holder, lease) in ("unreachable", "stalled")
    await t.until(lambda: "lost" in {event.kind for event in events}, "an event reports that the lease is lost")
    t.rig.restore(holder.client)
    await holder.release(lease)
    await other.release(await other.acquire(wait=_LONG))


@case(rig={"cut"}, shows=("E8",))
async def holder_is_told_that_its_lease_is_at_risk(t: CaseContext) -> None:
    holder = t.client(call_timeout=t.rig.short_call)
    await t.wait_until_connected(holder)
    lease, at_risk = await holder.acquire(ttl=_LONG), list[AnyLease]()
    lease.on_at_risk(at_risk.append)
    t.rig.cut(holder.client)
    with pytest.raises(Unavailable):
        await holder.renew(lease)
    await t.until(lambda: at_risk == [lease], "the callback ran, once")
    t.rig.restore(holder.client)


@case(rig={"cut"}, shows=("E9",))
async def client_calls_end_in_time_when_cut_off(t: CaseContext) -> None:
    client, other = t.client(call_timeout=t.rig.short_call), t.client()
    await t.wait_until_connected(client)
    lease = await client.acquire("held", ttl=_LONG)
    t.rig.cut(client.client)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "acquire": lambda: client.acquire(),
        "acquire for ever": lambda: client.acquire(wait=None),
        "try": lambda: client.try_acquire(client.lock()),
        "renew": lambda: client.renew(lease),
        "inspect": lambda: client.inspect(),
        "break": lambda: client.break_lock("held", lease.token),
        "ping": lambda: client.ping(),
    }
    for verb, call in calls.items():
        await t.assert_unavailable(call, t.rig.short_call + _GRACE, verb)
    assert lease.held, "an unanswered call does not end the lease"
    assert not await client.release(lease), "the release is not confirmed, and raises nothing"
    assert lease.state is LeaseState.RELEASED
    t.rig.restore(client.client)
    await t.until(lambda: _has_no_holdings(other), "the pending release is sent once the engine answers")


@case(rig={"pause"}, shows=("E6", "E8"))
async def late_grant_is_released_not_returned(t: CaseContext) -> None:
    ttl = max(0.5, t.client().traits.min_ttl)
    client, other = t.client(), t.client()
    await client.ping()
    t.rig.pause()
    with pytest.raises(Unavailable):
        await client.acquire(ttl=ttl, wait=0)
    t.rig.resume()
    await t.until(lambda: _has_no_holdings(other), "the late grant is released", _LONG)


@case(rig={"pause"}, shows=("E4", "E6"))
async def waiter_survives_a_pause_of_the_engine(t: CaseContext) -> None:
    holder, other = t.client(call_timeout=_LONG), t.client(call_timeout=_LONG)
    lease = await holder.acquire(ttl=_LONG)
    waiting = t.spawn(other.acquire(wait=_LONG, ttl=_LONG))
    await t.until(lambda: _has_waiters(holder), "the waiter is queued")
    t.rig.pause()
    releasing = t.spawn(holder.release(lease))
    await t.runtime.sleep(0.05)
    assert not waiting.done()
    t.rig.resume()
    assert await releasing.result(_LONG)
    granted = await waiting.result(_LONG)
    assert granted.held


@case(needs={"push"}, rig={"cut"}, shows=("E4", "E6"))
async def cut_off_waiter_leaves_no_queue_entry(t: CaseContext) -> None:
    holder, other = t.client(), t.client(call_timeout=t.rig.short_call)
    await t.wait_until_connected(other)
    lease = await holder.acquire(ttl=_LONG)
    waiting = t.spawn(other.acquire(wait=3.0))
    await t.until(lambda: _has_waiters(holder), "the waiter is queued")
    t.rig.cut(other.client)
    with pytest.raises((NotAcquired, Unavailable)):
        await waiting.result()
    t.rig.restore(other.client)
    await holder.release(lease)
    await t.until(lambda: _has_no_holdings(holder), "the waiter leaves the queue once its client is reconnected", _LONG)


async def _has_waiters(client: UnifiedClient) -> bool:
    return any(holding.state == "waiting" for holding in await client.inspect())


async def _has_no_holdings(client: UnifiedClient) -> bool:
    return not await client.inspect()
