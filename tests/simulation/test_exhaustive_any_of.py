"""`any_of`, with every await cancelled and every message lost: one holder of a name, and no claim left in any queue."""

from __future__ import annotations

import pytest

from leasehold import AsyncClient, AsyncLease, LeaseholdError
from leasehold.runtime.simulated import Process
from leasehold.testing.exhaustive import Scenario, awaits_with_messages, every_await_cancelled, every_message_lost

TTL = 4.0


class Pool(Scenario):
    """Three workers share two names, by `with` and by `acquire`."""

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.inside: dict[str, str] = {}
        self.served = 0
        super().__init__(lose, cancel)

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        pool = (
            client.any_of(["a", "b"], ttl=TTL, wait=20) if number else client.any_of(["b", "a"], ttl=TTL, min_hold=0.1)
        )
        for lock in (pool, client.any_of(["a", "b"], ttl=TTL, wait=0.2), client.any_of(["a", "b"], ttl=TTL, wait=0)):
            try:
                async with lock as lease:
                    await self._body(process, lease)
            except LeaseholdError:
                continue
            self.served += 1
        try:
            lease = await pool.acquire()
        except LeaseholdError:
            return
        try:
            await self._body(process, lease)
        finally:
            await lease.release()
        self.served += 1

    async def _body(self, process: Process, lease: AsyncLease) -> None:
        assert lease.name not in self.inside, "two holders"
        self.inside[lease.name] = process.name
        try:
            await process.sleep(0.3)
        finally:
            del self.inside[lease.name]


def test_pool_without_faults_serves_all_workers() -> None:
    pool = Pool()
    pool.run()
    assert pool.served >= 8


def test_pool_survives_every_cancelled_await() -> None:
    assert every_await_cancelled(Pool) > 50


def test_pool_survives_every_lost_message() -> None:
    assert every_message_lost(Pool) > 50


@pytest.mark.extended
@pytest.mark.usefixtures("untraced")
def test_pool_survives_sampled_cancel_and_loss_pairs() -> None:
    awaits_with_messages(Pool, 1, stride=25)
