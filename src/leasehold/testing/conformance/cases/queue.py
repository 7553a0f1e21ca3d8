"""E4 and E7: the queue, how a waiter is woken, and how long a waiter keeps its position without a heartbeat."""

from __future__ import annotations

import time

from leasehold.core.timing import HEARTBEAT_INTERVAL, RESERVATION_TTL, WAITER_TTL
from leasehold.errors import Unavailable
from leasehold.model import Busy, Claim, Grant
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.engine_driver import EngineDriver
from leasehold.testing.conformance.unified_client import UnifiedClient
from leasehold.testing.faulty import CALL_VERBS, Faults

_LONG = 60.0  # a wait that a wake-up must end early, or the case fails


@case(shows=("E4",))
async def wait_without_wakeup_returns_in_time(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    await holder.granted(holder.claim())
    waiter = other.waiter()
    busy = await other.busy(waiter)
    began = time.monotonic()
    await other.engine.wait(waiter, busy, 0.3)
    assert time.monotonic() - began < 0.3 + t.timeout
    again = await other.busy(waiter)
    assert again.position == 0, "a wait never grants, and no waiter loses its position by it"


@case(needs={"push"}, shows=("E4",))
async def waiter_is_woken_by_release(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), other.waiter()
    busy = await other.busy(waiter)
    waiting = t.spawn(other.engine.wait(waiter, busy, _LONG))
    await holder.release(held)
    await waiting.result()
    await other.granted(waiter)


@case(needs={"push"}, shows=("E4",))
async def wakeup_before_wait_is_remembered(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), other.waiter()
    busy = await other.busy(waiter)
    await holder.release(held)
    await t.spawn(other.engine.wait(waiter, busy, _LONG)).result()
    await other.granted(waiter)


@case(needs={"push"}, shows=("E4",))
async def next_waiter_is_woken_after_first_left_the_queue(t: CaseContext) -> None:
    holder, first, second = t.driver(), t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=_LONG))
    ahead, behind = first.waiter(), second.waiter()
    await first.busy(ahead)
    busy = await second.busy(behind)
    waiting = t.spawn(second.engine.wait(behind, busy, _LONG))
    await first.release(ahead)
    await holder.release(held)
    await waiting.result()
    await second.granted(behind)


@case(needs={"push", "ttl"}, shows=("E4",), expires=True)
async def waiter_retries_when_holder_expires(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    await holder.granted(holder.claim())
    waiter = other.waiter()
    waiting = t.spawn(_wait_for(other, waiter))
    await t.until(lambda: _has_waiters(holder, 1), "the waiter is queued")
    await t.pass_time(1.1 * t.rig.ttl)
    await waiting.result()


@case(needs={"fair"}, shows=("E2", "E4"))
async def grants_follow_queue_order(t: CaseContext) -> None:
    drivers = [t.driver() for _ in range(5)]
    held, holder = await drivers[0].acquire(drivers[0].claim()), drivers[0]
    waiters = [(driver, driver.waiter()) for driver in drivers[1:]]
    for position, (driver, waiter) in enumerate(waiters):
        assert (await driver.busy(waiter)).position == position
    while waiters:
        for driver, waiter in reversed(waiters):
            await driver.busy(waiter)
        await t.driver().busy(drivers[0].claim())  # a newcomer does not overtake the queue, held or free
        await holder.release(held)
        await t.driver().busy(drivers[0].claim())
        for driver, waiter in reversed(waiters[1:]):
            await driver.busy(waiter)
        (holder, held), *waiters = waiters
        await holder.granted(held)


@case(needs={"fair", "ttl"}, shows=("E7",), slow=True)
async def waiter_without_heartbeat_loses_its_position(t: CaseContext) -> None:
    holder, silent, other = t.driver(), t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=4 * WAITER_TTL))
    lost, kept = silent.waiter(), other.waiter()
    assert (await silent.busy(lost)).position == 0
    assert (await other.busy(kept)).position == 1
    for _ in range(4):
        await t.pass_time(HEARTBEAT_INTERVAL - 1)
        # A renewal keeps a queued claim in the queue, and says where.
        assert (await other.alive(kept)).position in (None, 0, 1)
    assert (await other.busy(kept)).position == 0, "the silent waiter has left the queue"
    await silent.gone(lost)
    await holder.release(held)
    await other.granted(kept)


@case(needs={"fair"}, shows=("E7",), slow=True)
async def renewal_keeps_queue_position_and_grants_nothing(t: CaseContext) -> None:
    holder, other, third = t.driver(), t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=4 * WAITER_TTL))
    waiter, behind = other.waiter(), third.waiter()
    await other.busy(waiter)
    for _ in range(5):
        await t.pass_time(HEARTBEAT_INTERVAL)
        await third.busy(behind)
        alive = await other.alive(waiter)
        assert alive.position in (None, 0)
    await holder.release(held)
    await other.alive(waiter)
    assert not [h for h in await other.inspect() if h.state == "held"], "reserved for the waiter, but not granted"
    await other.granted(waiter)


@case(needs={"fair"}, shows=("E7",), slow=True)
async def passed_over_waiter_keeps_its_position(t: CaseContext) -> None:
    holder, silent, other, last = (t.driver() for _ in range(4))
    held = await holder.acquire(holder.claim())
    first, second, third = silent.waiter(), other.waiter(ttl=2 * WAITER_TTL), last.waiter()
    for driver, waiter in ((silent, first), (other, second), (last, third)):
        await driver.busy(waiter)
    await holder.release(held)
    await t.pass_time(1.2 * RESERVATION_TTL)  # the first waiter does not use its reservation
    if isinstance(await other.attempt(second), Grant):  # engines with reservations pass it over
        assert (await silent.busy(first)).position == 0, "back at its old position"
        assert (await last.busy(third)).position == 1
        await other.release(second)
    await silent.granted(first)
    await silent.release(first)
    reserves = (await t.traits()).liveness == "ttl"  # else the waiter is dropped when its queue entry expires
    await t.until(
        lambda: _is_granted(last, third), "the last waiter is granted too", RESERVATION_TTL if reserves else WAITER_TTL
    )


@case(needs={"fair", "push", "ttl"}, rig={"kill"}, shows=("E4", "E7"))
async def unreachable_waiter_returns_to_its_position(t: CaseContext) -> None:
    holder, disconnected, other, last = (t.driver() for _ in range(4))
    held = await holder.acquire(holder.claim())
    first, second, third = disconnected.waiter(), other.waiter(), last.waiter()
    for driver, waiter in ((disconnected, first), (other, second), (last, third)):
        await driver.busy(waiter)
    t.rig.kill_session(disconnected)
    await holder.release(held)
    while not isinstance(await other.attempt(second), Grant):  # passed over at once, or when a server declines for it
        if isinstance(await disconnected.attempt(first), Grant):  # it had already reconnected
            return
    assert (await disconnected.busy(first)).position == 0
    await other.release(second)
    assert isinstance(await last.attempt(third), Busy)
    await disconnected.granted(first)


@case(needs={"fair", "push", "session"}, rig={"kill"}, shows=("E4", "E7"))
async def queue_position_ends_with_its_session(t: CaseContext) -> None:
    holder, dead, other = t.driver(), t.driver(), t.driver()
    held = await holder.acquire(holder.claim(ttl=_LONG))
    first, second = dead.waiter(), other.waiter()
    assert (await dead.busy(first)).position == 0
    busy = await other.busy(second)
    assert busy.position == 1
    waiting = t.spawn(other.engine.wait(second, busy, _LONG))
    t.rig.kill_session(dead)
    await waiting.result()
    assert (await other.busy(second)).position == 0
    assert (await dead.busy(first)).position == 1, "it joins the queue again, at the end"
    await holder.release(held)
    await other.granted(second)


@case(needs={"fair", "push"}, shows=("E4", "E7"), slow=True)
async def silent_first_waiter_delays_the_queue_only_briefly(t: CaseContext) -> None:
    holder, silent, other = t.driver(), t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), other.waiter()
    await silent.busy(silent.waiter())
    waiting = t.spawn(_wait_for(other, waiter))
    await t.until(lambda: _has_waiters(holder, 2), "both waiters are queued")
    await holder.release(held)
    await t.pass_time(1.2 * RESERVATION_TTL)
    # Engines without reservations grant the next waiter only when the silent one's queue entry expires.
    await waiting.result(0.0 if t.rig.can_advance_clock else WAITER_TTL)


@case(needs={"fair", "push"}, shows=("E4", "E7"))
async def first_waiter_of_an_idle_client_makes_few_calls(t: CaseContext) -> None:
    """It finds the name held, and joins the queue. Its attempt counts as a heartbeat, so the watchdog need not send one
    at once; and without that one the waiter does not attempt again. At the first contention it may attempt once more,
    when the engine has begun to listen for notifications."""
    holder, faults = t.client(), Faults()
    client = t.client(faults)
    await t.wait_until_connected(client)
    for limit in (3, 2):  # the second time the client has met contention before, and is idle again
        held = await holder.acquire(ttl=_LONG)
        calls_before, began = len(faults.calls), t.runtime.now()
        waiting = t.spawn(client.acquire(ttl=_LONG))
        await t.until(lambda: _is_queued(holder), "the waiter is queued")
        await t.runtime.sleep(0.2)  # time for calls that ought not to come
        calls: list[str] = [verb for verb in faults.calls[calls_before:] if verb in CALL_VERBS]
        if t.runtime.now() - began < HEARTBEAT_INTERVAL:  # else heartbeats are due
            assert set(calls) == {"attempt"}
            assert len(calls) <= limit
        await holder.release(held)
        await client.release(await waiting.result())


async def _is_queued(client: UnifiedClient) -> bool:
    return any(holding.state == "waiting" for holding in await client.inspect("job"))


async def _is_granted(driver: EngineDriver, claim: Claim) -> bool:
    return isinstance(await driver.attempt(claim), Grant)


async def _wait_for(driver: EngineDriver, waiter: Claim) -> None:
    """Attempt and wait until granted, as client code does, but retry only after a wake-up."""
    while True:
        try:
            reply = await driver.attempt(waiter)
        except Unavailable:
            continue  # the clock jumped during this call: its outcome is unknown, so repeat it (E2)
        if isinstance(reply, Grant):
            return
        await driver.engine.wait(waiter, reply, _LONG)


async def _has_waiters(driver: EngineDriver, count: int) -> bool:
    return sum(holding.state == "waiting" for holding in await driver.inspect()) == count
