"""Real usage of the asyncio API, for `mypy --strict`; never run. See `usage.py`."""

import asyncio
from datetime import datetime
from typing import assert_type

import leasehold
from leasehold import AsyncClient, AsyncLease, AsyncLock, Holding, LeaseState, Outcome, optimistic_async, versioned


async def create_clients() -> None:
    async with AsyncClient("memory://", namespace="shop", ttl=10) as client:
        assert_type(client, AsyncClient)
        assert_type(await client.ping(), float)
        await client.connect()
    client = AsyncClient()
    await client.close()

    client.close()  # type: ignore[unused-coroutine]
    with AsyncClient("memory://"):  # type: ignore[attr-defined]
        pass
    AsyncClient("memory://", "shop")  # type: ignore[call-arg]  # options are keyword-only


async def acquire_lock(client: AsyncClient) -> None:
    async with client.lock("orders/42", ttl=30, wait=5) as lease:
        assert_type(lease, AsyncLease)
    lock = client.lock("orders/42")
    assert_type(lock, AsyncLock)
    assert_type(await lock.acquire(), AsyncLease)
    assert_type(await lock.acquire(wait=0), AsyncLease)
    assert_type(await lock.try_acquire(), AsyncLease | None)
    assert_type(await lock.locked(), bool)
    async with asyncio.timeout(1), lock, client.semaphore("scanners", 2) as permit:
        assert_type(permit.slot, int | None)
    settings = client.rwlock("settings")
    async with settings.read() as reader, settings.write(wait=1):
        assert_type(reader, AsyncLease)

    client.lock("orders/42", timeout=3)  # type: ignore[call-arg]
    client.lock("orders/42", 30)  # type: ignore[call-arg]
    lock.acquire()  # type: ignore[unused-coroutine]
    lock.as_threading()  # type: ignore[attr-defined]
    (await lock.try_acquire()).check()  # type: ignore[union-attr]  # may be None
    with lock:  # type: ignore[attr-defined]
        pass


async def use_lease(lease: AsyncLease) -> None:
    assert_type(lease.token, int)
    assert_type(lease.guaranteed, bool)
    assert_type(lease.state, LeaseState)
    assert_type(lease.remaining, float)
    lease.check()
    await lease.verify()
    await lease.renew(60)
    await lease.ensure("60s")
    assert_type(await lease.hand_over(), str)
    lease.on_at_risk(lambda lease: print(lease.remaining))
    assert_type(await lease.release(), bool)
    assert_type(await lease.wait_lost(1), bool)
    lease.on_lost(lambda lost: print(assert_type(lost, AsyncLease).lost_reason))

    lease.release()  # type: ignore[unused-coroutine]
    await lease.check()  # type: ignore[func-returns-value, misc]  # nothing to await: it asks nobody


async def inspect_locks(client: AsyncClient) -> None:
    holdings = await client.inspect("orders/")
    assert_type(holdings, list[Holding])
    assert_type(await client.break_lock("orders/42", token=7), bool)


# ------------------------------------------------------------------ functions under a lock


async def fetch(item: str) -> int:
    return len(item)


async def fetch_with(item: str, lease: AsyncLease) -> int:
    return lease.token


def count(item: str) -> int:
    return len(item)


async def call_under_lock(client: AsyncClient) -> None:
    assert_type(await client.with_lock("stock", count, "teapot"), int)
    assert_type(await client.with_lock("stock", fetch, "teapot"), int)
    assert_type(await client.with_lock("stock", fetch_with, item="teapot"), int)
    assert_type(await client.lock("stock", wait=1).call(fetch, "teapot"), int)


async def decorate_functions(client: AsyncClient) -> None:
    @client.locked("stock/{item}", on_busy="skip")
    async def skipping(item: str) -> int:
        return len(item)

    assert_type(await skipping("teapot"), int | None)

    @client.locked("stock/{item}", wait=5)
    def waiting(item: str) -> int:
        return len(item)

    assert_type(await waiting("teapot"), int)
    await waiting(42)  # type: ignore[arg-type]

    @client.locked("stock/{item}")
    async def with_lease(lease: AsyncLease, item: str) -> int:
        return lease.token + len(item)

    assert_type(await with_lease("teapot"), int)
    assert_type(asyncio.create_task(with_lease("teapot")), asyncio.Task[int])
    with_lease("teapot")  # type: ignore[unused-coroutine]
    await with_lease("teapot", lease=None)  # type: ignore[call-arg]


async def use_multilock_and_election(client: AsyncClient, blocking: leasehold.Client) -> None:
    async with client.multilock(["a", "b"], wait=5) as leases:
        assert_type(leases, leasehold.AsyncLeases)
        assert_type(leases["a"], AsyncLease)
    assert_type(await (await client.multilock(["a"]).acquire()).release(), bool)
    async with client.any_of(["gpu0", "gpu1"]) as one:
        assert_type(one, AsyncLease)
    election = client.election("scheduler")
    async with election.lead() as term:
        assert_type(term, AsyncLease)
    async for seen in election.observe(seconds=5):
        assert_type(seen, leasehold.Term)

    async def start(term: AsyncLease) -> None:
        await term.verify()

    await election.serve(start, lambda term: None)
    assert_type(await election.leader(), leasehold.Term | None)
    assert_type(await client.deadlocks(), list[leasehold.Deadlock])
    leasehold.MultiLock([client.lock("a")])  # type: ignore[list-item]
    leasehold.AsyncMultiLock([blocking.lock("a")])  # type: ignore[list-item]


async def mix_blocking_and_async(client: AsyncClient, blocking: leasehold.Client) -> None:
    blocking_lease: leasehold.Lease = await client.lock("a").acquire()  # type: ignore[assignment]
    async_lease: AsyncLease = blocking.lock("a").acquire()  # type: ignore[assignment]
    print(blocking_lease, async_lease)


# -------------------------------------------------------------------------- records


async def charge(amount: int) -> str:
    return str(amount)


def blocking_charge(amount: int) -> int:
    return amount


async def use_records(client: AsyncClient) -> None:
    assert_type(await client.once("order-42", charge, 10), str)
    assert_type(await client.once("order-42", blocking_charge, 10, keep=5), int)

    decorated = client.once_per("order-{amount}")(charge)
    assert_type(await decorated(10), str)
    assert_type(await client.outcome("order-42"), Outcome | None)
    assert_type(await client.schedule("cleanup", 60).run_due(charge), list[datetime])
    assert_type(await client.status("order-42", {"new": {"paid"}}, "new").move("paid"), str)
    assert_type(await optimistic_async(charge, 10), str)
    assert_type(await optimistic_async(blocking_charge, 10, attempts=3), int)
    stock = versioned.AsyncValue(client, "stock")

    async def sell(left: bytes | None) -> str:
        return str(int(left or 5) - 1)

    assert_type(await stock.update(sell), versioned.Versioned)
    assert_type((await stock.write("5", "")).version, str)
