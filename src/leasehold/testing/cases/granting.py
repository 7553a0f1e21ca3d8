"""E1, E2, E3, E8: who is granted a name, by which token, and for how long."""

from __future__ import annotations

from typing import Final

import pytest

from leasehold.core.timing import granted_ttl
from leasehold.errors import Mismatch
from leasehold.model import Busy, Kind
from leasehold.testing.choosing import case
from leasehold.testing.seat import Seat
from leasehold.testing.trial import Trial


@case(shows=("E1",))
async def an_exclusive_grant_stands_alone(t: Trial) -> None:
    one, other = t.seat(), t.seat()
    mine, theirs = one.claim(), other.claim()
    grant = await one.granted(mine)
    busy = await other.busy(theirs)
    assert (busy.place, busy.token) == (None, grant.token), "not queued, and told who is in the way"
    assert busy.holder == mine.holder
    assert busy.left is not None
    assert 0 < busy.left <= grant.ttl
    assert await one.release(mine)
    await other.granted(theirs)


@case(shows=("E1",))
async def a_busy_answer_leaves_no_claim(t: Trial) -> None:
    one, other = t.seat(), t.seat()
    held, tried = await one.takes(one.claim()), other.claim()
    await other.busy(tried)
    await one.release(held)
    assert not await one.inspect(), "an unqueued claim that was refused must not be in line"
    await other.gone(tried)


@case(shows=("E2",))
async def a_repeated_attempt_gets_the_same_grant(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    claim = seat.claim()
    first = await seat.granted(claim)
    for queue in (False, True, False):
        again = await seat.granted(claim._replace(queue=queue))
        assert (again.token, again.slot) == (first.token, first.slot)
    held = [holding for holding in await seat.inspect() if holding.state == "held"]
    assert [holding.token for holding in held] == [first.token]
    assert await seat.release(claim), "once for all the times it was asked for"
    await other.granted(other.claim())


@case(shows=("E2",))
async def a_repeated_attempt_keeps_its_place_in_line(t: Trial) -> None:
    seats = [t.seat() for _ in range(4)]
    held = await seats[0].takes(seats[0].claim())
    waiters = [seat.waiter() for seat in seats[1:]]
    for _ in range(3):
        places = [(await seat.busy(waiter)).place for seat, waiter in zip(seats[1:], waiters, strict=True)]
        assert places == [0, 1, 2]
    await seats[0].release(held)
    for seat, waiter in zip(seats[1:], waiters, strict=True):
        await seat.granted(waiter)
        await seat.release(waiter)


@case(needs={"fencing"}, shows=("E3",))
async def tokens_rise_over_release_lapse_and_break(t: Trial) -> None:
    tokens: list[int] = []
    for end in ("release", "lapse", "break", "release", "new machine"):
        seat = t.seat()
        claim = seat.claim()
        grant = await (seat.granted_within(claim, 1.1 * t.rig.ttl) if tokens else seat.granted(claim))
        tokens.append(grant.token)
        held = claim._replace(token=grant.token)
        if end == "release":
            await seat.release(claim)
        elif end == "break":
            assert await seat.break_(held)
        elif end == "new machine":
            await seat.engine.close()
    assert tokens == sorted(set(tokens)), f"not strictly rising: {tokens}"
    assert all(0 < token < 2**53 for token in tokens)


@case(needs={"fencing", "shared"}, shows=("E3",))
async def tokens_rise_beside_one_another(t: Trial) -> None:
    seats = [t.seat() for _ in range(5)]
    tokens = [(await seat.granted(seat.claim(mode="shared"))).token for seat in seats]
    assert tokens == sorted(set(tokens)), f"not strictly rising: {tokens}"


@case(needs={"ttl"}, shows=("E1", "E8"))
async def a_grant_lives_as_long_as_it_was_told_and_no_longer(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    asked = holder.now()
    grant = await holder.granted(holder.claim())
    await t.pass_time(0.8 * t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)
    await other.granted_within(other.claim(), 0.3 * t.rig.ttl)


@case(needs={"session"}, rig={"kill"}, shows=("E1", "E8"))
async def a_dead_session_holds_nothing(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    grant = await holder.granted(holder.claim())
    t.rig.kill_session(holder)
    await other.granted_within(other.claim(), grant.ttl)


@case(shows=("E8",))
async def a_repeated_grant_tells_the_life_that_is_left(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    claim = holder.claim()
    first = await holder.granted(claim)
    await t.pass_time(0.5 * t.rig.ttl)
    asked = holder.now()
    again = await holder.granted(claim)
    assert 0 < again.ttl <= max(first.ttl, claim.ttl)
    await t.pass_time(0.8 * again.ttl)
    await other.refused_before(other.claim(), asked + again.ttl)


@case(shows=("E8",))
async def no_verb_shortens_a_life_already_promised(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    asked = holder.now()
    claim = holder.claim(ttl=3 * t.rig.ttl)
    grant = await holder.granted(claim)
    held = claim._replace(token=grant.token)
    await holder.alive(held._replace(ttl=t.rig.ttl / 2))
    await holder.granted(claim._replace(ttl=t.rig.ttl / 2))
    await t.pass_time(t.rig.ttl)
    await other.refused_before(other.claim(), asked + grant.ttl)


@case(needs={"rounding"}, shows=("E8",))
async def a_ttl_becomes_what_the_traits_say(t: Trial) -> None:
    seat = t.seat()
    traits = await t.traits()
    for number, asked in enumerate((0.3, 1.0, 2.5, 7.25)):
        made = granted_ttl(asked, traits.min_ttl, traits.ttl_step)
        grant = await seat.granted(seat.claim(f"job-{number}", ttl=asked))
        least = 0.5 * made if traits.liveness == "ttl" else 0.0  # a session may be shorter than the ttl asked for
        assert least < grant.ttl <= made + 0.001, f"asked {asked}, told {grant.ttl}, not {made}"


@case(needs={"engine-clock"}, shows=("E3", "E8"))
async def the_wall_clock_of_a_client_decides_nothing(t: Trial) -> None:
    tokens = []
    for wrong in (0, -10_000_000, 10_000_000, -1):
        seat, other = t.seat(), t.seat()
        true = seat.runtime.wall
        seat.runtime.wall = lambda true=true, wrong=wrong: true() + wrong  # type: ignore[misc]
        claim = seat.claim()
        grant = await seat.granted(claim)
        assert grant.ttl <= claim.ttl + (await t.traits()).ttl_step
        await t.pass_time(0.5 * t.rig.ttl)
        assert isinstance(await other.attempt(other.claim()), Busy)
        await seat.release(claim)
        tokens.append(grant.token)
    assert tokens == sorted(set(tokens))


_KINDS: Final[tuple[tuple[Kind, int], ...]] = (("lock", 1), ("semaphore", 2), ("semaphore", 3), ("lock", 1))


async def _refused(seat: Seat, *claims: tuple[Kind, int]) -> None:
    for kind, limit in claims:
        with pytest.raises(Mismatch) as caught:
            await seat.attempt(seat.claim(kind=kind, limit=limit))
        assert caught.value.name == "job"


@case(needs={"semaphore"}, shows=("E1",))
async def a_live_name_has_one_kind_and_one_limit(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    lock = await holder.takes(holder.claim())
    await _refused(other, ("semaphore", 1), ("semaphore", 3))
    await holder.release(lock)
    permit = await holder.takes(holder.claim(kind="semaphore", limit=3))
    await _refused(other, ("lock", 1), ("semaphore", 2), ("semaphore", 4))
    await other.granted(other.claim(kind="semaphore", limit=3))
    await holder.alive(permit)


@case(needs={"semaphore"}, shows=("E1", "E6"))
async def an_idle_name_has_no_kind(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    for kind, limit in _KINDS:
        held, waiter = seat.claim(kind=kind, limit=limit), other.waiter(kind=kind, limit=limit)
        await seat.granted(held)
        await other.attempt(waiter)
        await seat.release(held)
        await other.release(waiter)
    await seat.granted(seat.claim())
    await other.granted_within(other.claim(kind="semaphore", limit=2), 1.1 * t.rig.ttl)  # the lapsed fix none either
