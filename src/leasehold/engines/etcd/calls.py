"""Calls to an etcd cluster: several members, one deadline, one mapping of errors (E9).

A call goes to the member that answered last. If that one refuses, breaks off or stays silent for its share of the time,
the next is asked: everything this engine sends may be carried out twice. What etcd says of a cluster that is about to
recover (no leader, an election) is waited out until the deadline, as is a restart; everything else is said at once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from leasehold.core.timing import backoff
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.address import Address, look_up
from leasehold.engines.etcd.frames import OK, UNAUTHENTICATED, UNAVAILABLE, Broken, Status, Stream
from leasehold.engines.etcd.hpack import Header
from leasehold.engines.etcd.http2 import Connection
from leasehold.engines.etcd.wire import Malformed, Method
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Guard, Runtime, Signal

_log = logging.getLogger("leasehold.etcd")

M = TypeVar("M")

_DEADLINE, _NOT_FOUND, _EXISTS, _DENIED, _EXHAUSTED, _PRECONDITION, _ABORTED = 4, 5, 6, 7, 8, 9, 10
_INVALID, _UNIMPLEMENTED = 3, 12
_PAUSE: Final = 0.02
_LONGEST_PAUSE: Final = 0.25
_AT_ONCE: Final = 64  # calls of one batch
_LEAST_SHARE: Final = 0.2  # seconds for one member, however little time there is for all
_STALE_LOGIN: Final = ("invalid auth token", "revision of auth store is old")


class LeaseGone(Unavailable):
    """The etcd lease that was named is over."""


class LeaseThere(Unavailable):
    """The etcd lease to be made is there already: an earlier try of ours was carried out."""


class NoRoom(Unavailable):
    """The database is full: etcd deletes, and writes nothing."""


class Login:
    """The token etcd gave for user and password; one for both twins."""

    def __init__(self) -> None:
        self.token = ""

    def refused(self, status: Status) -> bool:
        """Whether the token is what is wrong: it ends by itself, and with every change of users and roles."""
        stale = status.code in (UNAUTHENTICATED, _INVALID) and any(text in status.text for text in _STALE_LOGIN)
        if stale:
            self.token = ""
        return stale


class Calls:
    """One twin's way to the cluster: one connection at a time, made when first needed."""

    def __init__(self, address: Address, runtime: Runtime, login: Login) -> None:
        self._address, self._runtime, self._login = address, runtime, login
        self._guard: Guard = runtime.guard()
        self._connection: Connection | None = None
        self._at = 0  # which endpoint is asked
        self._met = False  # anybody has ever answered
        self._waiting: list[Signal] | None = None  # for the connection that somebody is making

    async def ask(
        self, method: Method[M], request: tuple[Any, ...], deadline: float, doubts: list[str] | None = None
    ) -> M:
        """The answer, from whichever member gives one by the deadline. `doubts` gets a word for every try without an
        answer: such a request may yet be carried out, even after the one that was answered."""
        began, tries, refusals, renewed = self._runtime.now(), 0, 0, False
        last = Status(UNAVAILABLE, "no answer")
        members = len(self._address.endpoints)
        while (left := deadline - self._runtime.now()) > 0:
            try:
                await self._sign_in(deadline)
                status, messages = await self._once(method, wire.encode(request), self._share(left))
            except Broken as error:
                last, refusals = Status(UNAVAILABLE, str(error)), refusals + 1
                _doubt(doubts, last)
                if refusals > members and not self._met:  # each was asked, one of them twice: nobody is there
                    break
                if refusals > members:  # there was somebody before, and may be again in a moment
                    await self._pause(refusals - members, deadline)
                continue
            if status is None:
                last = Status(UNAVAILABLE, "no answer")
                _doubt(doubts, last)
                continue
            last, self._met = status, True
            if status.code == OK:
                return self._decoded(method, messages)
            if self._login.refused(status) and self._address.user and not renewed:
                renewed = True
                continue
            if not _passing(status):
                raise _meaning(status)
            _doubt(doubts, status)
            tries += 1
            await self._pause(tries, deadline)
        seconds = self._runtime.now() - began
        raise Unavailable(f"etcd gave no answer in {seconds:.1f} s: {last.text}", engine="etcd", seconds=seconds)

    async def _pause(self, tries: int, deadline: float) -> None:
        pause = backoff(tries, _PAUSE, _LONGEST_PAUSE, 0.5 + self._runtime.fraction() / 2)
        await self._runtime.sleep(min(pause, max(deadline - self._runtime.now(), 0.0)))

    def _share(self, left: float) -> float:
        """Until when one member is waited for: the rest of the time is for the others."""
        alone = len(self._address.endpoints) == 1
        return self._runtime.now() + (left if alone else min(left, max(left / 2, _LEAST_SHARE)))

    async def keep_alive(self, leases: Sequence[int], deadline: float) -> dict[int, int]:
        """The life each lease now has, in seconds; 0: it is over. One stream for all of them."""
        lives: dict[int, int] = {}
        misses, last = 0, "no answer"
        while missing := [lease for lease in leases if lease not in lives]:
            left = deadline - self._runtime.now()
            if left <= 0 or (misses > len(self._address.endpoints) and not self._met):
                raise Unavailable(f"etcd did not answer a keep-alive: {last}", engine="etcd")
            try:
                await self._keep_alive(missing, lives, self._share(left))
            except Broken as error:
                misses, last = misses + 1, str(error)
                if misses > len(self._address.endpoints):
                    await self._pause(misses, deadline)
        return lives

    async def _keep_alive(self, leases: Sequence[int], lives: dict[int, int], deadline: float) -> None:
        connection, stream = await self._started(wire.KEEP_ALIVE, wire.encode(wire.LeaseId(leases[0])), deadline, False)
        try:
            for lease in leases[1:]:
                connection.send(stream, wire.encode(wire.LeaseId(lease)))
            for _ in leases:
                while not stream.messages:
                    if stream.status is not None and not _passing(stream.status):
                        raise _meaning(stream.status)
                    if stream.status is not None:
                        raise Broken(stream.status.text)
                    if not await stream.wait(deadline - self._runtime.now()):
                        raise Broken("no answer in time")
                life = self._decoded(wire.KEEP_ALIVE, [stream.messages.pop(0)])
                lives[life.id] = max(life.ttl, 0)
        except Broken:
            self._leave(connection)
            raise
        finally:
            connection.cancel(stream)

    async def ask_each(self, method: Method[M], requests: Sequence[tuple[Any, ...]], deadline: float) -> list[M]:
        """Many small questions, sent all at once; what is not answered so is asked one by one."""
        answers: list[M] = []
        for begin in range(0, len(requests), _AT_ONCE):
            sent = []
            until = self._share(deadline - self._runtime.now())
            try:
                for request in requests[begin : begin + _AT_ONCE]:
                    sent.append(await self._started(method, wire.encode(request), until, True))
                for connection, stream in sent:
                    status = await self._ended(connection, stream, until)
                    if status is None or status.code != OK:
                        break
                    answers.append(self._decoded(method, stream.messages))
            except Broken as error:
                _log.debug("asked again, one by one: %s", error)
            finally:
                for connection, stream in sent:
                    if stream.status is None:
                        connection.cancel(stream)
            for request in requests[len(answers) : begin + _AT_ONCE]:
                answers.append(await self.ask(method, request, deadline))
        return answers

    def post(self, method: Method[M], request: tuple[Any, ...]) -> None:
        """Send without waiting, if there is a connection; nobody hears the answer."""
        connection = self._connection
        if connection is not None:
            try:
                connection.start(Stream(None), method.path, self._metadata(5.0), wire.encode(request), True)
            except (Broken, LeaseholdError) as error:
                _log.debug("not sent: %s", error)

    def _leave(self, connection: Connection | None) -> None:
        """Ask another member from now on, by a new connection. Calls still on the old one may end there."""
        with self._guard:
            if self._connection is connection:
                self._connection = None
                self._at = (self._at + 1) % len(self._address.endpoints)

    def drop(self) -> None:
        """In a forked child."""
        self._guard = self._runtime.guard()
        self._waiting = None
        if self._connection is not None:
            self._connection.drop()
            self._connection = None

    def close(self) -> None:
        with self._guard:
            left, self._connection = self._connection, None
        if left is not None:
            left.fail("closed")

    # ------------------------------------------------------------ one try

    async def _once(self, method: Method[M], body: bytes, deadline: float) -> tuple[Status | None, list[bytes]]:
        """How it ended, or None if it did not in time. Unless it was answered, the next try meets another member."""
        connection, stream = await self._started(method, body, deadline, True)
        try:
            status = await self._ended(connection, stream, deadline)
        finally:
            if stream.status is None:
                connection.cancel(stream)
        if status is not None and _passing(status) and len(self._address.endpoints) > 1:
            self._leave(connection)
        return status, stream.messages

    async def _ended(self, connection: Connection, stream: Stream, deadline: float) -> Status | None:
        heard = connection.heard
        while stream.status is None:
            if not await stream.wait(deadline - self._runtime.now()) and stream.status is None:
                if len(self._address.endpoints) > 1 or connection.heard == heard:
                    self._leave(connection)
                return None
        if stream.status.code == UNAVAILABLE and connection.broken is not None:
            self._leave(connection)
            raise Broken(connection.broken)
        return stream.status

    async def _started(self, method: Method[M], body: bytes, deadline: float, end: bool) -> tuple[Connection, Stream]:
        connection = await self.connected(deadline)
        stream = Stream(self._runtime.signal())
        metadata = self._metadata(max(deadline - self._runtime.now(), 0.001))
        connection.start(stream, method.path, metadata, body, end)
        return connection, stream

    def _metadata(self, seconds: float) -> list[Header]:
        found = [Header(b"grpc-timeout", b"%dm" % max(1, min(int(seconds * 1000), 99_999_999)))]
        if self._login.token:
            found.append(Header(b"token", self._login.token.encode()))
        return found

    async def connected(self, deadline: float) -> Connection:
        """The connection; many who ask at once wait for the one that makes it."""
        while True:
            with self._guard:
                connection = self._connection
                if connection is not None and connection.broken is None and not connection.leaving:
                    return connection
                signal = None
                if self._waiting is None:
                    self._waiting, self._connection = [], None
                else:
                    signal = self._runtime.signal()
                    self._waiting.append(signal)
            if signal is None:
                return await self._connect(deadline)
            if not await signal.wait(deadline - self._runtime.now()):
                raise Broken("nobody answers")

    async def _connect(self, deadline: float) -> Connection:
        try:
            made = await self._open(deadline)
            try:
                self._runtime.aside(made.reader(), "leasehold-etcd")
            except RuntimeError as error:
                made.drop()
                raise Broken(str(error)) from error
            with self._guard:
                self._connection = made
        except Broken:
            self._leave(None)
            raise
        finally:
            with self._guard:
                waiting, self._waiting = self._waiting or (), None
            for signal in waiting:
                signal.set()
        return made

    async def dial(self, deadline: float) -> Connection:
        """A connection for the caller alone, who reads it."""
        await self._sign_in(deadline)
        self.close()
        try:
            return await self._open(deadline)
        finally:
            self._leave(None)  # the next one goes to the next member

    async def _open(self, deadline: float) -> Connection:
        endpoint, tls = self._address.endpoints[self._at], self._address.tls
        made = Connection(self._runtime, str(endpoint), tls is not None)
        try:
            numbers = await look_up(endpoint.host, self._runtime, deadline)
            await self._runtime.call(made.open, endpoint, numbers, tls, deadline)
        except OSError as error:
            raise Broken(f"{endpoint}: {getattr(error, 'strerror', None) or error}") from error
        return made

    async def _sign_in(self, deadline: float) -> None:
        if not self._address.user or self._login.token:
            return
        request = wire.encode(wire.Authenticate(self._address.user, self._address.password))
        status, messages = await self._once(wire.LOGIN, request, deadline)
        if status is None:
            raise Broken("no answer")
        self._met = True
        if status.code == OK:
            self._login.token = self._decoded(wire.LOGIN, messages).token
        elif "authentication is not enabled" in status.text:
            raise ConfigError("this etcd knows no users: leave user and password out of the URL")
        elif _passing(status):
            raise Broken(status.text)
        else:
            raise _meaning(status)

    def _decoded(self, method: Method[M], messages: Sequence[bytes]) -> M:
        """Every answer of etcd has a header; one without it is none."""
        try:
            if len(messages) != 1:
                raise Malformed(f"{len(messages)} messages instead of one")
            answer = wire.decode(method.answer, messages[0])
            if not isinstance(getattr(answer, "header", None), wire.Header):
                raise Malformed("an answer without a header")
        except Malformed as error:
            self.close()
            raise Unavailable(f"etcd's answer cannot be read: {error}", engine="etcd") from error
        return answer


def _doubt(doubts: list[str] | None, status: Status) -> None:
    if doubts is not None:
        doubts.append(status.text)


def _passing(status: Status) -> bool:
    """Whether the cluster is about to recover by itself, and the same request may then be answered."""
    if status.code == _EXHAUSTED:
        return "too many requests" in status.text
    return status.code in (UNAVAILABLE, _ABORTED) or (status.code == _PRECONDITION and "leader" in status.text)


def _meaning(status: Status) -> Exception:
    """The one mapping of what etcd answers (E9)."""
    text = status.text or f"gRPC status {status.code}"
    if status.code == _NOT_FOUND and "lease" in text:
        return LeaseGone(text, engine="etcd")
    if status.code in (_EXISTS, _PRECONDITION) and "lease already exists" in text:
        return LeaseThere(text, engine="etcd")
    if "too large lease TTL" in text:
        return ConfigError("etcd keeps no lease longer than 9,000,000,000 s: choose a shorter ttl, delay or min_hold")
    if status.code == _UNIMPLEMENTED:
        return ConfigError(f"this is no etcd of version 3.4 or newer: {text}")
    if status.code == _DENIED:
        return ConfigError(f"etcd does not permit this user to do that: {text}")
    if status.code in (_INVALID, UNAUTHENTICATED):
        return ConfigError(f"etcd refuses this user, password or request: {text}")
    if "space exceeded" in text:
        return NoRoom(f"etcd takes no writes until its NOSPACE alarm is disarmed: {text}", engine="etcd")
    return Unavailable(f"etcd cannot answer: {text}", engine="etcd")
