"""Many at once, as far as ../test_crowds.py does not show it: leases of etcd's, and a line for permits."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest

from leasehold import AsyncClient


@pytest.mark.parametrize("shape", ["lock", "read", "semaphore", "delayed"])
def test_cancelled_at_any_moment_nothing_stays(url, member, shape, claims) -> None:
    dice = random.Random(5)
    there = member.leases()

    async def main() -> None:
        async with AsyncClient(url, ttl=5) as client, AsyncClient(url) as other:
            locks = {
                "lock": client.lock("job"),
                "read": client.rwlock("job").read(),
                "semaphore": client.semaphore("job", 2),
                "delayed": client.lock("job", delay=20),
            }
            held = None
            for turn in range(100):
                if turn % 10 == 5 and held is None and shape != "semaphore":
                    held = await other.lock("job").acquire()
                if turn % 10 == 9 and held is not None:
                    held = await held.release() and None
                task = asyncio.create_task(locks[shape].acquire())
                await asyncio.sleep(dice.random() * 0.004)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await (await task).release()
            end = time.monotonic() + 20
            while await client.inspect():
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert claims() == {}
    assert len(member.leases() - there) <= 5  # what was in doubt is revoked; where that was not heard, it lapses


def test_a_semaphore_is_fair_and_full(url) -> None:
    inside, most, order = [0], [0], []

    async def main() -> None:
        async with AsyncClient(url) as one, AsyncClient(url) as two:
            held = [await one.semaphore("pool", 3).acquire() for _ in range(3)]

            async def work(number: int, client: AsyncClient) -> None:
                async with client.semaphore("pool", 3):
                    order.append(number)
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    end = time.monotonic() + 20
                    while most[0] < 3 and time.monotonic() < end:  # the others have time to come in
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
    assert most[0] == 3
    assert all(abs(place - number) < 3 for place, number in enumerate(order)), order
