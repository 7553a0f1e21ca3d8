"""What a server between engine and clients needs: reservations that can be refused, claims that outlive an instance."""

from __future__ import annotations

from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext

_LONG = 60.0  # a ttl that does not end during a case, and a wait that must end early


@case(needs={"push"}, shows=("E4", "E7"))
async def declined_reservation_goes_to_the_next_waiter(t: CaseContext) -> None:
    holder, unreachable, other, last = (t.driver() for _ in range(4))
    held = await holder.acquire(holder.claim(ttl=_LONG))
    first, second, third = unreachable.waiter(), other.waiter(), last.waiter()
    await unreachable.busy(first)
    busy = await other.busy(second)
    await last.busy(third)
    waiting = t.spawn(other.engine.wait(second, busy, _LONG))
    await holder.release(held)
    assert await unreachable.decline(first)
    await waiting.result()
    await other.granted(second)
    assert not await unreachable.decline(first), "it was given on before"
    again = await unreachable.busy(first)
    assert (again.position or 0) <= 1, "it is passed over, or joins again: not lost"


@case(shows=("E6", "E7"))
async def decline_ends_neither_a_grant_nor_a_position(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), other.waiter()
    position = (await other.busy(waiter)).position
    for driver, claim in ((holder, held), (other, waiter), (other, other.claim())):
        assert not await driver.decline(claim), "only a reservation can be declined"
    await holder.alive(held)
    assert (await other.busy(waiter)).position == position


@case(needs={"ttl"}, shows=("E4", "E6"))
async def disowned_claim_lives_on(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), other.waiter()
    busy = await other.busy(waiter)
    waiting = t.spawn(other.engine.wait(waiter, busy, _LONG))
    assert not await waiting.finished(0.02)
    other.engine.disown(waiter)
    holder.engine.disown(held)
    await waiting.result()
    assert not other.registry.waiting
    assert not other.registry.pending_releases
    await holder.alive(held)
    assert (await other.busy(waiter)).position == busy.position
    await holder.release(held)
    await other.granted(waiter)
