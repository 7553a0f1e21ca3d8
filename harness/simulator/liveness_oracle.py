"""Checks a few times a second that no client waits for a free name, and that no claim was forgotten by its client.

A waiter that could be granted must not keep waiting. How long is too long depends on the faults. If no message is lost
and the head of the queue is healthy, it is a fraction of a second. Otherwise every waiter polls every few seconds (E4),
and the reservation of each waiter ahead may have to expire first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from harness.simulator.safety_oracle import AddFinding, NameModel, SafetyOracle
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD, PASSED, RESERVED, WAITING, QueueEntry
from leasehold.core.timing import HEARTBEAT_INTERVAL, RESERVATION_TTL
from leasehold.model import Claim
from leasehold.testing.network import NetworkTransport

CHECK_INTERVAL: Final = 0.25
PROMPT_SECONDS: Final = 0.3


class LivenessOracle:
    """`prompt`: no message is lost or late and the server never stops, so hand-offs must be immediate."""

    def __init__(self, safety_oracle: SafetyOracle, add_finding: AddFinding, *, prompt: bool) -> None:
        self._safety_oracle, self._server = safety_oracle, safety_oracle.server
        self._prompt, self._add_finding = prompt, add_finding
        # By name, id hash and number of waiters ahead: since when, in true time.
        self._stuck_since: dict[tuple[str, str, int], float] = {}
        self._pending_until: dict[str, float] = {}  # by id hash, on its client's clock

    def check(self, in_use: Callable[[str], bool]) -> None:
        """Call this every CHECK_INTERVAL seconds. `in_use`: whether a program still uses the lease of an id hash."""
        now = self._server.process.now()
        transports = {
            transport.client: transport for transport in self._server.transports if transport.client is not None
        }
        for connected in transports.values():
            for id_hash, pending in connected.registry.pending_releases.items():
                self._pending_until[id_hash] = pending.retry_until
        before, self._stuck_since = self._stuck_since, {}
        for (_, name), lock_state in self._server.memory.lock_states.items():
            model = self._safety_oracle.names["", name]
            self._check_first_healthy_waiter(name, model, lock_state, transports, now, before)
            for entry in lock_state.entries.values():
                # A claim with a second token is a duplicate request that arrived late: only its ttl ends it (E6).
                is_duplicate = model.first_tokens.get(entry.id_hash, entry.token) != entry.token
                if (transport := transports.get(entry.client)) is not None and not is_duplicate:
                    self._check_forgotten_claim(name, entry, transport, now, in_use)

    def _check_first_healthy_waiter(
        self,
        name: str,
        model: NameModel,
        lock_state: LockState,
        transports: dict[str, NetworkTransport],
        now: float,
        before: dict[tuple[str, str, int], float],
    ) -> None:
        """The queue is strict: only its first healthy waiter can be expected to be granted."""
        ahead = 0
        for entry in sorted(lock_state.entries.values(), key=lambda entry: entry.ticket):
            is_waiting = entry.state in (WAITING, PASSED) or (entry.state == RESERVED and entry.expires_at > now)
            if not is_waiting or entry.heartbeat_expires_at <= now:
                continue
            # A waiter that was passed over does not block others.
            transport, passed_over = transports.get(entry.client), entry.state == PASSED
            free_since = _free_since(lock_state, entry, now, model.limit_set_at)
            if transport is None or not self._is_healthy(transport) or _was_given_up(entry, transport):
                if not passed_over and free_since is None:
                    return  # others wait behind it until its heartbeats end (E7): the name is not yet free for it
                ahead += not passed_over
                continue
            if free_since is not None:
                key = (name, entry.id_hash, ahead)
                since = self._stuck_since[key] = before.get(key, self._server.world.time)
                # A client that was paused may have received its answer later by that much.
                pause_allowance = max(0.0, transport.process.resumed_at - model.joined_at[entry.id_hash])
                limit = (
                    HEARTBEAT_INTERVAL
                    + PROMPT_SECONDS
                    + (RESERVATION_TTL + 0.5) * ahead
                    + (0 if self._prompt else HEARTBEAT_INTERVAL)
                )
                if self._prompt and not ahead and not passed_over:
                    self._check_wait(name, entry, now - free_since, min(PROMPT_SECONDS + pause_allowance, limit))
                self._check_wait(name, entry, self._server.world.time - since, limit)
            if not passed_over:
                return

    def _check_wait(self, name: str, entry: QueueEntry, waited: float, bound: float) -> None:
        if waited > bound:
            self._add_finding(
                "waiter not served", f"{name}: {entry.id_hash[:16]} waits for a free name: {waited:.2f} s (E4)"
            )

    def _is_healthy(self, transport: NetworkTransport) -> bool:
        if transport.closed or transport.process.dead or transport.process.paused or not self._server.is_up:
            return False
        just_resumed = self._server.world.time - transport.process.resumed_at < CHECK_INTERVAL
        return not just_resumed and not self._server.process.paused and transport.process not in self._server.cut_off

    def _check_forgotten_claim(
        self, name: str, entry: QueueEntry, transport: NetworkTransport, now: float, in_use: Callable[[str], bool]
    ) -> None:
        """Report a claim that its live client does not know, and for which the server never got a release (E6)."""
        id_hash, occupies = entry.id_hash, entry.state in (RESERVED, HELD)
        if transport.process.now() >= self._pending_until.get(id_hash, float("inf")):
            return  # the client retried the release until the claim should have expired, but the attempt arrived later
        known = transport.registry.knows(id_hash) or id_hash in self._safety_oracle.released or in_use(id_hash)
        if (
            known
            or transport.closed
            or transport.process.dead
            or (entry.expires_at if occupies else entry.heartbeat_expires_at) <= now
        ):
            return
        for other in self._server.transports:
            if other.process is transport.process and any(
                _mentions(call.args, id_hash) for call in other.pending.values()
            ):
                return
        self._add_finding(
            "forgotten claim", f"{name}: {id_hash[:16]} is held or queued, but its client has forgotten it (E6)"
        )


def _was_given_up(entry: QueueEntry, transport: NetworkTransport) -> bool:
    """Whether no caller waits for this claim any more. Its last attempt reached the server after its release, so it is
    queued until its heartbeats end (E6). `_check_forgotten_claim` reports claims that a client should not forget."""
    return entry.id_hash not in transport.registry.waiting


def _free_since(lock_state: LockState, entry: QueueEntry, now: float, limit_set_at: float) -> float | None:
    """Since when this claim could be granted; None if it could not. After every verb the head of the queue is blocked,
    so the name became free by what has ended since: for a lock the last holder in its way, for a semaphore any. If none
    has ended, a larger limit was set."""
    if entry.state == RESERVED:
        return entry.since
    ends = [other.expires_at + (other.delay if other.state == HELD else 0.0) for other in lock_state.holders.values()]
    over = [end for end in ends if end <= now]
    if lock_state.kind == "semaphore":
        return min(over, default=limit_set_at or now) if len(ends) - len(over) < lock_state.limit else None
    exclusive = (entry.mode == "exclusive" or other.mode == "exclusive" for other in lock_state.holders.values())
    if any(end > now for end, blocks in zip(ends, exclusive, strict=True) if blocks):
        return None
    return max(over, default=now)


def _mentions(args: tuple[Any, ...], id_hash: str) -> bool:
    return any(isinstance(arg, Claim) and arg.id_hash == id_hash for arg in args)
