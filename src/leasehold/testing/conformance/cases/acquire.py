"""E1, E2, E3, E8: which claim is granted a name, with which token, and for how long."""

from __future__ import annotations

from typing import Final

import pytest

from leasehold.core.timing import granted_ttl
from leasehold.errors import Mismatch
from leasehold.model import Busy, Kind
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.engine_driver import EngineDriver


@case(shows=("E1",))
async def exclusive_grant_excludes_other_claims(t: CaseContext) -> None:
    seat, other = t.driver(), t.driver()
    mine, theirs = seat.claim(), other.claim()
    grant = await seat.granted(mine)
    busy = await other.busy(theirs)
    assert (busy.position, busy.token) == (None, grant.token), "not queued, and the answer names the holder"
    assert busy.holder == mine.holder
    assert busy.left is not None
    assert 0 < busy.left <= max(grant.ttl, mine.ttl)  # of a session engine, a grant may live for less than its ttl
    assert await seat.release(mine)
    await other.granted(theirs)


@case(shows=("E1",))
async def busy_attempt_leaves_no_claim_behind(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, tried = await holder.acquire(holder.claim()), other.claim()
    await other.busy(tried)
    await holder.release(held)
    assert not await holder.inspect(), "a refused attempt without queue=True must not be queued"
    await other.gone(tried)


@case(shows=("E2",))
async def repeated_attempt_gets_the_same_grant(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    claim = driver.claim()
    first = await driver.granted(claim)
    for queue in (False, True, False):
        again = await driver.granted(claim._replace(queue=queue))
        assert (again.token, again.slot) == (first.token, first.slot)
    held = [holding for holding in await driver.inspect() if holding.state == "held"]
    assert [holding.token for holding in held] == [first.token]
    assert await driver.release(claim), "one release ends the grant, however often it was attempted"
    await other.granted(other.claim())


@case(shows=("E2",))
async def repeated_attempt_keeps_its_queue_position(t: CaseContext) -> None:
    drivers = [t.driver() for _ in range(4)]
    held = await drivers[0].acquire(drivers[0].claim())
    waiters = [driver.waiter() for driver in drivers[1:]]
    for _ in range(3):
        positions = [(await driver.busy(waiter)).position for driver, waiter in zip(drivers[1:], waiters, strict=True)]
        assert positions == [0, 1, 2]
    await drivers[0].release(held)
    for driver, waiter in zip(drivers[1:], waiters, strict=True):
        await driver.granted(waiter)
        await driver.release(waiter)


@case(needs={"fencing"}, shows=("E3",), expires=True)
async def tokens_rise_after_release_expiry_and_break(t: CaseContext) -> None:
    tokens: list[int] = []
    for end in ("release", "expire", "break", "release", "new machine"):
        driver = t.driver()
        claim = driver.claim()
        grant = await (driver.granted_within(claim, 1.1 * t.rig.ttl) if tokens else driver.granted(claim))
        tokens.append(grant.token)
        held = claim._replace(token=grant.token)
        if end == "release":
            await driver.release(claim)
        elif end == "break":
            assert await driver.break_(held)
        elif end == "new machine":
            await driver.engine.close()
    assert tokens == sorted(set(tokens)), f"not strictly rising: {tokens}"
    assert all(0 < token < 2**53 for token in tokens)


@case(needs={"fencing", "shared"}, shows=("E3",))
async def tokens_rise_among_shared_grants(t: CaseContext) -> None:
    drivers = [t.driver() for _ in range(5)]
    tokens = [(await driver.granted(driver.claim(mode="shared"))).token for driver in drivers]
    assert tokens == sorted(set(tokens)), f"not strictly rising: {tokens}"


@case(needs={"ttl"}, shows=("E1", "E8"), expires=True)
async def unrenewed_grant_lives_for_its_ttl_and_no_longer(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    grant = await holder.granted(holder.claim())
    await t.pass_time(0.8 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)
    await other.granted_within(other.claim(), 0.3 * t.rig.ttl)


@case(needs={"session"}, rig={"kill"}, shows=("E1", "E8"))
async def killed_session_frees_its_grants(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    grant = await holder.granted(holder.claim())
    t.rig.kill_session(holder)
    await other.granted_within(other.claim(), grant.ttl)


@case(shows=("E8",), expires=True)
async def repeated_attempt_reports_the_remaining_ttl(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    claim = holder.claim()
    first = await holder.granted(claim)
    await t.pass_time(0.5 * t.rig.ttl)
    asked = holder.now()
    again = await holder.granted(claim)
    assert 0 < again.ttl <= max(first.ttl, claim.ttl)
    await t.pass_time(0.8 * again.ttl)
    await other.refused_before(other.claim(), asked + again.ttl)


@case(shows=("E8",))
async def promised_ttl_is_never_shortened_by_later_calls(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    claim = holder.claim(ttl=3 * t.rig.ttl)
    grant = await holder.granted(claim)
    held = claim._replace(token=grant.token)
    await holder.alive(held._replace(ttl=t.rig.ttl / 2))
    await holder.granted(claim._replace(ttl=t.rig.ttl / 2))
    await t.pass_time(t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)


@case(needs={"rounding"}, shows=("E8",))
async def granted_ttl_is_rounded_as_traits_declare(t: CaseContext) -> None:
    driver = t.driver()
    traits = await t.traits()
    for number, asked in enumerate((0.3, 1.0, 2.5, 7.25)):
        made = granted_ttl(asked, traits.min_ttl, traits.ttl_step)
        grant = await driver.granted(driver.claim(f"job-{number}", ttl=asked))
        least = 0.5 * made if traits.liveness == "ttl" else 0.0  # a session may be shorter than the ttl requested
        assert least < grant.ttl <= made + 0.001, f"requested a ttl of {asked}, got {grant.ttl}, not {made}"


@case(needs={"engine-clock"}, shows=("E3", "E8"))
async def client_wall_clock_has_no_effect_on_grants(t: CaseContext) -> None:
    tokens = []
    for offset in (0, -10_000_000, 10_000_000, -1):
        driver, other = t.driver(), t.driver()
        original = driver.runtime.wall
        driver.runtime.wall = lambda original=original, offset=offset: original() + offset  # type: ignore[misc]
        claim = driver.claim()
        grant = await driver.granted(claim)
        assert grant.ttl <= claim.ttl + (await t.traits()).ttl_step
        await t.pass_time(0.5 * t.rig.ttl)
        assert isinstance(await other.attempt(other.claim()), Busy)
        await driver.release(claim)
        tokens.append(grant.token)
    assert tokens == sorted(set(tokens))


_KINDS: Final[tuple[tuple[Kind, int], ...]] = (("lock", 1), ("semaphore", 2), ("semaphore", 3), ("lock", 1))


async def _refused(driver: EngineDriver, *claims: tuple[Kind, int]) -> None:
    for kind, limit in claims:
        with pytest.raises(Mismatch) as caught:
            await driver.attempt(driver.claim(kind=kind, limit=limit))
        assert caught.value.name == "job"


@case(needs={"semaphore"}, shows=("E1",))
async def live_name_refuses_other_kind_or_limit(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    lock = await holder.acquire(holder.claim())
    await _refused(other, ("semaphore", 1), ("semaphore", 3))
    await holder.release(lock)
    permit = await holder.acquire(holder.claim(kind="semaphore", limit=3))
    await _refused(other, ("lock", 1), ("semaphore", 2), ("semaphore", 4))
    await other.granted(other.claim(kind="semaphore", limit=3))
    await holder.alive(permit)


@case(needs={"semaphore"}, shows=("E1", "E6"), expires=True)
async def idle_name_accepts_any_kind(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    for kind, limit in _KINDS:
        held, waiter = driver.claim(kind=kind, limit=limit), other.waiter(kind=kind, limit=limit)
        await driver.granted(held)
        await other.attempt(waiter)
        await driver.release(held)
        await other.release(waiter)
    await driver.granted(driver.claim())
    # An expired grant does not fix the kind of its name either.
    await other.granted_within(other.claim(kind="semaphore", limit=2), 1.1 * t.rig.ttl)
