"""Writes down what simulated programs believe to hold, and sees that nobody is left believing what is over.

What they believe is taken from the leases themselves, and ends at the earliest of: the start of their release, word of
their loss, and their own local deadline turned into true time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from harness.checkers.history import History, Op
from leasehold.aio import AsyncLease
from leasehold.client.lease import LOST
from leasehold.runtime.simulated import Process, Simulator

LOSS_NOTICE_LIMIT: Final = 0.25  # a lease that ended by its clock is told so within this, unless its process is paused

Shape = Literal["lock", "read", "write", "semaphore"]
Style = Literal["with", "hand", "try"]
AddFinding = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What one operation asks for, and what it does with it."""

    name: str
    shape: Shape
    limit: int
    style: Style
    ttl: float
    wait: float | None
    work: float
    min_hold: float = 0.0
    max_hold: float | None = None
    delay: float = 0.0
    renews: bool = False


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease in somebody's hands."""

    worker: str
    process: Process
    lease: AsyncLease
    notified: bool = False
    short_lived: bool = False  # handed out late, or shortened by hand: it may have ended before anybody could look

    def __str__(self) -> str:
        return f"{self.worker} believed in {self.lease.name}"

    @property
    def trusted_until(self) -> float:
        """True time at which the lease's own clock ends it."""
        return self.process.true_time(self.lease._valid_until)


class ClientOracle:
    """Writes the history, start before sending; and sees that nobody is left believing what is over."""

    def __init__(self, world: Simulator, add_finding: AddFinding) -> None:
        self.history = History(lambda: world.time)
        self.lost = 0
        self.broken_tokens: set[int] = set()  # tokens an operator has broken
        self._world, self._add_finding = world, add_finding
        self._held: dict[str, HeldLease] = {}
        self._all_leases: list[HeldLease] = []

    def is_held(self, id_hash: str) -> bool:
        return id_hash in self._held

    def record_request(self, worker: str, request: Request) -> Op:
        return self.history.invoke(
            worker,
            "try" if request.wait == 0 else "acquire",
            request.name,
            mode="shared" if request.shape == "read" else "exclusive",
            kind="semaphore" if request.shape == "semaphore" else "lock",
            limit=request.limit,
        )

    def record_grant(self, op: Op, worker: str, process: Process, lease: AsyncLease) -> HeldLease:
        op.ok(token=lease.token, slot=lease.slot)
        if not lease.held:
            self._add_finding(
                "late", f"{worker} was handed a lease of {lease.name} that was over: {lease.lost_reason} (E8)"
            )
        held_lease = HeldLease(worker, process, lease, short_lived=lease.remaining < lease.ttl / 2)
        self._held[lease._claim.id_hash] = held_lease
        self._all_leases.append(held_lease)
        if (
            lease.token in self.broken_tokens
        ):  # before its holder heard of the grant: word of it comes with the next renewal
            self.history.lost(worker, lease.name, lease.token)
        lease.on_lost(lambda _: self._on_lost(held_lease))
        return held_lease

    def _on_lost(self, held_lease: HeldLease) -> None:
        if held_lease.process.dead or held_lease.notified:
            return
        held_lease.notified = True
        self.lost += 1
        now, end, lease = self._world.time, held_lease.trusted_until, held_lease.lease
        if lease.lost_reason is None:
            self._add_finding("untold", f"{held_lease.worker} lost {lease.name} and was not told why")
        if now - max(end, held_lease.process.resumed_at) > LOSS_NOTICE_LIMIT and not held_lease.short_lived:
            self._add_finding(
                "untold", f"{held_lease.worker} was told {now - end:.3f} s late that {lease.name} is lost"
            )
        self.history.lost(held_lease.worker, lease.name, lease.token, at=min(now, end))

    def record_break(self, token: int) -> None:
        """The server has carried out a break: what its holder believes from here on is nobody's promise."""
        self.broken_tokens.add(token)
        for held_lease in self._held.values():
            if held_lease.lease.token == token and not held_lease.notified:
                self.history.lost(held_lease.worker, held_lease.lease.name, token)

    def record_gone(self, process: Process, id_hash: str) -> None:
        """The engine's word that a lease is over has arrived: its holder must not go on believing."""
        if held_lease := self._held.get(id_hash):
            self._expect_soon(
                process, lambda: not held_lease.lease.held, "deaf", f"{held_lease} though the engine said it is gone"
            )

    def _expect_soon(self, process: Process, condition: Callable[[], bool], rule: str, text: str) -> None:
        """It must be so before long; one that was paused meanwhile gets more time."""

        def check() -> None:
            if self._world.time - process.resumed_at < LOSS_NOTICE_LIMIT:
                process.call_later(LOSS_NOTICE_LIMIT, check)
            elif not condition():
                self._add_finding(rule, text)

        process.call_later(LOSS_NOTICE_LIMIT, check)

    def record_release(self, held_lease: HeldLease) -> Op:
        self._record_expiry(held_lease)
        if held_lease.lease.lost_reason is not None:
            self._expect_soon(
                held_lease.process,
                lambda: held_lease.notified,
                "untold",
                f"{held_lease}, lost it, and got no word of that",
            )
        return self.history.invoke(held_lease.worker, "release", held_lease.lease.name, token=held_lease.lease.token)

    def forget(self, held_lease: HeldLease) -> None:
        self._held.pop(held_lease.lease._claim.id_hash, None)

    def record_crash(self, process: Process) -> None:
        """To be called before the process dies: from then on its people believe nothing."""
        for held_lease in [held_lease for held_lease in self._held.values() if held_lease.process is process]:
            self._record_expiry(held_lease)
            self.forget(held_lease)
        for worker in sorted({held_lease.worker for held_lease in self._all_leases if held_lease.process is process}):
            self.history.crashed(worker)

    def finish(self) -> None:
        """After the run: close what its own clock closed, and silence finalisers of what died in the simulation."""
        for held_lease in self._all_leases:
            if not held_lease.process.dead:
                self._record_expiry(held_lease)
            if held_lease.lease._final_state is None:
                held_lease.lease._final_state = LOST

    def _record_expiry(self, held_lease: HeldLease) -> None:
        if (
            not held_lease.notified
            and held_lease.trusted_until < self._world.time
            and held_lease.lease.lost_reason is not None
        ):
            self.history.lost(
                held_lease.worker, held_lease.lease.name, held_lease.lease.token, at=held_lease.trusted_until
            )
