"""What may become of a lease, brought about at once: for users' tests of what their code does then."""

from __future__ import annotations

from typing import Final

from leasehold.engines.memory import Store
from leasehold.model import Reason
from leasehold.recipes.lease import BaseLease
from leasehold.testing.clock import Clock, ClockLoop, ClockThreads

_NOT_AT_THE_ENGINE: Final = frozenset({"unreachable", "stalled", "max_hold", "forked"})  # it was never asked


def expire(lease: BaseLease) -> None:
    """Have the lease run out now, as if this process had stalled for its whole ttl: LOST, for the reason `stalled`.

    The engine frees the name at this instant, after the `delay` if there is one, and the next in line is told. No other
    lease is touched and the clock does not move. When this returns, `on_lost` callbacks have run, and the body of an
    `async with` is cancelled at the next turn of its loop. For leases of the `leasehold_client` fixtures.
    """
    clock, store = _parts(lease)
    desk, now = lease._desk, clock.now()
    _lapse(store, lease, now)
    with desk.guard:
        lease._valid_until, lease._tried = min(lease._valid_until, now), False
    desk.dog.watch(lease)
    clock.settle()


def lose(lease: BaseLease, reason: Reason = "broken") -> None:
    """Have the lease be lost now for this reason, told as by the engine; by default an operator breaks it.

    At the engine the name is then broken, lapsed or unknown as well, and free, but for reasons that only the holder
    can know (`unreachable`, `stalled`, `max_hold`, `forked`): there the grant stands until it is released. Returns as
    `expire` does. For leases of the `leasehold_client` fixtures.
    """
    clock, store = _parts(lease)
    claim = lease._claim
    if reason == "released":
        raise ValueError("released is no way to lose a lease: call lease.release()")
    if reason == "broken":
        store.break_(claim.namespace, claim.name, lease.token)  # tells the holder
    elif reason == "lapsed":
        _lapse(store, lease, clock.now())
    elif reason not in _NOT_AT_THE_ENGINE:
        store.release(claim._replace(min_hold=0.0))
    lease._lose(reason)
    clock.settle()


def _lapse(store: Store, lease: BaseLease, now: float) -> None:
    claim = lease._claim
    with store._guard:
        line = store.lines.get((claim.namespace, claim.name))
        party = line.parties.get(claim.mark) if line is not None else None
        if line is not None and party is not None:
            party.until = min(party.until, now)
            line._next_end = min(line._next_end, now)
    store.inspect(claim.namespace, claim.name, True)  # whoever looks ends what is over, and wakes the next


def _parts(lease: BaseLease) -> tuple[Clock, Store]:
    runtime, store = lease._desk.runtime, lease._desk.book.shelf.get("store")
    if not isinstance(runtime, ClockThreads | ClockLoop) or not isinstance(store, Store):
        raise TypeError("this needs a lease of leasehold_client or leasehold_async_client, whose engine it can reach")
    return runtime.clock, store
