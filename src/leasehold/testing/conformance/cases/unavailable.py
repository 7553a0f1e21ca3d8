"""E5 and E9: an engine that does not answer. Every verb raises Unavailable by its deadline; no verb guesses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import pytest

from leasehold.errors import Unavailable
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.engine_driver import EngineDriver

_DEADLINE: Final = 0.15
_GRACE: Final = 0.5  # what a call may take beyond its deadline, on every engine


async def _every_verb_is_unavailable(driver: EngineDriver) -> None:
    claim, held = driver.claim(), driver.claim("held")._replace(token=7)

    def deadline() -> float:
        return driver.now() + _DEADLINE

    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "attempt": lambda: driver.engine.attempt(claim, deadline()),
        "queued attempt": lambda: driver.engine.attempt(driver.waiter(), deadline()),
        "release": lambda: driver.engine.release(claim, deadline()),
        "break_": lambda: driver.engine.break_(claim.namespace, claim.name, 7, deadline()),
        "inspect": lambda: driver.engine.inspect(claim.namespace, "", False, deadline()),
        "ping": lambda: driver.engine.ping(deadline()),
    }
    for verb, call in calls.items():
        await driver.context.assert_unavailable(call, _DEADLINE + _GRACE, verb)

    async def renew() -> None:
        replies = await driver.engine.renew([held, claim], deadline())
        assert [type(reply) for reply in replies] == [Unavailable, Unavailable], "the state of the claims is unknown"
        raise replies[0]  # type: ignore[misc]

    await driver.context.assert_unavailable(renew, _DEADLINE + _GRACE, "renew")


@case(rig={"cut"}, shows=("E5", "E9"))
async def engine_calls_end_unavailable_in_time_when_cut_off(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    await driver.engine.ping(driver.deadline())
    t.rig.cut(driver)
    await _every_verb_is_unavailable(driver)
    await other.granted(other.claim("elsewhere"))
    t.rig.restore(driver)
    await t.until(lambda: _is_answered(driver), "the client reconnects automatically")


@case(rig={"cut"}, shows=("E5", "E9"))
async def engine_calls_end_unavailable_in_time_when_never_connected(t: CaseContext) -> None:
    driver = t.driver()
    t.rig.cut(driver)
    await _every_verb_is_unavailable(driver)


@case(rig={"pause"}, shows=("E5", "E9"))
async def engine_calls_end_unavailable_in_time_when_paused(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    held = await other.acquire(other.claim("kept", ttl=60.0))
    t.rig.pause()
    await _every_verb_is_unavailable(driver)
    t.rig.resume()
    await t.until(lambda: _is_answered(driver), "the engine continues")
    await other.alive(held)


@case(rig={"pause"}, shows=("E6",))
async def attempt_sent_to_paused_engine_is_ended_by_release(t: CaseContext) -> None:
    driver, other = t.driver(), t.driver()
    claim = driver.claim(ttl=60.0)
    t.rig.pause()
    with pytest.raises(Unavailable):
        await driver.engine.attempt(claim, driver.now() + 0.1)
    t.rig.resume()
    await t.until(lambda: _is_answered(driver), "the engine continues")
    await driver.release(claim)  # whether or not it had been granted
    await other.granted(other.claim())


@case(needs={"ttl"}, rig={"cut"}, shows=("E1",))
async def cut_off_holder_expires_and_is_gone_when_reconnected(t: CaseContext) -> None:
    holder, other = t.driver(), t.driver()
    held = await holder.acquire(holder.claim())
    t.rig.cut(holder)
    await other.granted_within(other.claim(), 1.1 * t.rig.ttl)
    t.rig.restore(holder)
    await t.until(lambda: _is_answered(holder), "the client reconnects automatically")
    await holder.gone(held)


async def _is_answered(driver: EngineDriver) -> bool:
    try:
        await driver.engine.ping(driver.deadline())
    except Unavailable:
        return False
    return True
