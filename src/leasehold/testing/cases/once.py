"""What `once` makes of an engine's locks: one runner at a time, a dead one followed, a late one refused.

The store is one of memory: these cases are about the engine. Stores have tests of their own.
"""

from __future__ import annotations

import pytest

from leasehold.errors import LeaseLost, StaleToken
from leasehold.stores.memory import MemoryStore
from leasehold.testing.choosing import case
from leasehold.testing.faces import Caller
from leasehold.testing.trial import Trial


@case(shows=("E1",))
async def of_all_who_call_once_one_runs(t: Trial) -> None:
    callers, store, ran = [t.caller() for _ in range(3)], MemoryStore(t.runtime), []

    async def work() -> int:
        ran.append(1)
        await t.runtime.sleep(0.01)  # give the others their chance
        return len(ran)

    crowd = [t.spawn(caller.once("order", work, store=store)) for caller in callers * 3]
    assert [await one.result(30.0) for one in crowd] == [1] * 9
    assert ran == [1]


@case(shows=("E1", "E6"))
async def a_run_that_failed_is_run_again_by_the_next(t: Trial) -> None:
    callers, store, ran = [t.caller() for _ in range(3)], MemoryStore(t.runtime), []

    async def work() -> str:
        ran.append(1)
        if len(ran) < 3:
            raise ValueError("not yet")
        return "at last"

    async def patiently(caller: Caller) -> object:
        while True:
            try:
                return await caller.once("order", work, store=store)
            except ValueError:
                continue

    crowd = [t.spawn(patiently(caller)) for caller in callers]
    assert [await one.result(30.0) for one in crowd] == ["at last"] * 3
    assert len(ran) == 3


@case(rig={"cut"}, shows=("E1", "E8"))
async def a_runner_cut_off_is_followed_and_its_result_refused(t: Trial) -> None:
    first, second, store = t.caller(call_timeout=t.rig.short_call), t.caller(), MemoryStore(t.runtime)
    inside, followed = [False], [False]

    async def slow() -> str:
        inside[0] = True
        await t.until(lambda: followed[0], "somebody else has taken over", 30.0 + t.rig.ttl)
        return "late"

    async def quick() -> str:
        return "second"

    late = t.spawn(first.once("order", slow, store=store))
    await t.until(lambda: inside[0], "the first runs it")
    t.rig.cut(first.client)
    successor = t.spawn(second.once("order", quick, store=store))
    await t.pass_time(t.rig.ttl)
    assert await successor.result(30.0 + t.rig.ttl) == "second"
    followed[0] = True
    with pytest.raises((StaleToken, LeaseLost)):  # LeaseLost where losing the lease ends the body
        await late.result(30.0)
    assert await second.once("order", slow, store=store) == "second"
