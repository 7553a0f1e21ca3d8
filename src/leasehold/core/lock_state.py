"""Who may hold a name: the state machine that every engine with a table of queue entries implements.

A `LockState` is the whole state of one live name. Its verbs get the time and a token counter as arguments and return
the notifications to send; they read no clock and send nothing. The memory engine is this module behind a mutex, and the
tests of the SQL and Redis engines compare those engines with it as their model.

    waiting ──> reserved ──> held ──> (released)            a reservation is a grant that the waiter has yet to claim:
       ^            │          └────> cooling ──> (removed)  its ttl must start at a request that the client has timed
       └─ passed ───┘ not claimed in time, or client unreachable: keeps its ticket and returns to its old position

Safety, in four sentences. A new holder is admitted only by `_can_admit`, after `_expire_holders` has ended every grant
that is over; an engine may also prove that the process of a grant has ended (E1). Every token comes from one counter,
which only rises (E3). A repeated attempt finds its entry by id hash (E2). `expires_at` of a grant only moves forward,
and only while it lies in the future, so a client that trusts an earlier answer is never overtaken by another holder
(E8).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

from leasehold.core.listing import listed_seconds
from leasehold.core.names import owner_of
from leasehold.core.queue_entry import (
    COOLING,
    HELD,
    PASSED,
    RESERVED,
    STATES,
    WAITING,
    Context,
    Notification,
    QueueEntry,
)
from leasehold.core.timing import NEVER, RESERVATION_PROBE, RESERVATION_TTL, WAITER_TTL
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Kind, Mode, fast_tuple

AttemptResult: TypeAlias = "tuple[Grant | Busy, list[Notification]]"


class LockState:
    """The state of one live name; `empty` when it has no claims left."""

    __slots__ = (
        "_next_expiry",
        "_next_waiter_scan",
        "_notified_head",
        "entries",
        "holders",
        "kind",
        "last_ticket",
        "limit",
        "limit_set",
        "waiters",
    )

    def __init__(self, now: float, kind: Kind = "lock", limit: int = 1) -> None:
        self.kind: Kind = kind
        self.limit = limit
        self.limit_set = False  # by `set_limit`: it counts instead of the claims' limits, also after the name was empty
        self.entries: dict[str, QueueEntry] = {}  # by id hash: all but the cooling entries
        self.holders: dict[int, QueueEntry] = {}  # by token: reserved, held, cooling
        self.waiters: list[tuple[int, QueueEntry]] = []  # by ticket; without the entries that were passed over
        self.last_ticket = 0
        self._next_expiry = NEVER  # no holder ends before this
        self._next_waiter_scan = now + WAITER_TTL
        self._notified_head: tuple[str, float] = ("", 0.0)  # the head that knows when to re-check, and when

    @property
    def empty(self) -> bool:
        return not self.entries and not self.holders

    # ------------------------------------------------------------------ verbs

    def attempt(self, context: Context, claim: Claim, client: str) -> AttemptResult:
        notifications: list[Notification] = []
        now = context.now
        if now >= self._next_expiry or now >= self._next_waiter_scan:
            self._expire_holders(now)
        if claim.kind != self.kind or claim.limit != self.limit:
            self._change_kind(context.now, claim)
        entry = self.entries.get(claim.id_hash)
        if entry is None:
            if self.waiters:
                self._advance_queue(context, notifications)
            if not self.waiters and (
                not self.holders
                or self._can_admit(claim.mode)
                or (self._end_dead_holders(context) and self._can_admit(claim.mode))
            ):
                entry = self._add_entry(context.now, claim, client)
                self._make_holder(context, entry, HELD, context.now + claim.ttl)
                return fast_tuple(Grant, (entry.token, claim.ttl, entry.slot)), notifications
            if not claim.queue:
                return self._busy(context.now, None), notifications
            entry = self._add_entry(context.now, claim, client)
        if entry.state == PASSED:
            entry.state = WAITING
            insort(self.waiters, (entry.ticket, entry))
        entry.heartbeat_expires_at, entry.client = context.now + WAITER_TTL, client
        if entry.state == WAITING:
            self._advance_queue(context, notifications, attempting=entry)
        if entry.state not in (RESERVED, HELD):
            return self._busy(context.now, entry), notifications
        return self._grant_entry(context, entry, claim, notifications), notifications

    def renew(self, context: Context, claim: Claim) -> tuple[Alive | Gone, list[Notification]]:
        notifications: list[Notification] = []
        entry = self.entries.get(claim.id_hash)
        expired = entry is not None and entry.state == HELD and entry.expires_at <= context.now
        self._expire_holders(context.now)
        self._advance_queue(context, notifications)
        entry = self.entries.get(claim.id_hash)
        if entry is None:
            return Gone("expired" if expired else "unknown"), notifications
        if not claim.token:  # queued: a heartbeat. It neither extends a reservation nor queues a passed-over waiter.
            entry.heartbeat_expires_at = context.now + WAITER_TTL
            return Alive(WAITER_TTL, self._position(entry) if entry.state == WAITING else None), notifications
        if entry.state != HELD or entry.token != claim.token:
            return Gone("unknown"), notifications
        return Alive(self._extend(context.now, entry, claim.ttl)), notifications

    def release(
        self, context: Context, id_hash: str, keep_min_hold: bool = True, release_held: bool = True
    ) -> tuple[bool, list[Notification]]:
        """`keep_min_hold=False`: the grant's `min_hold` does not apply. `release_held=False`: give up only a queue
        position or a reservation.

        The notification of a reservation may arrive late, when its client no longer knows the claim because it took the
        grant in the meantime and handed it to another client. Then the first client must not end the grant."""
        notifications: list[Notification] = []
        if context.now >= self._next_expiry or context.now >= self._next_waiter_scan:
            self._expire_holders(context.now)
        entry = self.entries.get(id_hash)
        if entry is not None and entry.state == HELD and not release_held:
            entry = None
        if entry is not None:
            # If the clock went back, the name must not be kept for longer than min_hold.
            if (
                keep_min_hold
                and entry.min_hold
                and entry.state == HELD
                and (kept_until := min(entry.since, context.now) + entry.min_hold) > context.now
            ):
                self._start_cooling(entry, kept_until, delay=0.0)
            else:
                self._remove(entry)
        if self.waiters:
            self._advance_queue(context, notifications)
        return entry is not None and entry.token > 0, notifications

    def break_(self, context: Context, token: int) -> tuple[bool, list[Notification]]:
        notifications: list[Notification] = []
        self._expire_holders(context.now)
        entry = self.holders.get(token)
        broken = entry is not None and (entry.state == HELD or (entry.state == COOLING and not entry.delay))
        if entry is not None and broken:
            # Cooling for a delay protects from a holder that has not noticed the break: a second break must not end it.
            if entry.state == HELD:
                notifications.append(Notification(entry.client, "broken", entry.id_hash))
            if entry.state == HELD and entry.delay:
                self._start_cooling(entry, context.now + entry.delay, entry.delay)
            else:
                self._remove(entry)
        self._advance_queue(context, notifications)
        return broken, notifications

    def set_limit(self, context: Context, limit: int | None) -> tuple[bool, list[Notification]]:
        """Set the limit of a semaphore, whatever its claims say; None: from when the name is empty, its next claim
        decides again. False: the name is in use as a lock.

        A smaller limit ends no grant. It withdraws reservations, since claiming one would make a grant: their waiters
        return to their positions."""
        notifications: list[Notification] = []
        self._expire_holders(context.now)
        if limit is None:
            self.limit_set = False
        else:
            self._expire_waiters(context.now)  # dead waiters must not fix the kind
            if self.kind == "lock" and not self.empty:
                return False, notifications
            self.kind, self.limit, self.limit_set = "semaphore", limit, True
            reserved = [entry for _, entry in sorted(self.holders.items()) if entry.state == RESERVED]
            for entry in reserved[len(reserved) - max(0, min(len(self.holders) - limit, len(reserved))) :]:
                self._withdraw_reservation(entry)
        self._advance_queue(context, notifications)
        return True, notifications

    def decline(self, context: Context, id_hash: str, client: str) -> tuple[bool, list[Notification]]:
        """Pass a waiter over whose reservation cannot be notified, unless another client serves the claim by now."""
        notifications: list[Notification] = []
        self._expire_holders(context.now)
        entry = self.entries.get(id_hash)
        declined = entry is not None and entry.state == RESERVED and entry.client == client
        if entry is not None and declined:
            self._pass_over(entry)
        self._advance_queue(context, notifications)
        return declined, notifications

    def sweep(self, context: Context) -> list[Notification]:
        """End what is over and reserve for the next waiters, without a request from any client."""
        notifications: list[Notification] = []
        self.expire(context.now)
        self._advance_queue(context, notifications)
        return notifications

    def expire(self, now: float) -> None:
        """End what is over, and reserve nothing: for read-only callers."""
        self._expire_holders(now)
        self._expire_waiters(now)

    def repair(self, context: Context) -> list[Notification]:
        """Make the collections consistent again after a verb was interrupted by Ctrl-C, MemoryError or RecursionError.

        The state of each entry is authoritative, because it changes in one step; the collections are rebuilt from it.
        What the interrupted verb was about to do has not happened, and its caller gives the claim up. Notifications
        that may not have been sent are sent again: a duplicate does no harm.
        """
        all_entries = [*self.entries.values(), *self.holders.values()]
        self.holders = {
            entry.token: entry for entry in all_entries if entry.token and entry.state in (RESERVED, HELD, COOLING)
        }
        self.entries = {entry.id_hash: entry for entry in all_entries if entry.state != COOLING}
        self.waiters = sorted((entry.ticket, entry) for entry in self.entries.values() if entry.state == WAITING)
        self._next_expiry, self._notified_head = 0.0, ("", 0.0)
        reserved = [
            Notification(entry.client, "reserved", entry.id_hash)
            for entry in self.entries.values()
            if entry.state == RESERVED
        ]
        return reserved + self.sweep(context)

    def holdings(self, namespace: str, name: str, now: float) -> Iterator[Holding]:
        """Holders by token, then the queue by ticket. A passed-over waiter is at the position it would return to."""
        all_entries = {id(entry): entry for entry in (*self.entries.values(), *self.holders.values())}
        for entry in sorted(all_entries.values(), key=lambda entry: (entry.token == 0, entry.token, entry.ticket)):
            is_holder = entry.state in (RESERVED, HELD, COOLING)
            yield Holding(
                namespace=namespace,
                name=name,
                state=STATES[entry.state],
                mode=entry.mode,
                kind=self.kind,
                limit=self.limit,
                fingerprint=entry.id_hash[:16],
                holder=entry.holder,
                age=listed_seconds(now - entry.since),
                left=listed_seconds((entry.expires_at if is_holder else entry.heartbeat_expires_at) - now),
                token=entry.token or None,
                slot=entry.slot,
                position=None if is_holder else self._position(entry),
                owner=owner_of(entry.id_hash),
            )

    # -------------------------------------------------------------- decisions

    def _can_admit(self, mode: Mode) -> bool:
        if not self.holders:
            return True
        if self.kind == "semaphore":
            return len(self.holders) < self.limit
        return mode == "shared" and all(entry.mode == "shared" for entry in self.holders.values())

    def _change_kind(self, now: float, claim: Claim) -> None:
        if self.limit_set and claim.kind == self.kind:
            return  # the limit that was set counts
        self._expire_waiters(now)  # dead waiters must not fix the kind
        if self.limit_set or not self.empty:
            raise mismatch(claim.name, claim.kind, claim.limit, self.kind, self.limit)
        self.kind, self.limit = claim.kind, claim.limit

    def _expire_holders(self, now: float) -> None:
        """End every grant, reservation and cooling period that is over. Runs before any decision."""
        if now >= self._next_waiter_scan:
            self._expire_waiters(now)
        if now < self._next_expiry:
            return
        for entry in [entry for entry in self.holders.values() if entry.expires_at <= now]:
            if entry.state == HELD and entry.expires_at + entry.delay > now:
                self._start_cooling(entry, entry.expires_at + entry.delay, entry.delay)
            elif entry.state == RESERVED and entry.heartbeat_expires_at > now:
                self._pass_over(entry)
            else:
                self._remove(entry)
        self._next_expiry = min((entry.expires_at for entry in self.holders.values()), default=NEVER)

    def _end_dead_holders(self, context: Context) -> bool:
        """End the grants that are bound to a process that has ended, before their ttl does. Whether there was one."""
        bound = [entry for entry in self.holders.values() if entry.state == HELD and entry.process_bound]
        dead = {client for client in {entry.client for entry in bound} if context.dead(client)}
        for entry in bound:
            if entry.client in dead and entry.delay:
                self._start_cooling(entry, context.now + entry.delay, entry.delay)
            elif entry.client in dead:
                self._remove(entry)
        return bool(dead)

    def _expire_waiters(self, now: float) -> None:
        """Remove waiters without a recent heartbeat. Runs rarely: `_advance_queue` removes a dead head as well."""
        self._next_waiter_scan = now + WAITER_TTL
        for entry in [
            entry
            for entry in self.entries.values()
            if entry.state in (WAITING, PASSED) and entry.heartbeat_expires_at <= now
        ]:
            self._remove(entry)

    def _advance_queue(
        self, context: Context, notifications: list[Notification], attempting: QueueEntry | None = None
    ) -> None:
        """Reserve for the head of the queue while it can be admitted; then notify the new head when to re-check."""
        while (head := self._head()) is not None:
            if head is not attempting and head.heartbeat_expires_at <= context.now:
                self._remove(head)
            elif head is not attempting and not context.reachable(head.client):
                self._pass_over(head)
            elif self._can_admit(head.mode):
                self._make_holder(context, head, RESERVED, context.now + RESERVATION_TTL)
                if head is not attempting:  # else the reply says so
                    notifications.append(Notification(head.client, "reserved", head.id_hash))
            elif unreachable := self._unreachable_reserved(context, attempting):
                for entry in unreachable:
                    self._pass_over(entry)
            elif not self._end_dead_holders(context):
                self._next_expiry = min(entry.expires_at for entry in self.holders.values())
                recheck_at = self._recheck_at(context.now)
                if head is attempting:  # the reply says when to re-check
                    self._notified_head = (head.id_hash, recheck_at)
                elif self._notified_head[0] != head.id_hash or recheck_at < self._notified_head[1]:
                    notifications.append(Notification(head.client, "recheck", head.id_hash, recheck_at - context.now))
                    self._notified_head = (head.id_hash, recheck_at)
                return

    def _recheck_at(self, now: float) -> float:
        """When the queue's head must re-check: at the first expiry, or soon if a reservation's client may be dead."""
        soonest = min(entry.expires_at for entry in self.holders.values())
        reserved = any(entry.state == RESERVED for entry in self.holders.values())
        return min(soonest, now + RESERVATION_PROBE) if reserved else soonest

    def _unreachable_reserved(self, context: Context, attempting: QueueEntry | None) -> list[QueueEntry]:
        """Reservations whose client became unreachable and will not claim them. The attempting client is alive."""
        reserved = [entry for entry in self.holders.values() if entry.state == RESERVED and entry is not attempting]
        return [entry for entry in reserved if not context.reachable(entry.client)]

    def _head(self) -> QueueEntry | None:
        """The first waiter. Engines that keep the queue in a table load it from there."""
        return self.waiters[0][1] if self.waiters else None

    # ----------------------------------------------------------- transitions

    def _add_entry(self, now: float, claim: Claim, client: str) -> QueueEntry:
        """A new entry, not yet queued: it starts as passed over, and the caller then queues it or makes it a holder."""
        self.last_ticket += 1
        entry = QueueEntry(
            claim.id_hash, client, claim.holder, claim.mode, claim.delay, self.last_ticket, now, now + WAITER_TTL
        )
        if claim.min_hold:
            entry.min_hold = claim.min_hold
        entry.process_bound = claim.process_bound
        self.entries[entry.id_hash] = entry
        return entry

    def _grant_entry(
        self, context: Context, entry: QueueEntry, claim: Claim, notifications: list[Notification]
    ) -> Grant:
        """Answer an attempt of a reserved or held entry: the same token, and at least the requested ttl (E2, E8)."""
        if entry.state == RESERVED:
            entry.state, entry.since, entry.expires_at = HELD, context.now, context.now
        entry.delay, entry.min_hold, entry.process_bound = claim.delay, claim.min_hold, claim.process_bound
        life = self._extend(context.now, entry, claim.ttl)
        self._next_expiry = min(self._next_expiry, entry.expires_at)
        if entry.mode == "shared" or self.kind == "semaphore" or not self._head_knows(entry.expires_at):
            self._advance_queue(context, notifications)
        return Grant(entry.token, life, entry.slot)

    def _head_knows(self, until: float) -> bool:
        """Whether the head re-checks by then without another notification. Behind an exclusive grant, which admits no
        other claim, there is nothing else to do."""
        head, (id_hash, recheck_at) = self._head(), self._notified_head
        return recheck_at <= until and (head is None or head.id_hash == id_hash)

    def _extend(self, now: float, entry: QueueEntry, ttl: float) -> float:
        """Move the end forward, never back. Returns the life left: exactly `ttl` if the end moved, without a rounding
        error."""
        if now + ttl < entry.expires_at:
            return entry.expires_at - now
        entry.expires_at = now + ttl
        return ttl

    def _make_holder(self, context: Context, entry: QueueEntry, state: int, until: float) -> None:
        token = context.issue_token()
        slot = self._free_slot() if self.kind == "semaphore" else None
        if entry.state == WAITING:
            self._leave_queue(entry)
        entry.state, entry.expires_at, entry.since, entry.token, entry.slot = state, until, context.now, token, slot
        self.holders[token] = entry
        if until < self._next_expiry:
            self._next_expiry = until

    def _free_slot(self) -> int:
        taken = {entry.slot for entry in self.holders.values()}
        return next(slot for slot in range(self.limit) if slot not in taken)

    def _start_cooling(self, entry: QueueEntry, until: float, delay: float) -> None:
        """End a claim, but keep its name or permit occupied until then."""
        self.entries.pop(entry.id_hash, None)
        entry.state, entry.expires_at, entry.delay = COOLING, until, delay
        self._next_expiry = min(self._next_expiry, until)

    def _pass_over(self, entry: QueueEntry) -> None:
        if entry.state == WAITING:
            self._leave_queue(entry)
        self.holders.pop(entry.token, None)
        entry.state, entry.token, entry.slot = PASSED, 0, None

    def _withdraw_reservation(self, entry: QueueEntry) -> None:
        self._pass_over(entry)
        entry.state, self._notified_head = WAITING, ("", 0.0)  # as a new head it must be notified when to re-check
        insort(self.waiters, (entry.ticket, entry))

    def _remove(self, entry: QueueEntry) -> None:
        if self.entries.get(entry.id_hash) is entry:
            del self.entries[entry.id_hash]
        if entry.state == WAITING:
            self._leave_queue(entry)
        self.holders.pop(entry.token, None)

    def _leave_queue(self, entry: QueueEntry) -> None:
        position = self._position(entry)
        if position < len(self.waiters) and self.waiters[position][1] is entry:
            del self.waiters[position]

    # --------------------------------------------------------------- answers

    def _busy(self, now: float, entry: QueueEntry | None) -> Busy:
        position = None if entry is None else self._position(entry)
        first_ending = min(self.holders.values(), key=lambda entry: entry.expires_at, default=None)
        if first_ending is None:
            return Busy(None, position)
        ends = self._recheck_at(now) if position == 0 else first_ending.expires_at
        return Busy(max(0.0, ends - now), position, first_ending.token, first_ending.holder)

    def _position(self, entry: QueueEntry) -> int:
        return bisect_left(self.waiters, entry.ticket, key=lambda waiter: waiter[0])


def describe_kind(kind: Kind, limit: int) -> str:
    return "lock" if kind == "lock" else f"semaphore of {limit}"


def mismatch(name: str, kind: Kind, limit: int, found_kind: Kind, found_limit: int) -> Mismatch:
    """The error of a claim of one kind on a name of another kind."""
    advice = ""
    if kind == "lock":
        advice = (
            "use one kind for a name, or wait until it is idle; a name whose limit was set stays a semaphore until the "
            "limit is removed (set_limit(name, None) or `leasehold resize --unset`)"
        )
    return Mismatch(
        name, wanted=describe_kind(kind, limit), found=describe_kind(found_kind, found_limit), advice=advice
    )
