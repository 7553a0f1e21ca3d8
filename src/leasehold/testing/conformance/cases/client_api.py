"""The promises as users see them, through `Client` and `AsyncClient`: exclusion, queueing, waiting, who holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from leasehold.config import REQUIREMENTS
from leasehold.errors import ConfigError, LeaseLost, Mismatch, NotAcquired, Unsupported
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import AnyLease, UnifiedClient

_LONG = 30.0


@case(shows=("E1",))
async def lock_has_at_most_one_holder(t: CaseContext) -> None:
    clients = [t.client() for _ in range(2)]
    holders, tokens = [], []

    async def work(client: UnifiedClient) -> None:
        for _ in range(5):
            async with client.hold(client.lock(wait=_LONG)) as lease:
                holders.append(lease)
                assert holders == [lease], "the lock has another holder too"
                tokens.append(lease.token)
                await t.runtime.sleep(0.001)  # let the other workers run
                lease.check()
                holders.remove(lease)

    tasks = [t.spawn(work(client)) for client in clients * 4]
    for task in tasks:
        await task.result(_LONG)
    assert len(set(tokens)) == len(tokens) == 40
    if clients[0].traits.fencing:
        assert tokens == sorted(tokens)


@case(needs={"semaphore"}, shows=("E1",))
async def semaphore_has_at_most_limit_holders(t: CaseContext) -> None:
    clients = [t.client() for _ in range(2)]
    holders: list[AnyLease] = []
    holder_counts = []

    async def work(client: UnifiedClient) -> None:
        for _ in range(5):
            async with client.hold(client.semaphore("pool", 3, wait=_LONG)) as lease:
                holders.append(lease)
                holder_counts.append(len(holders))
                await t.runtime.sleep(0.001)
                holders.remove(lease)

    tasks = [t.spawn(work(client)) for client in clients * 4]
    for task in tasks:
        await task.result(_LONG)
    assert max(holder_counts) <= 3


@case(needs={"fair"}, shows=("E2", "E4"))
async def waiters_are_granted_in_arrival_order(t: CaseContext) -> None:
    clients = [t.client() for _ in range(3)]
    lease = await clients[0].acquire()
    served: list[int] = []

    async def work(number: int, client: UnifiedClient) -> None:
        async with client.hold(client.lock(wait=_LONG)):
            served.append(number)

    tasks = []
    for number in range(6):
        tasks.append(t.spawn(work(number, clients[number % 3])))
        await t.until(partial(_has_waiters, clients[0], number + 1), f"waiter {number} is queued")
    await clients[0].release(lease)
    for task in tasks:
        await task.result(_LONG)
    assert served == [0, 1, 2, 3, 4, 5]


async def _has_waiters(client: UnifiedClient, count: int) -> bool:
    return sum(holding.state == "waiting" for holding in await client.inspect()) == count


@case(shows=("E1",))
async def acquire_without_wait_fails_at_once_naming_the_holder(t: CaseContext) -> None:
    holder, other = t.client(holder="web-3"), t.client()
    lease = await holder.acquire(purpose="nightly report")
    began = time.monotonic()
    with pytest.raises(NotAcquired) as caught:
        await other.acquire(wait=0)
    assert time.monotonic() - began < t.timeout
    error = caught.value
    assert (error.name, error.holder, error.purpose) == ("job", "web-3", "nightly report")
    assert error.token == lease.token
    assert error.pid
    assert error.host
    assert error.left is not None
    assert 0 < error.left <= t.ttl
    for fact in ("web-3", "nightly report", str(lease.token)):
        assert fact in str(error)
    assert await other.try_acquire(other.lock()) is None
    assert await other.locked(other.lock())
    assert [holding.state for holding in await other.inspect()] == ["held"], "a try leaves no waiter behind"
    assert await holder.release(lease)
    assert not await other.locked(other.lock())
    taken = await other.try_acquire(other.lock())
    assert taken is not None
    await other.release(taken)


@case(shows=("E4", "E6"))
async def acquire_gives_up_at_its_wait_and_leaves_the_queue(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    lease = await holder.acquire()
    for _ in range(2):  # the second time the client is already listening and queues at once
        began = time.monotonic()
        with pytest.raises(NotAcquired) as caught:
            await other.acquire(wait=0.3)
        assert 0.29 <= time.monotonic() - began < 0.3 + t.timeout
        assert caught.value.waited >= 0.29
        await t.until(lambda: _has_waiters(holder, 0), "the waiter that gave up has left the queue")
    lease.check()
    await holder.release(lease)


@case(shows=("E8",))
async def ensured_lease_lasts_and_ends_no_earlier(t: CaseContext) -> None:
    """Where grants last as long as their session, no longer life is promised."""
    client = t.client()
    lease = await client.acquire(ttl=t.rig.ttl)
    before = lease.remaining
    if client.traits.liveness == "session":
        with pytest.raises(ConfigError, match="at a time"):
            await client.ensure(lease, 3600.0)
    else:
        await client.ensure(lease, 3600.0)
        assert lease.remaining > 3590.0
        holdings = await client.inspect("job", exact=True)
        assert holdings[0].left > 3590.0
    assert lease.held
    await client.ensure(lease, 0.1 * before)
    assert await client.release(lease)


@case(needs={"outlives"}, shows=("E5", "E6", "E8"))
async def handed_over_lease_is_taken_over_once(t: CaseContext) -> None:
    first, second, third = t.client(), t.client(), t.client()
    lease = await first.acquire(ttl=_LONG, require={"outlives"})
    text = await first.hand_over(lease)
    assert not lease.held
    await first.close()
    assert await third.try_acquire(third.lock()) is None, "the name stays held in between"
    taken = await second.take_over(text)
    assert (taken.token, taken.held) == (lease.token, True)
    with pytest.raises(LeaseLost) as caught:
        await third.take_over(text)
    assert caught.value.reason == "taken_over"
    await second.renew(taken)
    assert await second.release(taken)
    assert not await third.inspect()


@case(needs={"outlives"}, shows=("E6",))
async def handed_over_lease_has_one_holder_of_two_at_once(t: CaseContext) -> None:
    first, others = t.client(), [t.client(), t.client()]
    text = await first.hand_over(await first.acquire(ttl=_LONG, require={"outlives"}))
    takes = [t.spawn(other.take_over(text)) for other in others]
    leases = []
    for take in takes:
        try:
            leases.append(await take.result())
        except LeaseLost:
            continue
    assert len(leases) == 1


@case(shows=("E6",))
async def lease_is_released_once_and_only_by_its_holder(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    first = await holder.acquire()
    assert await holder.release(first)
    second = await other.acquire(wait=_LONG)
    assert not await holder.release(first)
    await other.renew(second)
    assert second.held
    assert not first.held
    assert await other.release(second)


@case(shows=("E6",))
async def closing_client_withdraws_its_pending_acquires(t: CaseContext) -> None:
    watcher, closing = t.client(), t.client(call_timeout=t.timeout)
    held = await watcher.acquire("held")
    granted: list[AnyLease] = []

    async def hammer(name: str) -> None:
        while True:
            lease = await closing.acquire(name)
            granted.append(lease)
            await closing.release(lease)
            await t.runtime.sleep(0.001)  # if the engine answers at once, this loop would starve the other tasks

    tasks = [t.spawn(closing.acquire("held")) for _ in range(4)]
    tasks += [t.spawn(hammer(f"free-{number}")) for number in range(4)]  # type: ignore[arg-type]  # it never returns
    await t.until(lambda: _has_waiters(watcher, 4), "four waiters are queued")
    await t.until(lambda: len(granted) >= 4, "the other tasks get their grants")
    await closing.close()
    states = [(holding.name, holding.state) for holding in await watcher.inspect()]
    assert states == [("held", "held")], "close() has waited until every waiter left the queue"
    for task in tasks:
        with pytest.raises(ConfigError, match="closed"):
            await task.result()
    await watcher.release(held)


@case(needs={"fencing"}, shows=("E3",))
async def tokens_rise_across_clients(t: CaseContext) -> None:
    tokens = []
    for _ in range(4):
        client = t.client()
        lease = await client.acquire(wait=_LONG)
        tokens.append(lease.token)
        await client.close()  # releases what it holds
    assert all(earlier < later for earlier, later in pairwise(tokens)), tokens


@case(needs={"shared"}, shows=("E1",))
async def readers_share_and_writers_do_not(t: CaseContext) -> None:
    one, other = t.client(), t.client()
    reading = [await client.acquire_lock(client.read("doc", wait=_LONG)) for client in (one, other)]
    assert await other.try_acquire(other.lock("doc")) is None, "a lock of the same name counts as a writer"
    for client, lease in zip((one, other), reading, strict=True):
        await client.release(lease)
    writing = await one.acquire_lock(one.write("doc", wait=_LONG))
    assert await other.try_acquire(other.read("doc")) is None
    await one.release(writing)


@case(needs={"semaphore"}, shows=("E1",))
async def name_in_use_as_another_kind_is_refused(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    async with holder.hold(holder.lock("pool")):
        for limit in (1, 2):
            with pytest.raises(Mismatch) as caught:
                await other.acquire_lock(other.semaphore("pool", limit, wait=0))
            assert (caught.value.found, caught.value.wanted) == ("lock", f"semaphore of {limit}")
    async with holder.hold(holder.semaphore("pool", 2)):
        with pytest.raises(Mismatch):
            await other.acquire_lock(other.semaphore("pool", 3, wait=0))
        with pytest.raises(Mismatch):
            await other.try_acquire(other.lock("pool"))
        async with other.hold(other.semaphore("pool", 2, wait=0)):
            pass


@case(needs={"slots", "semaphore"}, shows=("E1",))
async def semaphore_lease_knows_its_slot(t: CaseContext) -> None:
    client = t.client()
    leases = [await client.acquire_lock(client.semaphore("pool", 2)) for _ in range(2)]
    assert sorted(lease.slot for lease in leases if lease.slot is not None) == [0, 1]
    assert await client.try_acquire(client.semaphore("pool", 2)) is None
    for lease in leases:
        await client.release(lease)
    plain = await client.acquire("plain")
    assert plain.slot is None
    await client.release(plain)


@case(needs={"outlives"}, shows=("E6",))
async def lock_options_min_hold_and_delay_are_honoured(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    began = holder.now()
    async with holder.hold(holder.lock(min_hold=t.rig.ttl)):
        pass
    if holder.now() < began + t.rig.ttl:
        assert [holding.state for holding in await other.inspect()] == ["cooling"]
    await t.pass_time(1.1 * t.rig.ttl)
    async with other.hold(other.lock(wait=_LONG, delay=t.rig.ttl)):
        pass
    lease = await holder.acquire(wait=_LONG)  # a clean release leaves no delay
    await holder.release(lease)


@case(shows=("E1",))
async def unsupported_requirement_is_refused_when_lock_is_built(t: CaseContext) -> None:
    client = t.client()
    await client.ping()
    traits = client.traits
    shapes: dict[str, Callable[[], object]] = {
        "shared": lambda: client.read("doc"),
        "outlives": lambda: client.lock(delay=1.0),
    }
    for requirement, promised in REQUIREMENTS.items():
        _builds_if(promised(traits), partial(client.lock, require={requirement}), requirement, t)
        if requirement in shapes:
            _builds_if(promised(traits), shapes[requirement], requirement, t)
    if not traits.resizable:
        with pytest.raises(Unsupported) as caught:
            await client.set_limit("pool", 2)
        assert "resizable" in caught.value.missing
    if traits.max_limit is not None:
        _builds_if(False, partial(client.semaphore, "pool", traits.max_limit + 1), "a limit above max_limit", t)


def _builds_if(promised: bool, build: Callable[[], object], requirement: str, t: CaseContext) -> None:
    if promised:
        build()
        return
    with pytest.raises(Unsupported) as caught:
        build()
    assert caught.value.engine == t.rig.scheme, requirement
