"""Bugs to plant into the code under test, each of which the simulation must find.

A simulation that finds nothing proves nothing, unless it is known to find something. Each bug is one that a real lock
service once had, as the smallest patch that reproduces it. `PLANTED` maps its name to a context manager that plants it;
`HARSH_ONLY` has those for which the ordinary families are too mild.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from leasehold.client import acquire
from leasehold.client.acquire import AcquireRequest
from leasehold.core import timing
from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import HELD, RESERVED, TokenCounter
from leasehold.engines.memory import MemoryEngine
from leasehold.engines.registry import ClaimRegistry
from leasehold.model import Gone, Grant
from tests.support import probe, probe_acquire, probe_lock_state, probe_memory

PLANTED: dict[str, Callable[[], Any]] = {}


def bug(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `patched(original, *args)` under its own name as the replacement of a method."""

    def register(patched: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def planted() -> Iterator[None]:
            original = getattr(owner, attribute)
            with patch.object(owner, attribute, lambda *args, **kwargs: patched(original, *args, **kwargs)):
                yield

        PLANTED[patched.__name__] = planted
        return patched

    return register


# ------------------------------------------------------------------ in the server


@bug(*probe_memory.SWEEP_NAME)
def lease_forgotten(original, server, context, key):
    """The sweep takes a held name for idle because its queue is empty."""
    notifications = original(server, context, key)
    if key in server.lock_states and not server.lock_states[key].waiters:
        del server.lock_states[key]
    return notifications


@bug(TokenCounter, "next")
def token_reused(_, counter, floor):
    """Tokens come from the wall clock alone."""
    counter.last = floor
    return floor


@bug(LockState, "renew")
def renew_after_expiry(original, lock_state, context, claim):
    entry = lock_state.entries.get(claim.id_hash)
    if entry is not None and entry.state == HELD and entry.token == claim.token:
        entry.expires_at = max(entry.expires_at, context.now + claim.ttl)
    return original(lock_state, context, claim)


@bug(LockState, "release")
def release_without_owner_check(original, lock_state, context, id_hash, min_hold, _held):
    """A release by any client frees the name, as a plain DEL does."""
    held = next((entry.id_hash for entry in lock_state.holders.values() if entry.state == HELD), id_hash)
    return original(lock_state, context, id_hash if id_hash in lock_state.entries else held, min_hold)


@bug(*probe_lock_state.ADVANCE_QUEUE)
def reservation_end_not_notified(original, lock_state, context, notifications, attempting=None):
    original(lock_state, context, notifications, attempting)
    if any(entry.state == RESERVED for entry in lock_state.holders.values()):
        notifications[:] = [notification for notification in notifications if notification.kind != "recheck"]


@bug(*probe_lock_state.PASS_OVER)
def passed_over_waiter_dropped(_, lock_state, entry):
    """A waiter that does not claim its reservation in time is removed from the queue."""
    probe_lock_state.remove(lock_state, entry)


@bug(*probe_memory.CURRENT_CONTEXT)
def wall_clock_used(original, server):
    context = original(server)
    context.now = probe_memory.server_runtime(server).wall()
    return context


@bug(*probe_lock_state.EXPIRE_HOLDERS)
def early_expiry(original, lock_state, now):
    original(lock_state, now + 0.2)


@bug(LockState, "attempt")
def repeated_attempt_queues_again(original, lock_state, context, claim, client):
    """A repeated attempt is not recognised: it gets a queue entry in addition to its grant."""
    entry = lock_state.entries.get(claim.id_hash)
    if entry is not None and entry.state == HELD and claim.queue:
        del lock_state.entries[claim.id_hash]
    return original(lock_state, context, claim, client)


@bug(*probe_lock_state.CAN_ADMIT)
def shared_beside_exclusive(original, lock_state, mode):
    return original(lock_state, mode) or (lock_state.kind == "lock" and mode == "shared")


@bug(*probe_lock_state.CHANGE_KIND)
def wrong_kind_admitted(_, lock_state, now, claim):
    lock_state.kind, lock_state.limit = claim.kind, claim.limit


@bug(LockState, "set_limit")
def smaller_limit_ignored(original, lock_state, context, limit):
    if limit is not None and lock_state.holders and limit < lock_state.limit:
        return True, []
    return original(lock_state, context, limit)


@bug(LockState, "set_limit")
def larger_limit_wakes_no_waiter(original, lock_state, context, limit):
    answer, _ = original(lock_state, context, limit)
    return answer, []


@bug(*probe_lock_state.WITHDRAW_RESERVATION)
def reservation_survives_a_smaller_limit(_, lock_state, entry):
    """A waiter claims the reservation that it got under the larger limit."""


@bug(LockState, "attempt")
def claims_bring_their_own_limit(original, lock_state, context, claim, client):
    """The limit that was set counts for some claims only: two limits at once."""
    stored = lock_state.limit
    if lock_state.limit_set and claim.kind == "semaphore":
        lock_state.limit = claim.limit
    try:
        return original(lock_state, context, claim, client)
    finally:
        if lock_state.limit_set:
            lock_state.limit = stored


@bug(*probe_lock_state.START_COOLING)
def delay_forgotten(original, lock_state, entry, until, delay):
    if delay:
        probe_lock_state.remove(lock_state, entry)
    else:
        original(lock_state, entry, until, delay)


@bug(*probe_lock_state.ADD_ENTRY)
def last_come_first_served(original, lock_state, now, claim, client):
    entry = original(lock_state, now, claim, client)
    entry.ticket = -entry.ticket
    return entry


@bug(*probe_lock_state.EXTEND)
def longer_ttl_answered_than_granted(original, lock_state, now, entry, ttl):
    """A renewal is answered with more life than the grant has."""
    return original(lock_state, now, entry, ttl) * 1.05


@bug(LockState, "break_")
def break_refused(original, lock_state, context, token):
    """The operator's break is refused as soon as another client waits for the name."""
    if not lock_state.waiters:
        return original(lock_state, context, token)
    notifications = []
    probe_lock_state.advance_queue(lock_state, context, notifications)
    return False, notifications


# ------------------------------------------------------------------ in the client


@bug(MemoryEngine, "attempt")
async def wake_up_that_grants(original, engine, claim, deadline):
    waiter = probe_memory.registry(engine).waiting.get(claim.id_hash)
    if waiter is not None and waiter.woken:
        return Grant(int(probe_memory.runtime(engine).wall() * 1_000_000), claim.ttl)
    return await original(engine, claim, deadline)


@bug(ClaimRegistry, "on_notification")
def waiter_never_woken(original, registry, kind, *args):
    if kind != "reserved":
        original(registry, kind, *args)


@bug(MemoryEngine, "wait")
async def waiter_forgotten_by_its_client(original, engine, claim, busy, seconds):
    """The client drops a claim from its registry while a caller still waits for it."""
    waiter = probe_memory.registry(engine).waiting.pop(claim.id_hash, None)
    if waiter is not None:
        await waiter.signal.wait(seconds)


@bug(ClaimRegistry, "retry_release")
def pending_release_forgotten(*_):
    """A release is sent once and never retried."""


@bug(*probe.ON_RENEWAL)
def gone_ignored(original, lease, renewal):
    if not isinstance(renewal.reply, Gone):
        original(lease, renewal)


@bug(*probe.END_LOST)
def loss_not_reported(original, lease, reason):
    probe.drop_callbacks(lease)
    return original(lease, reason)


class _Trusted(float):
    """A deadline that is still ahead when it is first compared."""

    _compared = False

    def __le__(self, other: float) -> bool:
        compared, self._compared = self._compared, True
        return compared and float.__le__(self, other)


@contextmanager
def late_grant_handed_out() -> Iterator[None]:
    """The client returns a grant however late its reply arrived."""
    ends = SimpleNamespace(**{**vars(timing), "valid_until": lambda *end: _Trusted(timing.valid_until(*end))})
    with patch.object(acquire, "timing", ends):
        yield


PLANTED["late_grant_handed_out"] = late_grant_handed_out


@bug(*probe.USE_TICKET)
async def ticket_not_asked_for(*_):
    """Whoever has the text goes on with the lease."""


@bug(timing, "trusted_until")
def strict_lease_kept_while_overdue(original, asked_at, ttl, drift, _strict):
    return original(asked_at, ttl, drift, False)


@bug(*probe.IS_OUTDATED)
def ensured_life_shortened(original, lease, renewal, validity):
    """The watchdog goes on to renew for the ttl of the lock, and counts from there."""
    if not renewal.explicit and not original(lease, renewal, validity):
        probe.replace_validity(lease, validity)
        claim = probe.claim(lease)
        probe.replace_claim(lease, claim._replace(ttl=min(claim.ttl, 1.0)))
    return original(lease, renewal, validity)


@bug(AcquireRequest, "register")
def counted_from_the_answer(original, request, grant):
    """The client counts the ttl from the reply, not from the request (E8)."""
    request.asked_at = probe.runtime(request.lock).now()
    return original(request, grant)


@bug(*probe.ON_RENEWAL)
def renewal_counted_from_the_answer(original, lease, renewal):
    """The client counts a renewed ttl from the reply, not from the request (E8)."""
    original(lease, renewal._replace(asked_at=probe.runtime(lease).now()))


@bug(probe_acquire.PoolMember, "leave")
def other_queues_of_a_pool_not_left(_, member):
    """After the grant of one name, the acquires of the others stay suspended, and their claims queued."""
    probe_acquire.mark_left(member)


@bug(probe_acquire.MemberSignal, "set")
def wake_up_of_a_pool_lost(_, signal):
    """A notification marks the acquire of its name, and the caller sleeps on."""
    signal.is_set = True


# ------------------------------------------------------------------ what only harsh seeds find

_VALID_UNTIL = timing.valid_until


def _margin(share: Callable[[float], float]) -> Any:
    """Make clients subtract another margin than their `drift`."""

    def valid_until(asked_at: float, ttl: float, drift: float = timing.DRIFT) -> float:
        return _VALID_UNTIL(asked_at, ttl, share(drift))

    return patch.object(timing, "valid_until", valid_until)


HARSH_ONLY: dict[str, Callable[[], Any]] = {
    "margin_below_the_promised_drift": lambda: _margin(lambda drift: drift * 0.9),
    "drift_of_the_client_ignored": lambda: _margin(lambda _: timing.DRIFT),
}
