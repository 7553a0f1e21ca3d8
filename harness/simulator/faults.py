"""The plan of a simulated run: requests and faults, all of them chosen by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Literal

from harness import probe
from harness.simulator.client_oracle import LIMITS, RESIZED, ClientOracle, Request, Shape, Style
from harness.simulator.workload import Program
from leasehold.aio import AsyncClient
from leasehold.core.timing import DRIFT
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Claim
from leasehold.runtime.simulated import Process, Simulator, Task
from leasehold.testing.network import RELIABLE, NetworkProfile, NetworkTransport, SimulatedServer

Family = Literal["calm", "mishaps", "outages", "storm", "pauses", "wake-ups", "slow answers", "losses"]
FAMILIES: Final[tuple[Family, ...]] = ("mishaps", "storm", "outages", "mishaps", "storm", "calm")
HARSH_FAMILIES: Final[tuple[Family, ...]] = ("pauses", "wake-ups", "slow answers", "losses")

_PROCESS_FAULTS: Final = ("pause", "pause head", "pause head", "pause head", "crash", "wall")
_NETWORK_FAULTS: Final = ("stall", "stall", "restart", "cut", "cut")
FAULTS_BY_FAMILY: Final[dict[Family, tuple[str, ...]]] = {
    "calm": (),
    "mishaps": _PROCESS_FAULTS,
    "outages": (*_NETWORK_FAULTS, "pause", "wall"),
    "storm": (*_PROCESS_FAULTS, *_NETWORK_FAULTS),
    "pauses": _PROCESS_FAULTS,
    "wake-ups": (*_PROCESS_FAULTS, "restart", "cut"),
    "slow answers": ("pause", "cut", "cut", "stall", "wall"),
    "losses": (*_PROCESS_FAULTS, *_NETWORK_FAULTS),
}

WIDE_DRIFT: Final = 0.05  # of clients that expect worse clocks than usual
POOL: Final = ("gpu0", "gpu1")  # acquired by `any_of`, and one by one


@dataclass(frozen=True, slots=True)
class SimulationPlan:
    """The parameters of a run, chosen at its start."""

    family: Family
    names: tuple[tuple[str, tuple[Shape, ...], int], ...]  # name, the shapes it is used as, limit
    programs: int
    max_workers: int
    seconds: float
    call_timeout: float
    ttls: tuple[float, ...]
    network: NetworkProfile
    faults: tuple[str, ...]
    fault_interval: float  # seconds between faults, on average
    fault_after_attempt: float  # the chance that a fault hits a program right after it sent an attempt
    idle: float  # seconds between the requests of one worker, on average
    work: float  # seconds that most work takes, on average
    break_rate: float  # how often the operator looks for a lock to break, per second
    cancel_chance: float
    resize_rate: float  # how often the operator changes the limit of a semaphore, per second
    mismatch_chance: float  # the chance that a program uses a name as another kind
    cut_after_renewal: float = 0.0  # the chance that a program is cut off right after a renewal was answered
    clock_rates: tuple[float, ...] = ()  # to choose the rate of each clock from; none: anything within the promise
    drift: float = DRIFT  # of the clients

    @property
    def expects_prompt_handoff(self) -> bool:
        return self.family in ("calm", "mishaps", "pauses")

    @property
    def max_claim_life(self) -> float:
        """The longest time a claim can exist after its last renewal: a late attempt may still arrive (E6)."""
        longest = max(self.ttls) + self.call_timeout  # `ensure` raises a ttl by the time of a call, for a strict lease
        return longest * 1.5 / (1 - self.drift) + max(3.0, self.network.late_by)

    def random_request(self, rng: random.Random) -> Request:
        name, shapes, limit = rng.choice(self.names)
        shape: Shape = rng.choice(shapes)
        if rng.random() < self.mismatch_chance:
            shape, limit = ("lock", 1) if shape == "semaphore" else ("semaphore", rng.choice([1, 2]))
        ttl = rng.choice(self.ttls)
        styles: list[Style] = ["with", "with", "hand", "hand", "try"]
        style = rng.choice(styles)
        short, long = rng.expovariate(1 / self.work), rng.uniform(0.8, 2.0) * ttl
        work = min(short if rng.random() < 0.85 else long, 8.0)
        rare = rng.random()
        return Request(
            name=name,
            shape=shape,
            limit=limit,
            style=style,
            ttl=ttl,
            wait=0 if style == "try" else rng.choice([None, None, 0, rng.uniform(0.1, 2), rng.uniform(2, 12)]),
            work=work,
            min_hold=rng.uniform(0.2, 1.5) if rare < 0.1 else 0.0,
            max_hold=rng.uniform(1.5, 4.0) if 0.1 < rare < 0.2 else None,
            delay=rng.uniform(0.2, 2.0) if 0.2 < rare < 0.35 else 0.0,
            renews=rng.random() < 0.15,
            strict=0.35 < rare < 0.5,
            ensures=0.45 < rare < 0.65,
            others=tuple(other for other in POOL if other != name) if shape == "lock" and name in POOL else (),
            hands_over=0.6 < rare < 0.75 and style != "with",
        )


def plan_for_seed(seed: int, rng: random.Random) -> SimulationPlan:
    family = FAMILIES[seed % len(FAMILIES)]
    names: list[tuple[str, tuple[Shape, ...], int]] = [
        ("ledger", ("lock",), 1),
        ("index", ("read", "read", "write", "lock"), 1),
        ("printers", ("semaphore",), rng.randint(1, 3)),
    ]
    rng.shuffle(names)
    # In a sparse run no request of another client hides a missing wake-up.
    sparse = rng.random() < (0.8 if family == "mishaps" else 0.4)
    pool: list[tuple[str, tuple[Shape, ...], int]] = [(name, ("lock", "lock", "write"), 1) for name in POOL]
    pool *= seed % 5 == 3  # by the number of the seed: the other runs are what they were before there were pools
    names = [*pool, *names[: 1 if sparse else rng.randint(1, 3)]]
    programs = 3 if sparse else rng.randint(3, 6)
    if resizes := seed % 7 == 4:
        names, programs = [(RESIZED, ("semaphore",), 2), *names[:1]], max(5, programs)
    return SimulationPlan(
        family=family,
        names=tuple(names),
        programs=programs,
        max_workers=1 if sparse else rng.choice([1, 2, 2, 4]),
        idle=0.7 if sparse else 0.3,
        work=2.0 if sparse else 0.5,
        break_rate=0.05 if sparse and family == "mishaps" else 0.3,
        seconds=rng.uniform(35, 75),
        call_timeout=rng.choice([1.0, 2.0, 5.0]),
        ttls=tuple(rng.choice([1.0, 1.5, 2.0, 3.0, 5.0, 10.0]) for _ in range(2)),
        network=NetworkProfile(
            latency=rng.choice([0.0005, 0.002, 0.02]),
            loss=rng.uniform(0.01, 0.2),
            duplication=rng.uniform(0.0, 0.2),
            late=rng.uniform(0.0, 0.15),
            notification_loss=rng.choice([0.0, 0.5]),
            ordered=False,
        )
        if family == "storm"
        else RELIABLE,
        faults=FAULTS_BY_FAMILY[family],
        fault_interval=rng.uniform(1.5, 3.5) if sparse else rng.uniform(0.7, 3.0),
        fault_after_attempt=0.0 if not FAULTS_BY_FAMILY[family] else rng.choice([0.03, 0.1]),
        cancel_chance=0.0 if family == "calm" else rng.choice([0.0, 0.1, 0.3]),
        resize_rate=2.0 if resizes else 0.0,
        mismatch_chance=rng.choice([0.0, 0.0, 0.05, 0.15]),
    )


def harsh_plan(seed: int, rng: random.Random) -> SimulationPlan:
    """More of everything than in `plan_for_seed`, and every clock at the edge of the promised drift.

    pauses        a fault of a process every second, and after every fourth attempt; no message is lost
    wake-ups      notifications are lost, doubled and late; requests and answers are not
    slow answers  a large share of each ttl passes before an answer arrives, and then the client is cut off
    losses        a third of all messages is lost, doubled or late, and everything above
    """
    family = HARSH_FAMILIES[seed % len(HARSH_FAMILIES)]
    plan, network = plan_for_seed(seed, rng), RELIABLE
    if family == "wake-ups":
        network = NetworkProfile(
            late_by=rng.choice([0.5, 3.0, 12.0]),
            notification_loss=rng.choice([0.0, 0.3, 0.9]),
            notification_duplication=rng.uniform(0.2, 0.8),
            notification_late=rng.uniform(0.2, 0.8),
        )
    elif family == "slow answers":
        network = NetworkProfile(
            latency=rng.choice([0.02, 0.1]), late=rng.uniform(0.3, 0.6), late_by=min(plan.ttls) * rng.uniform(0.1, 0.4)
        )
    elif family == "losses":
        network = NetworkProfile(
            latency=rng.choice([0.002, 0.02, 0.1]),
            loss=rng.uniform(0.1, 0.35),
            duplication=rng.uniform(0.1, 0.4),
            late=rng.uniform(0.1, 0.4),
            late_by=rng.choice([1.0, 5.0, 20.0]),
            notification_loss=rng.choice([0.0, 0.5, 0.9]),
            ordered=False,
        )
    drift = rng.choice([DRIFT, DRIFT, WIDE_DRIFT])
    return replace(
        plan,
        drift=drift,
        family=family,
        network=network,
        faults=FAULTS_BY_FAMILY[family],
        fault_interval=rng.uniform(0.4, 1.2),
        fault_after_attempt=rng.choice([0.1, 0.25]),
        cancel_chance=rng.choice([0.1, 0.3]),
        cut_after_renewal=0.3 if family == "slow answers" else 0.0,
        clock_rates=(1 - drift / 2, 1 + drift / 2),  # as far apart as the margin allows
    )


class Operator:
    """An operator that inspects the locks, and breaks one or changes the limit of a semaphore from time to time."""

    def __init__(self, server: SimulatedServer, client_oracle: ClientOracle, plan: SimulationPlan) -> None:
        self.process = Process(
            server.world, "operator", rate=server.world.random.choice(plan.clock_rates) if plan.clock_rates else None
        )
        self._client = AsyncClient(engine=server.opener(), runtime=self.process, holder="operator", call_timeout=2.0)
        self._client_oracle, self._plan = client_oracle, plan
        self._random = random.Random(server.world.random.getrandbits(64))
        self._tasks = [self.process.spawn(self._break_locks(), "operator")]
        if plan.resize_rate:
            self._tasks.append(self.process.spawn(self._change_limit(), "operator"))

    async def _change_limit(self) -> None:
        rng = random.Random(self._random.getrandbits(64))
        while True:
            await self.process.sleep(rng.expovariate(self._plan.resize_rate))
            with suppress(Unavailable, Mismatch):  # a program may use it as a lock
                await self._client.set_limit(RESIZED, rng.choice([*LIMITS, None]))

    async def _break_locks(self) -> None:
        while True:
            await self.process.sleep(self._random.expovariate(self._plan.break_rate))
            try:
                found = await self._client.inspect()
            except Unavailable:
                continue
            held = [holding for holding in found if holding.state in ("held", "cooling")]
            if held:
                chosen = self._random.choice(held)
                await self._break(chosen.name, chosen.token or 0)

    async def _break(self, name: str, token: int) -> None:
        op = self._client_oracle.history.invoke("operator", "break", name, token=token)
        try:
            broken = await self._client.break_lock(name, token=token)
        except Unavailable:
            op.unknown("unavailable")
            return
        # A duplicate of the request may have arrived first, and its answer was lost.
        op.ok(broken or token in self._client_oracle.broken_tokens)

    def close(self) -> Task:
        for task in self._tasks:
            task.cancel()
        return self.process.spawn(self._close(), "close")

    async def _close(self) -> None:
        if self._plan.resize_rate:
            await self._client.set_limit(RESIZED, None)
        await self._client.close()


class FaultInjector:
    """Chooses the next fault, and ends it after a while."""

    def __init__(
        self,
        world: Simulator,
        server: SimulatedServer,
        client_oracle: ClientOracle,
        plan: SimulationPlan,
        programs: list[Program],
        start_program: Callable[[str], None],
    ) -> None:
        self._world, self._server, self._client_oracle, self._plan = world, server, client_oracle, plan
        self._programs, self._start_program = programs, start_program
        self._random = random.Random(world.random.getrandbits(64))
        self._enabled = False
        self._restarts = 0

    def start(self) -> None:
        self._enabled = bool(self._plan.faults)
        if self._enabled:
            self._world.schedule(self._random.expovariate(1 / self._plan.fault_interval), self._inject_next)

    def stop(self) -> None:
        """End all faults, and inject no more."""
        self._enabled = False
        self._server.process.resume()
        self._server.start()
        for program in self._programs:
            self._server.restore(program.process)
            program.process.resume()

    def on_attempt(self, transport: NetworkTransport, claim: Claim) -> None:
        """An attempt has just been sent: the worst moment to pause its sender, for about the ttl of the grant."""
        if self._enabled and self._random.random() < self._plan.fault_after_attempt:
            program = next((candidate for candidate in self._programs if candidate.process is transport.process), None)
            if program is not None and self._random.random() < 0.8:
                self._pause(program, self._random.uniform(0.6, 1.2) * claim.ttl)
            elif program is not None and "crash" in self._plan.faults:
                self._world.schedule(0, lambda: self._crash(program))

    def on_renewal(self, process: Process, claim: Claim) -> None:
        """A renewal was answered: without another one the holder must stop before another client can be granted."""
        if self._enabled and self._plan.cut_after_renewal and self._random.random() < self._plan.cut_after_renewal:
            self._cut(process, self._random.uniform(0.8, 1.5) * claim.ttl)

    def _inject_next(self) -> None:
        if not self._enabled:
            return
        fault = self._random.choice(self._plan.faults)
        living = [program for program in self._programs if not program.process.dead]
        program = self._random.choice(living) if living else None
        if fault == "stall":
            self._server.process.pause()
            self._world.schedule(self._random.uniform(0.05, 6.0), self._server.process.resume)
        elif fault == "restart":
            self._server.stop()
            self._world.schedule(self._random.uniform(0.05, 3.0), self._server.start)
        elif fault == "wall":
            process = self._server.process if program is None or self._random.random() < 0.5 else program.process
            process.step_wall_clock(self._random.choice([-3600, -5, 5, 3600]))
        elif fault == "pause head":
            self._pause_first_waiter()
        elif program is not None and fault == "pause":
            self._pause(program, self._random.choice([0.3, 1.0, 3.5, 8.0]) * self._random.uniform(0.5, 1.5))
        elif program is not None and fault == "crash":
            self._crash(program)
        elif program is not None and fault == "cut":
            self._cut(program.process, self._random.uniform(0.2, 8.0))
        self._world.schedule(self._random.expovariate(1 / self._plan.fault_interval), self._inject_next)

    def _pause_first_waiter(self) -> None:
        """Pause the first waiter of a queue: the waiters behind it must not have to wait for it."""
        for lock_state in self._server.memory.lock_states.values():
            clients = [entry.client for _, entry in lock_state.waiters]
            for program in self._programs:
                if len(clients) > 1 and probe.core(program.client).registry.client_id == clients[0]:
                    self._pause(program, self._random.uniform(3.5, 9.0))
                    return

    def _pause(self, program: Program, seconds: float) -> None:
        if not program.process.paused:
            program.process.pause()
            self._world.schedule(seconds, program.process.resume)

    def _cut(self, process: Process, seconds: float) -> None:
        self._server.cut(process)
        self._world.schedule(seconds, lambda: self._server.restore(process))

    def _crash(self, program: Program) -> None:
        if program.process.dead:
            return
        self._client_oracle.record_crash(program.process)
        program.process.crash()
        self._restarts += 1
        name = f"{program.name.partition('.')[0]}.{self._restarts}"
        self._world.schedule(self._random.uniform(0.1, 3.0), lambda: self._enabled and self._start_program(name))
