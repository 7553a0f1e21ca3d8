"""Any one of a pool of names, as users see it: which name is granted, and that no other queue keeps a claim."""

from __future__ import annotations

import pytest

from leasehold.errors import NotAcquired, SelfDeadlock
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import UnifiedClient

_LONG = 30.0


@case(shows=("E1", "E6"))
async def any_of_grants_each_free_name_once(t: CaseContext) -> None:
    client, other = t.client(), t.client()
    pool = client.any_of(["a", "b"])
    async with client.hold(pool) as first, client.hold(pool) as second:
        assert {first.name, second.name} == {"a", "b"}
        with pytest.raises(SelfDeadlock):
            await client.acquire_lock(pool)
        assert await other.try_acquire(other.any_of(["a", "b"])) is None
        for wait in (0, 0.3):
            with pytest.raises(NotAcquired) as caught:
                await other.acquire_lock(other.any_of(["a", "b"]), wait)
            assert {refusal.name for refusal in caught.value.refusals} == {"a", "b"}
        await t.until(lambda: _claims(other, ["a held", "b held"]), "all queues are left when the wait is over")
    await t.until(lambda: _claims(other, []), "both are released")


@case(shows=("E4", "E6"))
async def any_of_waits_for_all_names_and_leaves_the_others(t: CaseContext) -> None:
    holder, client = t.client(), t.client()
    for freed, kept in ("ab", "ba"):
        leases = {name: await holder.acquire(name) for name in "ab"}
        waiting = t.spawn(client.acquire_lock(client.any_of(["a", "b"])))
        if (await t.traits()).fair:
            queued = sorted(["a held", "a waiting", "b held", "b waiting"])
            await t.until(lambda queued=queued: _claims(holder, queued), "it waits in both queues")  # type: ignore[misc]
        await holder.release(leases[freed])
        lease = await waiting.result(_LONG)
        assert lease.name == freed
        await t.until(lambda: _claims(holder, ["a held", "b held"]), "the other queue is left")
        await client.release(lease)
        await holder.release(leases[kept])


@case(needs={"fair"}, shows=("E4", "E6"))
async def any_of_has_its_position_in_each_queue(t: CaseContext) -> None:
    holder, pooled, behind = t.client(), t.client(), t.client()
    leases = {name: await holder.acquire(name) for name in "ab"}
    waiting = t.spawn(pooled.acquire_lock(pooled.any_of(["a", "b"])))
    queued = ["a held", "a waiting", "b held", "b waiting"]
    await t.until(lambda: _claims(holder, queued), "it waits in both queues")
    next_in_line = [t.spawn(behind.acquire(name)) for name in "ab"]
    await t.until(lambda: _claims(holder, sorted([*queued, "a waiting", "b waiting"])), "one waits behind it in each")
    await holder.release(leases["b"])
    lease = await waiting.result(_LONG)
    assert lease.name == "b", "it came first"
    assert not next_in_line[0].done()
    assert not next_in_line[1].done()
    await holder.release(leases["a"])
    first = await next_in_line[0].result(_LONG)  # no claim of the pool is ahead of it any more
    await pooled.release(lease)
    second = await next_in_line[1].result(_LONG)
    for each in (first, second):
        await behind.release(each)


async def _claims(client: UnifiedClient, expected: list[str]) -> bool:
    return sorted(f"{holding.name} {holding.state}" for holding in await client.inspect()) == expected
