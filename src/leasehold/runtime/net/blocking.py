"""Requests and replies over one connection, blocking: bytes out, replies in the order of the requests.

A `SocketStream` belongs to one caller at a time: it sends, and waits for the reply on the caller's thread. A parser
gives the bytes their meaning, so any protocol that replies in order can use it. The asyncio twin is in
`event_loop.py`.

Errors are the standard library's: `TimeoutError` at the deadline, `OSError` for a broken connection. Do not use a
stream again after either error, or after any other exception interrupted a call.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import finalize

from leasehold.runtime.net.host_names import Target, note_connect, resolve_blocking
from leasehold.runtime.net.tls_socket import TlsSocket
from leasehold.runtime.polling import POLLIN, new_poll

UNIX: Final[int] = getattr(socket, "AF_UNIX", -1)  # the family; -1: this system has none
READ_SIZE: Final = 65_536
_USUAL_REPLY_SIZE: Final = 448  # bytes: nearly every reply fits, and the interpreter allocates this without malloc
MAX_REPLY_SIZE: Final = 8 * 1024 * 1024  # bytes: no legitimate reply is larger
# A batch has short replies, but for the first ones, such as a cluster's map of slots. Parsed, each byte may need 16.
MAX_BATCH_SIZE: Final = 256 * 1024  # bytes of the replies behind these
LONG_REPLIES: Final = 3
WOULD_BLOCK: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TIMEOUT_SLACK: Final = 0.02  # seconds a call may wait too long, so that a timeout already set need not be set again

WOKEN: Final = object()  # instead of a reply: see `SelfPipe`

Clock: TypeAlias = Callable[[], float]


class RepliesTooLong(ConnectionAbortedError):
    """Each reply to a batch may be acceptable, but not all at once: send fewer requests at a time."""

    def __init__(self) -> None:
        super().__init__("the replies to one batch are too long")


class SocketAddress(NamedTuple):
    """Where to connect. Contains no secret, so it may be shown."""

    host: str = ""
    port: int = 0
    path: str = ""  # of a unix socket, instead of host and port

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.path or f"{host}:{self.port}"


class Parser(Protocol):
    """Splits a stream of bytes into replies."""

    @property
    def mid_reply(self) -> bool:
        """A part of a reply has arrived, which `gets` does not return yet."""

    def feed(self, data: bytes, /) -> object: ...

    def gets(self) -> Any:
        """The next complete reply; False: there is none yet."""


class ReplyUnasked(ConnectionAbortedError):
    """The next request would take it for its own."""

    def __init__(self, text: str = "the server sent a reply without a request") -> None:  # a text: it can be copied
        super().__init__(text)


class SelfPipe:
    """Wakes a thread that listens to a stream, so that this thread can write to it: no other thread may."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sock in (self._reader, self._writer):
            finalize(self, sock.close).atexit = False

    def set(self) -> None:
        """Wake the thread. From any thread."""
        with suppress(OSError):  # the pipe is full, so a wake-up is pending already
            self._writer.send(b"!")

    def wait_woken(self, sock: socket.socket, seconds: float) -> bool:
        """Wait until `sock` is readable (False) or a wake-up arrives, which is consumed (True). TimeoutError: neither
        within `seconds`."""
        if isinstance(sock, TlsSocket) and sock.is_ready():
            return False
        poll = new_poll()
        for each in (sock, self._reader):
            poll.register(each, POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        if not readable:
            raise TimeoutError("nothing was received in time")
        if self._reader.fileno() not in readable:
            return False
        with suppress(OSError):
            self._reader.recv(READ_SIZE)
        return True

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class BaseConnection:
    """How a connection ends, the same for every kind of connection."""

    __slots__ = ("__weakref__", "_sock")

    _sock: socket.socket

    def shutdown(self) -> None:
        """End the connection, from any thread. Its reader sees it as closed by the server, and closes the socket."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    def certificate_end(self) -> float | None:
        """When the server's certificate ends, in seconds since 1970. None: there is none, or it was not verified."""
        return certificate_end(self._sock)

    def after_fork(self) -> None:
        _redirect_to_devnull(self._sock.fileno())
        self._sock.close()


def certificate_end(sock: socket.socket) -> float | None:
    """When the peer's certificate ends, in seconds since 1970. None: there is none, or it was not verified."""
    certificate = sock.getpeercert() if isinstance(sock, TlsSocket) else None
    end = certificate.get("notAfter") if certificate else None
    return float(ssl.cert_time_to_seconds(end)) if isinstance(end, str) else None


class Readable(Protocol):
    """A socket, or what decrypts its bytes."""

    def recv(self, size: int, /) -> bytes: ...


class ReplyReader:
    """Reads replies from a socket that never blocks."""

    __slots__ = ("_parser", "_size", "received")

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._size = 0  # of the incomplete reply
        self.received = 0  # bytes

    @property
    def mid_reply(self) -> bool:
        return self._parser.mid_reply

    def read_available(self, sock: Readable) -> Iterator[Any]:
        """The replies that are complete by now. Raises the error that ends the connection."""
        try:
            data = sock.recv(READ_SIZE)
            while isinstance(sock, TlsSocket) and sock.pending():
                data += sock.recv(READ_SIZE)
        except WOULD_BLOCK:
            return
        if not data:
            raise ConnectionResetError("the server closed the connection")
        self._size += len(data)
        self.received += len(data)
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not False:
            self._size = 0
            yield reply
        if self._size > MAX_REPLY_SIZE:
            raise ConnectionAbortedError("the reply exceeds 8 MiB")
        if isinstance(sock, TlsSocket) and sock.ended:
            raise ConnectionResetError("the server closed the connection")


class SocketStream(BaseConnection):
    """A connection of one caller at a time. It uses the interpreter's timeout, which continues when a signal interrupts
    a call; a kernel timeout (SO_RCVTIMEO) would restart each time."""

    __slots__ = ("_clock", "_is_plain", "_parser", "_poll", "_received", "_timeout")

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._parser, self._clock = sock, parser, clock
        self._timeout = float("-inf")  # of the socket, as last set; -inf: not set yet
        self._received = 0  # bytes of all replies but the usual ones
        self._is_plain = not isinstance(sock, TlsSocket)  # os.write() to the descriptor is possible
        self._poll = poll_to_read(sock)
        finalize(self, sock.close).atexit = False  # a client may be dropped without a close()

    def call(self, data: bytes, deadline: float) -> Any:
        """Send one request and wait for its reply."""
        if self._poll(0) or self._parser.mid_reply:
            self._check_quiet()
        left = deadline - self._clock()
        if not left <= self._timeout <= left + _TIMEOUT_SLACK:
            self._set_timeout(left)
        self._write(data, deadline)
        self._parser.feed(self._sock.recv(_USUAL_REPLY_SIZE) or self._raise_closed())
        if (reply := self._parser.gets()) is False:  # nearly always complete
            reply = self.read(deadline, timeout_is_set=False)
        if self._parser.gets() is not False:
            raise ReplyUnasked
        return reply

    def calls(self, data: bytes, count: int, deadline: float) -> list[Any]:
        """Send many requests at once and wait for all replies."""
        self._check_quiet()
        self.send(data, deadline)
        replies: list[Any] = []
        received_before = 0
        for number in range(count):
            replies.append(self.read(deadline, timeout_is_set=not number))
            if number < LONG_REPLIES:
                received_before = self._received
            elif self._received - received_before > MAX_BATCH_SIZE:
                raise RepliesTooLong
        if self._parser.gets() is not False:
            raise ReplyUnasked
        return replies

    def send(self, data: bytes, deadline: float) -> None:
        left = deadline - self._clock()
        if not left <= self._timeout <= left + _TIMEOUT_SLACK:
            self._set_timeout(left)
        self._write(data, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        """Write without the poll() that `socket.send` makes first: the kernel nearly always accepts the data."""
        try:
            sent = os.write(self._sock.fileno(), data) if self._is_plain else 0
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._sock.sendall(data[sent:])
            self._set_timeout(deadline - self._clock())  # sendall may have taken a while

    def read(self, deadline: float, timeout_is_set: bool = True) -> Any:
        """The next reply. `timeout_is_set`: the socket's timeout already matches the deadline."""
        parser, size = self._parser, 0
        while (reply := parser.gets()) is False:
            if not timeout_is_set:
                self._set_timeout(deadline - self._clock())
            timeout_is_set = False
            data = self._sock.recv(READ_SIZE)
            if not data:
                self._raise_closed()
            size += len(data)
            if size > MAX_REPLY_SIZE:
                raise ConnectionAbortedError("the reply exceeds 8 MiB")
            self._received += len(data)
            parser.feed(data)
        return reply

    def listen(self, seconds: float, self_pipe: SelfPipe | None = None) -> Any:
        """The next message that the server pushes. TimeoutError: none within `seconds`; the stream is still usable.
        Returns WOKEN if another thread has woken this one through the self-pipe."""
        if (reply := self._parser.gets()) is not False:
            return reply
        if self_pipe is not None and self_pipe.wait_woken(self._sock, seconds):
            return WOKEN
        if not seconds <= self._timeout <= seconds + _TIMEOUT_SLACK:
            self._set_timeout(seconds)
        return self.read(self._clock() + seconds)

    def quiet(self) -> bool:
        """Whether nothing has arrived since the last reply. Else the server closed the connection or is out of step:
        do not use it again."""
        if self._parser.mid_reply:
            return False
        return self._sock.is_quiet() if isinstance(self._sock, TlsSocket) else not self._poll(0)

    def _check_quiet(self) -> None:
        """A late second reply would be taken for the reply to the next request."""
        if self.quiet():
            return
        self._sock.settimeout(0)
        if not self._parser.mid_reply and not self._sock.recv(1):
            self._raise_closed()
        raise ReplyUnasked

    def _raise_closed(self) -> NoReturn:
        raise ConnectionResetError("the server closed the connection")

    def _set_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("the deadline has passed")
        self._timeout = seconds
        self._sock.settimeout(seconds)

    def send_and_close(self, data: bytes) -> None:
        """Send what the kernel accepts at once, behind the earlier requests, and close."""
        with suppress(OSError):
            self._sock.settimeout(0)
            self._sock.send(data)
        self.close()


def poll_to_read(sock: socket.socket) -> Callable[[float], object]:
    """Call the result with 0: it is false as long as the server sends nothing. Made once for each connection, as it is
    called before each request. Always true with TLS, which may have read more than it has returned."""
    if isinstance(sock, TlsSocket):
        return lambda _: True
    poll = new_poll()
    poll.register(sock, POLLIN)
    return poll.poll


def connect_blocking(
    address: SocketAddress, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> SocketStream:
    """Connect, on the caller's thread."""
    return SocketStream(connect_socket(address, tls, clock, deadline), parser, clock)


def connect_socket(address: SocketAddress, tls: ssl.SSLContext | None, clock: Clock, deadline: float) -> socket.socket:
    candidates = resolve_address(address, deadline - clock())
    error: OSError = ConnectionRefusedError("the host has no address")
    for number, (family, target) in enumerate(candidates):
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("could not connect in time")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left / (len(candidates) - number))
            sock.connect(target)
            if family != UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                sock = tls_sock = TlsSocket(sock, tls, address.host)
                tls_sock.shake_hands(deadline - clock())
        except OSError as failure:
            note_connect((family, target), succeeded=False)
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            note_connect((family, target), succeeded=True)
            return sock
    raise error


def resolve_address(address: SocketAddress, seconds: float) -> list[Target]:
    """The family and address of each way to reach the host. OSError: there is none, or none was found in time."""
    return [(UNIX, address.path)] if address.path else resolve_blocking(address.host, address.port, seconds)


def _redirect_to_devnull(descriptor: int) -> None:
    """In a forked child: the connection belongs to the parent, so the child must not send anything on it."""
    if descriptor < 0:
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
