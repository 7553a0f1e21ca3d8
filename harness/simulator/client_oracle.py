"""Records which leases simulated programs trust, and checks that no program trusts a lease that has ended.

The times come from the leases themselves. Trust ends at the earliest of: the start of the release, the notification of
the loss, and the lease's own local deadline converted to true time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from harness.checkers.history import History, Op
from leasehold.aio import AsyncLease
from leasehold.client.lease import LOST
from leasehold.runtime.simulated import Process, Simulator

LOSS_NOTICE_LIMIT: Final = 0.25  # seconds from a lease's local deadline to its on_lost, unless the process is paused

Shape = Literal["lock", "read", "write", "semaphore"]
Style = Literal["with", "hand", "try"]
AddFinding = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Request:
    """What one operation acquires, and how it uses the lease."""

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
    """A lease that a worker holds."""

    worker: str
    process: Process
    lease: AsyncLease
    notified: bool = False
    short_lived: bool = False  # granted late or shortened by renew(ttl): it may end before it can be checked

    def __str__(self) -> str:
        return f"{self.worker} trusted its lease of {self.lease.name}"

    @property
    def trusted_until(self) -> float:
        """True time at which the lease's own clock ends it."""
        return self.process.true_time(self.lease._validity.valid_until)


class ClientOracle:
    """Records the history, and checks that no worker trusts a lease that has ended."""

    def __init__(self, world: Simulator, add_finding: AddFinding) -> None:
        self.history = History(lambda: world.time)
        self.lost = 0
        self.broken_tokens: set[int] = set()  # tokens that the operator has broken
        self.ended_by_release: set[str] = set()  # id hashes of grants that were alive when their release arrived
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
                "late", f"{worker} got a lease of {lease.name} that had already ended: {lease.lost_reason} (E8)"
            )
        held_lease = HeldLease(worker, process, lease, short_lived=lease.remaining < lease.ttl / 2)
        self._held[lease._claim.id_hash] = held_lease
        self._all_leases.append(held_lease)
        # Broken before the grant arrived: its holder is notified by the next renewal.
        if lease.token in self.broken_tokens:
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
            self._add_finding("loss not reported", f"{held_lease.worker} lost {lease.name}, and lost_reason is not set")
        if now - max(end, held_lease.process.resumed_at) > LOSS_NOTICE_LIMIT and not held_lease.short_lived:
            self._add_finding(
                "loss not reported",
                f"{held_lease.worker} was notified {now - end:.3f} s late that {lease.name} is lost",
            )
        self.history.lost(held_lease.worker, lease.name, lease.token, at=min(now, end))

    def record_break(self, token: int) -> None:
        """The server has broken a lock: from now on its holder has no promise."""
        self.broken_tokens.add(token)
        for held_lease in self._held.values():
            if held_lease.lease.token == token and not held_lease.notified:
                self.history.lost(held_lease.worker, held_lease.lease.name, token)

    def check_trust(self, promised_until: Callable[[str, int], float]) -> None:
        """Call this often: no live lease may be trusted for longer than the server promised to keep its grant (E8),
        even if no other client asks for the name. `promised_until`: by name and token, in true time."""
        for held_lease in self._held.values():
            lease = held_lease.lease
            if lease._final_state is None and held_lease.trusted_until > promised_until(lease.name, lease.token):
                self._add_finding(
                    "trusted too long", f"{held_lease}, token {lease.token}, beyond its promised end (E8)"
                )

    def record_gone(self, process: Process, id_hash: str) -> None:
        """The engine's answer that a lease is gone has arrived: its holder must not trust it any longer."""
        if held_lease := self._held.get(id_hash):
            self._expect_soon(
                process,
                lambda: not held_lease.lease.held,
                "loss ignored",
                f"{held_lease} after the engine said it is gone",
            )

    def _expect_soon(self, process: Process, condition: Callable[[], bool], rule: str, text: str) -> None:
        """Check the condition after LOSS_NOTICE_LIMIT seconds, or later if the process was paused meanwhile."""

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
                "loss not reported",
                f"{held_lease}, lost it, and was not notified",
            )
        return self.history.invoke(held_lease.worker, "release", held_lease.lease.name, token=held_lease.lease.token)

    def forget(self, held_lease: HeldLease) -> None:
        self._held.pop(held_lease.lease._claim.id_hash, None)

    def record_crash(self, process: Process) -> None:
        """Call this before the process dies: from then on its workers hold nothing."""
        for held_lease in [held_lease for held_lease in self._held.values() if held_lease.process is process]:
            self._record_expiry(held_lease)
            self.forget(held_lease)
        for worker in sorted({held_lease.worker for held_lease in self._all_leases if held_lease.process is process}):
            self.history.crashed(worker)

    def finish(self) -> None:
        """After the run, record the leases that expired, and silence the finalisers of those whose process died."""
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
