"""Every call's request and answer lost, repeated and delayed, one after the other.

Nobody is granted twice, and nothing is left once what is owed has been answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import pytest

from leasehold.errors import NotAcquired, Unavailable
from leasehold.testing.choosing import case
from leasehold.testing.faces import Caller
from leasehold.testing.faulty import (
    Fault,
    Faults,
    cannot_tell,
    delay,
    drop_answer,
    drop_request,
    duplicate,
    each_call,
)
from leasehold.testing.trial import Trial

_LONG: Final = 30.0


async def _nothing_left(caller: Caller) -> bool:
    return not await caller.inspect()


async def _scenario(t: Trial, subject: Caller, other: Caller) -> None:
    """Take a free name, be refused a held one, wait for it, renew, break, and give all up; whatever fails, go on."""
    with suppress(Unavailable):
        lease = await subject.acquire("free", wait=0, ttl=_LONG)
        try:
            await subject.renew(lease)
        finally:
            await subject.release(lease)
    theirs = await other.acquire("taken", ttl=_LONG)
    with pytest.raises((NotAcquired, Unavailable)):
        await subject.acquire("taken", wait=0, ttl=_LONG)
    waiting = t.spawn(subject.acquire("taken", wait=_LONG, ttl=_LONG))
    await t.until(lambda: _settled_in_line(waiting.done, other), "the waiter stands in line, or was not answered")
    theirs.check()
    await other.release(theirs)
    with suppress(Unavailable):
        mine = await waiting.result()
        assert mine.token > theirs.token or not subject.traits.fencing
        assert await other.try_acquire(other.lock("taken")) is None, "granted twice"
        try:
            await subject.inspect()
            await subject.break_lock("taken", mine.token)
        finally:
            await subject.release(mine)


async def _settled_in_line(done: Callable[[], bool], caller: Caller) -> bool:
    return done() or any(h.state == "waiting" for h in await caller.inspect("taken"))


async def _each_call_of_it(t: Trial, fault: Fault) -> None:
    for number, faults in enumerate(each_call(fault)):
        space = f"{t.namespace}-{number}"
        subject, other = t.caller(faults, namespace=space), t.caller(namespace=space)
        await _scenario(t, subject, other)
        await t.until(partial(_nothing_left, other), f"nothing is left after {faults.struck}")
        await subject.close()
        await other.close()
    assert number >= 8, f"the scenario makes only {number} calls"


@case(shows=("E2", "E6"))
async def the_answer_of_any_call_may_be_lost(t: Trial) -> None:
    await _each_call_of_it(t, drop_answer)


@case(shows=("E2", "E6"))
async def the_request_of_any_call_may_be_lost(t: Trial) -> None:
    await _each_call_of_it(t, drop_request)


@case(shows=("E2", "E6"))
async def any_call_may_arrive_twice(t: Trial) -> None:
    await _each_call_of_it(t, duplicate)


@case(shows=("E2",))
async def any_answer_may_be_late(t: Trial) -> None:
    await _each_call_of_it(t, delay(answer=0.05))


@case(shows=("E5",))
async def a_renewal_that_cannot_tell_puts_at_risk_and_no_more(t: Trial) -> None:
    faults = Faults()
    caller = t.caller(faults)
    lease = await caller.acquire(ttl=_LONG)
    faults.next("renew", cannot_tell, drop_answer)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await caller.renew(lease)
        assert lease.state == "AT_RISK"
        lease.check()
    await caller.renew(lease)
    assert lease.state == "HELD"
    assert await caller.release(lease)


@case(shows=("E6",))
async def an_owed_release_is_repeated_until_answered(t: Trial) -> None:
    faults = Faults()
    caller, other = t.caller(faults), t.caller()
    lease = await caller.acquire(ttl=_LONG)
    faults.next("release", *[drop_request] * 3)
    assert not await caller.release(lease), "not confirmed"
    await t.until(lambda: _nothing_left(other), "the release is repeated")
    assert [verb for verb, _ in faults.struck] == ["release"] * 3


@case(shows=("E6",))
async def giving_up_costs_no_second_deadline(t: Trial) -> None:
    faults = Faults()
    caller, other = t.caller(faults), t.caller()
    faults.next("attempt", drop_answer)
    faults.next("forget", drop_request)  # the release could not be sent at once: it is owed
    with pytest.raises(Unavailable):
        await caller.acquire(ttl=_LONG, wait=0)
    await t.until(lambda: _nothing_left(other), "the grant nobody was told of is given back")


@case(needs={"push"}, shows=("E4",))
async def a_wake_up_for_nothing_lets_nobody_in(t: Trial) -> None:
    faults = Faults()
    caller, other = t.caller(faults), t.caller()
    theirs = await other.acquire(ttl=_LONG)
    faults.always("wait", drop_answer)  # woken for nothing
    waiting = t.spawn(caller.acquire(wait=_LONG))
    await t.until(lambda: len(faults.calls) > 20, "it asks again and again, and is let in by none of it")
    assert not waiting.done()
    faults.clear()
    await other.release(theirs)
    lease = await waiting.result()
    assert await caller.release(lease)
