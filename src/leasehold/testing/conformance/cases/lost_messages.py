"""The request or the answer of every call lost, repeated or delayed, one call at a time.

No name is granted twice, and nothing is left behind once the pending releases are confirmed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import pytest

from leasehold.errors import NotAcquired, Unavailable
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import UnifiedClient
from leasehold.testing.faulty import Fault, Faults, cannot_tell, delay, drop_answer, drop_request, duplicate, each_call

_LONG: Final = 30.0


async def _has_no_holdings(client: UnifiedClient) -> bool:
    return not await client.inspect()


async def _scenario(t: CaseContext, subject: UnifiedClient, other: UnifiedClient) -> None:
    """Acquire a free name, be refused a held one, wait for it, renew, break, release all; continue after failures."""
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
    await t.until(lambda: _is_done_or_queued(waiting.done, other), "the waiter is queued, or has failed")
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


async def _is_done_or_queued(done: Callable[[], bool], client: UnifiedClient) -> bool:
    return done() or any(h.state == "waiting" for h in await client.inspect("taken"))


async def _run_with_each_call_faulty(t: CaseContext, fault: Fault) -> None:
    for number, faults in enumerate(each_call(fault)):
        space = f"{t.namespace}-{number}"
        subject, other = t.client(faults, namespace=space), t.client(namespace=space)
        await _scenario(t, subject, other)
        await t.until(partial(_has_no_holdings, other), f"nothing is left after {faults.struck}")
        await subject.close()
        await other.close()
    assert number >= 7, f"the scenario makes only {number} calls"  # 7 if the first attempt that queues is granted late


@case(shows=("E2", "E6"))
async def any_call_tolerates_a_lost_answer(t: CaseContext) -> None:
    await _run_with_each_call_faulty(t, drop_answer)


@case(shows=("E2", "E6"))
async def any_call_tolerates_a_lost_request(t: CaseContext) -> None:
    await _run_with_each_call_faulty(t, drop_request)


@case(shows=("E2", "E6"))
async def any_call_tolerates_a_duplicated_request(t: CaseContext) -> None:
    await _run_with_each_call_faulty(t, duplicate)


@case(shows=("E2",))
async def any_call_tolerates_a_late_answer(t: CaseContext) -> None:
    await _run_with_each_call_faulty(t, delay(answer=0.05))


@case(shows=("E5",))
async def unanswered_renewal_puts_lease_at_risk_not_lost(t: CaseContext) -> None:
    faults = Faults()
    client = t.client(faults)
    lease = await client.acquire(ttl=_LONG)
    faults.next("renew", cannot_tell, drop_answer)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await client.renew(lease)
        assert lease.state == "AT_RISK"
        lease.check()
    await client.renew(lease)
    assert lease.state == "HELD"
    assert await client.release(lease)


@case(shows=("E6",))
async def pending_release_is_retried_until_confirmed(t: CaseContext) -> None:
    faults = Faults()
    client, other = t.client(faults), t.client()
    lease = await client.acquire(ttl=_LONG)
    faults.next("release", *[drop_request] * 3)
    assert not await client.release(lease), "not confirmed"
    await t.until(lambda: _has_no_holdings(other), "the release is retried")
    assert [verb for verb, _ in faults.struck] == ["release"] * 3


@case(shows=("E6",))
async def unanswered_attempt_is_released_in_the_background(t: CaseContext) -> None:
    faults = Faults()
    client, other = t.client(faults), t.client()
    faults.next("attempt", drop_answer)
    faults.next("forget", drop_request)  # the release cannot be sent at once and becomes pending
    with pytest.raises(Unavailable):
        await client.acquire(ttl=_LONG, wait=0)
    await t.until(lambda: _has_no_holdings(other), "the grant whose answer was lost is released")


@case(needs={"push"}, shows=("E4",))
async def spurious_wakeup_grants_nothing(t: CaseContext) -> None:
    faults = Faults()
    client, other = t.client(faults), t.client()
    theirs = await other.acquire(ttl=_LONG)
    faults.always("wait", drop_answer)  # spurious wake-ups
    waiting = t.spawn(client.acquire(wait=_LONG))
    await t.until(lambda: len(faults.calls) > 20, "the waiter retries again and again")
    assert not waiting.done()
    faults.clear()
    await other.release(theirs)
    lease = await waiting.result()
    assert await client.release(lease)
