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

from leasehold.core.timing import WAITER_TTL
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.rpc import LeaseAlreadyExists, LeaseNotFound, RpcClient
from leasehold.errors import LeaseholdError
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

MAX_POOLED: Final = (
    256  # leases that nothing hangs on: so many waiters of one client come and go without making new ones
)
MIN_TTL: Final = 2  # seconds, with etcd's usual election timeout of 1 s
WAITER_LEASE_TTL: Final = int(WAITER_TTL)
_FRESH_FRACTION: Final = 0.2  # of its life: so old a lease is used as it is, an older one is kept alive first


class EtcdLease:
    __slots__ = ("id", "requested_ttl", "sent_at", "ttl")

    def __init__(self, lease_id: int, requested_ttl: int, ttl: int, sent_at: float) -> None:
        self.id, self.requested_ttl, self.ttl, self.sent_at = lease_id, requested_ttl, ttl, sent_at

    @property
    def expires_at(self) -> float:
        """No earlier than this does etcd end it."""
        return self.sent_at + self.ttl


def required_ttl(claim: Claim) -> int:
    """Whole seconds: the ttl, and the delay for which the name is kept after it."""
    return max(MIN_TTL, math.ceil(claim.ttl + claim.delay - 1e-6))


class LeasePool:
    """All leases of one client. Both twins use it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._pool: list[EtcdLease] = []
        self.min_ttl = MIN_TTL  # what the server made of the shortest ttl so far

    async def get(self, rpc: RpcClient, seconds: int, deadline: float) -> EtcdLease:
        """A lease of that many seconds that nothing hangs on, with most of its life ahead."""
        while (lease := self._take_pooled(seconds)) is not None:
            now = self._runtime.now()
            if now < lease.sent_at + lease.ttl * _FRESH_FRACTION:
                return lease
            try:
                if now < lease.expires_at and await self.keep_alive(rpc, [lease], deadline):
                    return lease
            except BaseException:  # given up, or cancelled: nobody else knows of it
                self.revoke_nowait(rpc, lease)
                raise
        return await self.create(rpc, seconds, deadline)

    def recycle(self, rpc: RpcClient, lease: EtcdLease) -> None:
        """Nothing hangs on it any more, for certain."""
        with self._mutex:
            now = self._runtime.now()
            self._pool = [each for each in self._pool if each.expires_at > now]
            if len(self._pool) < MAX_POOLED:
                self._pool.append(lease)
                return
        self.revoke_nowait(rpc, lease)

    def revoke_nowait(self, rpc: RpcClient, lease: EtcdLease) -> None:
        """End it, and whatever hangs on it. If this is not heard, it ends by itself: nobody keeps it alive."""
        rpc.send_nowait(messages.LEASE_REVOKE, messages.LeaseId(lease.id))

    async def revoke(self, rpc: RpcClient, lease: EtcdLease, deadline: float) -> None:
        """The same, and see that it is done."""
        try:
            await rpc.call(messages.LEASE_REVOKE, messages.LeaseId(lease.id), deadline)
        except LeaseNotFound:
            return

    async def keep_alive(self, rpc: RpcClient, leases: list[EtcdLease], deadline: float) -> set[int]:
        """Renew these, in one go; gives the ids of those that live."""
        sent_at = self._runtime.now()
        ttls = await rpc.keep_alive([lease.id for lease in leases], deadline)
        for lease in leases:
            if ttl := ttls[lease.id]:
                lease.sent_at, lease.ttl = max(lease.sent_at, sent_at), ttl
        return {lease.id for lease in leases if ttls[lease.id]}

    async def adopt(self, rpc: RpcClient, lease_id: int, deadline: float) -> EtcdLease | None:
        """One made elsewhere, by an earlier process or the other twin; None: it is over."""
        lease = EtcdLease(lease_id, 0, 0, self._runtime.now())
        return lease if await self.keep_alive(rpc, [lease], deadline) else None

    async def close(self, rpc: RpcClient, deadline: float) -> None:
        """Leave none behind that nothing hangs on. Those that cannot be ended now end by themselves."""
        with self._mutex:
            pool, self._pool = self._pool, []
        with suppress(LeaseholdError):
            for lease in pool:
                if lease.expires_at > self._runtime.now():
                    await self.revoke(rpc, lease, deadline)

    def after_fork(self) -> None:
        """The parent's leases are the parent's."""
        self._mutex, self._pool = self._runtime.mutex(), []

    def _take_pooled(self, seconds: int) -> EtcdLease | None:
        with self._mutex:
            for index in range(len(self._pool) - 1, -1, -1):
                if self._pool[index].requested_ttl == seconds:
                    return self._pool.pop(index)
        return None

    async def create(self, rpc: RpcClient, seconds: int, deadline: float) -> EtcdLease:
        """A new one. Unlike `get`, all of its life is ahead."""
        # The number is ours, so that a try that was carried out without an answer can be repeated.
        lease_id = int.from_bytes(self._runtime.random_bytes(8), "big") >> 1 or 1
        sent_at = self._runtime.now()
        try:
            ttl = (await rpc.call(messages.LEASE_GRANT, messages.LeaseGrantRequest(seconds, lease_id), deadline)).ttl
        except LeaseAlreadyExists:
            ttl = seconds
        except BaseException:  # it may have been made all the same
            rpc.send_nowait(messages.LEASE_REVOKE, messages.LeaseId(lease_id))
            raise
        if ttl > seconds:
            self.min_ttl = max(self.min_ttl, ttl)
        return EtcdLease(lease_id, seconds, max(ttl, seconds), sent_at)
