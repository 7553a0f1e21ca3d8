"""Schedules in the simulation: clients whose clocks are minutes apart, each with its own timer."""

from collections import Counter
from itertools import pairwise

import pytest

from leasehold.aio import AsyncClient
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.simulated import Process, Simulator
from leasehold.testing.network import NetworkProfile, SimulatedServer

SEEDS = 20
EVERY = 60.0
TICKS = 12
APART = [180.0, 60.0, 0.0, -120.0, -61.0]  # seconds from the right time: several clients have a tick due at one instant


class Fleet:
    """Runs one schedule in a process for each of these clocks, for a little longer than TICKS ticks."""

    def __init__(self, seed: int, missed: str, use_timer: bool, apart: list[float]) -> None:
        self.simulator = Simulator(seed)
        self.server = SimulatedServer(self.simulator, NetworkProfile(latency=0.01))
        self.store = MemoryStore(self.server.process)
        self.missed, self.use_timer = missed, use_timer
        self.runs: list[tuple[int, float, float]] = []  # tick, and the true time of its begin and end
        self.first_ticks: list[int] = []  # that each client reached after its start
        for number, seconds in enumerate(apart):
            process = Process(self.simulator, f"p{number}")
            process.step_wall_clock(seconds)
            self.first_ticks.append(int(process.wall() // EVERY) + 1)
            process.spawn(self._work(process), process.name)
        self.simulator.run((TICKS + 0.5) * EVERY)

    async def _work(self, process: Process) -> None:
        client = AsyncClient(engine=self.server.opener(), runtime=process, holder=process.name, call_timeout=1.0)
        schedule = client.schedule("job", EVERY, missed=self.missed, store=self.store)

        async def job(tick) -> None:
            begin = self.simulator.time
            await process.sleep(self.simulator.random.uniform(0, 2))
            self.runs.append((round(tick.timestamp() / EVERY), begin, self.simulator.time))

        while self.use_timer:
            await process.sleep(EVERY - process.wall() % EVERY + 0.001)
            await schedule.run_due(job)
        await schedule.run(job)

    @property
    def ticks(self) -> list[int]:
        """The ticks that ran, sorted."""
        return sorted(tick for tick, _, _ in self.runs)

    def reached_by_all(self, first: int) -> list[int]:
        """The ticks from `first` to the last one that every client has reached."""
        return list(range(first, min(self.first_ticks) + TICKS))

    @property
    def overlaps(self) -> bool:
        spans = sorted((begin, end) for _, begin, end in self.runs)
        return any(earlier[1] > later[0] for earlier, later in pairwise(spans))


@pytest.mark.parametrize("use_timer", [True, False], ids=["run_due", "run"])
@pytest.mark.parametrize("missed", ["skip", "last", "all"])
@pytest.mark.parametrize(
    "apart",
    [
        pytest.param(APART, id="minutes apart"),
        pytest.param([0.0, 0.0, 0.5], id="close", marks=pytest.mark.extended),
    ],
)
def test_every_tick_runs_once_whatever_the_clocks(missed, use_timer, apart):
    for seed in range(SEEDS):
        fleet = Fleet(seed, missed, use_timer, apart)
        assert max(Counter(fleet.ticks).values()) == 1, (seed, fleet.ticks)
        assert not fleet.overlaps, seed
        # With "last" and "all" a new schedule begins with the current tick of the client that creates it.
        first = min(fleet.first_ticks) if missed == "skip" else min(fleet.ticks)
        if missed == "last":  # and skips what the clients that are ahead have already missed
            first = max(fleet.first_ticks)
        missing = set(fleet.reached_by_all(first)) - set(fleet.ticks)
        assert missing == set(), seed
