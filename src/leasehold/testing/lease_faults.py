"""Make a lease expire or be lost at once: for tests of how your code reacts."""

from __future__ import annotations

from typing import Final

from leasehold.client.lease import BaseLease
from leasehold.engines.memory import MemoryServer
from leasehold.model import NO_MIN_HOLD, Reason
from leasehold.testing.clock import Clock, ClockLoop, ClockThreads

_CLIENT_SIDE_REASONS: Final = frozenset({"unreachable", "stalled", "max_hold", "forked"})  # the engine is not involved


def expire(lease: BaseLease) -> None:
    """Make the lease expire now, as if this process had stalled for its whole ttl: LOST, with the reason `stalled`.

    The engine frees the name now, or after the `delay` if there is one, and notifies the next waiter. No other lease is
    affected and the clock does not move. When this returns, `on_lost` callbacks have run; the body of an `async with`
    is cancelled when its loop next runs. Only for leases of the `leasehold_client` fixtures.
    """
    clock, server = _clock_and_server(lease)
    core, now = lease._core, clock.now()
    _expire_at_engine(server, lease, now)
    with core.mutex:
        valid_until = min(lease._validity.valid_until, now)
        lease._validity, lease._renewal_attempted = lease._validity._replace(valid_until=valid_until), False
    core.watchdog.watch(lease)
    clock.wait_idle()


def lose(lease: BaseLease, reason: Reason = "broken") -> None:
    """Make the lease be lost now, for this reason; by default as if an operator had broken it.

    The grant ends at the engine too (broken, expired or unknown) and the name is free, except for reasons that only the
    holder can know (`unreachable`, `stalled`, `max_hold`, `forked`): then the grant lives until it is released or
    expires. When this returns, the same has happened as with `expire`. Only for leases of the `leasehold_client`
    fixtures.
    """
    clock, server = _clock_and_server(lease)
    claim = lease._claim
    if reason == "released":
        raise ValueError("'released' is not a way to lose a lease: call lease.release()")
    if reason == "broken":
        server.break_(claim.namespace, claim.name, lease.token)  # notifies the holder
    elif reason == "expired":
        _expire_at_engine(server, lease, clock.now())
    elif reason not in _CLIENT_SIDE_REASONS:
        server.release(claim._replace(min_hold=NO_MIN_HOLD))
    lease._end_lost(reason)
    clock.wait_idle()


def _expire_at_engine(server: MemoryServer, lease: BaseLease, now: float) -> None:
    claim = lease._claim
    with server._mutex:
        lock_state = server.lock_states.get((claim.namespace, claim.name))
        entry = lock_state.entries.get(claim.id_hash) if lock_state is not None else None
        if lock_state is not None and entry is not None:
            entry.expires_at = min(entry.expires_at, now)
            lock_state._next_expiry = min(lock_state._next_expiry, now)
    server.inspect(claim.namespace, claim.name, True)  # expires the grant and wakes the next waiter


def _clock_and_server(lease: BaseLease) -> tuple[Clock, MemoryServer]:
    runtime, server = lease._core.runtime, lease._core.registry.shared.get("memory_server")
    if not isinstance(runtime, ClockThreads | ClockLoop) or not isinstance(server, MemoryServer):
        raise TypeError("expire() and lose() only work on leases of leasehold_client and leasehold_async_client")
    return runtime.clock, server
