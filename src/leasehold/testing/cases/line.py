"""E4 and E7: the line of waiters, how one is woken, and how long a place is kept for one not heard of."""

from __future__ import annotations

import time

from leasehold.core.timing import BEAT, BEAT_EVERY, RESERVATION
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Claim, Grant
from leasehold.testing.choosing import case
from leasehold.testing.seat import Seat
from leasehold.testing.trial import Trial

_LONG = 60.0  # a wait that must be cut short by a wake-up, or the case fails


@case(shows=("E4",))
async def a_wait_for_nothing_ends_in_time(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    await holder.granted(holder.claim())
    waiter = other.waiter()
    busy = await other.busy(waiter)
    began = time.monotonic()
    await other.engine.wait(waiter, busy, 0.3)
    assert time.monotonic() - began < 0.3 + t.patience
    again = await other.busy(waiter)
    assert again.place == 0, "a wait never grants, and costs nobody a place"


@case(needs={"push"}, shows=("E4",))
async def a_waiter_is_woken_by_a_release(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim(ttl=_LONG)), other.waiter()
    busy = await other.busy(waiter)
    waiting = t.spawn(other.engine.wait(waiter, busy, _LONG))
    await holder.release(held)
    await waiting.result()
    await other.granted(waiter)


@case(needs={"push"}, shows=("E4",))
async def a_wake_up_before_the_wait_is_remembered(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim(ttl=_LONG)), other.waiter()
    busy = await other.busy(waiter)
    await holder.release(held)
    await t.spawn(other.engine.wait(waiter, busy, _LONG)).result()
    await other.granted(waiter)


@case(needs={"push"}, shows=("E4",))
async def the_next_waiter_is_woken_when_the_first_leaves_the_line(t: Trial) -> None:
    holder, first, second = t.seat(), t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=_LONG))
    ahead, behind = first.waiter(), second.waiter()
    await first.busy(ahead)
    busy = await second.busy(behind)
    waiting = t.spawn(second.engine.wait(behind, busy, _LONG))
    await first.release(ahead)
    await holder.release(held)
    await waiting.result()
    await second.granted(behind)


@case(needs={"push", "ttl"}, shows=("E4",))
async def a_waiter_looks_again_when_the_holder_lapses(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    await holder.granted(holder.claim())
    waiter = other.waiter()
    waiting = t.spawn(_wait_for(other, waiter))
    await t.until(lambda: _in_line(holder, 1), "the waiter stands in line")
    await t.pass_time(1.1 * t.rig.ttl)
    await waiting.result()


@case(needs={"fair"}, shows=("E2", "E4"))
async def grants_follow_the_line(t: Trial) -> None:
    seats = [t.seat() for _ in range(5)]
    held, holder = await seats[0].takes(seats[0].claim()), seats[0]
    waiters = [(seat, seat.waiter()) for seat in seats[1:]]
    for place, (seat, waiter) in enumerate(waiters):
        assert (await seat.busy(waiter)).place == place
    while waiters:
        for seat, waiter in reversed(waiters):
            await seat.busy(waiter)
        await t.seat().busy(seats[0].claim())  # a newcomer is not let past the line, held or free
        await holder.release(held)
        await t.seat().busy(seats[0].claim())
        for seat, waiter in reversed(waiters[1:]):
            await seat.busy(waiter)
        (holder, held), *waiters = waiters
        await holder.granted(held)


@case(needs={"fair", "ttl"}, shows=("E7",), slow=True)
async def a_waiter_not_heard_of_loses_its_place(t: Trial) -> None:
    holder, silent, other = t.seat(), t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=4 * BEAT))
    lost, kept = silent.waiter(), other.waiter()
    assert (await silent.busy(lost)).place == 0
    assert (await other.busy(kept)).place == 1
    for _ in range(4):
        await t.pass_time(BEAT_EVERY - 1)
        assert isinstance((await other.renew(kept))[0], Alive), "a renewal keeps the place of a queued claim"
    assert (await other.busy(kept)).place == 0, "nobody else is left in line"
    await silent.gone(lost)
    await holder.release(held)
    await other.granted(kept)


@case(needs={"fair"}, shows=("E7",), slow=True)
async def a_renewal_keeps_a_place_and_grants_nothing(t: Trial) -> None:
    holder, other, third = t.seat(), t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=4 * BEAT))
    waiter, behind = other.waiter(), third.waiter()
    await other.busy(waiter)
    for _ in range(5):
        await t.pass_time(BEAT_EVERY)
        await third.busy(behind)
        alive = await other.alive(waiter)
        assert alive.place in (None, 0)
    await holder.release(held)
    await other.alive(waiter)
    assert not [h for h in await other.inspect() if h.state == "held"], "its turn came, but it has not claimed it"
    await other.granted(waiter)


@case(needs={"fair"}, shows=("E7",), slow=True)
async def one_passed_over_keeps_its_ticket(t: Trial) -> None:
    holder, silent, other, last = (t.seat() for _ in range(4))
    held = await holder.takes(holder.claim())
    first, second, third = silent.waiter(), other.waiter(ttl=2 * BEAT), last.waiter()
    for seat, waiter in ((silent, first), (other, second), (last, third)):
        await seat.busy(waiter)
    await holder.release(held)
    await t.pass_time(1.2 * RESERVATION)  # its turn, which it does not claim
    if isinstance(await other.attempt(second), Grant):  # engines that reserve pass it over
        assert (await silent.busy(first)).place == 0, "back at its old place"
        assert (await last.busy(third)).place == 1
        await other.release(second)
    await silent.granted(first)
    await silent.release(first)
    reserves = (await t.traits()).liveness == "ttl"  # else a turn not taken is over when the place lapses
    await t.until(lambda: _granted(last, third), "the last in line is served too", RESERVATION if reserves else BEAT)


@case(needs={"fair", "push", "ttl"}, rig={"kill"}, shows=("E4", "E7"))
async def one_that_cannot_be_told_comes_back_at_its_place(t: Trial) -> None:
    holder, deaf, other, last = (t.seat() for _ in range(4))
    held = await holder.takes(holder.claim())
    first, second, third = deaf.waiter(), other.waiter(), last.waiter()
    for seat, waiter in ((deaf, first), (other, second), (last, third)):
        await seat.busy(waiter)
    t.rig.kill_session(deaf)
    await holder.release(held)
    if isinstance(await other.attempt(second), Grant):  # passed over at once, unless it had connected anew by then
        assert (await deaf.busy(first)).place == 0
        await other.release(second)
    assert isinstance(await last.attempt(third), Busy)
    await deaf.granted(first)


@case(needs={"fair", "push", "session"}, rig={"kill"}, shows=("E4", "E7"))
async def a_place_ends_with_its_session(t: Trial) -> None:
    holder, dead, other = t.seat(), t.seat(), t.seat()
    held = await holder.takes(holder.claim(ttl=_LONG))
    first, second = dead.waiter(), other.waiter()
    assert (await dead.busy(first)).place == 0
    busy = await other.busy(second)
    assert busy.place == 1
    waiting = t.spawn(other.engine.wait(second, busy, _LONG))
    t.rig.kill_session(dead)
    await waiting.result()
    assert (await other.busy(second)).place == 0
    assert (await dead.busy(first)).place == 1, "it joins anew, at the end"
    await holder.release(held)
    await other.granted(second)


@case(needs={"fair", "push"}, shows=("E4", "E7"), slow=True)
async def a_silent_head_holds_up_nobody_for_long(t: Trial) -> None:
    holder, silent, other = t.seat(), t.seat(), t.seat()
    held, waiter = await holder.takes(holder.claim(ttl=_LONG)), other.waiter()
    await silent.busy(silent.waiter())
    waiting = t.spawn(_wait_for(other, waiter))
    await t.until(lambda: _in_line(holder, 2), "both stand in line")
    await holder.release(held)
    await t.pass_time(1.2 * RESERVATION)
    await waiting.result(0.0 if t.rig.can_travel else BEAT)  # engines that do not reserve: when its place lapses


async def _granted(seat: Seat, claim: Claim) -> bool:
    return isinstance(await seat.attempt(claim), Grant)


async def _wait_for(seat: Seat, waiter: Claim) -> None:
    """Ask and wait in turn until it is granted, as a recipe does, but never unprompted."""
    while True:
        try:
            reply = await seat.attempt(waiter)
        except Unavailable:
            continue  # the clock jumped in the midst of this call: its outcome is unknown, so it is asked again (E2)
        if isinstance(reply, Grant):
            return
        await seat.engine.wait(waiter, reply, _LONG)


async def _in_line(seat: Seat, count: int) -> bool:
    return sum(holding.state == "waiting" for holding in await seat.inspect()) == count
