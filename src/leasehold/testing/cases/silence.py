"""E5 and E9: an engine that does not answer. No verb guesses, none outlasts its deadline, none raises anything else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from leasehold.errors import Unavailable
from leasehold.testing.choosing import case
from leasehold.testing.seat import Seat
from leasehold.testing.trial import Trial

_DEADLINE: Final = 0.15
_GRACE: Final = 0.5  # what a call may take beyond its deadline, on every engine


async def _every_verb_is_unavailable(seat: Seat) -> None:
    claim, held = seat.claim(), seat.claim("held")._replace(token=7)

    def by() -> float:
        return seat.now() + _DEADLINE

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "attempt": lambda: seat.engine.attempt(claim, by()),
        "queued attempt": lambda: seat.engine.attempt(seat.waiter(), by()),
        "release": lambda: seat.engine.release(claim, by()),
        "break_": lambda: seat.engine.break_(claim.namespace, claim.name, 7, by()),
        "inspect": lambda: seat.engine.inspect(claim.namespace, "", False, by()),
        "ping": lambda: seat.engine.ping(by()),
    }
    for verb, call in calls.items():
        await seat.trial.unavailable(call, _DEADLINE + _GRACE, verb)

    async def renew() -> None:
        replies = await seat.engine.renew([held, claim], by())
        assert [type(reply) for reply in replies] == [Unavailable, Unavailable], "it cannot tell"
        raise replies[0]  # type: ignore[misc]

    await seat.trial.unavailable(renew, _DEADLINE + _GRACE, "renew")


@case(rig={"cut"}, shows=("E5", "E9"))
async def a_client_cut_off_is_told_unavailable_in_time(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    await seat.engine.ping(seat.deadline())
    t.rig.cut(seat)
    await _every_verb_is_unavailable(seat)
    await other.granted(other.claim("elsewhere"))
    t.rig.mend(seat)
    await t.until(lambda: _answered(seat), "the client finds back by itself")


@case(rig={"cut"}, shows=("E5", "E9"))
async def a_client_that_never_reached_the_engine_is_told_unavailable_in_time(t: Trial) -> None:
    seat = t.seat()
    t.rig.cut(seat)
    await _every_verb_is_unavailable(seat)


@case(rig={"pause"}, shows=("E5", "E9"))
async def a_paused_engine_is_unavailable_in_time(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    held = await other.takes(other.claim("kept", ttl=60.0))
    t.rig.pause()
    await _every_verb_is_unavailable(seat)
    t.rig.resume()
    await t.until(lambda: _answered(seat), "the engine goes on")
    await other.alive(held)


@case(rig={"pause"}, shows=("E6",))
async def what_was_sent_to_a_paused_engine_is_ended_by_a_release(t: Trial) -> None:
    seat, other = t.seat(), t.seat()
    claim = seat.claim(ttl=60.0)
    t.rig.pause()
    with pytest.raises(Unavailable):
        await seat.engine.attempt(claim, seat.now() + 0.1)
    t.rig.resume()
    await t.until(lambda: _answered(seat), "the engine goes on")
    await seat.release(claim)  # whether or not it had been granted
    await other.granted(other.claim())


@case(needs={"ttl"}, rig={"cut"}, shows=("E1",))
async def a_holder_cut_off_lapses_and_finds_itself_gone(t: Trial) -> None:
    holder, other = t.seat(), t.seat()
    held = await holder.takes(holder.claim())
    t.rig.cut(holder)
    await other.granted_within(other.claim(), 1.1 * t.rig.ttl)
    t.rig.mend(holder)
    await t.until(lambda: _answered(holder), "the client finds back by itself")
    await holder.gone(held)


async def _answered(seat: Seat) -> bool:
    try:
        await seat.engine.ping(seat.deadline())
    except Unavailable:
        return False
    return True
