"""Requests and answers over one connection, for either runtime: bytes out, replies in the order of the requests.

`dial` opens a connection. What the bytes mean is the parser's affair: any protocol that answers in order can bring one.

- Blocking, a `SocketStream` belongs to one caller at a time: it sends, and waits for the reply on the caller's thread.
- Under asyncio, a `LoopStream` is shared: writes of one turn of the loop leave together, one timer watches all
  deadlines, and a caller that gave up leaves its slot in the order of replies: nobody gets the answer of another.

Errors are the standard library's: `TimeoutError` at the deadline, `OSError` for a connection that is no more. A stream
that raised either, or was left in the middle of a call by anything else, is not to be used again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

_CHUNK: Final = 65_536
_LARGEST: Final = 64 * 1024 * 1024  # of one reply, in bytes: more is nobody's honest answer
_SLACK: Final = 0.02  # a timeout set for one call serves the next, if that waits no longer than this too much

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


class SocketStream:
    """A connection of one caller at a time. Deadlines are the kernel's: no second system call before each."""

    __slots__ = ("_clock", "_parser", "_patience", "_sock")

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._parser, self._clock = sock, parser, clock
        self._patience = -1.0

    def call(self, data: bytes, deadline: float) -> Any:
        """Send one request and wait for its reply."""
        self.send(data, deadline)
        return self.read(deadline)

    def calls(self, data: bytes, count: int, deadline: float) -> list[Any]:
        """Send many requests at once and wait for all replies."""
        self.send(data, deadline)
        return [self.read(deadline, primed=not number) for number in range(count)]

    def send(self, data: bytes, deadline: float) -> None:
        left = deadline - self._clock()
        if not left <= self._patience <= left + _SLACK:
            self._wait_up_to(left)
        try:
            self._sock.sendall(data)
        except BlockingIOError as error:
            raise TimeoutError("it takes no more bytes") from error

    def read(self, deadline: float, primed: bool = True) -> Any:
        """`primed`: the kernel knows the deadline already."""
        parser, size = self._parser, 0
        while (reply := parser.gets()) is False:
            if not primed:
                self._wait_up_to(deadline - self._clock())
            primed = False
            try:
                data = self._sock.recv(_CHUNK)
            except BlockingIOError as error:
                raise TimeoutError("no answer") from error
            if not data:
                raise ConnectionResetError("it closed the connection")
            size += len(data)
            if size > _LARGEST:
                raise ConnectionAbortedError("its answer is larger than any could be")
            parser.feed(data)
        return reply

    def listen(self, seconds: float) -> Any:
        """The next thing it says unasked; TimeoutError: nothing in so many seconds, and the stream is still good."""
        self._wait_up_to(seconds)
        return self.read(self._clock() + seconds)

    def _wait_up_to(self, seconds: float) -> None:
        if seconds <= 0:
            raise TimeoutError("no time left")
        self._patience = seconds
        if isinstance(self._sock, ssl.SSLSocket):  # it would try again for ever when the kernel gives up
            self._sock.settimeout(seconds)
            return
        value = struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000) or 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)

    def last_words(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was sent before, and hang up."""
        with suppress(OSError):
            self._sock.settimeout(0)
            self._sock.send(data)
        self.close()

    def shut(self) -> None:
        """End it for a thread that reads from it, which closes it."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    def after_fork(self) -> None:
        _to_null(self._sock.fileno())


class _Slot:
    """Who waits for the next so many replies."""

    __slots__ = ("count", "deadline", "future", "replies")

    def __init__(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        self.future, self.count, self.deadline = future, count, deadline
        self.replies: list[Any] = []


class LoopStream(asyncio.Protocol):
    """A connection shared by all tasks of a loop."""

    def __init__(self, parser: Parser, clock: Clock) -> None:
        self._parser, self._clock = parser, clock
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._slots: deque[_Slot] = deque()
        self._out: list[bytes] = []
        self._size = 0  # of the reply that is coming in
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self.good = False  # False: not to be given any new request
        self._lost: BaseException | None = None  # why it is no more

    def call(self, data: bytes, deadline: float) -> asyncio.Future[Any]:
        """Have one request sent; its reply is awaited."""
        future = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        self._slots.append(_Slot(future, 0, deadline))
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(data)
        if deadline < self._timer_at:
            self._watch(deadline)
        return future

    def calls(self, data: bytes, count: int, deadline: float) -> asyncio.Future[list[Any]]:
        """Have many requests sent at once; all their replies are awaited together."""
        future = self.call(data, deadline)
        if not future.done():
            self._slots[-1].count = count
        return future

    def post(self, data: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        """Send, and let nobody wait; `done` gets the reply, or the error instead of one. False: it cannot be sent."""
        if self._transport is None or self._transport.is_closing() or self._loop.is_closed():
            return False

        def settled(future: asyncio.Future[Any]) -> None:
            done(future.exception() or future.result() if not future.cancelled() else asyncio.CancelledError())

        self.call(data, deadline).add_done_callback(settled)
        self._flush()  # the loop may not turn again
        return True

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    # --------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.good = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        parser, slots = self._parser, self._slots
        parser.feed(data)
        self._size += len(data)
        while True:
            try:
                reply = parser.gets()
            except Exception as garbage:  # whatever the parser calls it
                self._end(garbage)
                return
            if reply is False:
                break
            self._size = 0
            if not slots:
                self._end(ConnectionAbortedError("it answered what nobody asked"))
                return
            slot = slots[0]
            if slot.count:
                slot.replies.append(reply)
                if len(slot.replies) < slot.count:
                    continue
                reply = slot.replies
            slots.popleft()
            if not slot.future.done():
                slot.future.set_result(reply)
        if self._size > _LARGEST:
            self._end(ConnectionAbortedError("its answer is larger than any could be"))

    def connection_lost(self, error: Exception | None) -> None:
        self._end(error or ConnectionResetError("it closed the connection"))

    # ----------------------------------------------------------- its ends

    def _watch(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._overdue)

    def _overdue(self) -> None:
        """Give up what is over. The connection is not given new requests: it may be dead. It is kept while somebody can
        still be answered on it, and what was asked before keeps its place in the order of replies."""
        now, self._timer, self._timer_at = self._clock(), None, float("inf")
        for slot in self._slots:
            if not slot.future.done() and slot.deadline <= now:
                slot.future.set_exception(TimeoutError("no answer"))
                self.good = False
        waiting = [slot.deadline for slot in self._slots if not slot.future.done()]
        if waiting:
            self._watch(min(waiting))
        elif not self.good:
            self.close()

    def _end(self, error: BaseException) -> None:
        self._lost = error
        self.close()
        while self._slots:
            future = self._slots.popleft().future
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be left to ask

    def close(self) -> None:
        self.good = False
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    def after_fork(self) -> None:
        """The selector is the parent's too: nothing may be taken out of it, so only the descriptor is replaced."""
        self.good = False
        if self._transport is not None and (sock := self._transport.get_extra_info("socket")) is not None:
            _to_null(sock.fileno())


Stream: TypeAlias = "SocketStream | LoopStream"


def dial(address: Address, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float) -> SocketStream:
    """Connect, on the caller's thread. Looking a name up is the system's affair, and knows no deadline."""
    if address.path:
        targets = [(socket.AF_UNIX, address.path)]
    else:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        targets = [(each[0], each[4]) for each in found]  # type: ignore[misc]
    error: OSError = ConnectionRefusedError("it has no address")
    for number, (family, target) in enumerate(targets):
        left = deadline - clock()
        if left <= 0:
            raise TimeoutError("no connection")
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left / (len(targets) - number))
            sock.connect(target)
            if family != socket.AF_UNIX:
                _tune(sock)
            if tls is not None:
                sock.settimeout(max(deadline - clock(), 0.001))
                sock = tls.wrap_socket(sock, server_hostname=address.host)
            else:
                sock.settimeout(None)
        except OSError as refused:
            sock.close()
            error = refused
        except BaseException:
            sock.close()
            raise
        else:
            return SocketStream(sock, parser, clock)
    raise error


async def dial_in_loop(
    address: Address, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> LoopStream:
    """Connect, in the running loop."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(deadline - clock()):
        if address.path:
            _, stream = await loop.create_unix_connection(lambda: LoopStream(parser, clock), address.path)
        else:
            _, stream = await loop.create_connection(
                lambda: LoopStream(parser, clock), address.host, address.port, ssl=tls
            )
            if (sock := stream._transport.get_extra_info("socket")) is not None:  # type: ignore[union-attr]
                _tune(sock)
    return stream


def _tune(sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _to_null(descriptor: int) -> None:
    """In a forked child: the connection is the parent's. No goodbye may leave on it from here."""
    if descriptor < 0:
        return
    null = os.open(os.devnull, os.O_RDWR)
    try:
        os.dup2(null, descriptor)
    finally:
        os.close(null)
