"""E5 and E6: what is answered about a claim, and what is left of one that has ended."""

from __future__ import annotations

from leasehold.model import Alive, Claim, Gone
from leasehold.testing.choosing import case
from leasehold.testing.seat import Seat
from leasehold.testing.trial import Trial


@case(shows=("E6",))
async def a_release_removes_every_trace(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim()), other.waiter()
    await other.busy(waiter)
    assert not await other.release(waiter), "it left the line; no grant ended"
    assert [holding.state for holding in await other.inspect()] == ["held"]
    assert await holder.release(held)
    assert not await holder.inspect()


@case(shows=("E6",))
async def a_repeated_release_is_harmless(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    first = await holder.takes(holder.claim())
    assert await holder.release(first)
    assert not await holder.release(first)
    second = await other.takes(other.claim())
    assert not await holder.release(first), "the next holder is not its own to release"
    await other.alive(second)


@case(shows=("E5", "E6"))
async def a_release_by_anybody_else_is_harmless(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim())
    for stranger in (other.claim(), other.waiter(), other.claim()._replace(token=held.token)):
        assert not await other.release(stranger)
    await holder.alive(held)
    await other.busy(other.claim())


@case(needs={"ttl"}, shows=("E6",))
async def a_late_release_is_harmless(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    late = await holder.takes(holder.claim())
    claim = other.claim()
    grant = await other.granted_within(claim, 1.1 * t.rig.ttl)
    assert not await holder.release(late)
    await other.alive(claim._replace(token=grant.token))


@case(shows=("E6",))
async def a_forgotten_claim_leaves_nothing(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim()), other.waiter()
    await other.busy(waiter)
    for seat, claim in ((other, waiter), (holder, held)):
        seat.engine.forget(claim)
        for owed in list(seat.book.owed.values()):  # not sent at once: the watchdog would repeat it
            await seat.release(owed.claim)

    async def nothing() -> bool:
        return not await other.inspect()

    await t.until(nothing, "what was forgotten is gone")


@case(needs={"ttl"}, shows=("E5",))
async def a_renewal_after_the_lapse_is_gone(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim())
    await t.pass_time(1.1 * t.rig.ttl)
    await t.until(lambda: _is_gone(holder, held), "the lapsed grant is gone, though nobody else has asked")
    await other.granted(other.claim())
    await holder.gone(held)


async def _is_gone(seat: Seat, held: Claim) -> bool:
    (reply,) = await seat.renew(held)
    return isinstance(reply, Gone)


@case(needs={"ttl"}, shows=("E5", "E8"))
async def a_renewed_grant_lives_on(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim())
    for _ in range(3):
        await t.pass_time(0.5 * t.rig.ttl)
        asked = holder.now()
        alive = await holder.alive(held)
        assert 0 < alive.ttl <= t.rig.ttl + (await t.traits()).ttl_step
    await t.pass_time(0.6 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + alive.ttl)


@case(shows=("E5",))
async def every_answer_is_about_that_very_claim(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    kept, freed = await seat.takes(seat.claim("kept")), await seat.takes(seat.claim("freed"))
    broken, never = await seat.takes(seat.claim("broken")), seat.claim("never")
    taken, behind = await other.takes(other.claim("taken")), seat.waiter("taken")
    await seat.busy(behind)
    await seat.release(freed)
    assert await other.break_(broken)
    older, stranger = kept._replace(token=kept.token - 1), other.claim("kept")._replace(token=kept.token)
    claims = [kept, freed, broken, never, behind, older, stranger, kept]
    replies = await seat.renew(*claims)
    kinds = [type(reply) for reply in replies]
    assert kinds == [Alive, Gone, Gone, Gone, Alive, Gone, Gone, Alive], f"{list(zip(claims, replies, strict=True))}"
    assert not await seat.renew()
    await other.alive(taken)


@case(shows=("E5",))
async def a_break_ends_the_grant_with_that_token_only(t: Trial) -> None:
    holder, other, operator = t.seat(), t.seat(), t.seat()
    first = await holder.takes(holder.claim())
    assert await operator.break_(first)
    await holder.gone(first)
    second = await other.takes(other.claim())
    assert not await operator.break_(first), "an old token hits nobody"
    assert not await operator.break_(second._replace(token=second.token + 1))
    assert not await operator.break_(second._replace(name="other"))
    await other.alive(second)


@case(shows=("E5",))
async def a_break_lets_the_next_in_line_go(t: Trial) -> None:
    holder, other, operator = t.seat(), t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim()), other.waiter()
    await other.busy(waiter)
    assert await operator.break_(held)
    await other.granted(waiter)
    await holder.gone(held)
    assert not await holder.release(held)


@case(needs={"outlives"}, shows=("E6",))
async def an_early_release_cools_for_min_hold(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    asked = holder.now()
    held = await holder.takes(holder.claim(min_hold=t.rig.ttl))
    await holder.release(held)
    await holder.gone(held)
    assert [holding.state for holding in await other.inspect()] == ["cooling"]
    await t.pass_time(0.7 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + t.rig.ttl)
    await other.granted_within(other.claim(), 0.4 * t.rig.ttl)


@case(needs={"outlives", "ttl"}, shows=("E1", "E6"))
async def a_delay_keeps_the_name_after_a_lapse(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    asked = holder.now()
    held = await holder.takes(holder.claim(delay=t.rig.ttl))
    await t.pass_time(1.5 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + 2 * t.rig.ttl)
    await holder.gone(held)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(needs={"outlives"}, shows=("E6",))
async def a_delay_keeps_the_name_after_a_break(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim(delay=t.rig.ttl))
    broken = other.now()
    assert await other.break_(held)
    await t.pass_time(0.5 * t.rig.ttl)
    await other.break_(held)  # told twice, it must not end sooner
    await other.refused_before(other.claim(), broken + t.rig.ttl)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(needs={"outlives"}, shows=("E6",))
async def a_clean_release_leaves_no_delay(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim(delay=t.rig.ttl))
    await holder.release(held)
    await other.granted(other.claim())


@case(needs={"outlives"}, shows=("E6",))
async def a_grant_outlives_its_client(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    asked = holder.now()
    grant = await holder.granted(holder.claim())
    await holder.engine.close()
    await t.pass_time(0.5 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)
    await other.granted_within(other.claim(), 0.6 * t.rig.ttl)


@case(rig={"count"}, shows=("E6",))
async def nothing_is_left_of_an_idle_name(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    for number in range(3):
        held, waiter = await holder.takes(holder.claim(f"job-{number}")), other.waiter(f"job-{number}")
        await other.busy(waiter)
        await other.busy(other.claim(f"job-{number}"))
        await other.release(waiter)
        await holder.release(held)
        await holder.renew(held, waiter)
        await holder.break_(held)
        await holder.inspect(f"job-{number}", exact=True)
    await t.until(
        lambda: t.rig.residue(t.namespace) == 0, "nothing is left, once a server that sweeps by itself did so"
    )


@case(needs={"ttl"}, rig={"count"}, shows=("E6",))
async def nothing_is_left_of_lapsed_names_in_the_long_run(t: Trial) -> None:
    seat = t.seat()
    for number in range(20):
        await seat.granted(seat.claim(f"lapses-{number}"))
    await t.pass_time(1.1 * t.rig.ttl)
    for number in range(40):  # whoever comes by cleans up: no sweeper of its own is asked of an engine
        claim = seat.claim(f"passes-by-{number}")
        await seat.granted(claim)
        await seat.release(claim)
    await t.until(lambda: t.rig.residue(t.namespace) == 0, "what lapsed is swept away")
