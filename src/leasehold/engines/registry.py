"""The memory that the two sides of a client share: the caller's runtime, and the watchdog's thread.

It knows which claims stand in line, which are held, and which releases are owed. Engines write what they hear into
it (`on_notification`); the watchdog works through it. Thread-safe: single steps on dictionaries, and remembered
signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from leasehold.core.timing import HEARTBEAT_INTERVAL, WAITER_TTL, WAKEUP_SLACK
from leasehold.model import Busy, Claim, Reason
from leasehold.runtime.base import Runtime, Signal

K = TypeVar("K")
V = TypeVar("V")


class RegisteredLease(Protocol):
    def _end_lost(self, reason: Reason) -> bool: ...

    def _mark_at_risk(self, why: str) -> None: ...


class Waiter:
    """A claim that stands in line, and what the engine has told it since it last asked."""

    __slots__ = ("cancelled", "claim", "recheck_at", "signal", "woken")

    def __init__(self, claim: Claim, signal: Signal) -> None:
        self.claim = claim
        self.signal = signal
        self.woken = False
        self.cancelled = False  # the client is closed: nothing is worth waiting for
        self.recheck_at: float | None = None


class PendingRelease(NamedTuple):
    """A release not yet confirmed, and until when it is worth repeating: after that the claim has lapsed."""

    claim: Claim
    retry_until: float


class ClaimRegistry:
    def __init__(self, runtime: Runtime, client_id: str) -> None:
        self.client_id = client_id  # this client's address for wake-ups; public, new after a fork
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[str, Callable[[], RegisteredLease | None]] = {}  # by mark: leases, weakly
        self.pending_releases: dict[str, PendingRelease] = {}
        self.shared: dict[str, object] = {}  # what else the twins of an engine share
        self.engines: WeakSet[object] = WeakSet()  # the client's engines; a task left in a loop of before may keep one
        self.closed = False  # the client is closed
        self.abandoned_ttl = WAITER_TTL  # how long a claim may stay at the engine that nothing more is heard of
        self.wake_watchdog: Callable[[float], None] = (
            _no_watchdog  # has the watchdog look by an instant; safe inside a finaliser
        )
        self.loss_epoch: object = None  # another one each time the engine lost its way
        self._now = runtime.now

    def add_waiter(self, claim: Claim, runtime: Runtime) -> Waiter:
        """Register for the wake-up of a queued claim, before it is sent (E4). What was told before is out of date."""
        waiter = self.waiting.get(claim.id_hash)
        if waiter is None:
            self.waiting[claim.id_hash] = waiter = Waiter(claim, runtime.signal())
            self.wake_watchdog(
                self._now() + HEARTBEAT_INTERVAL
            )  # the watchdog keeps its place in line from now on (E7)
        else:
            waiter.woken, waiter.recheck_at = False, None
        return waiter

    def remove_waiter(self, id_hash: str) -> None:
        self.waiting.pop(id_hash, None)

    def retry_release(self, claim: Claim, wake_now: bool = True) -> PendingRelease:
        """Have the watchdog repeat the release until the engine answered, or the claim has ended by itself.
        `wake_now=False`: the caller has sent one, and stirs the watchdog if that is not answered."""
        now = self._now()
        pending = self.pending_releases[claim.id_hash] = PendingRelease(
            claim, now + max(claim.ttl + claim.delay, self.abandoned_ttl)
        )
        if wake_now:
            self.wake_watchdog(now)
        return pending

    def remove_engine(self, engine: object) -> bool:
        """An engine is closed. True: so is what its twins share. The watchdog's twin comes and goes."""
        self.engines.discard(engine)
        return self.closed or not self.engines

    def knows(self, id_hash: str) -> bool:
        return id_hash in self.waiting or id_hash in self.held or id_hash in self.pending_releases

    def on_notification(
        self, kind: Literal["go", "head", "lost"], id_hash: str, seconds: float, unknown_claim: Claim | None
    ) -> None:
        """Note what the engine told about a claim. From any thread.

        A turn for a claim nobody here knows is a late attempt of one long given up: `unknown_claim`, a claim made from
        the message and without an id, is released, or the line would stand still until its reservation ends. Without an
        id no engine ends a grant for it: the grant may have been taken and handed on before this word came."""
        if kind == "lost":
            if (lease_ref := self.held.get(id_hash)) and (lease := lease_ref()):
                lease._end_lost("broken")
            return
        waiter = self.waiting.get(id_hash)
        if waiter is None:
            if kind == "go" and unknown_claim is not None and not self.knows(id_hash):
                self.retry_release(unknown_claim)
            return
        if kind == "go":
            waiter.woken = True
        else:
            waiter.recheck_at = self._now() + seconds + WAKEUP_SLACK
        waiter.signal.set()

    def connection_lost(self, why: str) -> None:
        """The engine lost its way to whatever holds: every lease is at risk until its next answer. From any thread."""
        self.loss_epoch = object()  # first: a lease that is being entered meanwhile is either met below, or sees this
        for _, lease_ref in snapshot_items(self.held):
            if lease := lease_ref():
                lease._mark_at_risk(why)


def snapshot_items(mapping: dict[K, V]) -> list[tuple[K, V]]:
    """What is in a dictionary that other threads change meanwhile: a garbage collection in here may let one of them in,
    and the dictionary is then found to have changed."""
    while True:
        try:
            return list(mapping.items())
        except RuntimeError:
            continue


def _no_watchdog(_at: float) -> None:
    """Without a watchdog, as in a test of one engine, nobody is stirred."""


async def wait_for_wakeup(runtime: Runtime, waiter: Waiter, busy: Busy, seconds: float) -> None:
    """What `wait` is for every engine that pushes: until told to go, or it is time to look again (E4)."""
    end = runtime.now() + seconds
    # Only the head of the line times the holder: everyone further back is told when that becomes them.
    recheck_at = end if busy.position or busy.left is None else runtime.now() + busy.left + WAKEUP_SLACK
    while not waiter.woken and not waiter.cancelled:
        if waiter.recheck_at is not None:
            recheck_at = waiter.recheck_at
        left = min(end, recheck_at) - runtime.now()
        if left <= 0 or not await waiter.signal.wait(left):
            return
