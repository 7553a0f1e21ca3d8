"""What may become of a lease, brought about at once: for users' tests of what their code does then."""

from __future__ import annotations

from typing import Final

from leasehold.client.lease import BaseLease
from leasehold.engines.memory import MemoryServer
from leasehold.model import Reason
from leasehold.testing.clock import Clock, ClockLoop, ClockThreads

_CLIENT_SIDE_REASONS: Final = frozenset({"unreachable", "stalled", "max_hold", "forked"})  # it was never asked


def expire(lease: BaseLease) -> None:
    """Have the lease run out now, as if this process had stalled for its whole ttl: LOST, for the reason `stalled`.

    The engine frees the name at this instant, after the `delay` if there is one, and the next in line is told. No other
    lease is touched and the clock does not move. When this returns, `on_lost` callbacks have run, and the body of an
    `async with` is cancelled at the next turn of its loop. For leases of the `leasehold_client` fixtures.
    """
    clock, server = _clock_and_server(lease)
    core, now = lease._core, clock.now()
    _expire_at_engine(server, lease, now)
    with core.mutex:
        lease._valid_until, lease._renewal_attempted = min(lease._valid_until, now), False
    core.watchdog.watch(lease)
    clock.wait_idle()


def lose(lease: BaseLease, reason: Reason = "broken") -> None:
    """Have the lease be lost now for this reason, told as by the engine; by default an operator breaks it.

    At the engine the name is then broken, lapsed or unknown as well, and free, but for reasons that only the holder
    can know (`unreachable`, `stalled`, `max_hold`, `forked`): there the grant stands until it is released. Returns as
    `expire` does. For leases of the `leasehold_client` fixtures.
    """
    clock, server = _clock_and_server(lease)
    claim = lease._claim
    if reason == "released":
        raise ValueError("released is no way to lose a lease: call lease.release()")
    if reason == "broken":
        server.break_(claim.namespace, claim.name, lease.token)  # tells the holder
    elif reason == "expired":
        _expire_at_engine(server, lease, clock.now())
    elif reason not in _CLIENT_SIDE_REASONS:
        server.release(claim._replace(min_hold=0.0))
    lease._end_lost(reason)
    clock.wait_idle()


def _expire_at_engine(server: MemoryServer, lease: BaseLease, now: float) -> None:
    claim = lease._claim
    with server._mutex:
        lock_state = server.lock_states.get((claim.namespace, claim.name))
        entry = lock_state.entries.get(claim.id_hash) if lock_state is not None else None
        if lock_state is not None and entry is not None:
            entry.until = min(entry.until, now)
            lock_state._next_expiry = min(lock_state._next_expiry, now)
    server.inspect(claim.namespace, claim.name, True)  # whoever looks ends what is over, and wakes the next


def _clock_and_server(lease: BaseLease) -> tuple[Clock, MemoryServer]:
    runtime, server = lease._core.runtime, lease._core.registry.shared.get("memory_server")
    if not isinstance(runtime, ClockThreads | ClockLoop) or not isinstance(server, MemoryServer):
        raise TypeError("this needs a lease of leasehold_client or leasehold_async_client, whose engine it can reach")
    return runtime.clock, server
