"""Waiting for the end of leases: of one, of several, or until it is enough."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from leasehold.core import timing

if TYPE_CHECKING:
    from leasehold.recipes.lease import BaseLease


async def wait_lost(
    leases: Sequence[BaseLease], seconds: float | None, enough: Callable[[], bool] = lambda: False
) -> bool:
    """Wait until one of them is over, or it is `enough` (whoever makes it so wakes them). False: none is lost."""
    runtime = leases[0]._desk.runtime
    end = timing.NEVER if seconds is None else runtime.now() + seconds
    signal = runtime.signal()
    for lease in leases:
        with lease._desk.guard:
            lease._signals = [*(lease._signals or ()), signal]
    try:
        while all(lease.held for lease in leases) and not enough() and (left := end - runtime.now()) > 0:
            await signal.wait(min(left, timing.LOOK_EVERY, *(lease.remaining for lease in leases)))
    finally:
        for lease in leases:
            with lease._desk.guard:
                lease._signals = [other for other in lease._signals or () if other is not signal]
    return any(lease.lost_reason is not None for lease in leases)
