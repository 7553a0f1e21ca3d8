"""Requests and answers over one connection: bytes out, replies in the order of the requests. This is the blocking form.

A `SocketStream` belongs to one caller at a time: it sends, and waits for the reply on the caller's thread. What the
bytes mean is the parser's affair: any protocol that answers in order can bring one. Its twin for asyncio is in
`loopstream.py`.

Errors are the standard library's: `TimeoutError` at the deadline, `OSError` for a connection that is no more. A stream
that raised either, or was left in the middle of a call by anything else, is not to be used again.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeAlias
from weakref import finalize

READ_SIZE: Final = 65_536
_USUAL_REPLY_SIZE: Final = 448  # bytes that an answer fits in as a rule, and the interpreter has at hand without malloc
MAX_REPLY_SIZE: Final = 64 * 1024 * 1024  # of one reply, in bytes: more is nobody's honest answer
WOULD_BLOCK: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_TIMEOUT_SLACK: Final = 0.02  # a timeout set for one call serves the next, if that waits no longer than this too much

WOKEN: Final = object()  # instead of a reply: see `SelfPipe`

Clock: TypeAlias = Callable[[], float]


class SocketAddress(NamedTuple):
    """Where to connect. Holds no secret: it may be shown."""

    host: str = ""
    port: int = 0
    path: str = ""  # of a unix socket, instead of host and port

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class Parser(Protocol):
    """Cuts a stream of bytes into replies."""

    def feed(self, data: bytes, /) -> object: ...

    def gets(self) -> Any:
        """The next reply that is whole; False: there is none yet."""


class SelfPipe:
    """Calls a thread away from the stream it listens to: that is its own to write to, nobody else's."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for sock in (self._reader, self._writer):
            finalize(self, sock.close).atexit = False

    def set(self) -> None:
        """From any thread."""
        with suppress(OSError):  # it is full: enough nudges are on their way
            self._writer.send(b"!")

    def wait_woken(self, sock: socket.socket, seconds: float) -> bool:
        """Wait until there is something to read, or a nudge, which is taken; TimeoutError: neither in so long."""
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
            return False
        poll = select.poll()
        for each in (sock, self._reader):
            poll.register(each, select.POLLIN)
        readable = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        if not readable:
            raise TimeoutError("nothing was said")
        if self._reader.fileno() not in readable:
            return False
        with suppress(OSError):
            self._reader.recv(READ_SIZE)
        return True

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


class BaseConnection:
    """How a connection ends, whoever uses it in whatever way."""

    __slots__ = ("__weakref__", "_sock")

    _sock: socket.socket

    def shutdown(self) -> None:
        """End it, from any thread: whoever reads from it hears of it as if the other side had, and closes it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    def after_fork(self) -> None:
        _redirect_to_devnull(self._sock.fileno())
        self._sock.close()


class ReplyReader:
    """Takes replies off a socket that never blocks."""

    __slots__ = ("_parser", "_size")

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._size = 0  # of the reply that is coming in

    def read_available(self, sock: socket.socket) -> Iterator[Any]:
        """Those that are whole by now. Raises what ends the connection."""
        try:
            data = sock.recv(READ_SIZE)
            while isinstance(sock, ssl.SSLSocket) and sock.pending():
                data += sock.recv(READ_SIZE)
        except WOULD_BLOCK:
            return
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._size += len(data)
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not False:
            self._size = 0
            yield reply
        if self._size > MAX_REPLY_SIZE:
            raise ConnectionAbortedError("its answer is larger than any could be")


class SocketStream(BaseConnection):
    """A connection of one caller at a time. Its timeout is the interpreter's, which counts on when a signal interrupts
    a call: one of the kernel's would begin anew each time."""

    __slots__ = ("_clock", "_is_plain", "_parser", "_timeout")

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._parser, self._clock = sock, parser, clock
        self._timeout = float("-inf")  # what the socket was told: nothing yet
        self._is_plain = not isinstance(sock, ssl.SSLSocket)  # its descriptor can be written to
        finalize(self, sock.close).atexit = False  # a client may be dropped without a close()

    def call(self, data: bytes, deadline: float) -> Any:
        """Send one request and wait for its reply."""
        left = deadline - self._clock()
        if not left <= self._timeout <= left + _TIMEOUT_SLACK:
            self._set_timeout(left)
        self._write(data, deadline)
        self._parser.feed(self._sock.recv(_USUAL_REPLY_SIZE) or self._raise_closed())
        reply = self._parser.gets()  # it is whole as a rule
        return reply if reply is not False else self.read(deadline, timeout_is_set=False)

    def calls(self, data: bytes, count: int, deadline: float) -> list[Any]:
        """Send many requests at once and wait for all replies."""
        self.send(data, deadline)
        return [self.read(deadline, timeout_is_set=not number) for number in range(count)]

    def send(self, data: bytes, deadline: float) -> None:
        left = deadline - self._clock()
        if not left <= self._timeout <= left + _TIMEOUT_SLACK:
            self._set_timeout(left)
        self._write(data, deadline)

    def _write(self, data: bytes, deadline: float) -> None:
        """The socket itself would ask the kernel first whether it takes any: it does, as a rule."""
        try:
            sent = os.write(self._sock.fileno(), data) if self._is_plain else 0
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._sock.sendall(data[sent:])
            self._set_timeout(deadline - self._clock())  # that may have taken a while

    def read(self, deadline: float, timeout_is_set: bool = True) -> Any:
        """`timeout_is_set`: the socket knows the deadline already."""
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
                raise ConnectionAbortedError("its answer is larger than any could be")
            parser.feed(data)
        return reply

    def listen(self, seconds: float, self_pipe: SelfPipe | None = None) -> Any:
        """The next thing it says unasked; TimeoutError: nothing in so many seconds, and the stream is still good.
        NUDGED: somebody nudged whoever listens."""
        if self_pipe is not None and (reply := self._parser.gets()) is not False:
            return reply
        if self_pipe is not None and self_pipe.wait_woken(self._sock, seconds):
            return WOKEN
        self._set_timeout(seconds)
        return self.read(self._clock() + seconds)

    def _raise_closed(self) -> NoReturn:
        raise ConnectionResetError("it closed the connection")

    def _set_timeout(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("no time left")
        self._timeout = seconds
        self._sock.settimeout(seconds)

    def send_and_close(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was sent before, and hang up."""
        with suppress(OSError):
            self._sock.settimeout(0)
            self._sock.send(data)
        self.close()


def connect_blocking(
    address: SocketAddress, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> SocketStream:
    """Connect, on the caller's thread. Looking up a name is the system's affair, and knows no deadline."""
    return SocketStream(connect_socket(address, tls, clock, deadline), parser, clock)


def connect_socket(address: SocketAddress, tls: ssl.SSLContext | None, clock: Clock, deadline: float) -> socket.socket:
    candidates = resolve_address(address)
    error: OSError = ConnectionRefusedError("it has no address")
    for number, (family, target) in enumerate(candidates):
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("no connection")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left / (len(candidates) - number))
            sock.connect(target)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                sock.settimeout(max(deadline - clock(), 0.001))
                sock = tls.wrap_socket(sock, server_hostname=address.host)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


def resolve_address(address: SocketAddress) -> list[tuple[int, Any]]:
    """The family and the address of each way to it. OSError: there is none."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a label that is empty, or too long
        raise OSError(f"it is no name of a host: {error}") from error
    return [(info[0], info[4]) for info in infos]


def _redirect_to_devnull(descriptor: int) -> None:
    """In a forked child: the connection is the parent's. No goodbye may leave on it from here."""
    if descriptor < 0:
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
