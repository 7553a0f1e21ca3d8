"""etcd's own leases: what a key hangs on, and what ends it when nobody is left to.

One lease carries the key of one claim at a time. To make one is a trip through the whole cluster, so those of released
claims are kept in a small pool. One goes back there only after its key was seen to be gone: a late write of a claim
given up would otherwise come to life under the next. What cannot be sure of that is revoked, which ends lease and key
in one step, and refuses every write that is still on its way.

Lives are counted on this client's clock from before the request left: etcd's count began later and so ends later.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Final

from leasehold.core.timing import BEAT
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.calls import Calls, LeaseGone, LeaseThere
from leasehold.errors import LeaseholdError
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

POOL: Final = 256  # leases that nothing hangs on: so many waiters of one client come and go without making new ones
LEAST: Final = 2  # seconds, with etcd's usual election timeout of 1 s
IN_LINE: Final = int(BEAT)
_YOUNG: Final = 0.2  # of its life: so old a lease is used as it is, an older one is kept alive first


class Lease:
    __slots__ = ("asked", "id", "sent", "ttl")

    def __init__(self, number: int, asked: int, ttl: int, sent: float) -> None:
        self.id, self.asked, self.ttl, self.sent = number, asked, ttl, sent

    @property
    def until(self) -> float:
        """No earlier than this does etcd end it."""
        return self.sent + self.ttl


def needed(claim: Claim) -> int:
    """Whole seconds: the ttl, and the delay for which the name is kept after it."""
    return max(LEAST, math.ceil(claim.ttl + claim.delay - 1e-6))


class Leases:
    """All leases of one client. Both twins use it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._guard = runtime.guard()
        self._pool: list[Lease] = []
        self.least = LEAST  # what the server made of the shortest ttl so far

    async def take(self, calls: Calls, seconds: int, deadline: float) -> Lease:
        """A lease of that many seconds that nothing hangs on, with most of its life ahead."""
        while (lease := self._pooled(seconds)) is not None:
            now = self._runtime.now()
            if now < lease.sent + lease.ttl * _YOUNG:
                return lease
            try:
                if now < lease.until and await self.keep(calls, [lease], deadline):
                    return lease
            except BaseException:  # given up, or cancelled: nobody else knows of it
                self.doom(calls, lease)
                raise
        return await self.make(calls, seconds, deadline)

    def give(self, calls: Calls, lease: Lease) -> None:
        """Nothing hangs on it any more, for certain."""
        with self._guard:
            now = self._runtime.now()
            self._pool = [each for each in self._pool if each.until > now]
            if len(self._pool) < POOL:
                self._pool.append(lease)
                return
        self.doom(calls, lease)

    def doom(self, calls: Calls, lease: Lease) -> None:
        """End it, and whatever hangs on it. If this is not heard, it ends by itself: nobody keeps it alive."""
        calls.post(wire.REVOKE, wire.LeaseId(lease.id))

    async def revoke(self, calls: Calls, lease: Lease, deadline: float) -> None:
        """The same, and see that it is done."""
        try:
            await calls.ask(wire.REVOKE, wire.LeaseId(lease.id), deadline)
        except LeaseGone:
            return

    async def keep(self, calls: Calls, leases: list[Lease], deadline: float) -> set[int]:
        """Renew these, in one go; gives the ids of those that live."""
        sent = self._runtime.now()
        lives = await calls.keep_alive([lease.id for lease in leases], deadline)
        for lease in leases:
            if life := lives[lease.id]:
                lease.sent, lease.ttl = max(lease.sent, sent), life
        return {lease.id for lease in leases if lives[lease.id]}

    async def adopt(self, calls: Calls, number: int, deadline: float) -> Lease | None:
        """One made elsewhere, by an earlier process or the other twin; None: it is over."""
        lease = Lease(number, 0, 0, self._runtime.now())
        return lease if await self.keep(calls, [lease], deadline) else None

    async def close(self, calls: Calls, deadline: float) -> None:
        """Leave none behind that nothing hangs on. Those that cannot be ended now end by themselves."""
        with self._guard:
            pool, self._pool = self._pool, []
        with suppress(LeaseholdError):
            for lease in pool:
                if lease.until > self._runtime.now():
                    await self.revoke(calls, lease, deadline)

    def after_fork(self) -> None:
        """The parent's leases are the parent's."""
        self._guard, self._pool = self._runtime.guard(), []

    def _pooled(self, seconds: int) -> Lease | None:
        with self._guard:
            for place in range(len(self._pool) - 1, -1, -1):
                if self._pool[place].asked == seconds:
                    return self._pool.pop(place)
        return None

    async def make(self, calls: Calls, seconds: int, deadline: float) -> Lease:
        """A new one. Unlike `take`, all of its life is ahead."""
        # The number is ours, so that a try that was carried out without an answer can be repeated.
        number = int.from_bytes(self._runtime.entropy(8), "big") >> 1 or 1
        sent = self._runtime.now()
        try:
            ttl = (await calls.ask(wire.GRANT, wire.Grant(seconds, number), deadline)).ttl
        except LeaseThere:
            ttl = seconds
        except BaseException:  # it may have been made all the same
            calls.post(wire.REVOKE, wire.LeaseId(number))
            raise
        if ttl > seconds:
            self.least = max(self.least, ttl)
        return Lease(number, seconds, max(ttl, seconds), sent)
