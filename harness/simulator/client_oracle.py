"""Records which leases simulated programs trust, and checks that no program trusts a lease that has ended.

The times come from the leases themselves. Trust ends at the earliest of: the start of the release, the notification of
the loss, and the lease's own local deadline converted to true time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from harness import probe
from harness.checkers.history import History, Op
from leasehold.aio import AsyncLease
from leasehold.client.lease import LOST
from leasehold.core.timing import overdue_at
from leasehold.runtime.simulated import Process, Simulator

RESIZED: Final = "encoders"  # the semaphore whose limit the operator changes
LIMITS: Final = (1, 2, 3, 4)  # that the operator chooses from
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
    strict: bool = False
    ensures: bool = False
    hands_over: bool = False
    others: tuple[str, ...] = ()  # any one of `name` and these


class RequestOps:
    """The calls of one request in the history: one for each name that may be granted."""

    def __init__(self, ops: dict[str, Op]) -> None:
        self._ops = ops

    def ok(self, lease: AsyncLease) -> None:
        for name, op in self._ops.items():
            if name == lease.name:
                op.ok(token=lease.token, slot=lease.slot)
            else:
                op.unknown("another name was granted")

    def fail(self, reason: str) -> None:
        for op in self._ops.values():
            op.fail(reason)

    def unknown(self, reason: str) -> None:
        for op in self._ops.values():
            op.unknown(reason)


@dataclass(slots=True, eq=False)
class HeldLease:
    """A lease that a worker holds."""

    worker: str
    process: Process
    lease: AsyncLease
    notified: bool = False
    ensured_until: float = 0.0  # by the clock of its process: what `ensure` has promised
    short_lived: bool = False  # granted late or shortened by renew(ttl): it may end during a call of the watchdog

    def __str__(self) -> str:
        return f"{self.worker} trusted its lease of {self.lease.name}"

    @property
    def trusted_until(self) -> float:
        """True time at which the lease's own clock ends it."""
        return self.process.true_time(probe.validity(self.lease).valid_until)


class ClientOracle:
    """Records the history, and checks that no worker trusts a lease that has ended."""

    def __init__(self, world: Simulator, add_finding: AddFinding) -> None:
        self.history = History(lambda: world.time)
        self.lost = 0
        self.broken_tokens: set[int] = set()  # tokens that the operator has broken
        self.ended_by_release: set[str] = set()  # id hashes of grants that were alive when their release arrived
        self._world, self._add_finding = world, add_finding
        self._held: dict[str, HeldLease] = {}
        self._handed_over: dict[str, str] = {}  # by id hash of the lease or its ticket: the worker that took it over
        self._all_leases: list[HeldLease] = []

    def is_held(self, id_hash: str) -> bool:
        return id_hash in self._held or id_hash in self._handed_over

    def record_handed_over(self, held_lease: HeldLease, id_hashes: Sequence[str]) -> None:
        """From now on no client knows these claims, until one takes the lease over or they expire."""
        self.record_release(held_lease).unknown("handed over")
        self.forget(held_lease)
        self._handed_over.update(dict.fromkeys(id_hashes, ""))

    def record_taken_over(self, worker: str, process: Process, lease: AsyncLease) -> HeldLease:
        """One text gives one holder, even if others try at the same time. The history has one interval per token, which
        ended with the hand-over; `check_trust` goes on to compare the lease with what the server promised."""
        id_hash = probe.claim(lease).id_hash
        if before := self._handed_over.get(id_hash):
            self._add_finding("taken over twice", f"{worker} and {before} took over the lease of {lease.name}")
        self._handed_over[id_hash] = worker
        self._held[id_hash] = taken = HeldLease(worker, process, lease, notified=True)
        self._all_leases.append(taken)
        return taken

    def record_request(self, worker: str, request: Request) -> RequestOps:
        # The history does not know when a limit changed: the safety oracle does.
        resized = request.name == RESIZED and request.shape == "semaphore"
        return RequestOps(
            {
                name: self.history.invoke(
                    worker,
                    "try" if request.wait == 0 else "acquire",
                    name,
                    mode="shared" if request.shape == "read" else "exclusive",
                    kind="semaphore" if request.shape == "semaphore" else "lock",
                    limit=max(LIMITS) if resized else request.limit,
                )
                for name in (request.name, *request.others)
            }
        )

    def record_grant(self, op: RequestOps, worker: str, process: Process, lease: AsyncLease) -> HeldLease:
        op.ok(lease)
        if not lease.held:
            self._add_finding(
                "late", f"{worker} got a lease of {lease.name} that had already ended: {lease.lost_reason} (E8)"
            )
        # The watchdog may be in a call that began before the grant: a slow one lasts two thirds of the shortest ttl.
        longest_call = probe.core(lease).watchdog.shortest_ttl * 2 / 3
        held_lease = HeldLease(worker, process, lease, short_lived=lease.remaining < longest_call)
        self._held[probe.claim(lease).id_hash] = held_lease
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
            if not probe.has_final_state(lease) and held_lease.trusted_until > promised_until(lease.name, lease.token):
                self._add_finding(
                    "trusted too long", f"{held_lease}, token {lease.token}, beyond its promised end (E8)"
                )
            validity = probe.validity(lease)
            if probe.is_strict(lease) and validity.valid_until > overdue_at(validity.asked_at, validity.ttl):
                self._add_finding("not strict", f"{held_lease} after its renewal was overdue, though it is strict")
            if not probe.has_final_state(lease) and validity.valid_until < held_lease.ensured_until:
                self._add_finding("not ensured", f"{held_lease}, which ends before what ensure() has promised")

    def record_ensured(self, held_lease: HeldLease, seconds: float) -> None:
        """`ensure` has returned: the lease lives for so long, and nothing shortens that."""
        lease, now = held_lease.lease, held_lease.process.now()
        if lease.held and lease.remaining < seconds:
            self._add_finding("not ensured", f"{held_lease} with {lease.remaining:.3f} s left after ensure({seconds})")
        held_lease.ensured_until = now + seconds

    def record_gone(self, process: Process, id_hash: str) -> None:
        """The engine's answer that a lease is gone has arrived: its holder must not trust it any longer."""
        # Of a lease that was handed over the engine notifies the first client.
        if (held_lease := self._held.get(id_hash)) and held_lease.process is process:
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
        self._held.pop(probe.claim(held_lease.lease).id_hash, None)

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
            if not probe.has_final_state(held_lease.lease):
                probe.set_final_state(held_lease.lease, LOST)

    def _record_expiry(self, held_lease: HeldLease) -> None:
        if (
            not held_lease.notified
            and held_lease.trusted_until < self._world.time
            and held_lease.lease.lost_reason is not None
        ):
            self.history.lost(
                held_lease.worker, held_lease.lease.name, held_lease.lease.token, at=held_lease.trusted_until
            )
