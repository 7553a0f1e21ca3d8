"""`once` on an engine's locks: one runner at a time, a dead runner is replaced, a late result is refused.

The store is in memory because these cases test the engine. Stores have their own tests.
"""

from __future__ import annotations

import pytest

from leasehold.errors import LeaseLost, StaleToken, Unavailable
from leasehold.records.stores.memory import MemoryStore
from leasehold.testing.conformance.case import case
from leasehold.testing.conformance.context import CaseContext
from leasehold.testing.conformance.unified_client import UnifiedClient


@case(shows=("E1",))
async def concurrent_once_calls_run_the_function_once(t: CaseContext) -> None:
    clients, store, ran = [t.client() for _ in range(3)], MemoryStore(t.runtime), []

    async def work() -> int:
        ran.append(1)
        await t.runtime.sleep(0.01)  # let the other tasks run
        return len(ran)

    tasks = [t.spawn(client.once("order", work, store=store)) for client in clients * 3]
    assert [await task.result(30.0) for task in tasks] == [1] * 9
    assert ran == [1]


@case(shows=("E1", "E6"))
async def failed_once_run_is_repeated_by_next_caller(t: CaseContext) -> None:
    clients, store, ran = [t.client() for _ in range(3)], MemoryStore(t.runtime), []

    async def work() -> str:
        ran.append(1)
        if len(ran) < 3:
            raise ValueError("not yet")
        return "at last"

    async def retry(client: UnifiedClient) -> object:
        while True:
            try:
                return await client.once("order", work, store=store)
            except ValueError:
                continue

    tasks = [t.spawn(retry(client)) for client in clients]
    assert [await task.result(30.0) for task in tasks] == ["at last"] * 3
    assert len(ran) == 3


@case(rig={"cut"}, shows=("E1", "E8"))
async def cut_off_once_runner_is_replaced_and_its_result_refused(t: CaseContext) -> None:
    first, second, store = t.client(call_timeout=t.rig.short_call), t.client(), MemoryStore(t.runtime)
    is_running, is_replaced = [False], [False]

    async def slow() -> str:
        is_running[0] = True
        await t.until(lambda: is_replaced[0], "another runner has taken over", 30.0 + t.rig.ttl)
        return "late"

    async def quick() -> str:
        return "second"

    async def run_first() -> object:
        while True:
            try:
                return await first.once("order", slow, store=store)
            except Unavailable:  # before it runs: on a busy machine calls may take longer than the short call_timeout
                if is_running[0]:
                    raise

    late = t.spawn(run_first())
    await t.until(lambda: is_running[0], "the first runner has started")
    t.rig.cut(first.client)
    successor = t.spawn(second.once("order", quick, store=store))
    await t.pass_time(t.rig.ttl)
    assert await successor.result(30.0 + t.rig.ttl) == "second"
    is_replaced[0] = True
    with pytest.raises((StaleToken, LeaseLost)):  # LeaseLost if losing the lease cancels the function
        await late.result(30.0)
    assert await second.once("order", slow, store=store) == "second"
