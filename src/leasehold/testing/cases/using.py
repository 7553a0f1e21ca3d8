"""The promises as users meet them, through `Client` and `AsyncClient`: exclusion, the line, waiting, who holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest

from leasehold.config import REQUIREMENTS
from leasehold.errors import ConfigError, Mismatch, NotAcquired, Unsupported
from leasehold.testing.choosing import case
from leasehold.testing.faces import AnyLease, Caller
from leasehold.testing.trial import Trial

_LONG = 30.0


@case(shows=("E1",))
async def only_one_is_ever_inside(t: Trial) -> None:
    callers = [t.caller() for _ in range(2)]
    inside, tokens = [], []

    async def work(caller: Caller) -> None:
        for _ in range(5):
            async with caller.inside(caller.lock(wait=_LONG)) as lease:
                inside.append(lease)
                assert inside == [lease], "somebody else is inside"
                tokens.append(lease.token)
                await t.runtime.sleep(0.001)  # give the others their chance
                lease.check()
                inside.remove(lease)

    crowd = [t.spawn(work(caller)) for caller in callers * 4]
    for one in crowd:
        await one.result(_LONG)
    assert len(set(tokens)) == len(tokens) == 40
    if callers[0].traits.fencing:
        assert tokens == sorted(tokens)


@case(needs={"semaphore"}, shows=("E1",))
async def no_more_than_the_limit_are_inside(t: Trial) -> None:
    callers = [t.caller() for _ in range(2)]
    inside: list[AnyLease] = []
    most = []

    async def work(caller: Caller) -> None:
        for _ in range(5):
            async with caller.inside(caller.semaphore("pool", 3, wait=_LONG)) as lease:
                inside.append(lease)
                most.append(len(inside))
                await t.runtime.sleep(0.001)
                inside.remove(lease)

    crowd = [t.spawn(work(caller)) for caller in callers * 4]
    for one in crowd:
        await one.result(_LONG)
    assert max(most) <= 3


@case(needs={"fair"}, shows=("E2", "E4"))
async def waiters_are_served_in_the_order_they_came(t: Trial) -> None:
    callers = [t.caller() for _ in range(3)]
    lease = await callers[0].acquire()
    served: list[int] = []

    async def work(number: int, caller: Caller) -> None:
        async with caller.inside(caller.lock(wait=_LONG)):
            served.append(number)

    crowd = []
    for number in range(6):
        crowd.append(t.spawn(work(number, callers[number % 3])))
        await t.until(partial(_in_line, callers[0], number + 1), f"waiter {number} stands in line")
    await callers[0].release(lease)
    for one in crowd:
        await one.result(_LONG)
    assert served == [0, 1, 2, 3, 4, 5]


async def _in_line(caller: Caller, count: int) -> bool:
    return sum(holding.state == "waiting" for holding in await caller.inspect()) == count


@case(shows=("E1",))
async def without_a_wait_it_is_now_or_not_at_all(t: Trial) -> None:
    holder, other = t.caller(holder="web-3"), t.caller()
    lease = await holder.acquire(purpose="nightly report")
    began = time.monotonic()
    with pytest.raises(NotAcquired) as caught:
        await other.acquire(wait=0)
    assert time.monotonic() - began < 2.0
    error = caught.value
    assert (error.name, error.holder, error.purpose) == ("job", "web-3", "nightly report")
    assert error.token == lease.token
    assert error.pid
    assert error.host
    assert error.left is not None
    assert 0 < error.left <= t.rig.ttl
    for fact in ("web-3", "nightly report", str(lease.token)):
        assert fact in str(error)
    assert await other.try_acquire(other.lock()) is None
    assert await other.locked(other.lock())
    assert [holding.state for holding in await other.inspect()] == ["held"], "a try leaves nothing in line"
    assert await holder.release(lease)
    assert not await other.locked(other.lock())
    taken = await other.try_acquire(other.lock())
    assert taken is not None
    await other.release(taken)


@case(shows=("E4", "E6"))
async def a_wait_is_bounded_and_leaves_the_line(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    lease = await holder.acquire()
    for _ in range(2):  # the second time the client listens already, and queues at once
        began = time.monotonic()
        with pytest.raises(NotAcquired) as caught:
            await other.acquire(wait=0.3)
        assert 0.29 <= time.monotonic() - began < 0.3 + 1.5
        assert caught.value.waited >= 0.29
        await t.until(lambda: _in_line(holder, 0), "who gave up is out of line")
    lease.check()
    await holder.release(lease)


@case(shows=("E6",))
async def a_release_is_for_the_holder_and_once(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    first = await holder.acquire()
    assert await holder.release(first)
    second = await other.acquire(wait=_LONG)
    assert not await holder.release(first)
    await other.renew(second)
    assert second.held
    assert not first.held
    assert await other.release(second)


@case(shows=("E6",))
async def a_client_that_closes_leaves_nothing_of_those_who_acquire(t: Trial) -> None:
    watcher, closing = t.caller(), t.caller(call_timeout=t.patience)
    held = await watcher.acquire("held")
    granted: list[AnyLease] = []

    async def hammer(name: str) -> None:
        while True:
            lease = await closing.acquire(name)
            granted.append(lease)
            await closing.release(lease)
            await t.runtime.sleep(0.001)  # an engine may answer at once, and a loop serve nobody else

    crowd = [t.spawn(closing.acquire("held")) for _ in range(4)]
    crowd += [t.spawn(hammer(f"free-{number}")) for number in range(4)]  # type: ignore[arg-type]  # it never returns
    await t.until(lambda: _in_line(watcher, 4), "four stand in line")
    await t.until(lambda: len(granted) >= 4, "the others get their grants")
    await closing.close()
    states = [(holding.name, holding.state) for holding in await watcher.inspect()]
    assert states == [("held", "held")], "close() has waited for those who left"
    for one in crowd:
        with pytest.raises(ConfigError, match="closed"):
            await one.result()
    await watcher.release(held)


@case(needs={"fencing"}, shows=("E3",))
async def tokens_rise_from_client_to_client(t: Trial) -> None:
    tokens = []
    for _ in range(4):
        caller = t.caller()
        lease = await caller.acquire(wait=_LONG)
        tokens.append(lease.token)
        await caller.close()  # releases what it holds
    assert all(earlier < later for earlier, later in pairwise(tokens)), tokens


@case(needs={"shared"}, shows=("E1",))
async def readers_share_and_writers_do_not(t: Trial) -> None:
    one, other = t.caller(), t.caller()
    reading = [await caller.take(caller.read("doc", wait=_LONG)) for caller in (one, other)]
    assert await other.try_acquire(other.lock("doc")) is None, "a lock and the write side are the same"
    for caller, lease in zip((one, other), reading, strict=True):
        await caller.release(lease)
    writing = await one.take(one.write("doc", wait=_LONG))
    assert await other.try_acquire(other.read("doc")) is None
    await one.release(writing)


@case(needs={"semaphore"}, shows=("E1",))
async def a_name_in_use_as_another_kind_is_refused(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    async with holder.inside(holder.lock("pool")):
        for limit in (1, 2):
            with pytest.raises(Mismatch) as caught:
                await other.take(other.semaphore("pool", limit, wait=0))
            assert (caught.value.found, caught.value.wanted) == ("lock", f"semaphore of {limit}")
    async with holder.inside(holder.semaphore("pool", 2)):
        with pytest.raises(Mismatch):
            await other.take(other.semaphore("pool", 3, wait=0))
        with pytest.raises(Mismatch):
            await other.try_acquire(other.lock("pool"))
        async with other.inside(other.semaphore("pool", 2, wait=0)):
            pass


@case(needs={"slots", "semaphore"}, shows=("E1",))
async def a_lease_of_a_semaphore_knows_its_slot(t: Trial) -> None:
    caller = t.caller()
    leases = [await caller.take(caller.semaphore("pool", 2)) for _ in range(2)]
    assert sorted(lease.slot for lease in leases if lease.slot is not None) == [0, 1]
    assert await caller.try_acquire(caller.semaphore("pool", 2)) is None
    for lease in leases:
        await caller.release(lease)
    plain = await caller.acquire("plain")
    assert plain.slot is None
    await caller.release(plain)


@case(needs={"outlives"}, shows=("E6",))
async def min_hold_and_delay_as_asked_for_by_a_lock(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    began = holder.now()
    async with holder.inside(holder.lock(min_hold=t.rig.ttl)):
        pass
    if holder.now() < began + t.rig.ttl:
        assert [holding.state for holding in await other.inspect()] == ["cooling"]
    await t.pass_time(1.1 * t.rig.ttl)
    async with other.inside(other.lock(wait=_LONG, delay=t.rig.ttl)):
        pass
    lease = await holder.acquire(wait=_LONG)  # a clean release leaves no delay
    await holder.release(lease)


@case(shows=("E1",))
async def what_an_engine_does_not_promise_is_refused_when_a_lock_is_built(t: Trial) -> None:
    caller = t.caller()
    await caller.ping()
    traits = caller.traits
    shapes: dict[str, Callable[[], object]] = {
        "shared": lambda: caller.read("doc"),
        "outlives": lambda: caller.lock(delay=1.0),
    }
    for word, promised in REQUIREMENTS.items():
        _builds_if(promised(traits), partial(caller.lock, require={word}), word, t)
        if word in shapes:
            _builds_if(promised(traits), shapes[word], word, t)
    if traits.max_limit is not None:
        _builds_if(False, partial(caller.semaphore, "pool", traits.max_limit + 1), "a limit above max_limit", t)


def _builds_if(promised: bool, build: Callable[[], object], word: str, t: Trial) -> None:
    if promised:
        build()
        return
    with pytest.raises(Unsupported) as caught:
        build()
    assert caught.value.engine == t.rig.scheme, word
