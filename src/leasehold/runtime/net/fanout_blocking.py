"""Requests to several servers at once, from one thread: all are sent before the caller waits for any answer.

A `NonblockingConnection` is a connection to one server that never blocks: connecting, the TLS handshake and signing in
are steps driven by `poll`, so a server that does not answer does not delay the others. A `ConnectionGroup` has one
connection to each server and belongs to one caller at a time. The asyncio twin is `gather_answers` in
`fanout_event_loop.py`.

If the caller gives up a pending answer, its connection is not used again: an answer that still arrives must never be
taken for the answer to a later request.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias
from weakref import finalize, ref

from leasehold.runtime.net.blocking import (
    MAX_BATCH_SIZE,
    READ_SIZE,
    UNIX,
    WOULD_BLOCK,
    BaseConnection,
    Clock,
    Parser,
    RepliesTooLong,
    ReplyReader,
    ReplyUnasked,
    SocketAddress,
)
from leasehold.runtime.net.host_names import LookUp, Target, note_connect, start_look_up
from leasehold.runtime.net.tls_socket import OverheadLimit, TlsMemory
from leasehold.runtime.polling import POLLIN, POLLOUT, new_poll

_LONGEST_POLL: Final = 1_000_000.0  # seconds: poll() takes milliseconds as a 32-bit number

# By the number of the server: a list of replies, or the exception instead.
AnswersByServer: TypeAlias = dict[int, Any]
# From the number of a server, the request and its answer: the request to send instead, or None to accept the answer.
Correction: TypeAlias = Callable[[int, bytes, Any], bytes | None]


def ignore_repeat(_number: int) -> None:
    """For requests whose answer does not depend on an earlier try."""


def accept_answer(_number: int, _request: bytes, _answer: Any) -> None:
    """The correction of requests that need none."""


class FanoutRequests(NamedTuple):
    first: Mapping[int, bytes]  # by the number of the server
    later: Mapping[int, bytes] = {}  # sent only if the first servers do not decide the outcome
    compensation: Callable[[], bytes] = bytes  # sent right behind a request that was given up
    correction: Correction = accept_answer
    on_repeat: Callable[[int], None] = ignore_repeat  # a broken connection: the server's request is sent again


class WaitPolicy(NamedTuple):
    """How long the caller waits for answers."""

    all_until: float  # wait for all answers until this instant
    deadline: float  # then wait for enough answers until this one
    decided: Callable[[AnswersByServer], bool]  # whether the answers are enough

    def wait_until(self, now: float, answers: AnswersByServer) -> float:
        return self.all_until if now < self.all_until or self.decided(answers) else self.deadline

    def needs_more(self, now: float, answers: AnswersByServer, waiting: Collection[int]) -> bool:
        """Whether the servers asked first are too slow, or too few, to decide the outcome."""
        return (now >= self.all_until or not waiting) and not self.decided(answers)

    def combined_with(self, known: AnswersByServer) -> WaitPolicy:
        """The same policy for a request to the other servers, when these have answered already."""
        return self._replace(decided=lambda new_answers: self.decided(known | new_answers))


class FanoutServer(Protocol):
    """A server to connect to."""

    address: SocketAddress
    tls: ssl.SSLContext | None

    def handshake(self) -> tuple[bytes, int, Callable[[list[Any]], None]]:
        """The first bytes to send on a connection, the number of replies to them, and a function that checks those
        replies: it raises if the connection cannot be used."""


class MemoryTls:
    """TLS over a socket that never blocks. OpenSSL gets a bounded number of bytes at a time, from memory: it ignores
    some messages, and from a socket it would read as long as the server sends them."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._sock = sock
        self._tls, self._incoming, self._outgoing = TlsMemory.begin(context, host)
        self._overhead = OverheadLimit()
        self._begun = False

    def shake_hands(self) -> bool:
        """Continue the handshake: True at its end. Send what `encrypt` returns then."""
        try:
            if self._begun:
                self._receive(READ_SIZE)
            self._begun = True
            self._tls.do_handshake()
        except WOULD_BLOCK:
            return False
        return True

    def encrypt(self, data: bytes) -> bytes:
        if data:
            self._tls.write(data)
        return self._outgoing.read()

    def recv(self, size: int) -> bytes:
        """As of a socket: raises one of WOULD_BLOCK if there is nothing to read."""
        self._receive(size)
        received, data = self._incoming.pending, b""
        try:
            while more := self._tls.read(size):
                data += more
        except ssl.SSLWantReadError:
            self._overhead.check(received, bool(data), self._outgoing.pending)
            if not data:
                raise
        return data

    def _receive(self, size: int) -> None:
        if not (data := self._sock.recv(size)):
            raise ConnectionResetError("the server closed the connection")
        self._incoming.write(data)


class NonblockingConnection(BaseConnection):
    """A connection to one server, from the first connection attempt on."""

    def __init__(self, server: FanoutServer, parser: Parser, max_batch: int) -> None:
        self._server, self._reply_reader = server, ReplyReader(parser)
        self._target: Target = (UNIX, server.address.path)  # the one in use
        self._targets: list[Target] = [self._target]
        self._look_up: LookUp | None = None  # not answered yet
        self._outgoing = b""  # not accepted by the kernel yet
        self._first_request = b""  # to be sent once the connection is open
        self._handshake_replies = 0
        self.replies: list[Any] = []
        self.expected_replies = 0  # to the last request; `replies` holds only those
        self._max_batch = max_batch  # bytes of the replies behind the first one
        self._received_before = 0  # bytes, when that was complete
        self.open = self.has_answered = False
        self._tls: MemoryTls | None = None  # once TLS has begun
        self._error: OSError = ConnectionRefusedError("the host has no address")
        self._current_socket: list[socket.socket] = []  # for the finaliser, if the connection is dropped without close
        self._sock = self._start_connecting() if server.address.path else self._start_look_up()
        finalize(self, _close_all, self._current_socket).atexit = False

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    @property
    def events(self) -> int:
        connecting = not self.open and not self._handshake_replies and self._tls is None and self._look_up is None
        return POLLOUT if connecting else POLLIN | (POLLOUT if self._outgoing else 0)

    @property
    def request_sent(self) -> bool:
        """Whether the last request was sent completely, so that what is sent now arrives behind it."""
        return self.open and not self._outgoing

    def is_quiet(self, readable: bool) -> bool:
        """Whether the server has sent nothing since the last answer. Handles messages of TLS itself."""
        self.replies = []
        try:
            if readable:
                self._read()
        except Exception:  # parsers raise errors of their own
            return False
        return not (self.replies or self._reply_reader.mid_reply)

    def send_request(self, data: bytes, count: int) -> None:
        self.replies, self.expected_replies = [], count
        if self.open:
            self._send(data)
        else:
            self._first_request = data

    def advance(self) -> None:
        """Do what is possible without blocking. Raises the error that ends the connection."""
        if not self.open and not self._handshake_replies:
            self._continue_connecting()
        elif self._outgoing:
            self._send(b"")
        if self.open or self._handshake_replies:
            self._read()

    def _start_look_up(self) -> socket.socket:
        """A socket that becomes readable once the name of the server has been looked up; if it has been, one that
        connects."""
        host, port = self._server.address.host, self._server.address.port
        look_up = start_look_up(host)
        if look_up.done:
            self._targets = look_up.targets(port)
            return self._start_connecting()
        self._look_up = look_up
        sock, done = socket.socketpair()
        self._current_socket[:] = [sock, done]
        done_ref = ref(done)  # weak: a connection that is dropped before the answer closes both

        def on_done() -> None:
            if (found := done_ref()) is not None:
                found.close()

        look_up.when_done(on_done)
        return sock

    def _start_connecting(self) -> socket.socket:
        """Start connecting to the next address of the server."""
        while self._targets:
            family, target = self._target = self._targets.pop(0)
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            self._current_socket[:] = [sock]
            try:
                sock.connect(target)
            except WOULD_BLOCK:
                return sock
            except OSError as error:
                note_connect(self._target, succeeded=False)
                sock.close()
                self._error = error
                continue
            return sock
        raise self._error

    def _continue_connecting(self) -> None:
        if self._look_up is not None:
            self._sock.close()
            self._targets, self._look_up = self._look_up.targets(self._server.address.port), None
            self._sock = self._start_connecting()
            return
        if self._tls is None:
            if number := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                note_connect(self._target, succeeded=False)
                self._error = OSError(number, os.strerror(number))
                self._sock.close()
                self._sock = self._start_connecting()
                return
            if self._sock.family != UNIX:
                self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._server.tls is not None:
                self._tls = MemoryTls(self._sock, self._server.tls, self._server.address.host)
        if self._tls is not None and not self._tls.shake_hands():
            self._send(b"")
            return
        handshake, self._handshake_replies, self._check_handshake = self._server.handshake()
        self._send(handshake)

    def _send(self, data: bytes) -> None:
        if self._tls is not None:
            data = self._tls.encrypt(data)
        data = self._outgoing + data if self._outgoing else data
        try:
            sent = self._sock.send(data)
        except WOULD_BLOCK:
            sent = 0
        self._outgoing = data[sent:]

    def _read(self) -> None:
        self.replies += self._reply_reader.read_available(self._tls or self._sock)
        wanted = self.expected_replies if self.open else self._handshake_replies
        if not 1 < len(self.replies) <= wanted:  # more than wanted is another error, or messages to a subscriber
            self._received_before = self._reply_reader.received
        elif self._reply_reader.received - self._received_before > self._max_batch:
            raise RepliesTooLong
        if not self.open and len(self.replies) >= self._handshake_replies:
            if len(self.replies) > self._handshake_replies:
                raise ReplyUnasked
            self._check_handshake(self.replies)
            note_connect(self._target, succeeded=True)
            self.open, self.replies = True, []
            self._send(self._first_request)

    def note_end(self) -> None:
        """Begin with another address the next time, unless this one has connected."""
        if not self.open and self._look_up is None:
            note_connect(self._target, succeeded=False)

    def send_and_close(self, data: bytes) -> None:
        """Send what the kernel accepts at once, but only behind a request that was sent completely, and close."""
        if data and self.request_sent:
            with suppress(OSError):
                self._send(data)
        self.close()


class ConnectionGroup:
    """Connections to several servers, at most one to each. A server may be given twice."""

    def __init__(self, servers: Sequence[FanoutServer], parser: Callable[[], Parser], clock: Clock) -> None:
        self._servers, self._parser, self._clock = servers, parser, clock
        self._connections: dict[int, NonblockingConnection] = {}
        self._server_by_fd: dict[int, int] = {}
        self._poll = new_poll()
        self._on_repeat: Callable[[int], None] = ignore_repeat  # of the current requests

    def request_all(self, requests: FanoutRequests, count: int, policy: WaitPolicy) -> AnswersByServer:
        """Send each server its request, and wait for `count` replies from each, as long as the policy says.

        If a connection that has answered before breaks, it is reopened and the request is sent again, once. A server
        that has not answered by the end is sent the compensation behind the request, if that was sent completely.
        Servers missing from the result were not asked.
        """
        answers: AnswersByServer = {}
        waiting: dict[int, bytes] = {}
        self._on_repeat = requests.on_repeat
        try:
            self._send_all(requests.first, count, answers, waiting)
            later = requests.later
            while waiting or later:
                now = self._clock()
                if later and policy.needs_more(now, answers, waiting):
                    self._send_all(later, count, answers, waiting)
                    later = {}
                left = policy.wait_until(now, answers) - now
                if left <= 0 or not waiting:
                    break
                for fd, _ in self._poll.poll(min(left, _LONGEST_POLL) * 1000 + 1):
                    if (found := self._server_by_fd.get(fd)) is not None:
                        self._advance(found, count, answers, waiting, requests.correction)
        finally:
            for number in waiting:
                self.drop(number, requests.compensation())
                answers[number] = TimeoutError("no reply in time")
        return answers

    def _send_all(
        self, requests: Mapping[int, bytes], count: int, answers: AnswersByServer, waiting: dict[int, bytes]
    ) -> None:
        self._drop_noisy(requests)
        for number, data in requests.items():
            waiting[number] = data
            self._send(number, data, count, answers, waiting)

    def _drop_noisy(self, numbers: Iterable[int]) -> None:
        """Drop those of these connections on which something came after the last answer: it would be taken for the
        answer to the next request."""
        readable = {self._server_by_fd.get(fd) for fd, _ in self._poll.poll(0)}
        for number in numbers:
            connection = self._connections.get(number)
            if connection is not None and not connection.is_quiet(number in readable):
                self.drop(number)

    def send(self, number: int, data: bytes) -> None:
        """Send `data` as soon as the connection is open; `receive` returns what the server sends back."""
        connection = self._connections.get(number) or self._connect(number)
        connection.send_request(data, 0)
        self._poll.modify(connection.fd, connection.events)

    def receive(self, seconds: float) -> list[tuple[int, Any]]:
        """The messages of all servers, each with the server's number; an exception: that connection is closed."""
        received: list[tuple[int, Any]] = []
        for fd, _ in self._poll.poll(max(0.0, min(seconds, _LONGEST_POLL)) * 1000):
            number = self._server_by_fd[fd]
            connection = self._connections[number]
            try:
                connection.advance()
            except Exception as error:
                self.drop(number)
                received.append((number, error))
                continue
            self._register(number, connection, fd)
            if connection.open:
                received += [(number, reply) for reply in connection.replies]
                connection.replies = []
        return received

    def _send(self, number: int, data: bytes, count: int, answers: AnswersByServer, waiting: dict[int, bytes]) -> None:
        try:
            connection = self._connections.get(number) or self._connect(number)
            connection.send_request(data, count)
        except Exception as error:
            self._on_error(number, error, count, answers, waiting)
            return
        if connection._outgoing or not connection.open:
            self._poll.modify(connection.fd, connection.events)

    def _advance(
        self, number: int, count: int, answers: AnswersByServer, waiting: dict[int, bytes], correction: Correction
    ) -> None:
        connection = self._connections[number]
        # Once the request is sent, only replies are read, and what `poll` is registered for stays the same.
        registered = None if connection.request_sent else (connection.fd, connection.events)
        try:
            connection.advance()
            if connection.open and len(connection.replies) > count:
                raise ReplyUnasked
        except Exception as error:  # parsers and handshakes raise errors of their own
            self._on_error(number, error, count, answers, waiting)
            return
        if registered is not None and registered != (connection.fd, connection.events):
            self._register(number, connection, registered[0])
        if connection.open and len(connection.replies) >= count and number in waiting:
            connection.has_answered = True
            if (corrected := correction(number, waiting[number], connection.replies)) is not None:
                waiting[number] = corrected
                self._drop_noisy([number])
                self._send(number, corrected, count, answers, waiting)
                return
            answers[number] = connection.replies
            del waiting[number]

    def _on_error(
        self, number: int, error: Exception, count: int, answers: AnswersByServer, waiting: dict[int, bytes]
    ) -> None:
        connection = self._connections.get(number)
        retry = connection is not None and connection.has_answered and isinstance(error, OSError) and number in waiting
        self.drop(number)
        if retry:
            self._on_repeat(number)
            self._send(number, waiting[number], count, answers, waiting)
        elif number in waiting:
            del waiting[number]
            answers[number] = error

    def _connect(self, number: int) -> NonblockingConnection:
        connection = self._connections[number] = NonblockingConnection(
            self._servers[number], self._parser(), MAX_BATCH_SIZE // len(set(self._servers))
        )
        self._server_by_fd[connection.fd] = number
        self._poll.register(connection.fd, connection.events)
        return connection

    def _register(self, number: int, connection: NonblockingConnection, fd: int) -> None:
        if connection.fd != fd:  # a new socket, to another address of the server; it may also get the same descriptor
            del self._server_by_fd[fd]
            with suppress(KeyError):
                self._poll.unregister(fd)
        self._server_by_fd[connection.fd] = number
        self._poll.register(connection.fd, connection.events)

    def drop(self, number: int, final_data: bytes = b"") -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        connection.note_end()
        fd = next((fd for fd, found in self._server_by_fd.items() if found == number), -1)
        self._server_by_fd.pop(fd, None)
        with suppress(KeyError):
            self._poll.unregister(fd)
        connection.send_and_close(final_data)

    def shutdown(self) -> None:
        for connection in list(self._connections.values()):
            connection.shutdown()

    def close(self) -> None:
        for number in list(self._connections):
            self.drop(number)

    def after_fork(self) -> None:
        for connection in self._connections.values():
            connection.after_fork()
        self._connections, self._server_by_fd, self._poll = {}, {}, new_poll()


def _close_all(socks: list[socket.socket]) -> None:
    for sock in socks:
        sock.close()
