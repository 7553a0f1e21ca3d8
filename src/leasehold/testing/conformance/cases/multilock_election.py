"""Several names or several candidates, as users see them: multilock, deadlocks, election."""

from __future__ import annotations

from itertools import permutations

import pytest

from leasehold.core.timing import TERM_VISIBLE
from leasehold.errors import Deadlocked, LeaseLost, NotAcquired
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import UnifiedClient

_LONG = 30.0


@case(shows=("E1", "E6"))
async def multilock_acquires_all_names_or_none(t: CaseContext) -> None:
    holder, other, observer = t.client(), t.client(), t.client()
    held = await holder.acquire("b")
    for wait in (0, 0.3):
        with pytest.raises(NotAcquired) as caught:
            async with other.hold_all(other.multilock(["c", "a", "b"], wait=wait)):
                pytest.fail("the body ran without all locks")
        assert caught.value.name == "b"
        await t.until(lambda: _has_names(observer, {"b"}), "the locks acquired before are released")
    await holder.release(held)
    async with other.hold_all(other.multilock(["c", "a", "b"])) as leases:
        assert await _has_names(observer, {"a", "b", "c"})
        assert list(leases) == ["c", "a", "b"]
        assert leases.held
        leases.check()
    await t.until(lambda: _has_names(observer, set()), "all locks are released")


async def _has_names(client: UnifiedClient, expected: set[str]) -> bool:
    return {holding.name for holding in await client.inspect()} == expected


@case(shows=("E1", "E4"))
async def multilocks_in_any_order_do_not_deadlock(t: CaseContext) -> None:
    clients = [t.client() for _ in range(2)]
    inside: dict[str, int] = {}
    orders = [order[:2] for order in permutations("abc")]

    async def acquire_both(number: int, names: tuple[str, ...]) -> None:
        client = clients[number % 2]
        for _ in range(3):
            async with client.hold_all(client.multilock(names, wait=_LONG)):
                for name in names:
                    assert inside.setdefault(name, number) == number, f"{name} has two holders"
                await t.runtime.sleep(0.001)
                for name in names:
                    del inside[name]

    tasks = [t.spawn(acquire_both(number, names)) for number, names in enumerate(orders)]
    for task in tasks:
        await task.result(_LONG)


@case(shows=("E1", "E6"), expires=True)
async def multilock_is_lost_when_one_lease_is_lost(t: CaseContext) -> None:
    client, operator = t.client(), t.client()

    async def work() -> None:
        async with client.hold_all(client.multilock(["a", "b"])) as leases:
            await operator.break_lock("b", leases["b"].token)
            await t.until(lambda: not leases.held, "the multilock is lost", t.rig.ttl)
            assert leases["a"].held

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "b"
    await t.until(lambda: _has_names(operator, set()), "the other lock is released")


@case(needs={"fair"}, shows=("E4", "E6"))
async def deadlock_is_raised_in_one_of_its_waiters(t: CaseContext) -> None:
    clients = [t.client() for _ in range(2)]
    ready: list[str] = []
    raised: list[Deadlocked] = []

    async def acquire_both(number: int) -> None:
        client, first, second = clients[number], "ab"[number], "ba"[number]
        try:
            async with client.hold(client.lock(first, wait=_LONG)):
                ready.append(first)
                await t.until(lambda: len(ready) == 2, "each task holds its first lock")
                async with client.hold(client.lock(second, wait=_LONG, on_deadlock="raise")):
                    pass
        except Deadlocked as deadlocked:
            raised.append(deadlocked)

    for task in [t.spawn(acquire_both(number)) for number in range(2)]:
        await task.result(_LONG)
    (deadlocked,) = raised
    assert set(deadlocked.names) == {"a", "b"}
    await t.until(lambda: _has_names(clients[0], set()), "no claim is left")


@case(needs={"fair"}, shows=("E4",))
async def deadlock_is_reported_with_its_victim(t: CaseContext) -> None:
    clients = [t.client() for _ in range(3)]
    observer = t.client()
    ready: list[str] = []

    async def acquire_both(number: int) -> None:
        client, first, second = clients[number], "abc"[number], "abc"[(number + 1) % 3]
        try:
            async with client.hold(client.lock(first, wait=_LONG)):
                ready.append(first)
                await t.until(lambda: len(ready) == 3, "each task holds its first lock")
                async with client.hold(client.lock(second, wait=_LONG)):
                    pass
        except LeaseLost:
            return

    async def deadlock_reported() -> bool:
        return bool(await observer.deadlocks())

    tasks = [t.spawn(acquire_both(number)) for number in range(3)]
    await t.until(deadlock_reported, "the deadlock is reported")
    (deadlock,) = await observer.deadlocks()
    assert {wait.name for wait in deadlock.waits} == {"a", "b", "c"}
    assert len({wait.waiter.owner for wait in deadlock.waits}) == 3
    assert deadlock.victim.token is not None
    assert await observer.break_lock(deadlock.victim.name, deadlock.victim.token)
    for task in tasks:
        await task.result(_LONG)
    assert await observer.deadlocks() == []


@case(needs={"fair"}, shows=("E4",))
async def chain_of_waiters_is_not_reported_as_deadlock(t: CaseContext) -> None:
    holder, other = t.client(), t.client()
    held = await holder.acquire("a")

    async def hold_b_and_wait_for_a() -> None:
        async with other.hold(other.lock("b")), other.hold(other.lock("a", wait=_LONG)):
            pass

    async def wait_for_b() -> None:
        async with other.hold(other.lock("b", wait=_LONG)):
            pass

    async def has_waiters(count: int) -> bool:
        return sum(holding.state == "waiting" for holding in await holder.inspect()) == count

    tasks = [t.spawn(hold_b_and_wait_for_a())]
    await t.until(lambda: has_waiters(1), "the first waits")
    tasks.append(t.spawn(wait_for_b()))  # the same client, but another thread or task, and thus another owner
    await t.until(lambda: has_waiters(2), "the second waits")
    assert await holder.deadlocks() == []
    await holder.release(held)
    for task in tasks:
        await task.result(_LONG)


@case(needs={"fencing", "outlives"}, shows=("E3", "E6"))
async def election_observer_sees_each_term_once_in_order(t: CaseContext) -> None:
    clients, observer = [t.client(holder=f"candidate {number}") for number in range(2)], t.client()
    elections = [client.election("boss") for client in clients]
    led: list[tuple[int, str]] = []

    async def lead() -> None:
        for number in (0, 1, 1):  # each leads only for a moment
            term = await clients[number].campaign(elections[number])
            led.append((term.token, term.holder))
            leader = await observer.leader(observer.election("boss"))
            assert leader is not None
            assert (leader.token, leader.holder.label) == led[-1]
            assert await clients[number].resign(elections[number])

    leading = t.spawn(lead())
    in_view = max(TERM_VISIBLE, (await t.traits()).min_ttl)  # an engine keeps no grant for less
    seen = await observer.observe(observer.election("boss"), 4 * in_view)
    await leading.result(_LONG)
    tokens = [term.token for term in seen]
    assert tokens == sorted(set(tokens))
    if not any(term.missed for term in seen):  # on a busy machine the observer may miss terms, and says so
        assert [(term.token, term.holder.label) for term in seen] == led[: len(seen)]
        assert len(seen) == 3


@case(needs={"fencing"}, shows=("E1", "E3"), expires=True)
async def broken_leader_is_succeeded_by_next_candidate(t: CaseContext) -> None:
    first, second, operator = t.client(), t.client(), t.client()
    term = await first.campaign(first.election("boss"))
    candidate = second.election("boss")
    following = t.spawn(second.campaign(candidate))
    assert await operator.break_lock("boss", term.token)
    after = await following.result(_LONG)
    assert after.token > term.token
    await t.until(lambda: not term.held, "the first leader has lost its term", t.rig.ttl)
    assert await second.resign(candidate)
