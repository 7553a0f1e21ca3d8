"""E5 and E6: what the engine answers about a claim, and what is left of a claim that has ended."""

from __future__ import annotations

from functools import partial
from typing import Unpack

from leasehold.model import NO_MIN_HOLD, Alive, Claim, Gone, Grant, Holder
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.engine_driver import ClaimFields, EngineDriver

_LONG = 60.0  # seconds that must not pass during a case


@case(shows=("E6",))
async def release_removes_every_trace(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim()), other.waiter()
    await other.busy(waiter)
    assert not await other.release(waiter), "the waiter left the queue; no grant ended"
    assert [holding.state for holding in await other.inspect()] == ["held"]
    assert await holder.release(held)
    assert not await holder.inspect()


@case(shows=("E6",))
async def repeated_release_is_harmless(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    first = await holder.acquire(holder.claim())
    assert await holder.release(first)
    assert not await holder.release(first)
    second = await other.acquire(other.claim())
    assert not await holder.release(first), "it must not release the next holder's grant"
    await other.alive(second)


@case(shows=("E5", "E6"))
async def release_by_another_client_is_harmless(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim())
    for stranger in (other.claim(), other.waiter(), other.claim()._replace(token=held.token)):
        assert not await other.release(stranger)
    await holder.alive(held)
    await other.busy(other.claim())


@case(needs={"ttl"}, shows=("E6",), expires=True)
async def release_after_expiry_is_harmless(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    late = await holder.acquire(holder.claim())
    claim = other.claim()
    grant = await other.granted_within(claim, 1.1 * t.rig.ttl)
    assert not await holder.release(late)
    await other.alive(claim._replace(token=grant.token))


@case(shows=("E6",))
async def forgotten_claim_leaves_no_trace(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim()), other.waiter()
    await other.busy(waiter)
    for driver, claim in ((other, waiter), (holder, held)):
        driver.engine.forget(claim)
        # There is no watchdog to retry a release that could not be sent at once.
        for pending in list(driver.registry.pending_releases.values()):
            await driver.release(pending.claim)

    async def has_no_holdings() -> bool:
        return not await other.inspect()

    await t.until(has_no_holdings, "the forgotten claims are gone")


@case(needs={"ttl"}, shows=("E5",), expires=True)
async def renewal_after_expiry_answers_gone(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim())
    await t.pass_time(1.1 * t.rig.ttl)
    await t.until(lambda: _is_gone(holder, held), "the expired grant is gone, even without another attempt")
    await other.granted(other.claim())
    await holder.gone(held)


async def _is_gone(driver: EngineDriver, held: Claim) -> bool:
    (reply,) = await driver.renew(held)
    return isinstance(reply, Gone)


@case(needs={"ttl"}, shows=("E5", "E8"), expires=True)
async def renewed_grant_stays_alive(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    claim = holder.claim()
    grant = await holder.granted(claim)
    held, expires_at = claim._replace(token=grant.token), asked + grant.ttl
    for _ in range(3):
        await t.pass_time(0.5 * t.rig.ttl)
        asked = holder.now()
        alive = await holder.alive_before(held, expires_at)
        if alive is None:
            return
        expires_at = asked + alive.ttl
        assert 0 < alive.ttl <= t.rig.ttl + (await t.traits()).ttl_step
    await t.pass_time(0.6 * t.rig.ttl)
    await other.refused_before(other.claim(), expires_at)


@case(shows=("E5",))
async def renewal_answers_each_claim_separately(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    kept, freed = await driver.acquire(driver.claim("kept")), await driver.acquire(driver.claim("freed"))
    broken, never = await driver.acquire(driver.claim("broken")), driver.claim("never")
    taken, behind = await other.acquire(other.claim("taken")), driver.waiter("taken")
    await driver.busy(behind)
    await driver.release(freed)
    assert await other.break_(broken)
    older_token_claim, stranger = kept._replace(token=kept.token - 1), other.claim("kept")._replace(token=kept.token)
    claims = [kept, freed, broken, never, behind, older_token_claim, stranger, kept]
    replies = await driver.renew(*claims)
    kinds = [type(reply) for reply in replies]
    assert kinds == [Alive, Gone, Gone, Gone, Alive, Gone, Gone, Alive], f"{list(zip(claims, replies, strict=True))}"
    assert not await driver.renew()
    await other.alive(taken)


@case(shows=("E5",))
async def break_ends_only_the_grant_with_its_token(t: CaseContext) -> None:
    holder, other, operator = t.driver(), t.driver(), t.driver()
    first = await holder.acquire(holder.claim())
    assert await operator.break_(first)
    await holder.gone(first)
    second = await other.acquire(other.claim())
    assert not await operator.break_(first), "an old token breaks no grant"
    assert not await operator.break_(second._replace(token=second.token + 1))
    assert not await operator.break_(second._replace(name="other"))
    await other.alive(second)


@case(shows=("E5",))
async def break_lets_the_next_waiter_acquire(t: CaseContext) -> None:
    holder, other, operator = t.driver(), t.driver(), t.driver()
    held, waiter = await holder.acquire(holder.claim()), other.waiter()
    await other.busy(waiter)
    assert await operator.break_(held)
    await other.granted(waiter)
    await holder.gone(held)
    assert not await holder.release(held)


@case(needs={"outlives"}, shows=("E6",))
async def early_release_keeps_name_cooling_for_min_hold(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    held = await holder.acquire(holder.claim(min_hold=t.rig.ttl))
    await holder.release(held)
    await holder.gone(held)
    found = [holding.state for holding in await other.inspect()]
    assert found == ["cooling"] or holder.now() >= asked + t.rig.ttl
    await t.pass_time(0.7 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + t.rig.ttl)
    await other.granted_within(other.claim(), 0.4 * t.rig.ttl)


def _bare(claim: Claim, **fields: Unpack[ClaimFields]) -> Claim:
    """A claim that its caller knows only by namespace, name and id."""
    return Claim(claim.namespace, claim.name, claim.id, claim.id_hash, Holder(""), 1.0)._replace(**fields)


@case(needs={"outlives"}, shows=("E6",))
async def engine_keeps_min_hold_for_a_release_that_does_not_know_it(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    for name, queue, releases in (("job", False, holder), ("queued", True, holder), ("elsewhere", False, other)):
        ahead = await other.acquire(other.claim(name)) if queue else None
        claim = holder.claim(name, min_hold=_LONG, queue=queue)
        if ahead is not None:
            await holder.busy(claim)
            await other.release(ahead)
        asked = holder.now()
        await holder.granted(claim)
        assert await releases.release(_bare(claim)), f"a grant of {name} ended"
        assert [holding.state for holding in await other.inspect(name, exact=True)] == ["cooling"]
        await other.refused_before(other.claim(name), asked + _LONG)


@case(needs={"outlives"}, shows=("E6",))
async def min_hold_does_not_apply_to_a_claim_without_work(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    claim = holder.claim(min_hold=_LONG)
    await holder.granted(claim)
    await holder.release(claim._replace(min_hold=NO_MIN_HOLD))
    await other.granted(other.claim())


@case(needs={"outlives"}, shows=("E6",))
async def release_that_does_not_know_the_delay_leaves_none(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    for driver in (holder, other):
        claim, waiter = holder.claim(delay=_LONG), other.waiter()
        await holder.granted(claim)
        await other.busy(waiter)
        assert await driver.release(_bare(claim))
        await t.until(partial(_is_granted, other, waiter), "the waiter does not wait for the delay")
        await other.release(waiter)


@case(needs={"outlives", "ttl"}, shows=("E1", "E5", "E8"), expires=True)
async def renewal_that_does_not_know_the_delay_keeps_it(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim(delay=4 * t.rig.ttl))
    for driver in (holder, other, holder):
        asked = driver.now()
        alive = await driver.alive(_bare(held, ttl=t.rig.ttl)._replace(token=held.token))
        assert alive.ttl <= t.rig.ttl + (await t.traits()).ttl_step, "the delay is not part of the life"
    await t.pass_time(2 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + 4 * t.rig.ttl)


async def _is_granted(driver: EngineDriver, claim: Claim) -> bool:
    return isinstance(await driver.attempt(claim), Grant)


@case(needs={"outlives", "ttl"}, shows=("E1", "E6"), expires=True)
async def delay_keeps_name_busy_after_expiry(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    held = await holder.acquire(holder.claim(delay=t.rig.ttl))
    await t.pass_time(1.5 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + 2 * t.rig.ttl)
    await holder.gone(held)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(needs={"outlives"}, shows=("E6",))
async def delay_keeps_name_busy_after_break(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim(delay=t.rig.ttl))
    broken = other.now()
    assert await other.break_(held)
    await t.pass_time(0.5 * t.rig.ttl)
    await other.break_(held)  # repeating the break must not end the delay sooner
    await other.refused_before(other.claim(), broken + t.rig.ttl)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(needs={"outlives"}, shows=("E6",))
async def clean_release_leaves_no_delay(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim(delay=t.rig.ttl))
    await holder.release(held)
    await other.granted(other.claim())


@case(needs={"outlives"}, shows=("E6",), expires=True)
async def grant_outlives_its_closed_client(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    asked = holder.now()
    grant = await holder.granted(holder.claim())
    await holder.engine.close()
    await t.pass_time(0.5 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(rig={"count"}, shows=("E6",))
async def idle_name_leaves_no_data_behind(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    for number in range(3):
        held, waiter = await holder.acquire(holder.claim(f"job-{number}")), other.waiter(f"job-{number}")
        await other.busy(waiter)
        await other.busy(other.claim(f"job-{number}"))
        await other.release(waiter)
        await holder.release(held)
        await holder.renew(held, waiter)
        await holder.break_(held)
        await holder.inspect(f"job-{number}", exact=True)
    await t.until(lambda: t.rig.residue(t.namespace) == 0, "nothing is left, at the latest after the server's sweep")


@case(needs={"ttl"}, rig={"count"}, shows=("E6",), expires=True)
async def expired_names_are_swept_eventually(t: CaseContext) -> None:
    driver = t.driver()
    for number in range(20):
        await driver.granted(driver.claim(f"expires-{number}"))
    await t.pass_time(1.1 * t.rig.ttl)

    async def is_swept() -> bool:
        """An engine need not have a background sweeper. It may sweep a few names every few attempts, and those of other
        namespaces first. So there are many attempts to one count, which is slow on some servers."""
        for _ in range(16):
            claim = driver.claim("passes-by")
            await driver.granted(claim)
            await driver.release(claim)
        return t.rig.residue(t.namespace) == 0

    await t.until(is_swept, "the expired names are swept")


@case(shows=("E5", "E6"))
async def renewal_and_release_need_namespace_name_and_id(t: CaseContext) -> None:
    """The id alone is not enough: a caller that may use one name must not renew or end a claim on another."""
    holder, other = t.driver(), t.driver()
    held, taken = await holder.acquire(holder.claim()), await other.acquire(other.claim("taken"))
    waiter = holder.waiter("taken")
    position = (await holder.busy(waiter)).position
    for driver in (holder, other):
        for right in (held, waiter, taken):
            for wrong in (
                right._replace(name="free"),
                right._replace(name="taken" if right.name == "job" else "job"),
                right._replace(namespace=f"{t.namespace}-of-another-tenant"),
            ):
                await driver.gone(wrong)
                assert not await driver.decline(wrong)
                assert not await driver.release(wrong)
    await holder.alive(held)
    await other.alive(taken)
    await holder.alive(waiter)
    assert (await holder.busy(waiter)).position == position
    assert await holder.release(held)
    assert await other.release(taken)
    await holder.granted(waiter)
