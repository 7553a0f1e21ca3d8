"""`once` in the simulated world: runners paused and crashed, and a store whose requests and answers are lost and late.

Whatever happens, a key has one result, everybody who gets one gets that, and no runner that was taken over is believed.
"""

import asyncio
from contextlib import suppress
from itertools import pairwise

import pytest

from leasehold.aio import AsyncClient
from leasehold.core import once as core
from leasehold.errors import LeaseholdError, StaleToken, Unavailable
from leasehold.recipes import once as recipe
from leasehold.runtime.simulated import Process, World
from leasehold.store import Record
from leasehold.stores.memory import MemoryStore
from leasehold.testing.network import Server, Weather

SEEDS = 120
KEYS = ["a", "b"]
STORM = Weather(latency=0.01, loss=0.03, duplication=0.05, late=0.05, late_by=4.0, ordered=False)


class Ledger(MemoryStore):
    """The store itself; writes down every record it took."""

    def __init__(self, process):
        super().__init__(process)
        self.history: dict[str, list[core.Run]] = {}

    def write(self, key, record, was, keep, seconds):
        written = super().write(key, record, was, keep, seconds)
        if written:
            self.history.setdefault(key, []).append(core.unpacked(record.data))
        return written


class Way:
    """One process's way to the ledger: loses requests and answers, and carries some out when nobody waits any more."""

    def __init__(self, process: Process, ledger: Ledger) -> None:
        self.process, self.ledger = process, ledger

    async def read(self, key: str, seconds: float) -> Record | None:
        return await self._send(lambda: self.ledger.read(key, seconds), seconds)

    async def write(self, key, record, was, keep, seconds) -> bool:
        return await self._send(lambda: self.ledger.write(key, record, was, keep, seconds), seconds)

    async def _send(self, call, seconds):
        chance = self.process.world.random
        fate = chance.random()
        if fate < 0.05:  # the request is lost
            await self.process.sleep(seconds)
            raise Unavailable("lost")
        if fate < 0.10:  # carried out, soon or late; the answer is lost
            self.process.world.after(chance.uniform(0, 2 * seconds), call)
            await self.process.sleep(seconds)
            raise Unavailable("answer lost")
        await self.process.sleep(chance.uniform(0.001, 0.05))
        answer = call()
        await self.process.sleep(chance.uniform(0.001, 0.05))
        return answer


class Tale:
    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.server = Server(self.world, STORM)
        self.ledger = Ledger(self.server.process)
        self.got: list[tuple[str, object]] = []
        self.refused = 0
        self.effects = 0
        self.processes = [Process(self.world, f"p{number}") for number in range(5)]

    def play(self) -> None:
        for process in self.processes:
            process.spawn(self._work(process), process.name)
            process.spawn(self._trouble(process), "trouble")
        self.world.run(400.0)
        for process in self.processes:
            process.crash()  # ends whatever still waits

    async def _work(self, process: Process) -> None:
        client = AsyncClient(engine=self.server.opener(), runtime=process, holder=process.name, call_timeout=1.0)
        chance = self.world.random
        for _ in range(6):
            key = chance.choice(KEYS)
            try:
                result = await client.once(
                    key, self._effect, process, store=Way(process, self.ledger), ttl=3.0, wait=60.0, keep=None
                )
                self.got.append((f"once::{key}", result))
            except StaleToken:
                self.refused += 1
            except (LeaseholdError, asyncio.CancelledError, ValueError):
                pass
            await process.sleep(chance.uniform(0, 5))

    async def _effect(self, process: Process) -> int:
        end = process.now() + self.world.random.uniform(0.1, 4)
        while (left := end - process.now()) > 0:
            with suppress(asyncio.CancelledError):  # as a thread would, it goes on though its lease is lost
                await process.sleep(left)
        self.effects += 1
        if self.world.random.random() < 0.2:
            raise ValueError("failed")
        return self.effects

    async def _trouble(self, process: Process) -> None:
        chance = self.world.random
        while True:
            await process.sleep(chance.expovariate(1 / 8))
            fate = chance.random()
            if fate < 0.1 and sum(not other.dead for other in self.processes) > 2:
                self.world.after(0.0, process.crash)
                return
            elif fate < 0.6:
                process.pause()
                self.world.after(chance.uniform(0.5, 8), process.resume)


def wrong(tale: Tale) -> list[str]:
    """What must never be."""
    found = []
    for key, runs in tale.ledger.history.items():
        states = [run.state for run in runs]
        if states.count("done") > 1 or "done" in states[:-1]:
            found.append(f"{key} changed after it was done: {states}")
        begun = [run.token for run in runs if run.state == "running"]
        if begun != sorted(set(begun)):
            found.append(f"{key}: tokens do not rise: {begun}")
        for before, after in pairwise(runs):
            if after.state != "running" and (before.state, before.token) != ("running", after.token):
                found.append(f"{key}: token {after.token} ended what {before.token} had begun")
        results = {result for name, result in tale.got if name == key}
        if results - {run.result for run in runs if run.state == "done"}:
            found.append(f"{key}: {results} were given")
    return found


def told(seed: int) -> Tale:
    tale = Tale(seed)
    tale.play()
    return tale


def test_a_key_has_one_result_whatever_happens():
    tales = [told(seed) for seed in range(SEEDS)]
    assert {seed: complaints for seed, tale in enumerate(tales) if (complaints := wrong(tale))} == {}
    # The tales are about something.
    assert sum(len(tale.got) for tale in tales) > 10 * SEEDS
    assert sum(tale.refused for tale in tales) > 0, "late runners were refused"
    runs = [run for tale in tales for history in tale.ledger.history.values() for run in history]
    assert sum(run.runs > 1 for run in runs) > SEEDS, "runs were taken over"


SWAP = recipe.Records.swap


async def trusting_the_lock(self, key, data, was, keep):
    """The late runner's result is written over whatever is there."""
    return await SWAP(self, key, data, await self.read(key), keep)


async def hoping_for_the_best(self, key, data, was, keep):
    """A lost answer is taken for a yes."""
    new = Record(self.desk.runtime.entropy(16).hex(), data)
    try:
        return new if await self.store.write(key, new, was.edition if was else "", keep, 1.0) else None
    except Unavailable:
        return new


RUNNING_WHAT_IS_DONE = property(lambda run: False)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (recipe.Records, "swap", trusting_the_lock),
        (recipe.Records, "swap", hoping_for_the_best),
        (core.Run, "settled", RUNNING_WHAT_IS_DONE),
    ],
    ids=["trusting the lock", "hoping for the best", "running what is done"],
)
def test_a_planted_bug_is_found(where, name, bug, monkeypatch):
    monkeypatch.setattr(where, name, bug)
    assert any(wrong(told(seed)) for seed in range(SEEDS))
