"""Programs that nest locks in any order, with `on_deadlock="raise"`: all finish, and one of each cycle gives up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from leasehold import AsyncClient, Deadlocked, LeaseholdError
from leasehold.client import deadlock_search
from leasehold.core.deadlocks import deadlocks, identity
from leasehold.runtime.simulated import Process, Simulator
from leasehold.testing.exhaustive import Scenario, every_await_cancelled, every_message_lost
from leasehold.testing.network import NetworkProfile, SimulatedServer

TTL = 4.0


class Cycle(Scenario):
    """Three workers, each of which holds one name and waits for the next."""

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.deadlocked = self.served = 0
        super().__init__(lose, cancel)

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        first, second = "abc"[number], "abc"[(number + 1) % 3]
        try:
            async with client.lock(first, ttl=TTL):
                await process.sleep(0.3)
                async with client.lock(second, ttl=TTL, on_deadlock="raise"):
                    await process.sleep(0.1)
        except Deadlocked:
            self.deadlocked += 1
        except LeaseholdError:
            return
        else:
            self.served += 1


def test_one_of_three_gives_up_and_the_others_are_served() -> None:
    cycle = Cycle()
    cycle.run()
    assert (cycle.deadlocked, cycle.served) == (1, 2)
    assert cycle.world.time < 10


def test_cycle_survives_every_cancelled_await() -> None:
    assert every_await_cancelled(Cycle) > 20


def test_cycle_survives_every_lost_message() -> None:
    assert every_message_lost(Cycle) > 20


class Philosophers:
    """One seed: each program nests two names in a random order, and some of them never give up."""

    def __init__(self, seed: int) -> None:
        self.world, self.rng = Simulator(seed), random.Random(seed)
        self.server = SimulatedServer(self.world, NetworkProfile(latency=self.rng.choice([0.002, 0.02])))
        self.raised = 0
        self.cycles_given_up: Counter[frozenset[object]] = Counter()
        self.false_alarms: list[str] = []
        self.meals = 0
        self.finished = [self._program(f"p{number}") for number in range(4)]

    def _program(self, name: str):
        process = Process(self.world, name)
        client = AsyncClient(engine=self.server.opener(), runtime=process, holder=name, call_timeout=1.0)
        on_deadlock = "wait" if name == "p0" else "raise"

        async def dine() -> None:
            for _ in range(6):
                await process.sleep(self.rng.uniform(0, 0.5))
                first, second = self.rng.sample("abc", 2)
                async with client.lock(first, ttl=TTL):
                    await process.sleep(self.rng.uniform(0, 0.2))
                    try:
                        async with client.lock(second, ttl=TTL, on_deadlock=on_deadlock):
                            await process.sleep(self.rng.uniform(0, 0.2))
                            self.meals += 1
                    except Deadlocked:
                        self._judge(name)
            await client.close()

        return process.spawn(dine(), name)

    def _judge(self, name: str) -> None:
        """The request to leave the queue is still on its way: the server must have the cycle, with this program."""
        cycles = deadlocks(self.server.memory.inspect("", "", False))
        own_cycles = [cycle for cycle in cycles if name in {wait.waiter.holder.label for wait in cycle.waits}]
        if not own_cycles:
            self.false_alarms.append(name)
        self.cycles_given_up.update(map(identity, own_cycles))
        self.raised += 1

    def run(self) -> None:
        for task in self.finished:
            self.world.run_until_complete(task, 600)
        assert not self.server.memory.inspect("", "", False)


def given_up_twice(philosophers: Philosophers) -> list[frozenset[object]]:
    """The cycles for which more than one program gave up. A new cycle, even of the same programs, has other claims."""
    return [cycle for cycle, times in philosophers.cycles_given_up.items() if times > 1]


def test_simulation_finds_callers_that_give_up_together(monkeypatch) -> None:
    monkeypatch.setattr(deadlock_search, "GIVE_UP_INTERVAL", 0.0)
    found = []
    for seed in range(15):
        philosophers = Philosophers(seed)
        philosophers.run()
        found += given_up_twice(philosophers)
    assert found


@pytest.mark.parametrize("seeds", [range(15), pytest.param(range(15, 150), marks=pytest.mark.extended)], ids=str)
def test_philosophers_finish_and_only_members_of_a_cycle_give_up(seeds) -> None:
    raised = 0
    for seed in seeds:
        philosophers = Philosophers(seed)
        philosophers.run()
        assert philosophers.false_alarms == [], f"seed {seed}"
        assert not given_up_twice(philosophers), f"seed {seed}: two gave up for one cycle"
        assert philosophers.meals + philosophers.raised == 24, f"seed {seed}"
        raised += philosophers.raised
    assert raised > len(seeds) / 3
