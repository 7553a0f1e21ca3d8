"""A client's claims by state, shared by its two engine instances: the caller's runtime and the watchdog's thread.

The registry knows which claims are queued, which are held, and which releases are pending. Engines report notifications
to it (`on_notification`); the watchdog renews and retries what it finds there. It is thread-safe, because it uses only
single steps on dictionaries, and signals that are remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Final, Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from leasehold.core.timing import HEARTBEAT_INTERVAL, NEVER, WAITER_TTL, WAKEUP_SLACK, poll_interval
from leasehold.errors import StaleToken
from leasehold.model import Busy, Claim, Holder, Reason
from leasehold.runtime.base import Runtime, Signal

_MAX_PENDING_RELEASES: Final = 1_000  # beyond this, wake-ups for unknown claims are ignored: a server may send many
_MAX_RELEASED_ON_COMMIT: Final = 10_000
_MAX_STALE_RECHECKS: Final = 64  # entries of former waiters that may be kept

K = TypeVar("K")
V = TypeVar("V")


class RegisteredLease(Protocol):
    def _end_lost(self, reason: Reason) -> bool: ...

    def _mark_at_risk(self, why: str) -> None: ...


class Waiter:
    """A queued claim, and the notifications that arrived since its last attempt."""

    __slots__ = (
        "answered",
        "cancelled",
        "claim",
        "holders",
        "joined_at",
        "kept_at",
        "polls",
        "recheck_at",
        "recheck_by",
        "refusals",
        "refused",
        "signal",
        "woken",
    )

    def __init__(self, claim: Claim, signal: Signal, joined_at: float) -> None:
        self.claim = claim
        self.joined_at = joined_at
        self.kept_at = joined_at  # when the last heartbeat that the engine confirmed was sent
        self.signal = signal
        self.answered = False  # the engine has answered an attempt, so it knows the claim
        self.woken = False
        self.cancelled = False  # the client is closed: stop waiting
        self.refusals = 0  # how often overloaded servers refused its attempts
        self.refused = False  # its last attempt was refused, and it is not in the queue: a heartbeat would keep nothing
        self.recheck_at: float | None = None
        self.recheck_by: float | None = None  # attempt again by then: the engine relies on it instead of a notification
        self.polls = 0  # how often it has waited without a wake-up to expect
        self.holders: tuple[str, ...] = ()  # addresses of the clients it waits for, if their end can be noticed


class PendingRelease(NamedTuple):
    """A release that is not yet confirmed. After `retry_until` the claim has expired and retries are useless."""

    claim: Claim
    retry_until: float


class ClaimRegistry:
    def __init__(self, runtime: Runtime, client_id: str) -> None:
        # Identifies this client in wake-up addresses and etcd keys; public, changes after a fork. With SQL servers the
        # address is another one: `SqlListener.address`.
        self.client_id = client_id
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[str, Callable[[], RegisteredLease | None]] = {}  # by id hash: weak references to leases
        self.pending_releases: dict[str, PendingRelease] = {}
        # Id hashes of leases that a transaction of the caller is to release: it may have locked their rows.
        self.released_on_commit: set[str] = set()
        self.shared: dict[str, object] = {}  # other state that the two engine instances share
        # The client's engine instances. A task left in an old event loop may keep one alive.
        self.engines: WeakSet[object] = WeakSet()
        self.closed = False  # the client is closed
        # Whether an engine may send a release behind an attempt that was not answered in time. Not if the claim may be
        # repeated through another instance: the release might arrive last, and end the repeated grant.
        self.undo_unanswered = True
        self.abandoned_ttl = WAITER_TTL  # how long an abandoned claim may stay at the engine
        # Makes the watchdog run by an instant; safe inside a finaliser.
        self.wake_watchdog: Callable[[float], None] = _no_watchdog
        # Reports a token that a fence refused to the lock server of this client, if it has one. Never waits or raises.
        self.report_refusal: Callable[[Claim, int, StaleToken, str], None] = _not_reported
        self.connection_epoch: object = None  # a new object each time the engine lost its connection
        self._now = runtime.now

    def add_waiter(self, claim: Claim, runtime: Runtime) -> Waiter:
        """Register a queued claim for its wake-up, before the attempt is sent (E4). Discards earlier notifications."""
        waiter = self.waiting.get(claim.id_hash)
        if waiter is None:
            now = self._now()
            self.waiting[claim.id_hash] = waiter = Waiter(claim, runtime.signal(), now)
            self.wake_watchdog(now + HEARTBEAT_INTERVAL)  # it sends heartbeats for the waiter from then on (E7)
        else:
            waiter.woken, waiter.recheck_at, waiter.recheck_by, waiter.refused = False, None, None, False
        return waiter

    def remove_waiter(self, id_hash: str) -> None:
        self.waiting.pop(id_hash, None)

    def disown_waiter(self, id_hash: str) -> None:
        """Remove a waiter whose claim another client serves from now on, and let its `wait` return."""
        if (waiter := self.waiting.pop(id_hash, None)) is not None:
            waiter.cancelled = True
            waiter.signal.set()

    def retry_release(self, claim: Claim, wake_now: bool = True) -> PendingRelease:
        """Make the watchdog retry the release until the engine has answered or the claim has expired.
        `wake_now=False`: the caller has sent a release, and wakes the watchdog itself if the engine does not answer."""
        now = self._now()
        pending = self.pending_releases[claim.id_hash] = PendingRelease(
            claim, now + max(claim.ttl + claim.delay, self.abandoned_ttl)
        )
        if wake_now:
            self.wake_watchdog(now)
        return pending

    def add_released_on_commit(self, id_hash: str) -> None:
        if len(self.released_on_commit) >= _MAX_RELEASED_ON_COMMIT:  # lost leases are never released, and stay here
            self.released_on_commit.clear()
        self.released_on_commit.add(id_hash)

    def remove_engine(self, engine: object) -> bool:
        """Note that an engine instance was closed. True: close what the instances share as well.

        The watchdog's instance comes and goes while the client lives."""
        self.engines.discard(engine)
        return self.closed or not self.engines

    def knows(self, id_hash: str) -> bool:
        return id_hash in self.waiting or id_hash in self.held or id_hash in self.pending_releases

    def on_notification(
        self, kind: Literal["reserved", "recheck", "broken"], id_hash: str, seconds: float, unknown_claim: Claim | None
    ) -> None:
        """Record a notification about a claim. Callable from any thread.

        A reservation for a claim that this client does not know comes from a late attempt of a claim that was given up.
        Then `unknown_claim` (see `make_unknown_claim`) is released; otherwise the queue would stall until the
        reservation expires. Engines never end a grant for a claim without an id, because the grant may
        have been taken and handed to another client before this notification arrived."""
        if kind == "broken":
            if (lease_ref := self.held.get(id_hash)) and (lease := lease_ref()):
                lease._end_lost("broken")
            return
        waiter = self.waiting.get(id_hash)
        if waiter is None:
            if (
                kind == "reserved"
                and unknown_claim is not None
                and not self.knows(id_hash)
                and len(self.pending_releases) < _MAX_PENDING_RELEASES
            ):
                self.retry_release(unknown_claim)
            return
        if kind == "reserved":
            waiter.woken = True
        else:
            waiter.recheck_at = self._now() + seconds + WAKEUP_SLACK
        waiter.signal.set()

    def mark_all_at_risk(self, why: str) -> None:
        """The engine lost its connection: every lease is at risk until the engine answers for it. From any thread."""
        # First: a lease registered at the same time is found below, or sees the new epoch.
        self.connection_epoch = object()
        for _, lease_ref in snapshot_items(self.held):
            if lease := lease_ref():
                lease._mark_at_risk(why)


class RecheckTimer:
    """When each head of a queue must re-check. Used by a listener's thread.

    Each hand-off makes another waiter the head of the queue and tells it when to re-check. Usually its reservation
    comes first. So the listener keeps that time, instead of waking the waiter to sleep again."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []  # a heap; may contain claims that left, or attempted again since

    def schedule(self, registry: ClaimRegistry, id_hash: str, at: float) -> None:
        if (waiter := registry.waiting.get(id_hash)) is None:
            return
        waiter.recheck_at = at  # for a waiter that wakes earlier
        heappush(self._due, (at, id_hash))
        if len(self._due) > _MAX_STALE_RECHECKS + 2 * len(registry.waiting):
            latest = {(waiter.recheck_at or 0.0, id_hash) for id_hash, waiter in snapshot_items(registry.waiting)}
            self._due = list(latest.intersection(self._due))
            heapify(self._due)

    def wake_due(self, registry: ClaimRegistry, now: float) -> None:
        """Wake the waiters whose time has come."""
        while self._due and self._due[0][0] <= now:
            at, id_hash = heappop(self._due)
            if (waiter := registry.waiting.get(id_hash)) is not None and waiter.recheck_at == at:
                waiter.signal.set()

    def next_due(self) -> float:
        return self._due[0][0] if self._due else float("inf")


def snapshot_items(mapping: dict[K, V]) -> list[tuple[K, V]]:
    """The items of a dictionary that other threads change. A garbage collection during the copy may let another thread
    run; if that changes the dictionary, the copy raises RuntimeError and is repeated."""
    while True:
        try:
            return list(mapping.items())
        except RuntimeError:
            continue


def make_unknown_claim(namespace: str, name: str, id_hash: str) -> Claim:
    """The claim of a notification, for `on_notification`. It has no id, so its release ends no grant."""
    return Claim(namespace, name, "", id_hash, Holder("unknown"), WAITER_TTL)


def _no_watchdog(_at: float) -> None:
    """Does nothing: for a registry without a watchdog, as in tests of one engine."""


def _not_reported(_claim: Claim, _token: int, _stale: StaleToken, _fence: str) -> None:
    """Does nothing: the engine is not a lock server."""


async def wait_for_wakeup(
    runtime: Runtime,
    waiter: Waiter,
    busy: Busy,
    seconds: float,
    *,
    polls: bool = False,
    probe: Callable[[Waiter], bool] | None = None,
    probe_interval: float = NEVER,
) -> None:
    """`wait` of every engine: returns at the wake-up, or when it is time to re-check (E4). `polls`: no wake-up reaches
    this client now. `probe`: also returns if this says so. The head of the queue calls it at each interval, and a
    waiter behind it less often."""
    if polls:
        seconds = min(seconds, poll_interval(busy.position, waiter.polls, runtime.random()))
        waiter.polls += 1
    end = runtime.now() + seconds
    # Only the head of the queue re-checks when the holder's grant ends; a waiter that becomes the head is notified.
    recheck_at = end if busy.position or busy.left is None else runtime.now() + busy.left + WAKEUP_SLACK
    while not waiter.woken and not waiter.cancelled:
        if waiter.recheck_at is not None:
            recheck_at = waiter.recheck_at
        left = min(end, recheck_at) - runtime.now()
        if left <= 0:
            return
        pause = probe_interval if waiter.recheck_at is not None else probe_interval * (1 + (busy.position or 0))
        if not await waiter.signal.wait(min(left, pause)) and (left <= pause or probe is None or probe(waiter)):
            return
