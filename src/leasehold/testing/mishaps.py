"""What a simulated story is about: who wants what, and what goes wrong, all of it by the seed's own chances."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from leasehold.aio import AsyncClient
from leasehold.errors import Unavailable
from leasehold.model import Claim
from leasehold.runtime.simulated import Process, Task, World
from leasehold.testing.network import CALM, NetworkLink, Server, Weather
from leasehold.testing.witness import Shape, Style, Wish, Witness
from leasehold.testing.workload import Program

Family = Literal["calm", "mishaps", "outages", "storm"]
FAMILIES: Final[tuple[Family, ...]] = ("mishaps", "storm", "outages", "mishaps", "storm", "calm")

_PROCESS: Final = ("pause", "pause head", "pause head", "pause head", "crash", "wall")
_NETWORK: Final = ("stall", "stall", "restart", "cut", "cut")
FAULTS: Final[dict[Family, tuple[str, ...]]] = {
    "calm": (),
    "mishaps": _PROCESS,
    "outages": (*_NETWORK, "pause", "wall"),
    "storm": (*_PROCESS, *_NETWORK),
}


@dataclass(frozen=True, slots=True)
class Tale:
    """The part of a story that is known from the start."""

    family: Family
    names: tuple[tuple[str, tuple[Shape, ...], int], ...]  # name, the shapes it is used as, limit
    programs: int
    most_workers: int
    seconds: float
    call_timeout: float
    ttls: tuple[float, ...]
    weather: Weather
    faults: tuple[str, ...]
    every: float  # seconds between faults, on average
    at_worst: float  # the chance that a fault hits a program just as it has asked for a lock
    idle: float  # seconds between the wishes of one worker, on average
    work: float  # seconds that most of the work takes, on average
    breaks: float  # how often an operator looks for something to break, per second
    cancels: float
    wrong: float  # the chance that a program takes a name for something else than it is

    @property
    def prompt(self) -> bool:
        return self.family in ("calm", "mishaps")

    @property
    def longest(self) -> float:
        """No claim outlives its last renewal by more."""
        return max(self.ttls) + 3.0

    def wish(self, chance: random.Random) -> Wish:
        name, shapes, limit = chance.choice(self.names)
        shape: Shape = chance.choice(shapes)
        if chance.random() < self.wrong:
            shape, limit = ("lock", 1) if shape == "semaphore" else ("semaphore", chance.choice([1, 2]))
        ttl = chance.choice(self.ttls)
        styles: list[Style] = ["with", "with", "hand", "hand", "try"]
        style = chance.choice(styles)
        short, long = chance.expovariate(1 / self.work), chance.uniform(0.8, 2.0) * ttl
        work = min(short if chance.random() < 0.85 else long, 8.0)
        rare = chance.random()
        return Wish(
            name=name,
            shape=shape,
            limit=limit,
            style=style,
            ttl=ttl,
            wait=0 if style == "try" else chance.choice([None, None, 0, chance.uniform(0.1, 2), chance.uniform(2, 12)]),
            work=work,
            min_hold=chance.uniform(0.2, 1.5) if rare < 0.1 else 0.0,
            max_hold=chance.uniform(1.5, 4.0) if 0.1 < rare < 0.2 else None,
            delay=chance.uniform(0.2, 2.0) if 0.2 < rare < 0.35 else 0.0,
            renews=chance.random() < 0.15,
        )


def tale(seed: int, chance: random.Random) -> Tale:
    family = FAMILIES[seed % len(FAMILIES)]
    names: list[tuple[str, tuple[Shape, ...], int]] = [
        ("ledger", ("lock",), 1),
        ("index", ("read", "read", "write", "lock"), 1),
        ("printers", ("semaphore",), chance.randint(1, 3)),
    ]
    chance.shuffle(names)
    # Where little happens nobody is helped by what others ask: each missing wake-up shows.
    sparse = chance.random() < (0.8 if family == "mishaps" else 0.4)
    return Tale(
        family=family,
        names=tuple(names[: 1 if sparse else chance.randint(1, 3)]),
        programs=3 if sparse else chance.randint(3, 6),
        most_workers=1 if sparse else chance.choice([1, 2, 2, 4]),
        idle=0.7 if sparse else 0.3,
        work=2.0 if sparse else 0.5,
        breaks=0.05 if sparse and family == "mishaps" else 0.3,
        seconds=chance.uniform(35, 75),
        call_timeout=chance.choice([1.0, 2.0, 5.0]),
        ttls=tuple(chance.choice([1.0, 1.5, 2.0, 3.0, 5.0, 10.0]) for _ in range(2)),
        weather=Weather(
            latency=chance.choice([0.0005, 0.002, 0.02]),
            loss=chance.uniform(0.01, 0.2),
            duplication=chance.uniform(0.0, 0.2),
            late=chance.uniform(0.0, 0.15),
            deaf=chance.choice([0.0, 0.5]),
            ordered=False,
        )
        if family == "storm"
        else CALM,
        faults=FAULTS[family],
        every=chance.uniform(1.5, 3.5) if sparse else chance.uniform(0.7, 3.0),
        at_worst=0.0 if not FAULTS[family] else chance.choice([0.03, 0.1]),
        cancels=0.0 if family == "calm" else chance.choice([0.0, 0.1, 0.3]),
        wrong=chance.choice([0.0, 0.0, 0.05, 0.15]),
    )


class Operator:
    """Somebody who looks at who holds what, and now and then breaks a lock."""

    def __init__(self, server: Server, witness: Witness, tale: Tale) -> None:
        self.process = Process(server.world, "operator")
        self._client = AsyncClient(engine=server.opener(), runtime=self.process, holder="operator", call_timeout=2.0)
        self._witness, self._tale = witness, tale
        self._chance = random.Random(server.world.random.getrandbits(64))
        self._task = self.process.spawn(self._walk(), "operator")

    async def _walk(self) -> None:
        while True:
            await self.process.sleep(self._chance.expovariate(self._tale.breaks))
            try:
                found = await self._client.inspect()
            except Unavailable:
                continue
            held = [holding for holding in found if holding.state in ("held", "cooling")]
            if held:
                chosen = self._chance.choice(held)
                await self._break(chosen.name, chosen.token or 0)

    async def _break(self, name: str, token: int) -> None:
        op = self._witness.history.invoke("operator", "break", name, token=token)
        try:
            broken = await self._client.break_lock(name, token=token)
        except Unavailable:
            op.unknown("unavailable")
            return
        # A double of the request may have been first, and its answer lost.
        op.ok(broken or token in self._witness.broken)

    def close(self) -> Task:
        self._task.cancel()
        return self.process.spawn(self._client.close(), "close")


class Mishaps:
    """Chooses what goes wrong next, and puts it right again after a while."""

    def __init__(
        self,
        world: World,
        server: Server,
        witness: Witness,
        tale: Tale,
        programs: list[Program],
        hire: Callable[[str], None],
    ) -> None:
        self._world, self._server, self._witness, self._tale = world, server, witness, tale
        self._programs, self._hire = programs, hire
        self._chance = random.Random(world.random.getrandbits(64))
        self._on = False
        self._born = 0

    def start(self) -> None:
        self._on = bool(self._tale.faults)
        if self._on:
            self._world.after(self._chance.expovariate(1 / self._tale.every), self._next)

    def stop(self) -> None:
        """Everything is put right, and stays so."""
        self._on = False
        self._server.process.resume()
        self._server.start()
        for program in self._programs:
            self._server.heal(program.process)
            program.process.resume()

    def asked(self, link: NetworkLink, claim: Claim) -> None:
        """A claim has just been sent: the worst moment for its sender to stop, for about as long as the grant lives."""
        if self._on and self._chance.random() < self._tale.at_worst:
            program = next((one for one in self._programs if one.process is link.process), None)
            if program is not None and self._chance.random() < 0.8:
                self._pause(program, self._chance.uniform(0.6, 1.2) * claim.ttl)
            elif program is not None and "crash" in self._tale.faults:
                self._world.after(0, lambda: self._crash(program))

    def _next(self) -> None:
        if not self._on:
            return
        fault = self._chance.choice(self._tale.faults)
        living = [program for program in self._programs if not program.process.dead]
        program = self._chance.choice(living) if living else None
        if fault == "stall":
            self._server.process.pause()
            self._world.after(self._chance.uniform(0.05, 6.0), self._server.process.resume)
        elif fault == "restart":
            self._server.stop()
            self._world.after(self._chance.uniform(0.05, 3.0), self._server.start)
        elif fault == "wall":
            process = self._server.process if program is None or self._chance.random() < 0.5 else program.process
            process.step_wall(self._chance.choice([-3600, -5, 5, 3600]))
        elif fault == "pause head":
            self._pause_head()
        elif program is not None and fault == "pause":
            self._pause(program, self._chance.choice([0.3, 1.0, 3.5, 8.0]) * self._chance.uniform(0.5, 1.5))
        elif program is not None and fault == "crash":
            self._crash(program)
        elif program is not None and fault == "cut":
            self._server.cut(program.process)
            self._world.after(self._chance.uniform(0.2, 8.0), lambda: self._server.heal(program.process))
        self._world.after(self._chance.expovariate(1 / self._tale.every), self._next)

    def _pause_head(self) -> None:
        """Stop one who is next in a line where others wait behind: they must not have to wait for it."""
        for line in self._server.store.lines.values():
            clients = [party.client for _, party in line.waiters]
            for program in self._programs:
                if len(clients) > 1 and program.client._desk.book.client == clients[0]:
                    self._pause(program, self._chance.uniform(3.5, 9.0))
                    return

    def _pause(self, program: Program, seconds: float) -> None:
        if not program.process.paused:
            program.process.pause()
            self._world.after(seconds, program.process.resume)

    def _crash(self, program: Program) -> None:
        if program.process.dead:
            return
        self._witness.crashes(program.process)
        program.process.crash()
        self._born += 1
        name = f"{program.name.partition('.')[0]}.{self._born}"
        self._world.after(self._chance.uniform(0.1, 3.0), lambda: self._on and self._hire(name))
