"""Checks a simulated server by its answers.

The history checker only knows what holders observe; this oracle observes the server. It builds its own model from the
answers: which claim was promised which ttl (E1, E8) and token (E2, E3), in which order claims arrived (fair), and when
each sent its last heartbeat (E7). `liveness_oracle.py` checks how long clients wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import COOLING, HELD, PASSED, RESERVED, WAITING, QueueEntry
from leasehold.core.timing import WAITER_TTL
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Grant
from leasehold.testing.network import Observer, SimulatedServer

_ROUNDING: Final = 1e-6

_EMPTY_STATE: Final = LockState(0.0)

AddFinding = Callable[[str, str], None]
Key = tuple[str, str]


@dataclass(slots=True)
class Promised:
    """What the server promised to one grant: `end` for its holder, `name_kept_until` for the name (delay, min_hold)."""

    claim: Claim
    since: float
    end: float
    name_kept_until: float
    ended: bool = False


@dataclass(slots=True)
class NameModel:
    """The model of one name."""

    promises: dict[int, Promised] = field(default_factory=dict)  # by token
    live: dict[int, Promised] = field(default_factory=dict)  # by token, those that may still occupy the name
    highest_token: int = 0
    issued_tokens: set[int] = field(default_factory=set)
    tickets: dict[str, int] = field(default_factory=dict)  # by id hash
    arrivals: dict[str, int] = field(default_factory=dict)  # by id hash, in the order in which they joined the queue
    first_tokens: dict[str, int] = field(default_factory=dict)  # by id hash
    joined_at: dict[str, float] = field(default_factory=dict)  # by id hash, in true time
    heartbeats: dict[str, float] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)
    limit: int | None = None  # that an operator has set; after it was removed, until the name is empty
    limit_set: bool = False
    limit_set_at: float = 0.0  # by the server's clock

    def has_waiters(self, now: float) -> bool:
        """Whether a claim was queued after the last verb, and its heartbeats have not ended since."""
        queued = [id_hash for id_hash, state in self.states.items() if state in (WAITING, PASSED, RESERVED)]
        return any(self.heartbeats.get(id_hash, 0.0) > now for id_hash in queued)


class SafetyOracle(Observer):
    """Observes every request and its answer, and the queue after each of them."""

    def __init__(self, server: SimulatedServer, add_finding: AddFinding) -> None:
        self.server = server
        self.passed_over = self.grants = 0
        # Id hashes that the server released or answered no to: a duplicate request may still arrive (E6).
        self.released: set[str] = set()
        self._add_finding = add_finding
        self.names: dict[Key, NameModel] = {}
        self._arrival_count = 0

    def promised_until(self, name: str, token: int) -> float:
        """The end of a grant, in true time."""
        return self.server.process.true_time(self.names["", name].promises[token].end) + _ROUNDING

    # ------------------------------------------------------------- checks of the answers

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        now = self.server.process.now()
        if verb == "attempt":
            claim: Claim = args[0]
            key = (claim.namespace, claim.name)
            is_new = key not in self.names or not self.names[key].states
            model = self.names.setdefault(key, NameModel())
            if isinstance(answer, Grant):
                self._on_grant(model, claim, answer, now)
            elif isinstance(answer, Busy) and claim.queue:
                model.heartbeats[claim.id_hash] = now + WAITER_TTL
            else:
                self.released.add(claim.id_hash)
            if is_new:  # an attempt for a new name sweeps two others
                self._check_all_names(now)
            else:
                self._check_name(key, now)
        elif verb == "renew":
            for claim, reply in zip(args[0], answer, strict=True):
                if isinstance(reply, Alive):
                    self._on_renewal(claim, reply, now)
                self._check_name((claim.namespace, claim.name), now)
        elif verb == "release":
            self._on_release(args[0], now)
        elif verb == "set_limit":
            self._on_limit(args[:2], args[2], answer, now)
        elif verb == "break_":
            self._on_break(args[:2], args[2], answer, now)
        else:
            self._check_all_names(now)

    def _on_grant(self, model: NameModel, claim: Claim, grant: Grant, now: float) -> None:
        known = model.promises.get(grant.token)
        if known is None:
            self.grants += 1
            model.first_tokens.setdefault(claim.id_hash, grant.token)
            self._check_admission(model, claim, grant.token, now)
            known = model.promises[grant.token] = model.live[grant.token] = Promised(claim, now, now, now)
        elif known.claim.id_hash != claim.id_hash:
            self._add_finding("token", f"{claim.name}: token {grant.token} was granted to two claims (E3)")
        elif known.ended or known.end <= now:
            self._add_finding(
                "granted after its end", f"{claim.name}: token {grant.token} was granted again after its end"
            )
        known.end = max(known.end, now + grant.ttl)
        known.name_kept_until = known.end + claim.delay
        self._check_life(claim, grant.token, known.end)

    def _check_admission(self, model: NameModel, claim: Claim, token: int, now: float) -> None:
        """Check a new grant against the promises to other claims (E1, E2)."""
        for other_token, other in list(model.live.items()):
            if other.name_kept_until <= now + _ROUNDING:
                del model.live[other_token]
                continue
            if not other.ended and other.end > now + _ROUNDING and other.claim.id_hash == claim.id_hash:
                self._add_finding(
                    "two tokens for one claim", f"{claim.name}: one claim has tokens {other_token} and {token} (E2)"
                )
            same_limit = model.limit is not None or claim.limit == other.claim.limit
            if claim.kind != other.claim.kind or not same_limit:
                self._add_finding("kind", f"{claim.name}: {claim} was granted together with {other.claim} (E1)")
            elif claim.kind == "lock" and "exclusive" in (claim.mode, other.claim.mode):
                self._add_finding(
                    "exclusion", f"{claim.name}: token {token} was granted while {other_token} was held (E1)"
                )
        if not model.limit_set and not model.live and not model.has_waiters(now):
            model.limit = None  # it was removed, and the name has been empty since
        limit = claim.limit if model.limit is None else model.limit
        if claim.kind == "semaphore" and len(model.live) >= limit:
            self._add_finding("limit", f"{claim.name}: granted {len(model.live) + 1} permits of {limit} (E1)")

    def _on_renewal(self, claim: Claim, reply: Alive, now: float) -> None:
        model = self.names[claim.namespace, claim.name]
        if not claim.token:
            model.heartbeats[claim.id_hash] = now + WAITER_TTL
            return
        promise = model.promises.get(claim.token)
        if promise is None or promise.ended or promise.end <= now - _ROUNDING:
            self._add_finding("renew", f"{claim.name}: token {claim.token} was renewed after its end (E5)")
        elif promise.end > now + reply.ttl + _ROUNDING:
            self._add_finding("renew", f"{claim.name}: a renewal shortened the ttl of token {claim.token} (E8)")
        else:
            promise.end = now + reply.ttl
            promise.name_kept_until = promise.end + promise.claim.delay
            self._check_life(claim, claim.token, promise.end)

    def _check_life(self, claim: Claim, token: int, end: float) -> None:
        """The server must keep a grant for as long as it answered: no other client need ask for the name (E8)."""
        lock_state = self.server.memory.lock_states.get((claim.namespace, claim.name))
        entry = lock_state.holders.get(token) if lock_state else None
        if entry is None or entry.expires_at < end - _ROUNDING:
            self._add_finding("life", f"{claim.name}: token {token} ends before the ttl that was answered is over (E8)")

    def _on_release(self, claim: Claim, now: float) -> None:
        key = (claim.namespace, claim.name)
        lock_state = self.server.memory.lock_states.get(key)
        if not claim.id and lock_state and (entry := lock_state.entries.get(claim.id_hash)) and entry.state == HELD:
            return  # it only ends a queued or reserved claim, and this one is held
        self.released.add(claim.id_hash)
        if (model := self.names.get(key)) is not None:
            model.heartbeats.pop(claim.id_hash, None)
            model.arrivals.pop(claim.id_hash, None)
            for promise in model.live.values():
                if promise.claim.id_hash == claim.id_hash and not promise.ended and promise.end > now:
                    min_hold = 0.0 if claim.min_hold < 0 else promise.claim.min_hold
                    promise.ended, promise.name_kept_until = True, max(now, promise.since + min_hold)
        if lock_state is not None:
            entries = (*lock_state.entries.values(), *lock_state.holders.values())
            left = [entry for entry in entries if entry.id_hash == claim.id_hash and entry.state != COOLING]
            if left:
                self._add_finding("release", f"{claim.name}: {claim.fingerprint} was released and still exists (E6)")
        self._check_name(key, now)

    def _on_limit(self, key: Key, limit: int | None, answer: Any, now: float) -> None:
        if not isinstance(answer, Mismatch):
            model = self.names.setdefault(key, NameModel())
            model.limit_set, model.limit_set_at = limit is not None, now
            if limit is not None:
                model.limit = limit
        self._check_name(key, now)

    def _on_break(self, key: Key, token: int, answer: Any, now: float) -> None:
        model = self.names.get(key)
        promise = model.promises.get(token) if model is not None else None
        live = promise is not None and not promise.ended and promise.end > now + _ROUNDING
        if answer is True and promise is not None:
            promise.ended, promise.name_kept_until = True, now + promise.claim.delay if live else now
        elif live:
            self._add_finding("break", f"{key[1]}: the server refused to break token {token}, which is held")
        self._check_name(key, now)

    # --------------------------------------------------------------- checks of the queue

    def _check_all_names(self, now: float) -> None:
        for key in self.names:
            self._check_name(key, now)

    def _check_name(self, key: Key, now: float) -> None:
        """Check what changed in a queue: the order of the grants (fair), and claims that disappeared (E7)."""
        model = self.names.get(key)
        if model is None:
            return
        lock_state = self.server.memory.lock_states.get(key) or _EMPTY_STATE
        for entry in lock_state.entries.values():
            # A new ticket: the claim had expired, and the same request queued it again.
            is_new = model.tickets.get(entry.id_hash, entry.ticket) != entry.ticket
            model.tickets[entry.id_hash] = entry.ticket
            if entry.state in (WAITING, PASSED) and (is_new or entry.id_hash not in model.arrivals):
                self._arrival_count += 1
                model.arrivals[entry.id_hash] = self._arrival_count
                model.joined_at[entry.id_hash] = self.server.world.time
            if entry.state == PASSED and model.states.get(entry.id_hash) != PASSED:
                self.passed_over += 1
        for token, entry in lock_state.holders.items():
            if token not in model.issued_tokens:
                self._check_token(key, model, lock_state, token, entry)
            if entry.state == HELD:  # granted: if it queues again, that is a new arrival
                model.arrivals.pop(entry.id_hash, None)
        for id_hash, state in model.states.items():
            if id_hash not in lock_state.entries and state in (WAITING, PASSED, RESERVED):
                if model.heartbeats.pop(id_hash, now) > now + _ROUNDING:
                    self._add_finding(
                        "dropped", f"{key[1]}: {id_hash[:16]} was dropped from the queue despite its heartbeats (E7)"
                    )
                model.arrivals.pop(id_hash, None)
        model.states = {id_hash: entry.state for id_hash, entry in lock_state.entries.items()}
        if not model.states:
            model.arrivals.clear()

    def _check_token(self, key: Key, model: NameModel, lock_state: LockState, token: int, entry: QueueEntry) -> None:
        if token <= model.highest_token:
            self._add_finding("token", f"{key[1]}: token {token} was issued after {model.highest_token} (E3)")
        model.issued_tokens.add(token)
        model.highest_token = max(model.highest_token, token)
        own_arrival = model.arrivals.get(entry.id_hash, self._arrival_count + 1)
        for _, waiter in lock_state.waiters:
            if model.arrivals.get(waiter.id_hash, own_arrival) < own_arrival:
                self._add_finding(
                    "order", f"{key[1]}: token {token} was granted before the earlier {waiter.id_hash[:16]} (fair)"
                )
