"""What tests read and change inside a client: the only place that knows where it is kept.

There is one such module per subject: this one for the client, `probe_sqlite.py` for that engine, and so on. A test that
needs more adds a function there, so that a rename in `src/` changes one file of the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from harness.probe import AnyClient as AnyClient
from harness.probe import claim as claim
from harness.probe import core as core
from harness.probe import has_final_state as has_final_state
from harness.probe import new_claim as new_claim
from harness.probe import validity as validity
from leasehold import AsyncClient, Client, MultiLock
from leasehold.client import base, lease_document
from leasehold.client import core as core_module
from leasehold.client.acquire import AcquireRequest
from leasehold.client.core import ClientCore
from leasehold.client.election import BaseElection
from leasehold.client.held_locks import HeldLocks
from leasehold.client.lease import BaseLease, Renewal, Validity
from leasehold.client.lock import BaseLock
from leasehold.client.watchdog import Watchdog
from leasehold.config import ClientOptions, EngineConfig
from leasehold.core.timing import NEVER
from leasehold.engines.registry import ClaimRegistry, PendingRelease, Waiter
from leasehold.model import Alive, Claim, Gone, Reason
from leasehold.runtime.base import Runtime, run_sync


class Place(NamedTuple):
    """Where something private is kept: `monkeypatch.setattr(*place, other)` replaces it, `getattr(*place)` reads it."""

    owner: Any  # a module, a class or an object
    name: str

    def of(self, owner: object) -> Place:
        """The same of another owner: of one object rather than its class."""
        return Place(owner, self.name)


MAX_EVENTS = Place(core_module, "_MAX_EVENTS")  # that wait for a slow hook

# Steps that tests watch, or during which they do harm.
DRAIN_IN_FLIGHT = Place(ClientCore, "_drain_in_flight")  # when closing, waits until callers have withdrawn their claims
END_LOST = Place(BaseLease, "_end_lost")
IS_OUTDATED = Place(BaseLease, "_is_outdated")  # whether a renewal's answer is older than what the lease knows
ON_RENEWAL = Place(BaseLease, "_on_renewal")  # called with each answer to a renewal
ROLLBACK = Place(BaseLease, "_rollback")  # called for each lease of a multilock that was not granted in full
RUN_ONCE = Place(Watchdog, "_run_once")
SEND_HEARTBEATS = Place(Watchdog, "_send_heartbeats")
SEND_RENEWALS = Place(Watchdog, "_send_renewals")  # of leases, and heartbeats
USE_TICKET = Place(lease_document, "_use_ticket")  # of a lease's document: only one caller may take it over


# --------------------------------------------------------------- the client


def engine(client: AnyClient | Any) -> Any:
    """The engine of the caller's thread or loop; the watchdog has its own. An engine is returned as it is."""
    return client._core._engine if hasattr(client, "_core") else client


def engine_state(client: AnyClient) -> dict[str, Any]:
    """What the client's two engine instances share, by the name of the engine."""
    return client._core.registry.shared


def registry(client: AnyClient) -> ClaimRegistry:
    return client._core.registry


def client_id(client: AnyClient) -> str:
    """How engines address the client's notifications."""
    return client._core.registry.client_id


def runtime(client: AnyClient) -> Runtime:
    return client._core.runtime


def config(client: AnyClient) -> EngineConfig:
    return client._core.config


def client_options(client: Client | AsyncClient) -> ClientOptions:
    """The options that the client was made with, with defaults filled in."""
    return client._options


def is_closed(client: AnyClient) -> bool:
    return client._core.closed


def live_core(key: int) -> ClientCore | None:
    """The core with this `id`, if the hooks at fork and exit would find it."""
    known = base._CORES.get(key)
    return None if known is None else known()


def callback_runtime(client: AnyClient) -> Runtime:
    """What starts the thread of the client's callbacks."""
    return client._core.callbacks._runtime


def rebase(client: Client | AsyncClient, floor: int) -> int:
    """Let tokens continue far above all others and `floor`, as `leasehold rebase` does."""
    return run_sync(client._rebase(floor))


def held_locks(client: AnyClient) -> HeldLocks:
    """The locks that threads and tasks have entered by `with`."""
    return client._core.held_locks


def held_lock_entries(client: AnyClient) -> dict[Any, Any]:
    """What `held_locks` keeps, by holder and name. Empty if nothing is left behind."""
    return client._core.held_locks._held


def replace_held_lock_entries(client: AnyClient, entries: dict[Any, Any]) -> None:
    client._core.held_locks._held = entries


# ----------------------------------------------------- waiters and releases


def waiters(client: AnyClient) -> list[Waiter]:
    """The client's queued claims."""
    return list(client._core.registry.waiting.values())


def wake_waiters(client: AnyClient) -> None:
    """Let every waiter check again, as after a notification. For clocks that tests advance by hand."""
    for waiter in waiters(client):
        waiter.signal.set()


def pending_releases(client: AnyClient) -> list[PendingRelease]:
    """The releases that the engine has not confirmed."""
    return list(client._core.registry.pending_releases.values())


def unreleased_names(client: AnyClient) -> set[str]:
    """The names of the claims that the watchdog still has to release."""
    to_release = [claim for claim, *_ in list(client._core.watchdog._to_release)]
    return {claim.name for claim in [*to_release, *(pending.claim for pending in pending_releases(client))]}


def failed_releases(client: AnyClient) -> int:
    """How many retries of pending releases have failed in a row."""
    return client._core.watchdog._release_failures


def replace_releases(client: AnyClient, queue: deque[Any]) -> None:
    """Put this queue in place of the one with the claims that the watchdog still has to release."""
    client._core.watchdog._to_release = queue


# ------------------------------------------------------------- the watchdog


def watchdog(client: AnyClient) -> Watchdog:
    return client._core.watchdog


def watchdog_engine(client: AnyClient) -> Any:
    """The watchdog's own instance of the engine; None until it needs one."""
    return client._core.watchdog._engine


def replace_engine_opener(client: AnyClient, opener: Callable[[Runtime], Any]) -> None:
    """Set what opens the watchdog's instance of the engine."""
    client._core.watchdog._open_engine = opener


def watchdog_runtime(client: AnyClient) -> Runtime:
    return client._core.watchdog._runtime


def watchdog_sleeps(client: AnyClient) -> bool:
    """Whether the watchdog has planned its next work, and sleeps until then."""
    return client._core.watchdog._wakes_at < NEVER


def watchdog_wakes_at(client: AnyClient) -> float:
    """When the watchdog does its next work; NEVER while it works."""
    return client._core.watchdog._wakes_at


def wake_watchdog(client: AnyClient) -> None:
    """Make the watchdog do now what is due."""
    client._core.watchdog.wake_by(-1.0)


def watchdog_has_ended(client: AnyClient) -> bool:
    """Whether the thread has ended after `stop`."""
    ended = client._core.watchdog._stopped_signal
    return ended is not None and bool(run_sync(ended.wait(0.0)))


def new_leases(client: AnyClient) -> dict[str, Any]:
    """The leases that the watchdog was given, and has not planned yet."""
    return client._core.watchdog._new_leases


def planned_expiries(client: AnyClient) -> int:
    """How many leases the watchdog will end when their time is over."""
    return len(client._core.watchdog._expiries)


def planned_renewals(client: AnyClient) -> int:
    return len(client._core.watchdog._renewals)


def next_planned_renewal(client: AnyClient) -> float:
    return client._core.watchdog._next_renewal_at()


def next_heartbeat(client: AnyClient) -> float | None:
    """When the watchdog sends the waiters' next heartbeat; None while there is none to send."""
    return client._core.watchdog._next_heartbeat_at


def make_heartbeat_due(client: AnyClient) -> None:
    """As if the waiters had queued long ago. Wake the watchdog, and it sends one."""
    for waiter in waiters(client):
        waiter.joined_at = 0.0
    watchdog(client)._next_heartbeat_at = 0.0


def send_due_heartbeats(client: AnyClient) -> None:
    """The watchdog's step for waiters."""
    watchdog = client._core.watchdog
    run_sync(watchdog._send_heartbeats(watchdog._runtime))


def pretend_last_call_took(client: AnyClient, seconds: float) -> None:
    """As if a call of the watchdog had taken this long. It then has a connection."""
    client._core.watchdog._last_answer = seconds


# ---------------------------------------------------------------- the lease


def renewed_at(lease: BaseLease) -> float:
    """When the request was sent whose answer the lease trusts: its grant's, or that of its last renewal."""
    return lease._validity.asked_at


def next_renewal(lease: BaseLease) -> float:
    """When the watchdog will renew the lease."""
    return lease._renew_at


def renewal_failed(lease: BaseLease) -> bool:
    """Whether the last renewal got no answer."""
    return lease._renewal_failed


def plan_renewal(lease: BaseLease, at: float, *, renewed: float | None = None, failed: bool = False) -> None:
    """Set when the lease is due for renewal, and what was known before that."""
    lease._renew_at, lease._renewal_failed = at, failed
    if renewed is not None:
        lease._validity = lease._validity._replace(asked_at=renewed)


def trusted_until(lease: BaseLease) -> float:
    """When the lease stops being trusted, if it is not renewed."""
    return lease._validity.valid_until


def replace_validity(lease: BaseLease, validity: Validity) -> None:
    lease._validity = validity


def replace_claim(lease: BaseLease, claim: Claim) -> None:
    """Set what the next renewals send."""
    lease._claim = claim


def drop_callbacks(lease: BaseLease) -> None:
    """Forget whom to notify of the end."""
    lease._callbacks = None


def max_hold_ends_at(lease: BaseLease) -> float:
    return lease._max_hold_at


def callers_of_wait_lost(lease: BaseLease) -> int:
    return len(lease._signals or ())


def depth(lease: BaseLease) -> int:
    """How many times the lease of a reentrant lock is held."""
    return lease._depth


def renewal_claim(lease: BaseLease, ttl: float | None = None) -> Claim:
    """The claim that a renewal sends. `ttl`: another one, asked for by hand."""
    return lease._claim_for_renewal(ttl)


def answer_renewal(lease: BaseLease, asked_at: float, claim: Claim, reply: Alive | Gone | Any) -> None:
    """Pass an answer of the engine to the lease, as the watchdog does."""
    lease._on_renewal(Renewal(asked_at, claim, reply))


def end_lost(lease: BaseLease, reason: Reason) -> None:
    """End the lease as lost, as the watchdog or an attempt does that learns of it."""
    lease._end_lost(reason)


def invalidate(lease: BaseLease) -> None:
    """As if the lease had been released: nothing renews it, and nothing releases it."""
    lease._invalidate("released")


# --------------------------------------------- locks, multilocks, elections


def client_of(lock: BaseLock[Any]) -> Any:
    """The client that made the lock."""
    return lock._client


def sorted_locks(multilock: MultiLock) -> list[Any]:
    """The locks in the order in which they are acquired."""
    return list(multilock._sorted_locks)


def lock_of(election: BaseElection[Any]) -> Any:
    """The lock whose holder leads."""
    return election._lock


def term(election: BaseElection[Any]) -> Any:
    """The lease of the leader; None while this candidate does not lead."""
    return election._term


def acquire_request(lock: BaseLock[Any], wait: float | None = None) -> AcquireRequest[BaseLease]:
    """A call to acquire the lock that has sent nothing yet."""
    core = lock._core
    request = AcquireRequest[BaseLease](lock, lock._new_claim(), core.runtime.now(), wait, False, core.engine)
    request.engine, request.asked_at = core.engine(), core.runtime.now()
    return request
