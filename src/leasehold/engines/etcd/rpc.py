"""Calls to an etcd cluster: several members, one deadline, one mapping of errors (E9).

A call goes to the member that answered last. If that member refuses, disconnects, or does not answer in its share of
the time (`server_share`), the client tries the next one: every request of this engine may safely be executed twice. If
none answers, the next call begins with another member.
Errors of a cluster that is about to recover (no leader, an election) are retried until the deadline, as is a restart.
Every other error is raised at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from leasehold.core.timing import backoff, server_share
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.grpc.frames import (
    MAX_REPLY,
    OK,
    UNAUTHENTICATED,
    UNAVAILABLE,
    ConnectionBroken,
    GrpcStatus,
    GrpcStream,
)
from leasehold.engines.etcd.grpc.hpack import encode_literal
from leasehold.engines.etcd.messages import KeyValue, MalformedReply, RpcMethod
from leasehold.engines.etcd.url import EtcdUrl, resolve
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, ListingTooLong, Unavailable
from leasehold.runtime.base import Mutex, Runtime, Signal

_log = logging.getLogger("leasehold.etcd")

M = TypeVar("M")

(
    _DEADLINE_EXCEEDED,
    _NOT_FOUND,
    _ALREADY_EXISTS,
    _PERMISSION_DENIED,
    _RESOURCE_EXHAUSTED,
    _FAILED_PRECONDITION,
    _ABORTED,
) = 4, 5, 6, 7, 8, 9, 10
_INVALID_ARGUMENT, _UNIMPLEMENTED = 3, 12
_PAUSE: Final = 0.02
_MAX_PAUSE: Final = 0.25
_MAX_CONCURRENT: Final = 64  # calls of one batch
_MIN_MEMBER_TIME: Final = 0.2  # seconds for one member, even if little time is left
_NO_LEADER: Final = "no leader"
HAS_LEADER: Final = encode_literal(b"hasleader", b"true")  # a member without a leader refuses at once, instead of never
# The last one: a request without a token, because another call has just discarded it.
_STALE_LOGIN_TEXTS: Final = ("invalid auth token", "revision of auth store is old", "user name is empty")


class LeaseNotFound(Unavailable):
    """The etcd lease has expired or was revoked."""


class LeaseAlreadyExists(Unavailable):
    """The etcd lease exists already: an earlier try of this client created it."""


class NoSpace(Unavailable):
    """The database is full: etcd still accepts deletes, but no writes."""


class ClusterMemory:
    """What a client knows of the cluster. Its engine instances share it."""

    def __init__(self) -> None:
        self.auth_token = ""  # that etcd issued for user and password
        self.last_answer = 0.0  # seconds that it took

    def discard_stale_login(self, status: GrpcStatus) -> bool:
        """Whether the call failed because of a stale token: tokens expire, and end when users or roles change."""
        stale = status.code in (UNAUTHENTICATED, _INVALID_ARGUMENT) and any(
            text in status.text for text in _STALE_LOGIN_TEXTS
        )
        if stale:
            self.auth_token = ""
        return stale


class RpcClient:
    """One engine instance's access to the cluster: one connection at a time, opened when it is first needed."""

    def __init__(self, url: EtcdUrl, runtime: Runtime, memory: ClusterMemory) -> None:
        self._url, self._runtime, self._memory = url, runtime, memory
        self._mutex: Mutex = runtime.mutex()
        self._connection: GrpcConnection | None = None
        self._endpoint_index = 0  # the endpoint in use
        self._ever_answered = False  # some member has answered at least once
        self._connect_waiters: list[Signal] | None = None  # callers that wait for a connection another one is opening

    async def call(
        self, method: RpcMethod[M], request: tuple[Any, ...], deadline: float, unconfirmed: list[str] | None = None
    ) -> M:
        """The answer of the first member that gives one by the deadline. `unconfirmed` collects the tries without an
        answer: etcd may still execute such a request, even after the one that was answered."""
        started_at, tries, failures, logins, no_leader = self._runtime.now(), 0, 0, 0, False
        first = self._endpoint_index
        last_status = GrpcStatus(UNAVAILABLE, "no answer")
        member_count = len(self._url.endpoints)
        while (left := deadline - self._runtime.now()) > 0:
            try:
                await self._authenticate(deadline)
                status, payloads = await self._try_once(method, messages.encode(request), self._member_deadline(left))
            except ConnectionBroken as error:
                last_status, failures = GrpcStatus(UNAVAILABLE, str(error)), failures + 1
                _note_unconfirmed(unconfirmed, last_status)
                if failures > member_count and not self._ever_answered:  # every member failed, one of them twice
                    break
                if failures > member_count:  # the cluster answered before, so it may be restarting
                    await self._pause(failures - member_count, deadline)
                continue
            if status is None:
                last_status = GrpcStatus(UNAVAILABLE, "no answer")
                _note_unconfirmed(unconfirmed, last_status)
                continue
            last_status, self._ever_answered = status, True
            if status.code == OK:
                return self._decode_reply(method, payloads)
            if self._url.user and self._memory.discard_stale_login(status):
                logins += 1
                if logins > 1:  # users or roles were changed once more, or other calls log in as well
                    await self._pause(logins, deadline)
                continue
            if not _is_transient(status):
                raise _to_error(status)
            _note_unconfirmed(unconfirmed, status)
            no_leader |= _has_no_leader(status)
            tries += 1
            await self._pause(tries, deadline)
        self._begin_behind(first)
        seconds = self._runtime.now() - started_at
        within = f" in {seconds:.1f} s" if seconds >= 0.05 else ""
        raise self._no_answer(within, last_status.text, no_leader, seconds)

    def _no_answer(self, to_what: str, why: str, no_leader: bool, seconds: float | None = None) -> Unavailable:
        """`no_leader`: a member has answered that it has none."""
        members = ", ".join(map(str, self._url.endpoints))
        text = f"etcd at {members} did not answer{to_what}: {why.removeprefix(f'{members}: ')}"
        if no_leader:
            text += (
                "; a member that answered has no leader: it is cut off from the majority, or an election is under way"
            )
        return Unavailable(text, engine="etcd", seconds=seconds, no_majority=no_leader)

    async def _pause(self, tries: int, deadline: float) -> None:
        pause = backoff(tries, _PAUSE, _MAX_PAUSE, 0.5 + self._runtime.random() / 2)
        await self._runtime.sleep(min(pause, max(deadline - self._runtime.now(), 0.0)))

    def _member_deadline(self, left: float) -> float:
        """Until when to wait for one member: the rest of the time is for the others."""
        share = server_share(left, min(len(self._url.endpoints), 2), self._memory.last_answer)
        return self._runtime.now() + min(left, max(share, _MIN_MEMBER_TIME))

    async def keep_alive(self, leases: Sequence[int], deadline: float) -> dict[int, int]:
        """Renew leases on one stream. Returns the seconds that each lease has left; 0: it has expired."""
        ttls: dict[int, int] = {}
        failures, last_error, no_leader, first = 0, "no answer", False, self._endpoint_index
        while missing := [lease for lease in leases if lease not in ttls]:
            left = deadline - self._runtime.now()
            if left <= 0 or (failures > len(self._url.endpoints) and not self._ever_answered):
                self._begin_behind(first)
                raise self._no_answer(" a keep-alive", last_error, no_leader)
            try:
                await self._keep_alive_once(missing, ttls, self._member_deadline(left))
            except ConnectionBroken as error:
                failures, last_error = failures + 1, str(error)
                no_leader |= _NO_LEADER in last_error
                if failures > len(self._url.endpoints):
                    await self._pause(failures, deadline)
        return ttls

    async def _keep_alive_once(self, leases: Sequence[int], ttls: dict[int, int], deadline: float) -> None:
        connection, stream = await self._start_call(
            messages.LEASE_KEEP_ALIVE, messages.encode(messages.LeaseId(leases[0])), deadline, False, len(leases)
        )
        sent_at, wanted = self._runtime.now(), set(leases)
        try:
            for lease in leases[1:]:
                connection.send(stream, messages.encode(messages.LeaseId(lease)))
            for _ in leases:
                while not stream.messages:
                    if stream.status is not None and not _is_transient(stream.status):
                        raise _to_error(stream.status)
                    if stream.status is not None:
                        raise ConnectionBroken(stream.status.text)
                    if not await stream.wait(deadline - self._runtime.now()):
                        raise ConnectionBroken("no answer in time")
                reply = self._decode_reply(messages.LEASE_KEEP_ALIVE, [stream.messages.pop(0)])
                if reply.id not in wanted:  # else the call would ask again, without a pause, until its deadline
                    raise ConnectionBroken("etcd sent an invalid reply to a keep-alive")
                ttls[reply.id] = max(reply.ttl, 0)
            self._memory.last_answer = self._runtime.now() - sent_at
        except ConnectionBroken:
            self._switch_member(connection)
            raise
        finally:
            connection.cancel(stream)

    async def call_each(self, method: RpcMethod[M], requests: Sequence[tuple[Any, ...]], deadline: float) -> list[M]:
        """Send many small requests at once; those without an answer, or with a long one, are repeated one by one."""
        answers: list[M] = []
        max_bytes = min(method.max_reply, MAX_REPLY // max(1, min(len(requests), _MAX_CONCURRENT)))
        for begin in range(0, len(requests), _MAX_CONCURRENT):
            sent = []
            member_deadline = self._member_deadline(deadline - self._runtime.now())
            try:
                for request in requests[begin : begin + _MAX_CONCURRENT]:
                    body = messages.encode(request)
                    sent.append(await self._start_call(method, body, member_deadline, True, 1, max_bytes))
                for connection, stream in sent:
                    status = await self._wait_status(connection, stream, member_deadline)
                    if status is None or status.code != OK:
                        break
                    answers.append(self._decode_reply(method, stream.messages))
            except ConnectionBroken as error:
                _log.debug("a batch of calls failed; repeating them one by one: %s", error)
            finally:
                for connection, stream in sent:
                    if stream.status is None:
                        connection.cancel(stream)
            for request in requests[len(answers) : begin + _MAX_CONCURRENT]:
                answers.append(await self.call(method, request, deadline))
        return answers

    def send_nowait(self, method: RpcMethod[M], request: tuple[Any, ...]) -> None:
        """Send without waiting if there is a connection, and ignore the answer."""
        connection = self._connection
        if connection is not None:
            try:
                stream = GrpcStream(None, max_bytes=method.max_reply)
                connection.start(stream, method.path, self._metadata(method, 5.0), messages.encode(request), True)
            except (ConnectionBroken, LeaseholdError) as error:
                _log.debug("request not sent: %s", error)

    def _switch_member(self, connection: GrpcConnection | None) -> None:
        """Use another member from now on, on a new connection. Open calls may finish on the old one."""
        with self._mutex:
            if self._connection is connection:
                self._connection = None
                self._endpoint_index = (self._endpoint_index + 1) % len(self._url.endpoints)

    def _begin_behind(self, first: int) -> None:
        """After a call without an answer, whose first member had most of the time: the next call begins with the
        second. Otherwise it may begin with the same silent member, and so leave the others too little time again."""
        with self._mutex:
            if self._connection is None:
                self._endpoint_index = (first + 1) % len(self._url.endpoints)

    def after_fork(self) -> None:
        """In a forked child: drop the parent's connection and send nothing."""
        self._mutex = self._runtime.mutex()
        self._connect_waiters = None
        if self._connection is not None:
            self._connection.close_descriptor()
            self._connection = None

    def close(self) -> None:
        with self._mutex:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.fail("closed")

    # ------------------------------------------------------------ one try

    async def _try_once(
        self, method: RpcMethod[M], body: bytes, deadline: float
    ) -> tuple[GrpcStatus | None, list[bytes]]:
        """The call's status, or None if it did not end in time. After a failure the next try uses another member."""
        connection, stream = await self._start_call(method, body, deadline, True)
        sent_at = self._runtime.now()
        try:
            status = await self._wait_status(connection, stream, deadline)
        finally:
            if stream.status is None:
                connection.cancel(stream)
        if status is not None:
            self._memory.last_answer = self._runtime.now() - sent_at
            if _is_transient(status) and len(self._url.endpoints) > 1:
                self._switch_member(connection)
        return status, stream.messages

    async def _wait_status(self, connection: GrpcConnection, stream: GrpcStream, deadline: float) -> GrpcStatus | None:
        received_before = connection.bytes_received
        while stream.status is None:
            if not await stream.wait(deadline - self._runtime.now()) and stream.status is None:
                if len(self._url.endpoints) > 1 or connection.bytes_received == received_before:
                    self._switch_member(connection)
                return None
        if stream.status.code == UNAVAILABLE and connection.failure is not None:
            self._switch_member(connection)
            raise ConnectionBroken(connection.failure)
        return stream.status

    async def _start_call(
        self,
        method: RpcMethod[M],
        body: bytes,
        deadline: float,
        end: bool,
        max_messages: int = 1,
        max_bytes: int | None = None,
    ) -> tuple[GrpcConnection, GrpcStream]:
        connection = await self.get_connection(deadline)
        max_bytes = max_bytes or min(MAX_REPLY, max_messages * method.max_reply)
        stream = GrpcStream(self._runtime.signal(), max_messages, max_bytes)
        metadata = self._metadata(method, max(deadline - self._runtime.now(), 0.001))
        connection.start(stream, method.path, metadata, body, end)
        return connection, stream

    def _metadata(self, method: RpcMethod[M], seconds: float) -> bytes:
        metadata = encode_literal(b"grpc-timeout", b"%dm" % max(1, min(int(seconds * 1000), 99_999_999)))
        if method is not messages.STATUS:  # which a member without a leader is asked about itself
            metadata += HAS_LEADER
        if self._memory.auth_token:
            metadata += encode_literal(b"token", self._memory.auth_token.encode())
        return metadata

    async def get_connection(self, deadline: float) -> GrpcConnection:
        """The shared connection. If several callers need one at once, the first opens it and the others wait."""
        opens_it = False
        try:
            while not opens_it:
                with self._mutex:
                    connection = self._connection
                    if connection is not None and connection.failure is None and not connection.going_away:
                        return connection
                    if self._connect_waiters is None:
                        opens_it = True  # first: if Ctrl-C comes at any later point, the others must not wait
                        self._connect_waiters, self._connection = [], None
                        continue
                    signal = self._runtime.signal()
                    self._connect_waiters.append(signal)
                if not await signal.wait(deadline - self._runtime.now()):
                    raise ConnectionBroken("no connection in time")
            return await self._connect(deadline)
        finally:
            if opens_it:
                with self._mutex:
                    waiters, self._connect_waiters = self._connect_waiters or (), None
                for signal in waiters:
                    signal.set()

    async def _connect(self, deadline: float) -> GrpcConnection:
        try:
            connection = await self._open_connection(deadline)
            try:
                self._runtime.start_thread(connection.make_reader(), "leasehold-etcd")
            except RuntimeError as error:
                connection.close_descriptor()
                raise ConnectionBroken(str(error)) from error
            with self._mutex:
                self._connection = connection
        except ConnectionBroken:
            self._switch_member(None)
            raise
        return connection

    async def connect_unshared(self, deadline: float) -> GrpcConnection:
        """A new connection for the caller alone, without a reader thread."""
        await self._authenticate(deadline)
        self.close()
        try:
            return await self._open_connection(deadline)
        finally:
            self._switch_member(None)  # the next one goes to the next member

    async def _open_connection(self, deadline: float) -> GrpcConnection:
        endpoint, tls = self._url.endpoints[self._endpoint_index], self._url.tls
        connection = GrpcConnection(self._runtime, str(endpoint), tls is not None)
        try:
            addresses = await resolve(endpoint.host, self._runtime, deadline)
            await self._runtime.call(connection.open, endpoint, addresses, tls, deadline)
        except OSError as error:
            raise ConnectionBroken(f"{endpoint}: {getattr(error, 'strerror', None) or error}") from error
        return connection

    async def _authenticate(self, deadline: float) -> None:
        if not self._url.user or self._memory.auth_token:
            return
        password = await self._url.password.read_with(self._runtime, deadline)
        request = messages.encode(messages.AuthenticateRequest(self._url.user, password))
        status, payloads = await self._try_once(messages.AUTHENTICATE, request, deadline)
        if status is None:
            raise ConnectionBroken("no answer")
        self._ever_answered = True
        if status.code == OK:
            self._memory.auth_token = self._decode_reply(messages.AUTHENTICATE, payloads).token
        elif "authentication is not enabled" in status.text:
            raise ConfigError("authentication is not enabled in this etcd: remove user and password from the URL")
        elif _is_transient(status):
            raise ConnectionBroken(status.text)
        else:
            raise _to_error(status)

    def _decode_reply(self, method: RpcMethod[M], payloads: list[bytes]) -> M:
        try:
            return _decode_one(method, payloads)
        except MalformedReply as error:
            self.close()
            payloads.clear()  # megabytes, perhaps: the error, which refers to this frame, may live for long
            text = f"etcd sent an invalid reply: {error}"
            raise Unavailable(text, engine="etcd") from error.with_traceback(None)


class RangeReader:
    """Reads all keys that begin with a prefix, in pages, as of the moment of the first page."""

    def __init__(self, rpc: RpcClient, prefix: bytes, deadline: float) -> None:
        self._rpc, self._deadline = rpc, deadline
        self._begin, self._end = prefix, messages.range_end(prefix)
        self._revision, self._size, self._more = 0, 0, True

    async def next_page(self) -> tuple[KeyValue, ...]:
        """Empty: there are no more. Raises Unavailable after `MAX_REPLY` bytes, and if a server sends other keys than
        the next ones."""
        if not self._more:
            return ()
        request = messages.RangeRequest(self._begin, self._end, messages.MAX_PAGE, revision=self._revision)
        reply = await self._rpc.call(messages.RANGE, request, self._deadline)
        for kv in reply.kvs:
            if not self._begin <= kv.key < self._end:
                raise Unavailable("etcd sent an invalid reply: keys that were not requested", engine="etcd")
            self._begin = kv.key + b"\0"
            self._size += len(kv.key) + len(kv.value)
        if self._size > MAX_REPLY:
            raise ListingTooLong(
                "etcd has more keys than the client reads: ask for the names with one prefix", engine="etcd"
            )
        if reply.header is not None:
            self._revision = self._revision or reply.header.revision
        self._more = bool(reply.more)
        return reply.kvs


async def read_range(rpc: RpcClient, prefix: bytes, deadline: float) -> list[KeyValue]:
    """All keys that begin with the prefix."""
    reader, found = RangeReader(rpc, prefix, deadline), list[KeyValue]()
    while page := await reader.next_page():
        found += page
    return found


def _decode_one(method: RpcMethod[M], payloads: list[bytes]) -> M:
    """Decode a reply. A reply without a header is invalid: etcd always sends one."""
    if len(payloads) != 1:
        raise MalformedReply(f"{len(payloads)} messages instead of one")
    reply = messages.decode(method.reply_type, payloads[0], method.max_items)
    if not isinstance(getattr(reply, "header", None), messages.ResponseHeader):
        raise MalformedReply("no header")
    return reply


def _note_unconfirmed(unconfirmed: list[str] | None, status: GrpcStatus) -> None:
    if unconfirmed is not None:
        unconfirmed.append(status.text)


def _has_no_leader(status: GrpcStatus) -> bool:
    return status.code == UNAVAILABLE and _NO_LEADER in status.text


def _is_transient(status: GrpcStatus) -> bool:
    """Whether the cluster is about to recover, so that the same request may succeed then."""
    if status.code == _RESOURCE_EXHAUSTED:
        return "too many requests" in status.text
    return status.code in (UNAVAILABLE, _ABORTED) or (status.code == _FAILED_PRECONDITION and "leader" in status.text)


def _to_error(status: GrpcStatus) -> Exception:
    """The one mapping of etcd's errors (E9)."""
    text = status.text or f"gRPC status {status.code}"
    if status.code == _NOT_FOUND and "lease" in text:
        return LeaseNotFound(text, engine="etcd")
    if status.code in (_ALREADY_EXISTS, _FAILED_PRECONDITION) and "lease already exists" in text:
        return LeaseAlreadyExists(text, engine="etcd")
    if "too large lease TTL" in text:
        return ConfigError("an etcd lease lasts at most 9,000,000,000 s: choose a shorter ttl, delay or min_hold")
    if status.code == _UNIMPLEMENTED:
        return ConfigError(f"the server is not etcd 3.4 or newer: {text}")
    if status.code == _PERMISSION_DENIED:
        return AccessDenied(f"etcd does not permit the user in the URL to do this: {text}")
    if status.code in (_INVALID_ARGUMENT, UNAUTHENTICATED):
        return ConfigError(f"etcd rejected the user, the password or the request: {text}")
    if "larger than max" in text:
        return ConfigError(f"etcd does not accept requests of this size (--max-request-bytes): {text}")
    if "space exceeded" in text:
        return NoSpace(f"etcd accepts no writes until its NOSPACE alarm is disarmed: {text}", engine="etcd")
    return Unavailable(f"etcd reported an error: {text}", engine="etcd")
