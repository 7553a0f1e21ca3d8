"""The first calls of a new client may be concurrent: it connects, creates its tables and starts its threads only once
they come. Every public call that asks the engine or the store is the first call of a new client, twenty times at once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from leasehold import AsyncLease
from leasehold.runtime.base import maybe_await, run_sync
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from leasehold.testing.conformance.unified_client import UnifiedClient
from tests.support.bursts import CALLERS, failures, in_tasks, in_threads

# The user of MySQL's rig may not create tables, and Redlock and lock servers keep no records.
WITHOUT_STORE = ["mysql", "redlock", "http-redis-pair"]
KEEP_RECORDS = ["memory", "sqlite", "postgresql", "redis", "redis-sentinel", "redis-cluster", "etcd", "zookeeper"]
ENGINES = [*KEEP_RECORDS, *WITHOUT_STORE]

_MOVES = {"new": {"paid"}}

Call = Callable[[UnifiedClient, str, str | None], Coroutine[Any, Any, object]]  # of a client, with a name and a store


# Every engine in the second tier: each test makes a new client for every call.
FIRST_TIER = ("memory", "sqlite", "redis")


@pytest.fixture(
    params=[pytest.param(name, marks=() if name in FIRST_TIER else pytest.mark.extended) for name in ENGINES]
)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    found = rig_or_skip(rig_type(request.param))
    yield found
    found.close()


@pytest.fixture
def store(rig: Rig, tmp_path) -> str | None:
    """For `store=`: None where the client of the rig can keep records at its own URL."""
    return f"sqlite://{tmp_path}/records.db" if rig.scheme in (*WITHOUT_STORE, "http") else None


# ------------------------------------------------------------------- the calls


async def acquire(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.release(await client.acquire(name, ttl=60))


async def acquire_one_name(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.release(await client.acquire("hot", ttl=60))


async def acquire_required(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.release(await client.acquire(name, ttl=60, require={"push"}))


async def try_acquire(client: UnifiedClient, name: str, store: str | None) -> bool:
    lease = await client.try_acquire(client.lock(name, ttl=60))
    return lease is not None and await client.release(lease)


async def semaphore(client: UnifiedClient, name: str, store: str | None) -> bool:
    if client.traits.max_limit == 1:
        return True
    return await client.release(await client.acquire_lock(client.semaphore("permits", 3, ttl=60)))


async def read_and_write(client: UnifiedClient, name: str, store: str | None) -> bool:
    if not client.traits.shared:
        return True
    lock = client.write("rw", ttl=60) if name.endswith("7") else client.read("rw", ttl=60)
    return await client.release(await client.acquire_lock(lock))


async def multilock(client: UnifiedClient, name: str, store: str | None) -> bool:
    async with client.hold_all(client.multilock([name, "shared"], ttl=60)) as leases:
        return leases.held


async def any_of(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.release(await client.acquire_lock(client.any_of(["shared", name], ttl=60)))


async def election(client: UnifiedClient, name: str, store: str | None) -> bool:
    candidate = client.election(name, ttl=60)
    await client.campaign(candidate)
    return await client.resign(candidate)


async def leader(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.leader(client.election(name)) is None


async def with_lock(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.with_lock(name, lambda: True))


async def locked(client: UnifiedClient, name: str, store: str | None) -> bool:
    return not await client.locked(client.lock(name))


async def once(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.once(name, lambda: True, store=store))


async def once_for_one_key(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.once("one", lambda: True, store=store))


async def outcome(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.outcome(name, store=store)) is None


async def status_get(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.status(name, _MOVES, "new", store=store).get()) == "new"


async def status_move(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await maybe_await(client.client.status(name, _MOVES, "new", store=store).move("paid")) == "new"


async def status_and_acquire(client: UnifiedClient, name: str, store: str | None) -> bool:
    """The calls of the first half are at the store when those of the second half ask the engine."""
    return await (status_get if int(name) < CALLERS // 2 else acquire)(client, name, store)


async def schedule(client: UnifiedClient, name: str, store: str | None) -> bool:
    due = client.client.schedule(name, 3600, missed="last", store=store).run_due(lambda: None)
    return isinstance(await maybe_await(due), list)


async def inspect(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.inspect() == []


async def deadlocks(client: UnifiedClient, name: str, store: str | None) -> bool:
    return not client.traits.fair or await client.deadlocks() == []


async def break_lock(client: UnifiedClient, name: str, store: str | None) -> bool:
    return not await client.break_lock(name, token=1)


async def set_limit(client: UnifiedClient, name: str, store: str | None) -> bool:
    if client.traits.resizable:
        await client.set_limit(name, 3)
        await client.set_limit(name, None)
    return True


async def ping(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.ping() >= 0


async def close(client: UnifiedClient, name: str, store: str | None) -> bool:
    return await client.close() is None


CALLS: tuple[Call, ...] = (
    acquire,
    acquire_one_name,
    acquire_required,
    try_acquire,
    semaphore,
    read_and_write,
    multilock,
    any_of,
    election,
    leader,
    with_lock,
    locked,
    once,
    once_for_one_key,
    outcome,
    status_get,
    status_move,
    status_and_acquire,
    schedule,
    inspect,
    deadlocks,
    break_lock,
    set_limit,
    ping,
    close,
)


# ------------------------------------------------------------------- the tests


@pytest.fixture
def namespace() -> Callable[[], str]:
    return lambda: f"test-{os.urandom(6).hex()}"


def test_first_calls_of_twenty_threads_succeed(rig, store, namespace) -> None:
    failed = {}
    for call in CALLS:
        with rig.client(namespace=namespace(), call_timeout=30) as client:
            unified = UnifiedClient(client)
            results = in_threads(lambda number: run_sync(call(unified, str(number), store)))  # noqa: B023
            failed[call.__name__] = failures(results)
    assert {name: found for name, found in failed.items() if found} == {}


def test_first_calls_of_twenty_tasks_succeed(rig, store, namespace) -> None:
    failed = {}

    async def make_calls(call: Call) -> None:
        async with rig.async_client(namespace=namespace(), call_timeout=30) as client:
            unified = UnifiedClient(client)
            failed[call.__name__] = failures(await in_tasks(lambda number: call(unified, str(number), store)))

    for call in CALLS:
        asyncio.run(make_calls(call))
    assert {name: found for name, found in failed.items() if found} == {}


def test_leases_can_be_released_first_in_the_next_loop(rig, namespace) -> None:
    """The releases find the connections of a loop that is closed, and the lock that is acquired meanwhile new ones."""
    client = rig.async_client(namespace=namespace(), call_timeout=30)

    async def acquire_all() -> list[AsyncLease]:
        return await asyncio.gather(*(client.lock(f"{number}", ttl=60).acquire() for number in range(CALLERS - 1)))

    async def release_all(leases: list[AsyncLease]) -> None:
        async def release(number: int) -> bool:
            if number < len(leases):
                return await leases[number].release()
            return await (await client.lock("other", ttl=60).acquire()).release()

        failed = failures(await in_tasks(release))
        holdings = await client.inspect()
        await client.close()
        assert (failed, holdings) == ({}, [])

    asyncio.run(release_all(asyncio.run(acquire_all())))
