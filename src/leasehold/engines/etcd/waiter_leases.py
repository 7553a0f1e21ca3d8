"""Keeps the etcd leases of a client's waiters alive, on the connection of the watch stream.

A waiter's lease is short, because etcd passes over a dead waiter only when its lease ends. So it cannot wait for the
watchdog's heartbeats: the watch thread renews it at a quarter of its life, and does not wait for the answer before it
sends the next one. In a network that delays each request by a second, a lease still gets three renewals in its life.

A living waiter without heartbeats ends as on every engine (E7): its lease is renewed only while it would then end
within `WAITER_TTL` of the last heartbeat.

Safety does not depend on this: a waiter whose lease has ended joins the queue again, and a grant has another lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final
from weakref import ref

from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.grpc.frames import GrpcStream
from leasehold.engines.etcd.leases import RENEW_SHARE, EtcdLease

_MIN_PAUSE: Final = 0.2  # seconds between two batches
_MAX_PAUSE: Final = 1.0  # a new waiter's lease is never due sooner
_ANSWER_TIMEOUT: Final = 1.0  # or three times the last answer of the cluster; then another member is asked


class WaiterLeases:
    """Used by the watch thread alone."""

    def __init__(
        self, now: Callable[[], float], list_leases: Callable[[], list[EtcdLease]], answer_time: Callable[[], float]
    ) -> None:
        """`answer_time`: the seconds that the cluster's last answer took."""
        self._now, self._list_leases, self._answer_time = now, list_leases, answer_time
        self._sent_at: dict[int, float] = {}  # the last renewal of each lease
        self._next_batch_at = 0.0
        self._connection: GrpcConnection | None = None
        self._metadata = b""
        self._stream: _KeepAliveStream | None = None

    @property
    def is_needed(self) -> bool:
        return bool(self._list_leases())

    def use(self, connection: GrpcConnection | None, metadata: bytes) -> None:
        """Send on this connection from now on."""
        self._connection, self._metadata, self._stream, self._next_batch_at = connection, metadata, None, 0.0
        self._sent_at.clear()  # what was sent on the last one may be lost

    def send_due(self, can_switch: bool) -> float | None:
        """Renew the leases that are due. Returns the seconds until the next call; None: there is no waiter.
        `can_switch`: if the member does not answer, fail, so that the next connection goes to another one."""
        connection, now = self._connection, self._now()
        if connection is None:
            return None
        stream = self._stream
        if stream is not None and stream.status is not None:
            self._stream = stream = None
        if stream is not None and stream.outstanding and can_switch:
            timeout = max(_ANSWER_TIMEOUT, 3 * self._answer_time())
            if now - max(stream.outstanding[0][1], stream.answered_at) >= timeout:
                connection.fail("etcd did not answer a keep-alive")
                return None
        if now < self._next_batch_at:
            return self._next_batch_at - now
        leases = self._list_leases()
        if not leases:
            return None
        self._sent_at = {lease.id: self._sent_at.get(lease.id, 0.0) for lease in leases}
        next_due_at = now + _MAX_PAUSE
        for lease in leases:
            due_at = max(lease.sent_at, self._sent_at[lease.id]) + lease.ttl * RENEW_SHARE
            if due_at <= now:
                self._send(connection, lease, now)
            else:
                next_due_at = min(next_due_at, due_at)
        self._next_batch_at = max(next_due_at, now + _MIN_PAUSE)
        return self._next_batch_at - now

    def _send(self, connection: GrpcConnection, lease: EtcdLease, now: float) -> None:
        request = messages.encode(messages.LeaseId(lease.id))
        self._sent_at[lease.id] = now
        if self._stream is None:
            self._stream = _KeepAliveStream(connection, self._now)
            self._stream.outstanding.append((lease, now))
            connection.start(self._stream, messages.LEASE_KEEP_ALIVE.path, self._metadata, request, False)
        else:
            self._stream.outstanding.append((lease, now))
            connection.send(self._stream, request)


class _KeepAliveStream(GrpcStream):
    """etcd answers in the order of the requests."""

    def __init__(self, connection: GrpcConnection, now: Callable[[], float]) -> None:
        super().__init__(None, max_bytes=messages.LEASE_KEEP_ALIVE.max_reply)
        self._connection, self._now = ref(connection), now  # the connection refers to its streams
        self.answered_at = 0.0  # the last answer: one of hundreds of renewals takes long, although etcd is not silent
        self.outstanding: deque[tuple[EtcdLease, float]] = deque()  # and when its renewal was sent

    def on_message(self, message: bytes) -> None:
        try:
            reply = messages.decode(messages.LEASE_KEEP_ALIVE.reply_type, message)
        except messages.MalformedReply:
            reply = messages.LeaseTtlResponse()
        if not self.outstanding or self.outstanding[0][0].id != reply.id:
            if (connection := self._connection()) is not None:
                connection.fail("etcd sent an invalid reply to a keep-alive")
            return
        self.answered_at = self._now()
        lease, sent_at = self.outstanding.popleft()
        if reply.ttl > 0:  # else it has expired: the waiter finds out at its next heartbeat
            lease.sent_at, lease.ttl = max(lease.sent_at, sent_at), reply.ttl
