"""Concurrency beyond ../test_concurrency.py: the leases at etcd, and the queue of a semaphore."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest

from leasehold import AsyncClient


@pytest.mark.parametrize("shape", ["lock", "read", "semaphore", "delayed"])
def test_cancelled_acquire_leaves_no_claim_and_no_lease(url, member, shape, claims) -> None:
    rng = random.Random(5)
    leases_before = member.leases()

    async def main() -> None:
        async with AsyncClient(url, ttl=5) as client, AsyncClient(url) as other:
            locks = {
                "lock": client.lock("job"),
                "read": client.rwlock("job").read(),
                "semaphore": client.semaphore("job", 2),
                "delayed": client.lock("job", delay=20),
            }
            held = None
            for round_number in range(100):
                if round_number % 10 == 5 and held is None and shape != "semaphore":
                    held = await other.lock("job").acquire()
                if round_number % 10 == 9 and held is not None:
                    held = await held.release() and None
                task = asyncio.create_task(locks[shape].acquire())
                await asyncio.sleep(rng.random() * 0.004)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).release()
            end = time.monotonic() + 20
            while await client.inspect():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert claims() == {}
    assert (
        len(member.leases() - leases_before) <= 5
    )  # unconfirmed leases are revoked; if that is not confirmed, they expire


def test_semaphore_serves_waiters_in_order_and_fills_all_permits(url) -> None:
    inside, max_inside, order = [0], [0], []

    async def main() -> None:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            held = [await one.semaphore("pool", 3).acquire() for _ in range(3)]

            async def work(number: int, client: AsyncClient) -> None:
                async with client.semaphore("pool", 3):
                    order.append(number)
                    inside[0] += 1
                    max_inside[0] = max(max_inside[0], inside[0])
                    end = time.monotonic() + 20
                    while max_inside[0] < 3 and time.monotonic() < end:  # gives the others time to acquire
                        await asyncio.sleep(0.001)
                    inside[0] -= 1

            tasks = []
            for number in range(30):
                tasks.append(asyncio.create_task(work(number, (one, two)[number % 2])))
                while len(await two.inspect("pool")) < number + 4:
                    await asyncio.sleep(0.001)
            for lease in held:
                await lease.release()
            await asyncio.wait_for(asyncio.gather(*tasks), 60)

    asyncio.run(main())
    assert max_inside[0] == 3
    assert all(abs(position - number) < 3 for position, number in enumerate(order)), order
