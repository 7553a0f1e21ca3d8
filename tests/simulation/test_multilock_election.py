"""Elections and multilocks under faults: processes pause, crash or are cut off; messages are lost, duplicated, late.

By their own clocks there are never two leaders, or two holders of a name. Start and stop callbacks alternate, and
observers see terms in order.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from leasehold import AsyncClient, AsyncLease, AsyncLeases, LeaseholdError
from leasehold.runtime.simulated import Process, Simulator
from leasehold.testing.network import NetworkProfile, SimulatedServer

# A simulation ends while leases are held, and these are then garbage-collected.
pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")

SEEDS = int(os.environ.get("LEASEHOLD_SEEDS", "400"))
SECONDS = 60.0
TTL = 3.0
UNRELIABLE = NetworkProfile(
    latency=0.005, loss=0.02, duplication=0.02, late=0.02, late_by=3.0, notification_loss=0.02, ordered=False
)


class FaultSimulation:
    """The run of one seed."""

    def __init__(self, seed: int) -> None:
        self.simulator = Simulator(seed)
        self.rng = random.Random(seed)
        self.server = SimulatedServer(self.simulator, UNRELIABLE if seed % 2 else NetworkProfile())
        self.held: defaultdict[str, dict[str, AsyncLease]] = defaultdict(dict)  # by name, by process
        self.calls: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        self.started: dict[int, float] = {}
        self.seen: list[tuple[int, bool]] = []
        self.meals = 0
        self.programs = [self._program(f"p{number}") for number in range(4)]
        self.observer = self._observer()

    def _client(self, name: str) -> tuple[Process, AsyncClient]:
        process = Process(self.simulator, name)
        return process, AsyncClient(engine=self.server.opener(), runtime=process, call_timeout=1.0)

    def _program(self, name: str) -> Process:
        process, client = self._client(name)

        async def start(term: AsyncLease) -> None:
            self.calls[name].append(("start", term.token))
            self.held["boss"][name] = term
            if term.held:
                self.started[term.token] = self.simulator.time
            await process.sleep(0.05)

        async def stop(term: AsyncLease) -> None:
            self.calls[name].append(("stop", term.token))
            await process.sleep(0.05)
            self.held["boss"].pop(name, None)

        async def serve() -> None:
            while True:
                election = client.election("boss", ttl=TTL)
                resign = partial(_spawn, process, election.resign)
                process.call_later(self.rng.uniform(2, 20), resign)
                await election.serve(start, stop)

        async def dine() -> None:
            while True:
                forks = self.rng.sample("abcd", self.rng.choice([2, 3]))
                try:
                    async with client.multilock(forks, ttl=TTL, wait=8) as leases:
                        await self._eat(name, process, leases)
                except LeaseholdError:
                    await process.sleep(0.1)

        process.spawn(serve(), f"{name} serves")
        process.spawn(dine(), f"{name} dines")
        return process

    async def _eat(self, name: str, process: Process, leases: AsyncLeases) -> None:
        for fork in leases:
            self.held[fork][name] = leases[fork]
        try:
            await process.sleep(self.rng.uniform(0.01, 0.5))
            self.meals += leases.held
        finally:
            for fork in leases:
                self.held[fork].pop(name, None)

    def _observer(self) -> Process:
        process, client = self._client("observer")

        async def observe_terms() -> None:
            async for term in client.election("boss", ttl=TTL).observe():
                self.seen.append((term.token, term.missed))

        process.spawn(observe_terms(), "observer")
        return process

    def run(self) -> None:
        next_fault_at = 1.0
        while self.simulator.time < SECONDS:
            self.simulator.run(0.02)
            for name, holders in self.held.items():
                believing = [who for who, lease in holders.items() if lease.held]
                assert len(believing) <= 1, f"{believing} hold {name} at {self.simulator.time:.2f}"
            if self.simulator.time >= next_fault_at:
                next_fault_at += self.rng.expovariate(1 / 2.0)
                self._inject_fault()
        for process in [*self.programs, self.observer]:
            process.crash()
        self._check_history()

    def _inject_fault(self) -> None:
        index = self.rng.randrange(len(self.programs))
        victim, fault = self.programs[index], self.rng.choice(["pause", "pause", "crash", "cut"])
        seconds = self.rng.uniform(0.5, 2 * TTL)
        if fault == "pause":
            victim.pause()
            self.simulator.schedule(seconds, victim.resume)
        elif fault == "cut":
            self.server.cut(victim)
            self.simulator.schedule(seconds, lambda: self.server.restore(victim))
        else:
            victim.crash()
            for holders in self.held.values():
                holders.pop(victim.name, None)
            self.programs[index] = self._program(f"{victim.name}'")

    def _check_history(self) -> None:
        for name, calls in self.calls.items():
            for (first_kind, token), (second_kind, second_token) in zip(calls[::2], calls[1::2], strict=False):
                assert (first_kind, second_kind, token) == ("start", "stop", second_token), f"{name}: {calls}"
        tokens = [token for token, _ in self.seen]
        assert tokens == sorted(set(tokens))
        if not any(missed for _, missed in self.seen):
            in_time = {token for token, at in self.started.items() if at < SECONDS - 2}
            assert in_time <= set(tokens), "the observer missed a term and did not report it"


def _spawn(process: Process, fn: Callable[[], Coroutine[Any, Any, object]]) -> None:
    process.spawn(fn(), "resign")


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(10, 20))]
)
def test_seed_keeps_leaders_and_holders_exclusive(seed: int) -> None:
    simulation = FaultSimulation(seed)
    simulation.run()
    assert len(simulation.started) >= 3
    assert simulation.meals >= 10


@pytest.mark.faults
def test_many_seeds_keep_leaders_and_holders_exclusive() -> None:
    for seed in range(20, SEEDS // 10):
        FaultSimulation(seed).run()
