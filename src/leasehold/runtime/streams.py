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

CHUNK: Final = 65_536
_USUAL: Final = 448  # bytes that an answer fits in as a rule, and the interpreter has at hand without malloc
LARGEST: Final = 64 * 1024 * 1024  # of one reply, in bytes: more is nobody's honest answer
NOT_NOW: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_SLACK: Final = 0.02  # a timeout set for one call serves the next, if that waits no longer than this too much

NUDGED: Final = object()  # instead of a reply: see `Nudge`

Clock: TypeAlias = Callable[[], float]


class Address(NamedTuple):
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


class Nudge:
    """Calls a thread away from the stream it listens to: that is its own to write to, nobody else's."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)
        for each in (self._near, self._far):
            finalize(self, each.close).atexit = False

    def set(self) -> None:
        """From any thread."""
        with suppress(OSError):  # it is full: enough nudges are on their way
            self._far.send(b"!")

    def comes_first(self, sock: socket.socket, seconds: float) -> bool:
        """Wait until there is something to read, or a nudge, which is taken; TimeoutError: neither in so long."""
        if isinstance(sock, ssl.SSLSocket) and sock.pending():
            return False
        poll = select.poll()
        for each in (sock, self._near):
            poll.register(each, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(seconds * 1000)]
        if not found:
            raise TimeoutError("nothing was said")
        if self._near.fileno() not in found:
            return False
        with suppress(OSError):
            self._near.recv(CHUNK)
        return True

    def close(self) -> None:
        self._near.close()
        self._far.close()


class OnSocket:
    """How a connection ends, whoever uses it in whatever way."""

    __slots__ = ("__weakref__", "_sock")

    _sock: socket.socket

    def shut(self) -> None:
        """End it, from any thread: whoever reads from it hears of it as if the other side had, and closes it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    def after_fork(self) -> None:
        _to_null(self._sock.fileno())
        self._sock.close()


class Inbox:
    """Takes replies off a socket that never blocks."""

    __slots__ = ("_parser", "_size")

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self._size = 0  # of the reply that is coming in

    def replies(self, sock: socket.socket) -> Iterator[Any]:
        """Those that are whole by now. Raises what ends the connection."""
        try:
            data = sock.recv(CHUNK)
            while isinstance(sock, ssl.SSLSocket) and sock.pending():
                data += sock.recv(CHUNK)
        except NOT_NOW:
            return
        if not data:
            raise ConnectionResetError("it closed the connection")
        self._size += len(data)
        self._parser.feed(data)
        while (reply := self._parser.gets()) is not False:
            self._size = 0
            yield reply
        if self._size > LARGEST:
            raise ConnectionAbortedError("its answer is larger than any could be")


class SocketStream(OnSocket):
    """A connection of one caller at a time. Its timeout is the interpreter's, which counts on when a signal interrupts
    a call: one of the kernel's would begin anew each time."""

    __slots__ = ("_clock", "_parser", "_patience", "_plain")

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._parser, self._clock = sock, parser, clock
        self._patience = float("-inf")  # what the socket was told: nothing yet
        self._plain = not isinstance(sock, ssl.SSLSocket)  # its descriptor can be written to
        finalize(self, sock.close).atexit = False  # a client may be dropped without a close()

    def call(self, data: bytes, deadline: float) -> Any:
        """Send one request and wait for its reply."""
        left = deadline - self._clock()
        if not left <= self._patience <= left + _SLACK:
            self._wait_up_to(left)
        self._put(data, deadline)
        self._parser.feed(self._sock.recv(_USUAL) or self._ended())
        reply = self._parser.gets()  # it is whole as a rule
        return reply if reply is not False else self.read(deadline, primed=False)

    def calls(self, data: bytes, count: int, deadline: float) -> list[Any]:
        """Send many requests at once and wait for all replies."""
        self.send(data, deadline)
        return [self.read(deadline, primed=not number) for number in range(count)]

    def send(self, data: bytes, deadline: float) -> None:
        left = deadline - self._clock()
        if not left <= self._patience <= left + _SLACK:
            self._wait_up_to(left)
        self._put(data, deadline)

    def _put(self, data: bytes, deadline: float) -> None:
        """The socket itself would ask the kernel first whether it takes any: it does, as a rule."""
        try:
            sent = os.write(self._sock.fileno(), data) if self._plain else 0
        except BlockingIOError:
            sent = 0
        if sent < len(data):
            self._sock.sendall(data[sent:])
            self._wait_up_to(deadline - self._clock())  # that may have taken a while

    def read(self, deadline: float, primed: bool = True) -> Any:
        """`primed`: the socket knows the deadline already."""
        parser, size = self._parser, 0
        while (reply := parser.gets()) is False:
            if not primed:
                self._wait_up_to(deadline - self._clock())
            primed = False
            data = self._sock.recv(CHUNK)
            if not data:
                self._ended()
            size += len(data)
            if size > LARGEST:
                raise ConnectionAbortedError("its answer is larger than any could be")
            parser.feed(data)
        return reply

    def listen(self, seconds: float, nudge: Nudge | None = None) -> Any:
        """The next thing it says unasked; TimeoutError: nothing in so many seconds, and the stream is still good.
        NUDGED: somebody nudged whoever listens."""
        if nudge is not None and (reply := self._parser.gets()) is not False:
            return reply
        if nudge is not None and nudge.comes_first(self._sock, seconds):
            return NUDGED
        self._wait_up_to(seconds)
        return self.read(self._clock() + seconds)

    def _ended(self) -> NoReturn:
        raise ConnectionResetError("it closed the connection")

    def _wait_up_to(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("no time left")
        self._patience = seconds
        self._sock.settimeout(seconds)

    def last_words(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was sent before, and hang up."""
        with suppress(OSError):
            self._sock.settimeout(0)
            self._sock.send(data)
        self.close()


def dial(address: Address, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float) -> SocketStream:
    """Connect, on the caller's thread. Looking up a name is the system's affair, and knows no deadline."""
    return SocketStream(connected(address, tls, clock, deadline), parser, clock)


def connected(address: Address, tls: ssl.SSLContext | None, clock: Clock, deadline: float) -> socket.socket:
    found = targets(address)
    error: OSError = ConnectionRefusedError("it has no address")
    for number, (family, target) in enumerate(found):
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("no connection")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left / (len(found) - number))
            sock.connect(target)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is not None:
                sock.settimeout(max(deadline - clock(), 0.001))
                sock = tls.wrap_socket(sock, server_hostname=address.host)
        except OSError as refused:
            sock.close()
            error = refused
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error


def targets(address: Address) -> list[tuple[int, Any]]:
    """The family and the address of each way to it. OSError: there is none."""
    if address.path:
        return [(socket.AF_UNIX, address.path)]
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except UnicodeError as bad:  # a label that is empty, or too long
        raise OSError(f"it is no name of a host: {bad}") from bad
    return [(each[0], each[4]) for each in found]


def _to_null(descriptor: int) -> None:
    """In a forked child: the connection is the parent's. No goodbye may leave on it from here."""
    if descriptor < 0:
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
