"""Recipes over several names or several candidates: multilock, deadlocks, election, as users meet them."""

from __future__ import annotations

from itertools import permutations

import pytest

from leasehold.core.timing import LINGER
from leasehold.errors import LeaseLost, NotAcquired
from leasehold.testing.choosing import case
from leasehold.testing.faces import Caller
from leasehold.testing.trial import Trial

_LONG = 30.0


@case(shows=("E1", "E6"))
async def several_names_are_taken_all_or_none(t: Trial) -> None:
    holder, other, look = t.caller(), t.caller(), t.caller()
    held = await holder.acquire("b")
    for wait in (0, 0.3):
        with pytest.raises(NotAcquired) as caught:
            async with other.inside_all(other.multilock(["c", "a", "b"], wait=wait)):
                pytest.fail("it began without all of them")
        assert caught.value.name == "b"
        await t.until(lambda: _names(look, {"b"}), "what was taken before is given back")
    await holder.release(held)
    async with other.inside_all(other.multilock(["c", "a", "b"])) as leases:
        assert await _names(look, {"a", "b", "c"})
        assert list(leases) == ["c", "a", "b"]
        assert leases.held
        leases.check()
    await t.until(lambda: _names(look, set()), "all of them are given back")


async def _names(caller: Caller, expected: set[str]) -> bool:
    return {holding.name for holding in await caller.inspect()} == expected


@case(shows=("E1", "E4"))
async def sets_of_names_in_any_order_come_to_no_deadlock(t: Trial) -> None:
    callers = [t.caller() for _ in range(2)]
    inside: dict[str, int] = {}
    orders = [order[:2] for order in permutations("abc")]

    async def eat(number: int, names: tuple[str, ...]) -> None:
        caller = callers[number % 2]
        for _ in range(3):
            async with caller.inside_all(caller.multilock(names, wait=_LONG)):
                for name in names:
                    assert inside.setdefault(name, number) == number, f"two have {name}"
                await t.runtime.sleep(0.001)
                for name in names:
                    del inside[name]

    crowd = [t.spawn(eat(number, names)) for number, names in enumerate(orders)]
    for one in crowd:
        await one.result(_LONG)


@case(shows=("E1", "E6"))
async def the_loss_of_one_is_the_loss_of_all(t: Trial) -> None:
    caller, operator = t.caller(), t.caller()

    async def work() -> None:
        async with caller.inside_all(caller.multilock(["a", "b"])) as leases:
            await operator.break_lock("b", leases["b"].token)
            await t.until(lambda: not leases.held, "the loss is told", t.rig.ttl)
            assert leases["a"].held

    with pytest.raises(LeaseLost) as caught:
        await work()
    assert caught.value.name == "b"
    await t.until(lambda: _names(operator, set()), "the other one is given back")


@case(needs={"fair"}, shows=("E4",))
async def a_circle_of_waiters_is_named_with_its_way_out(t: Trial) -> None:
    callers = [t.caller() for _ in range(3)]
    look = t.caller()
    ready: list[str] = []

    async def both(number: int) -> None:
        caller, first, second = callers[number], "abc"[number], "abc"[(number + 1) % 3]
        try:
            async with caller.inside(caller.lock(first, wait=_LONG)):
                ready.append(first)
                await t.until(lambda: len(ready) == 3, "all have their first")
                async with caller.inside(caller.lock(second, wait=_LONG)):
                    pass
        except LeaseLost:
            return

    async def named() -> bool:
        return bool(await look.deadlocks())

    crowd = [t.spawn(both(number)) for number in range(3)]
    await t.until(named, "the circle is named")
    (deadlock,) = await look.deadlocks()
    assert {wait.name for wait in deadlock.waits} == {"a", "b", "c"}
    assert len({wait.waiter.owner for wait in deadlock.waits}) == 3
    assert deadlock.victim.token is not None
    assert await look.break_lock(deadlock.victim.name, deadlock.victim.token)
    for one in crowd:
        await one.result(_LONG)
    assert await look.deadlocks() == []


@case(needs={"fair"}, shows=("E4",))
async def whoever_merely_waits_is_in_no_circle(t: Trial) -> None:
    holder, other = t.caller(), t.caller()
    held = await holder.acquire("a")

    async def chain() -> None:
        async with other.inside(other.lock("b")), other.inside(other.lock("a", wait=_LONG)):
            pass

    async def wait_for_b() -> None:
        async with other.inside(other.lock("b", wait=_LONG)):
            pass

    async def waiting(count: int) -> bool:
        return sum(holding.state == "waiting" for holding in await holder.inspect()) == count

    crowd = [t.spawn(chain())]
    await t.until(lambda: waiting(1), "the first waits")
    crowd.append(t.spawn(wait_for_b()))  # by the same client: another thread or task is another owner
    await t.until(lambda: waiting(2), "the second waits")
    assert await holder.deadlocks() == []
    await holder.release(held)
    for one in crowd:
        await one.result(_LONG)


@case(needs={"fencing", "outlives"}, shows=("E3", "E6"))
async def an_observer_sees_every_term_once_and_in_order(t: Trial) -> None:
    callers, look = [t.caller(holder=f"candidate {number}") for number in range(2)], t.caller()
    elections = [caller.election("boss") for caller in callers]
    led: list[tuple[int, str]] = []

    async def lead() -> None:
        for number in (0, 1, 1):  # each for no longer than it takes to say so
            term = await callers[number].campaign(elections[number])
            led.append((term.token, term.holder))
            leader = await look.leader(look.election("boss"))
            assert leader is not None
            assert (leader.token, leader.holder.label) == led[-1]
            assert await callers[number].resign(elections[number])

    leading = t.spawn(lead())
    in_view = max(LINGER, (await t.traits()).min_ttl)  # an engine keeps nothing for less than that
    seen = await look.observed(look.election("boss"), 4 * in_view)
    await leading.result(_LONG)
    tokens = [term.token for term in seen]
    assert tokens == sorted(set(tokens))
    if not any(term.missed for term in seen):  # a machine too busy to look says so
        assert [(term.token, term.holder.label) for term in seen] == led[: len(seen)]
        assert len(seen) == 3


@case(needs={"fencing"}, shows=("E1", "E3"))
async def a_leader_that_is_broken_is_followed(t: Trial) -> None:
    first, second, operator = t.caller(), t.caller(), t.caller()
    term = await first.campaign(first.election("boss"))
    candidate = second.election("boss")
    following = t.spawn(second.campaign(candidate))
    assert await operator.break_lock("boss", term.token)
    after = await following.result(_LONG)
    assert after.token > term.token
    await t.until(lambda: not term.held, "the first is told", t.rig.ttl)
    assert await second.resign(candidate)
