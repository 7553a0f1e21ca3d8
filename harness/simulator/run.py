"""One simulated run: its programs, its oracles, and the checks at its end."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from harness import probe
from harness.checkers.intervals import check
from harness.simulator.client_oracle import RESIZED, ClientOracle
from harness.simulator.faults import FaultInjector, Operator, SimulationPlan, harsh_plan, plan_for_seed
from harness.simulator.liveness_oracle import CHECK_INTERVAL, LivenessOracle
from harness.simulator.safety_oracle import SafetyOracle
from harness.simulator.workload import Program
from leasehold.core.queue_entry import Notification
from leasehold.core.timing import WAITER_TTL
from leasehold.model import Claim, Gone
from leasehold.runtime.simulated import Simulator
from leasehold.testing.network import RELIABLE, NetworkTransport, SimulatedServer

OPERATION_LIMIT: Final = 150.0  # seconds after the faults: every waiter may hold for as long as work takes
SETTLE_SECONDS: Final = 3.0  # after the last call timed out: every pending release was retried by then
COMMAND: Final = "python -m harness.simulator.seeds --seed"


@dataclass(frozen=True, slots=True)
class Finding:
    at: float
    rule: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] at {self.at:.6f}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one seed. Without `findings` it passed."""

    seed: int
    harsh: bool
    family: str
    findings: tuple[Finding, ...]
    grants: int
    lost: int
    passed_over: int
    events: int
    simulated: float  # seconds
    last_random: float  # runs with the same value were the same throughout
    history: str  # as JSON lines

    def __str__(self) -> str:
        verdict = "clean" if not self.findings else f"{len(self.findings)} finding(s)"
        lines = [
            f"seed {self.seed} ({self.family}): {verdict}; {self.grants} grants, {self.lost} leases lost, "
            f"{self.passed_over} passed over, {self.events} events in {self.simulated:.0f} simulated seconds"
        ]
        lines += [f"  {finding}" for finding in self.findings[:10]]
        if self.findings:
            lines.append(f"  replay: {COMMAND} {self.seed}{' --harsh' * self.harsh} -v")
        return "\n".join(lines)


class _MessageObserver(SafetyOracle):
    """The safety oracle, which also passes messages on to the client oracle and the fault injector."""

    client_oracle: ClientOracle
    fault_injector: FaultInjector

    def sent(self, transport: NetworkTransport, verb: str, args: tuple[Any, ...]) -> None:
        if verb == "attempt":
            self.fault_injector.on_attempt(transport, args[0])

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        super().answered(verb, args, answer)
        if verb == "break_" and answer is True:
            self.client_oracle.record_break(args[2])
        elif verb == "release" and answer is True:
            self.client_oracle.ended_by_release.add(args[0].id_hash)

    def delivered(self, transport: NetworkTransport, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        if verb == "renew":
            claims: Sequence[Claim] = args[0]
            for claim, reply in zip(claims, answer, strict=True):
                if claim.token and isinstance(reply, Gone):
                    self.client_oracle.record_gone(transport.process, claim.id_hash)
                elif claim.token:
                    self.fault_injector.on_renewal(transport.process, claim)

    def notified(self, transport: NetworkTransport, notification: Notification) -> None:
        if notification.kind == "broken":
            self.client_oracle.record_gone(transport.process, notification.id_hash)


class SimulationRun:
    """One seed, from the first request to the last check of the server."""

    def __init__(self, seed: int, *, harsh: bool = False) -> None:
        self.findings: list[Finding] = []
        self.harsh, self.world = harsh, Simulator(seed)
        plan: SimulationPlan = (harsh_plan if harsh else plan_for_seed)(seed, random.Random(seed))
        self.plan = plan
        rates = plan.clock_rates
        self.server = SimulatedServer(self.world, plan.network, rate=self.world.random.choice(rates) if rates else None)
        self.client_oracle = ClientOracle(self.world, self.add_finding)
        self.safety_oracle = _MessageObserver(self.server, self.add_finding)
        self.liveness_oracle = LivenessOracle(
            self.safety_oracle, self.add_finding, prompt=self.plan.expects_prompt_handoff
        )
        self.programs: list[Program] = []
        self.fault_injector = FaultInjector(
            self.world, self.server, self.client_oracle, self.plan, self.programs, self._start_program
        )
        self.safety_oracle.client_oracle, self.safety_oracle.fault_injector = self.client_oracle, self.fault_injector
        self.server.observer = self.safety_oracle
        self.operator = Operator(self.server, self.client_oracle, self.plan)

    def add_finding(self, rule: str, text: str) -> None:
        self.findings.append(Finding(self.world.time, rule, text))

    def _start_program(self, name: str) -> None:
        self.programs.append(
            Program(
                name,
                self.server,
                self.client_oracle,
                self.add_finding,
                self.plan.random_request,
                workers=self.world.random.randint(1, self.plan.max_workers),
                call_timeout=self.plan.call_timeout,
                cancel_chance=self.plan.cancel_chance,
                idle=self.plan.idle,
                ttls=self.plan.ttls,
                clock_rates=self.plan.clock_rates,
                drift=self.plan.drift,
                programs=self.programs,
            )
        )

    def run(self) -> Report:
        try:
            self._run()
        except Exception as error:  # a crash of the code under test is a finding too
            frame = traceback.extract_tb(error.__traceback__)[-1]
            self.add_finding("error", f"{error!r} in {frame.name}, line {frame.lineno} of {frame.filename}")
        self.client_oracle.finish()
        self.findings += [Finding(v.at, v.rule, v.text) for v in check(self.client_oracle.history).violations]
        for process in [self.operator.process, *(program.process for program in self.programs)]:
            process.crash()  # closes everything that still waits
        return self._report()

    def _run(self) -> None:
        for number in range(self.plan.programs):
            self._start_program(f"c{number}")
        self._check_liveness()
        self.fault_injector.start()
        if self._advance(self.plan.seconds) and self._drain():
            self._check_nothing_left()

    def _check_liveness(self) -> None:
        self.liveness_oracle.check(self.client_oracle.is_held)
        self.client_oracle.check_trust(self.safety_oracle.promised_until)
        self.world.schedule(CHECK_INTERVAL, self._check_liveness)

    def _advance(self, seconds: float) -> bool:
        """Let time pass, but stop at the first finding: later ones only follow from it."""
        end = self.world.time + seconds
        while self.world.time < end and not self.findings:
            self.world.run(min(1.0, end - self.world.time))
        return not self.findings

    def _run_until(self, done: Callable[[], bool], seconds: float, what: str) -> bool:
        end = self.world.time + seconds
        while not done() and self._advance(0.5):
            if self.world.time >= end:
                self.add_finding("unfinished", f"{what} did not finish within {seconds} s without faults")
        return not self.findings

    def _drain(self) -> bool:
        """Stop all faults; then every call, every pending release and every client must finish."""
        self.fault_injector.stop()
        self.server.profile = RELIABLE
        living = [program for program in self.programs if not program.process.dead]
        for program in living:
            program.stopping = True

        def is_idle() -> bool:
            return all(task.done for program in living for task in (*program.workers, *program.takers))

        if not self._run_until(is_idle, OPERATION_LIMIT, "an operation"):
            return False
        settle_seconds = self.plan.call_timeout + SETTLE_SECONDS
        if not self._advance(settle_seconds):
            return False
        for program in living:
            registry = probe.core(program.client).registry
            if registry.pending_releases or registry.waiting or registry.held:
                text = f"{program.name} has claims or pending releases {settle_seconds} s after its last call (E6)"
                self.add_finding("not released", text)
        closing = [program.process.spawn(program.close(), "close") for program in living]
        closing.append(self.operator.close())
        if not self._run_until(lambda: all(task.done for task in closing), self.plan.call_timeout + 1, "close()"):
            return False
        for task in closing:
            task.result()
        return self._advance(1.0)

    def _check_nothing_left(self) -> None:
        if self.plan.expects_prompt_handoff and self.safety_oracle.passed_over and not self.plan.faults:
            self.add_finding(
                "passed over", f"{self.safety_oracle.passed_over} waiters were passed over though all were healthy"
            )
        running = [task for program in self.programs for task in program.process.tasks]
        if running:
            self.add_finding("left running", f"{running} still run after close()")
        if not self._advance(self.plan.max_claim_life + WAITER_TTL):
            return
        if self.plan.resize_rate:  # a limit that was sent before the operator took it back may have arrived after that
            self.server.memory.set_limit("", RESIZED, None)
        left = self.server.memory.inspect("", "", False)
        if left or self.server.memory.lock_states:
            self.add_finding(
                "left behind", f"the server still has {left}, one ttl and {WAITER_TTL} s after the last client"
            )

    def _report(self) -> Report:
        return Report(
            seed=self.world.seed,
            harsh=self.harsh,
            family=self.plan.family,
            findings=tuple(sorted(self.findings, key=lambda finding: finding.at)),
            grants=self.safety_oracle.grants,
            lost=self.client_oracle.lost,
            passed_over=self.safety_oracle.passed_over,
            events=self.world.event_count,
            simulated=self.world.time,
            last_random=self.world.random.random(),
            history=self.client_oracle.history.to_json() if self.findings else "",
        )
