"""What tests read and change inside a client: the only place that knows where it is kept.

A test that needs more adds a function here, so that a rename in `client/` changes one file of the tests.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

from leasehold import AsyncClient, Client
from leasehold.client.acquire import AcquireRequest
from leasehold.client.core import ClientCore
from leasehold.client.held_locks import HeldLocks
from leasehold.client.lease import BaseLease, Renewal
from leasehold.client.lock import BaseLock
from leasehold.client.watchdog import Watchdog
from leasehold.config import EngineConfig
from leasehold.core.timing import NEVER
from leasehold.engines.registry import ClaimRegistry, PendingRelease, Waiter
from leasehold.model import Alive, Claim, Gone
from leasehold.runtime.base import Runtime


class HasCore(Protocol):
    """A client, or what it has made: a lock, a multilock, an election."""

    _core: ClientCore


AnyClient: TypeAlias = Client | AsyncClient | HasCore


def core(client: AnyClient) -> ClientCore:
    """What all leases of the client share."""
    return client._core


def engine(client: AnyClient) -> Any:
    """The engine of the caller's thread or loop; the watchdog has its own."""
    return client._core._engine


def engine_state(client: AnyClient) -> dict[str, Any]:
    """What the client's two engine instances share, by the name of the engine."""
    return client._core.registry.shared


def registry(client: AnyClient) -> ClaimRegistry:
    return client._core.registry


def client_id(client: AnyClient) -> str:
    """How engines address the client's notifications."""
    return client._core.registry.client_id


def watchdog(client: AnyClient) -> Watchdog:
    return client._core.watchdog


def watchdog_sleeps(client: AnyClient) -> bool:
    """Whether the watchdog has planned its next work, and sleeps until then."""
    return client._core.watchdog._wakes_at < NEVER


def runtime(client: AnyClient) -> Runtime:
    return client._core.runtime


def config(client: AnyClient) -> EngineConfig:
    return client._core.config


def is_closed(client: AnyClient) -> bool:
    return client._core.closed


def held_locks(client: AnyClient) -> HeldLocks:
    """The locks that threads and tasks have entered by `with`."""
    return client._core.held_locks


def waiters(client: AnyClient) -> list[Waiter]:
    """The client's queued claims."""
    return list(client._core.registry.waiting.values())


def wake_waiters(client: AnyClient) -> None:
    """Let every waiter check again, as after a notification. For clocks that tests advance by hand."""
    for waiter in waiters(client):
        waiter.signal.set()


def make_heartbeat_due(client: AnyClient) -> None:
    """As if the waiters had queued long ago. Wake the watchdog, and it sends one."""
    for waiter in waiters(client):
        waiter.joined_at = 0.0
    watchdog(client)._next_heartbeat_at = 0.0


def pending_releases(client: AnyClient) -> list[PendingRelease]:
    """The releases that the engine has not confirmed."""
    return list(client._core.registry.pending_releases.values())


def unreleased_names(client: AnyClient) -> set[str]:
    """The names of the claims that the watchdog still has to release."""
    to_release = [claim for claim, *_ in list(client._core.watchdog._to_release)]
    return {claim.name for claim in [*to_release, *(pending.claim for pending in pending_releases(client))]}


def wake_watchdog(client: AnyClient) -> None:
    """Make the watchdog do now what is due."""
    client._core.watchdog.wake_by(-1.0)


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


def claim(lease: BaseLease) -> Claim:
    """The claim that the lease was granted for, with its secret id."""
    return lease._claim


def trusted_until(lease: BaseLease) -> float:
    """When the lease stops being trusted, if it is not renewed."""
    return lease._validity.valid_until


def renewal_claim(lease: BaseLease, ttl: float | None = None) -> Claim:
    """The claim that a renewal sends. `ttl`: another one, asked for by hand."""
    return lease._claim_for_renewal(ttl)


def answer_renewal(lease: BaseLease, asked_at: float, claim: Claim, reply: Alive | Gone | Any) -> None:
    """Pass an answer of the engine to the lease, as the watchdog does."""
    lease._on_renewal(Renewal(asked_at, claim, reply))


def acquire_request(lock: BaseLock[Any], wait: float | None = None) -> AcquireRequest[BaseLease]:
    """A call to acquire the lock that has sent nothing yet."""
    core = lock._core
    request = AcquireRequest[BaseLease](lock, lock._new_claim(), core.runtime.now(), wait, False, core.engine)
    request.engine, request.asked_at = core.engine(), core.runtime.now()
    return request
