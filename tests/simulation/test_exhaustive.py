"""Cancels every await and loses every message, one at a time: no double grant, and no claim left behind.

The scenario uses every verb: it attempts, queues, is woken, renews, verifies, releases and gives up.
"""

from __future__ import annotations

import pytest

from leasehold import AsyncClient, LeaseholdError
from leasehold.client import attempt_limit
from leasehold.runtime.simulated import Process
from leasehold.testing.exhaustive import Scenario, awaits_with_messages, every_await_cancelled, every_message_lost
from tests.support import probe, probe_acquire

TTL = 4.0


class Locks(Scenario):
    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.inside: list[str] = []
        self.served: list[int] = []
        super().__init__(lose, cancel)

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        await process.sleep(number * 0.05)
        for lock in (
            client.lock("x", ttl=TTL, min_hold=0.1),
            client.lock("x", ttl=TTL, delay=0.2, wait=20),
            client.rwlock("y").read(ttl=TTL) if number else client.rwlock("y").write(ttl=TTL),
            client.semaphore("z", 2, ttl=TTL),
            client.lock("x", ttl=TTL, wait=0.3),
        ):
            try:
                async with lock as lease:
                    if lock.name == "x":
                        self.inside.append(process.name)
                    try:
                        await process.sleep(0.3)
                        if lock.name == "x" and lease.held:
                            assert self.inside == [process.name], "two holders"
                        await lease.verify()
                        await process.sleep(TTL / 2)
                        await lease.renew(TTL * 2)
                        if lock.name == "x" and lease.held:
                            assert self.inside == [process.name], "two holders"
                    finally:
                        if lock.name == "x":
                            self.inside.remove(process.name)
            except LeaseholdError:
                continue  # the client reported the fault
            self.served.append(lease.token)

    def run(self) -> None:
        super().run()
        assert len(self.served) == len(set(self.served))


def test_lock_scenario_without_faults_serves_all_workers() -> None:
    scenario = Locks()
    scenario.run()
    assert len(scenario.served) >= 12


def test_lock_scenario_survives_every_cancelled_await() -> None:
    assert every_await_cancelled(Locks) > 100


def test_lock_scenario_survives_every_lost_message() -> None:
    assert every_message_lost(Locks) > 150


class ManyCallers(Locks):
    """Each client may have one attempt under way, and has other callers besides the worker."""

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        others = [process.spawn(self._contend(client, process), f"caller {each}") for each in range(2)]
        await super().work(number, client, process)
        for other in others:
            await other.join()

    async def _contend(self, client: AsyncClient, process: Process) -> None:
        for round_ in range(6):
            try:
                async with client.lock("x" if round_ % 2 else "w", ttl=TTL, wait=20):
                    await process.sleep(0.1)
            except LeaseholdError:
                continue  # the client reported the fault

    def run(self) -> None:
        super().run()
        for client in self.clients:
            assert not probe_acquire.attempts_under_way(probe.core(client).attempts)
            assert not probe_acquire.callers_waiting(probe.core(client).attempts)


@pytest.fixture
def _one_attempt_at_a_time(monkeypatch) -> None:
    monkeypatch.setattr(attempt_limit, "MAX_ATTEMPTS", 1)


@pytest.mark.usefixtures("_one_attempt_at_a_time")
def test_callers_that_wait_to_be_sent_survive_every_cancelled_await() -> None:
    assert every_await_cancelled(ManyCallers) > 100


@pytest.mark.extended
@pytest.mark.usefixtures("_one_attempt_at_a_time", "untraced")
def test_callers_that_wait_to_be_sent_survive_every_lost_message() -> None:
    assert every_message_lost(ManyCallers) > 150


@pytest.mark.extended
@pytest.mark.parametrize("who", range(3))
@pytest.mark.usefixtures("untraced")
def test_lock_scenario_survives_sampled_cancel_and_loss_pairs(who: int) -> None:
    awaits_with_messages(Locks, who, stride=12)


@pytest.mark.faults
@pytest.mark.parametrize("who", range(3))
def test_lock_scenario_survives_all_cancel_and_loss_pairs(who: int) -> None:
    awaits_with_messages(Locks, who, stride=1)
