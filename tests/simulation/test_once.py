"""`once` in the simulation: runners are paused and crash, and the store loses and delays requests and replies.

Every key has one result, every caller that gets a result gets this one, and the result of a runner whose run was taken
over is refused.
"""

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest

from leasehold.aio import AsyncClient
from leasehold.core import once as once_records
from leasehold.errors import LeaseholdError, StaleToken, Unavailable
from leasehold.records import once as once_module
from leasehold.records.store import Record
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.simulated import Process, Simulator
from leasehold.testing.network import NetworkProfile, SimulatedServer

SEEDS = 120
KEYS = ["a", "b"]
UNRELIABLE = NetworkProfile(latency=0.01, loss=0.03, duplication=0.05, late=0.05, late_by=4.0, ordered=False)


class RecordingStore(MemoryStore):
    """The store itself; keeps a history of every record written."""

    def __init__(self, process):
        super().__init__(process)
        self.history: dict[str, list[once_records.RunRecord]] = {}

    def write(self, key, record, expected_version, keep, seconds):
        written = super().write(key, record, expected_version, keep, seconds)
        if written:
            self.history.setdefault(key, []).append(once_records.load(record.data))
        return written


class LossyStore:
    """One process's connection to the store: loses requests and replies, and executes some requests too late."""

    def __init__(self, process: Process, store: RecordingStore) -> None:
        self.process, self.store = process, store

    async def read(self, key: str, seconds: float) -> Record | None:
        return await self._send(lambda: self.store.read(key, seconds), seconds)

    async def write(self, key, record, expected_version, keep, seconds) -> bool:
        return await self._send(lambda: self.store.write(key, record, expected_version, keep, seconds), seconds)

    async def _send(self, call, seconds):
        rng = self.process.simulator.random
        draw = rng.random()
        if draw < 0.05:  # the request is lost
            await self.process.sleep(seconds)
            raise Unavailable("lost")
        if draw < 0.10:  # executed, soon or late; the reply is lost
            self.process.simulator.schedule(rng.uniform(0, 2 * seconds), call)
            await self.process.sleep(seconds)
            raise Unavailable("answer lost")
        await self.process.sleep(rng.uniform(0.001, 0.05))
        answer = call()
        await self.process.sleep(rng.uniform(0.001, 0.05))
        return answer


class FaultSimulation:
    def __init__(self, seed: int) -> None:
        self.simulator = Simulator(seed)
        self.server = SimulatedServer(self.simulator, UNRELIABLE)
        self.store = RecordingStore(self.server.process)
        self.results: list[tuple[str, object]] = []
        self.refused_count = 0
        self.effects = 0
        self.processes = [Process(self.simulator, f"p{number}") for number in range(5)]

    def run(self) -> None:
        for process in self.processes:
            process.spawn(self._work(process), process.name)
            process.spawn(self._inject_faults(process), "trouble")
        self.simulator.run(400.0)
        for process in self.processes:
            process.crash()  # ends the tasks that still wait

    async def _work(self, process: Process) -> None:
        client = AsyncClient(engine=self.server.opener(), runtime=process, holder=process.name, call_timeout=1.0)
        rng = self.simulator.random
        for _ in range(6):
            key = rng.choice(KEYS)
            try:
                result = await client.once(
                    key, self._effect, process, store=LossyStore(process, self.store), ttl=3.0, wait=60.0, keep=None
                )
                self.results.append((f"once::{key}", result))
            except StaleToken:
                self.refused_count += 1
            except (LeaseholdError, asyncio.CancelledError, ValueError):
                pass
            await process.sleep(rng.uniform(0, 5))

    async def _effect(self, process: Process) -> int:
        end = process.now() + self.simulator.random.uniform(0.1, 4)
        while (left := end - process.now()) > 0:
            with suppress(asyncio.CancelledError):  # continues after a lost lease, as a thread would
                await process.sleep(left)
        self.effects += 1
        if self.simulator.random.random() < 0.2:
            raise ValueError("failed")
        return self.effects

    async def _inject_faults(self, process: Process) -> None:
        rng = self.simulator.random
        while True:
            await process.sleep(rng.expovariate(1 / 8))
            draw = rng.random()
            if draw < 0.1 and sum(not other.dead for other in self.processes) > 2:
                self.simulator.schedule(0.0, process.crash)
                return
            elif draw < 0.6:
                process.pause()
                self.simulator.schedule(rng.uniform(0.5, 8), process.resume)


def find_violations(simulation: FaultSimulation) -> list[str]:
    """Return every broken promise."""
    violations = []
    for key, runs in simulation.store.history.items():
        states = [run.state for run in runs]
        if states.count("done") > 1 or "done" in states[:-1]:
            violations.append(f"{key} changed after it was done: {states}")
        tokens = [run.token for run in runs if run.state == "running"]
        if tokens != sorted(set(tokens)):
            violations.append(f"{key}: tokens do not rise: {tokens}")
        for before, after in pairwise(runs):
            if after.state != "running" and (before.state, before.token) != ("running", after.token):
                violations.append(f"{key}: token {after.token} ended what {before.token} had begun")
        results = {result for name, result in simulation.results if name == key}
        if results - {run.result for run in runs if run.state == "done"}:
            violations.append(f"{key}: {results} were given")
    return violations


def run_seed(seed: int) -> FaultSimulation:
    simulation = FaultSimulation(seed)
    simulation.run()
    return simulation


def test_once_key_has_one_result_under_faults():
    simulations = [run_seed(seed) for seed in range(SEEDS)]
    assert {
        seed: violations for seed, simulation in enumerate(simulations) if (violations := find_violations(simulation))
    } == {}
    # The runs must exercise what they check.
    assert sum(len(simulation.results) for simulation in simulations) > 10 * SEEDS
    assert sum(simulation.refused_count for simulation in simulations) > 0, "no late runner was refused"
    runs = [run for simulation in simulations for history in simulation.store.history.values() for run in history]
    assert sum(run.runs > 1 for run in runs) > SEEDS, "too few runs were taken over"


SWAP = once_module.RecordAccess.swap


async def swap_without_comparison(self, key, data, expected, keep):
    """A late runner overwrites the current record."""
    return await SWAP(self, key, data, await self.read(key), keep)


async def swap_assuming_success(self, key, data, expected, keep):
    """A lost reply counts as success."""
    new = Record(self.core.runtime.random_bytes(16).hex(), data)
    try:
        return new if await self.store.write(key, new, expected.version if expected else "", keep, 1.0) else None
    except Unavailable:
        return new


NEVER_FINISHED = property(lambda run: False)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (once_module.RecordAccess, "swap", swap_without_comparison),
        (once_module.RecordAccess, "swap", swap_assuming_success),
        (once_records.RunRecord, "finished", NEVER_FINISHED),
    ],
    ids=["trusting the lock", "hoping for the best", "running what is done"],
)
def test_planted_once_bug_is_found(where, name, bug, monkeypatch):
    monkeypatch.setattr(where, name, bug)
    assert any(find_violations(run_seed(seed)) for seed in range(SEEDS))
