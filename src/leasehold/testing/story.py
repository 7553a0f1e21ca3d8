"""One story from its first wish to the last look at the server: who takes part, who watches, and when it is over."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from leasehold.core.party import Word
from leasehold.core.timing import BEAT
from leasehold.model import Claim, Gone
from leasehold.runtime.simulated import World
from leasehold.testing.checker import check
from leasehold.testing.mishaps import Mishaps, Operator, Tale, tale
from leasehold.testing.monitor import Monitor
from leasehold.testing.network import CALM, NetworkLink, Server
from leasehold.testing.patience import LOOK_EVERY, Patience
from leasehold.testing.witness import Witness
from leasehold.testing.workload import Program

PATIENCE: Final = 150.0  # for the quiet end: everybody in line may hold for as long as any work takes
SETTLED: Final = 3.0  # so long after the last call could have timed out, every owed release has been repeated
COMMAND: Final = "python -m leasehold.testing.simulation --seed"


@dataclass(frozen=True, slots=True)
class Complaint:
    at: float
    rule: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] at {self.at:.6f}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one seed. Empty `complaints` are the aim."""

    seed: int
    family: str
    complaints: tuple[Complaint, ...]
    grants: int
    lost: int
    passed_over: int
    events: int
    simulated: float  # seconds
    last_chance: float  # two runs that end with the same one were the same throughout
    history: str  # as JSON lines, to look at or to keep

    def __str__(self) -> str:
        verdict = "clean" if not self.complaints else f"{len(self.complaints)} complaint(s)"
        lines = [
            f"seed {self.seed} ({self.family}): {verdict}; {self.grants} grants, {self.lost} leases lost, "
            f"{self.passed_over} passed over, {self.events} events in {self.simulated:.0f} simulated seconds"
        ]
        lines += [f"  {complaint}" for complaint in self.complaints[:10]]
        if self.complaints:
            lines.append(f"  replay: {COMMAND} {self.seed} -v")
        return "\n".join(lines)


class _Watcher(Monitor):
    """The monitor, and what else has to see messages: the witness, and those who choose the worst moment."""

    witness: Witness
    mishaps: Mishaps

    def sent(self, link: NetworkLink, verb: str, args: tuple[Any, ...]) -> None:
        if verb == "attempt":
            self.mishaps.asked(link, args[0])

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        super().answered(verb, args, answer)
        if verb == "break_" and answer is True:
            self.witness.was_broken(args[2])

    def delivered(self, link: NetworkLink, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        if verb == "renew":
            claims: Sequence[Claim] = args[0]
            for claim, reply in zip(claims, answer, strict=True):
                if claim.token and isinstance(reply, Gone):
                    self.witness.heard_gone(link.process, claim.mark)

    def heard(self, link: NetworkLink, word: Word) -> None:
        if word.kind == "lost":
            self.witness.heard_gone(link.process, word.mark)


class Story:
    """Everything that happens in one seed, from the first wish to the last look at the server."""

    def __init__(self, seed: int) -> None:
        self.complaints: list[Complaint] = []
        self.world = World(seed)
        self.tale: Tale = tale(seed, random.Random(seed))
        self.server = Server(self.world, self.tale.weather)
        self.witness = Witness(self.world, self.complain)
        self.watcher = _Watcher(self.server, self.complain)
        self.patience = Patience(self.watcher, self.complain, prompt=self.tale.prompt)
        self.programs: list[Program] = []
        self.mishaps = Mishaps(self.world, self.server, self.witness, self.tale, self.programs, self._hire)
        self.watcher.witness, self.watcher.mishaps = self.witness, self.mishaps
        self.server.observer = self.watcher
        self.operator = Operator(self.server, self.witness, self.tale)

    def complain(self, rule: str, text: str) -> None:
        self.complaints.append(Complaint(self.world.time, rule, text))

    def _hire(self, name: str) -> None:
        self.programs.append(
            Program(
                name,
                self.server,
                self.witness,
                self.complain,
                self.tale.wish,
                workers=self.world.random.randint(1, self.tale.most_workers),
                call_timeout=self.tale.call_timeout,
                cancels=self.tale.cancels,
                idle=self.tale.idle,
                ttls=self.tale.ttls,
            )
        )

    def play(self) -> Report:
        try:
            self._play()
        except Exception as error:  # the code under test fell over: that is a finding, too
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.complain("error", f"{error!r} in {place.name}, line {place.lineno} of {place.filename}")
        self.witness.ends()
        self.complaints += [Complaint(v.at, v.rule, v.text) for v in check(self.witness.history).violations]
        for process in [self.operator.process, *(program.process for program in self.programs)]:
            process.crash()  # closes whatever still waits
        return self._report()

    def _play(self) -> None:
        for number in range(self.tale.programs):
            self._hire(f"c{number}")
        self._look()
        self.mishaps.start()
        if self._pass(self.tale.seconds) and self._quiet():
            self._check_nothing_left()

    def _look(self) -> None:
        self.patience.look(self.witness.in_use)
        self.world.after(LOOK_EVERY, self._look)

    def _pass(self, seconds: float) -> bool:
        """Let time pass, but not after the first complaint: what follows from it is no news."""
        end = self.world.time + seconds
        while self.world.time < end and not self.complaints:
            self.world.run(min(1.0, end - self.world.time))
        return not self.complaints

    def _until(self, done: Callable[[], bool], seconds: float, what: str) -> bool:
        end = self.world.time + seconds
        while not done() and self._pass(0.5):
            if self.world.time >= end:
                self.complain("unfinished", f"{what} did not come to an end within {seconds} s without faults")
        return not self.complaints

    def _quiet(self) -> bool:
        """All faults end; then so must every call, every owed release, and every client."""
        self.mishaps.stop()
        self.server.weather = CALM
        living = [program for program in self.programs if not program.process.dead]
        for program in living:
            program.stopping = True
        workers = [worker for program in living for worker in program.workers]
        if not self._until(lambda: all(worker.done for worker in workers), PATIENCE, "an operation"):
            return False
        settled = self.tale.call_timeout + SETTLED
        if not self._pass(settled):
            return False
        for program in living:
            book = program.client._desk.book
            if book.owed or book.waiting or book.held:
                self.complain("owed", f"{program.name} still owes, waits or holds {settled} s after its last call (E6)")
        closing = [program.process.spawn(program.close(), "close") for program in living]
        closing.append(self.operator.close())
        if not self._until(lambda: all(task.done for task in closing), self.tale.call_timeout + 1, "close()"):
            return False
        for task in closing:
            task.result()
        return self._pass(1.0)

    def _check_nothing_left(self) -> None:
        if self.tale.prompt and self.watcher.passed_over and not self.tale.faults:
            self.complain("passed over", f"{self.watcher.passed_over} waiters were passed over though all were well")
        running = [task for program in self.programs for task in program.process.tasks]
        if running:
            self.complain("left running", f"{running} run on after close()")
        if not self._pass(self.tale.longest + BEAT):
            return
        left = self.server.store.inspect("", "", False)
        if left or self.server.store.lines:
            self.complain("left behind", f"{left} is left at the server, one ttl and {BEAT} s after the last client")

    def _report(self) -> Report:
        return Report(
            seed=self.world.seed,
            family=self.tale.family,
            complaints=tuple(sorted(self.complaints, key=lambda complaint: complaint.at)),
            grants=self.watcher.grants,
            lost=self.witness.lost,
            passed_over=self.watcher.passed_over,
            events=self.world.events,
            simulated=self.world.time,
            last_chance=self.world.random.random(),
            history=self.witness.history.to_json() if self.complaints else "",
        )
