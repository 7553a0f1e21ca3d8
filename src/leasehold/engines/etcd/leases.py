"""etcd's own leases: a key is attached to one, and etcd deletes the key when its lease expires.

A lease carries the key of one claim at a time. Creating one takes a consensus round of the cluster, so the leases of
released claims are kept in a small pool. A lease returns to the pool only after its key is known to be gone: otherwise
a late write of an abandoned claim would live on under the next claim's lease. If that is not certain, the lease is
revoked. That ends lease and key in one step, and makes etcd refuse every write that is still in flight.

A claim may move from one client to another, together with its key and the lease of that key. The second client renews
that lease, but neither revokes it nor keeps it: the first one may have it in its pool, or under another claim's key.

The client counts a lease's life on its own clock from before it sent the request. etcd starts counting later, so the
lease ends later at etcd.
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

MAX_POOLED: Final = 256  # unused leases: up to this many waiters of a client come and go without creating new ones
MIN_TTL: Final = 2  # seconds: etcd's minimum with its default election timeout of 1 s
# Seconds. etcd passes over a dead waiter when its lease ends, and notices that up to a second late: 5 s in all.
WAITER_LEASE_TTL: Final = 4
SERVED_WAITER_LEASE_TTL: Final = int(WAITER_TTL)  # for a lock server: its client has that long to find another server
RENEW_SHARE: Final = 1 / 4  # of its life: when a waiter's lease is renewed
_FRESH_FRACTION: Final = 0.2  # of its ttl: a pooled lease older than this is kept alive before it is used


class EtcdLease:
    __slots__ = ("id", "is_adopted", "requested_ttl", "sent_at", "ttl")

    def __init__(self, lease_id: int, requested_ttl: int, ttl: int, sent_at: float, is_adopted: bool = False) -> None:
        self.id, self.requested_ttl, self.ttl, self.sent_at = lease_id, requested_ttl, ttl, sent_at
        self.is_adopted = is_adopted  # another client may have created it, and use it for another claim by now

    @property
    def expires_at(self) -> float:
        """etcd does not end the lease before this instant of the client's clock."""
        return self.sent_at + self.ttl


def required_ttl(claim: Claim) -> int:
    """The ttl plus the delay for which the engine keeps the name afterwards, in whole seconds."""
    return max(MIN_TTL, math.ceil(claim.ttl + claim.delay - 1e-6))


class LeasePool:
    """The unused leases of one client. Both engine instances use it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._pool: list[EtcdLease] = []
        self.min_ttl = MIN_TTL  # grows if the server raises a shorter ttl

    async def get(self, rpc: RpcClient, seconds: int, deadline: float) -> EtcdLease:
        """An unused lease of `seconds` with most of its life left."""
        while (lease := self._take_pooled(seconds)) is not None:
            now = self._runtime.now()
            if now < lease.sent_at + lease.ttl * _FRESH_FRACTION:
                return lease
            try:
                if now < lease.expires_at and await self.keep_alive(rpc, [lease], deadline):
                    return lease
            except BaseException:  # failed or cancelled: the lease is in no list any more, so end it here
                self.revoke_nowait(rpc, lease)
                raise
        return await self.create(rpc, seconds, deadline)

    def recycle(self, rpc: RpcClient, lease: EtcdLease) -> None:
        """Return a lease to the pool. Its key must be known to be gone."""
        if lease.is_adopted:
            return
        with self._mutex:
            now = self._runtime.now()
            self._pool = [each for each in self._pool if each.expires_at > now]
            if len(self._pool) < MAX_POOLED:
                self._pool.append(lease)
                return
        self.revoke_nowait(rpc, lease)

    def revoke_nowait(self, rpc: RpcClient, lease: EtcdLease) -> None:
        """Send a revoke, which also deletes the attached key. If it is lost, the lease expires: it is not renewed."""
        if not lease.is_adopted:
            rpc.send_nowait(messages.LEASE_REVOKE, messages.LeaseId(lease.id))

    async def revoke(self, rpc: RpcClient, lease: EtcdLease, deadline: float) -> None:
        """Revoke a lease and wait for the confirmation."""
        if lease.is_adopted:
            return
        try:
            await rpc.call(messages.LEASE_REVOKE, messages.LeaseId(lease.id), deadline)
        except LeaseNotFound:
            return

    async def keep_alive(self, rpc: RpcClient, leases: list[EtcdLease], deadline: float) -> set[int]:
        """Renew these leases on one stream. Returns the ids of those that are alive."""
        sent_at = self._runtime.now()
        ttls = await rpc.keep_alive([lease.id for lease in leases], deadline)
        for lease in leases:
            if ttl := ttls[lease.id]:
                lease.sent_at, lease.ttl = max(lease.sent_at, sent_at), ttl
        return {lease.id for lease in leases if ttls[lease.id]}

    async def adopt(self, rpc: RpcClient, lease_id: int, deadline: float) -> EtcdLease | None:
        """Renew a lease that another client created, or an earlier process. None: it has expired."""
        lease = EtcdLease(lease_id, 0, 0, self._runtime.now(), is_adopted=True)
        return lease if await self.keep_alive(rpc, [lease], deadline) else None

    async def close(self, rpc: RpcClient, deadline: float) -> None:
        """Revoke all unused leases, together. Those that cannot be revoked by the deadline expire."""
        with self._mutex:
            pool, self._pool = self._pool, []
        live_ids = [messages.LeaseId(lease.id) for lease in pool if lease.expires_at > self._runtime.now()]
        with suppress(LeaseholdError):
            await rpc.call_each(messages.LEASE_REVOKE, live_ids, deadline)

    def after_fork(self) -> None:
        """In a forked child: the pooled leases belong to the parent."""
        self._mutex, self._pool = self._runtime.mutex(), []

    def _take_pooled(self, seconds: int) -> EtcdLease | None:
        with self._mutex:
            for index in range(len(self._pool) - 1, -1, -1):
                if self._pool[index].requested_ttl == seconds:
                    return self._pool.pop(index)
        return None

    async def create(self, rpc: RpcClient, seconds: int, deadline: float) -> EtcdLease:
        """Create a lease. Unlike one from `get`, it has its whole life left."""
        # The client chooses the id, so that it can repeat a request that got no reply.
        lease_id = int.from_bytes(self._runtime.random_bytes(8), "big") >> 1 or 1
        sent_at = self._runtime.now()
        try:
            ttl = (await rpc.call(messages.LEASE_GRANT, messages.LeaseGrantRequest(seconds, lease_id), deadline)).ttl
        except LeaseAlreadyExists:
            ttl = seconds
        except BaseException:  # etcd may have created the lease nevertheless
            rpc.send_nowait(messages.LEASE_REVOKE, messages.LeaseId(lease_id))
            raise
        if ttl > seconds:
            self.min_ttl = max(self.min_ttl, ttl)
        return EtcdLease(lease_id, seconds, max(ttl, seconds), sent_at)
