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
    await waiting.finished(0.02)  # lets it begin
    other.engine.disown(waiter)
    holder.engine.disown(held)
    await waiting.result()
    assert not other.registry.waiting
    assert not other.registry.pending_releases
    await holder.alive(held)
    assert (await other.busy(waiter)).position == busy.position
    await holder.release(held)
    await other.granted(waiter)


# ------------------------------------------------- E2, E5 and E6 hold through any instance, whichever was asked before


@case(needs={"ttl"}, shows=("E2", "E5", "E6"))
async def claim_belongs_to_no_instance(t: CaseContext) -> None:
    first, second, third = t.driver(), t.driver(), t.driver()
    claim = first.claim(ttl=_LONG)
    grant = await first.granted(claim)
    held = claim._replace(token=grant.token)
    for driver in (second, third, first, second):
        again = await driver.granted(claim)
        assert (again.token, again.slot) == (grant.token, grant.slot)
        await driver.alive(held)
    assert [holding.state for holding in await third.inspect()] == ["held"]
    await third.busy(third.claim())
    assert await third.release(held)
    for driver in (first, second, third):
        await driver.gone(held)
        assert not await driver.release(held)
    assert not await first.inspect()
    await first.granted(first.claim())


@case(needs={"fair", "ttl"}, shows=("E2", "E5", "E6", "E7"))
async def queued_claim_keeps_its_position_at_any_instance(t: CaseContext) -> None:
    drivers = [t.driver() for _ in range(3)]
    held = await drivers[0].acquire(drivers[0].claim(ttl=_LONG))
    waiters = [drivers[number].waiter(ttl=_LONG) for number in range(3)]
    for turn in range(3):
        for number, waiter in enumerate(waiters):
            driver = drivers[(number + turn) % 3]
            assert (await driver.busy(waiter)).position == number
            await driver.alive(waiter)
    assert [holding.state for holding in await drivers[0].inspect()] == ["held", "waiting", "waiting", "waiting"]
    assert not await drivers[2].release(waiters[0]), "it left the queue; no grant ended"
    assert (await drivers[0].busy(waiters[1])).position == 0
    assert await drivers[1].release(held)
    token = (await drivers[2].granted(waiters[1])).token
    assert (await drivers[0].granted(waiters[1])).token == token
    assert (await drivers[1].busy(waiters[2])).position == 0
    assert await drivers[1].release(waiters[1])
    await drivers[0].granted(waiters[2])
    assert await drivers[2].release(waiters[2])
    assert not await drivers[0].inspect()


@case(needs={"push", "ttl"}, shows=("E2", "E4"))
async def waiter_is_woken_at_the_instance_it_asked_last(t: CaseContext) -> None:
    holder, first, second = t.driver(), t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim(ttl=_LONG)), first.waiter(ttl=_LONG)
    await first.busy(waiter)
    busy = await second.busy(waiter)
    first.engine.disown(waiter)
    waiting = t.spawn(second.engine.wait(waiter, busy, _LONG))
    await holder.release(held)
    await waiting.result()
    await second.granted(waiter)


@case(needs={"semaphore", "ttl"}, shows=("E1", "E2", "E6"))
async def permit_belongs_to_no_instance(t: CaseContext) -> None:
    first, second, third = t.driver(), t.driver(), t.driver()
    claims = [first.claim(kind="semaphore", limit=2, ttl=_LONG) for _ in range(3)]
    grants = [await first.granted(claims[0]), await second.granted(claims[1])]
    for driver in (third, second, first):
        for claim, grant in zip(claims, grants, strict=False):
            again = await driver.granted(claim)
            assert (again.token, again.slot) == (grant.token, grant.slot)
        await driver.busy(claims[2])
    assert await third.release(claims[0]._replace(token=grants[0].token))
    await second.granted(claims[2])
    await first.busy(claims[0])


@case(needs={"ttl"}, shows=("E2", "E8"))
async def repeat_at_another_instance_never_shortens_a_grant(t: CaseContext) -> None:
    first, second = t.driver(), t.driver()
    claim = first.claim(ttl=_LONG)
    grant = await first.granted(claim)
    again = await second.granted(claim._replace(ttl=t.rig.ttl))
    assert again.token == grant.token
    assert again.ttl > t.rig.ttl + (await t.traits()).ttl_step + (await t.traits()).min_ttl
    assert (await first.alive(claim._replace(token=grant.token, ttl=t.rig.ttl))).ttl > t.rig.ttl


@case(needs={"ttl"}, shows=("E6",))
async def release_ends_a_claim_that_was_granted_again_elsewhere(t: CaseContext) -> None:
    first, second = t.driver(), t.driver()
    claim = first.claim(ttl=_LONG)
    await first.granted(claim)
    assert await second.release(claim)
    await second.granted(claim)
    assert await first.release(claim), "what the instance knows is out of date"
    assert not await second.inspect()


@case(needs={"ttl"}, shows=("E1", "E2"))
async def simultaneous_attempts_at_all_instances_are_one_grant(t: CaseContext) -> None:
    drivers = [t.driver() for _ in range(3)]
    for queue in (False, True):
        claim = drivers[0].claim(ttl=_LONG, queue=queue)
        attempts = [t.spawn(driver.granted(claim)) for driver in drivers for _ in range(2)]
        tokens = {(await attempt.result()).token for attempt in attempts}
        assert len(tokens) == 1, tokens
        assert len(await drivers[0].inspect()) == 1
        assert await drivers[2].release(claim)
        assert not await drivers[1].inspect()
