"""Requests and answers over one connection, for asyncio: see `streams.py` for what a stream is.

A `LoopStream` is shared by all tasks of a loop. While answers are awaited, writes of one turn of the loop leave
together; one timer watches all deadlines, and a caller that gave up leaves its slot in the order of replies: nobody
gets the answer of another.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import finalize, ref

from leasehold.runtime.net.blocking import (
    WOULD_BLOCK,
    BaseConnection,
    Clock,
    Parser,
    ReplyReader,
    SocketAddress,
    connect_socket,
)


class _PendingReply:
    """Who waits for the next so many replies; 0: for one, as it is."""

    __slots__ = ("count", "deadline", "future", "replies")

    def __init__(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        self.future, self.count, self.deadline = future, count, deadline
        self.replies: list[Any] = []


class LoopStream(BaseConnection):
    """A connection on the bare socket. A transport of asyncio's could neither be let go after its loop was closed, nor
    left alone in a forked child."""

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._reply_reader, self._clock = sock, ReplyReader(parser), clock
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_PendingReply] = deque()
        self._outgoing: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._waiting_to_write = False  # the kernel took no more: the loop says when it does
        self._error: BaseException | None = None  # why it is no more
        self.usable = True  # False: not to be given any new request
        sock.setblocking(False)
        self._loop.add_reader(sock, _read_if_alive, ref(self))
        self._finalizer = finalize(self, _close_socket, self._loop, sock)
        self._finalizer.atexit = False

    def call(self, data: bytes, deadline: float) -> asyncio.Future[Any]:
        """Have one request sent; its reply is awaited."""
        return self._send_request(data, 0, deadline)

    def calls(self, data: bytes, count: int, deadline: float) -> asyncio.Future[list[Any]]:
        """Have many requests sent at once; all their replies are awaited together."""
        return self._send_request(data, count, deadline)

    @property
    def open(self) -> bool:
        """False: nothing that was asked here can be answered any more."""
        return self._error is None

    def post(self, data: bytes, deadline: float, callback: Callable[[Any], None]) -> bool:
        """Send, and let nobody wait; `done` gets the reply, or the error instead of one. False: it cannot be sent."""
        if self._error is not None or self._loop.is_closed():
            return False

        def on_done(future: asyncio.Future[Any]) -> None:
            callback(future.exception() or future.result())

        self._send_request(data, 0, deadline).add_done_callback(on_done)
        self._flush()  # the loop may not turn again
        return True

    def _send_request(self, data: bytes, count: int, deadline: float) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if self._error is not None:
            future.set_exception(self._error)
            return future
        if deadline < self._timer_at:
            self._set_timer(deadline)
        was_idle = not self._pending
        self._pending.append(_PendingReply(future, count, deadline))
        if was_idle:
            self._send_now(data)
        else:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            self._outgoing.append(data)
        return future

    def _send_now(self, data: bytes) -> None:
        """Nobody's answer is awaited: nobody gains if this one waits for the next turn, which would cost it a tenth."""
        self._outgoing.append(data)
        try:
            self._flush()
        except BaseException as error:  # how much of it was sent is not known
            self._pending.clear()  # its own, which nobody gets to see
            self._close_with(ConnectionAbortedError(f"torn in the midst of a request: {error!r}"))
            raise

    # --------------------------------------------------- called by the loop

    def _flush(self) -> None:
        if not self._outgoing or self._error is not None:
            return
        data = b"".join(self._outgoing)
        try:
            sent = self._sock.send(data)
        except WOULD_BLOCK:
            sent = 0
        except OSError as error:
            self._close_with(error)
            return
        if sent == len(data):
            self._outgoing.clear()
            if self._waiting_to_write:
                self._waiting_to_write = False
                self._loop.remove_writer(self._sock)
        else:
            self._outgoing = [data[sent:]]
            if not self._waiting_to_write:
                self._waiting_to_write = True
                self._loop.add_writer(self._sock, self._flush)

    def _read(self) -> None:
        try:
            for reply in self._reply_reader.read_available(self._sock):
                self._on_reply(reply)
        except Exception as error:  # whatever the parser calls it
            self._close_with(error)

    def _on_reply(self, reply: Any) -> None:
        if not self._pending:
            raise ConnectionAbortedError("it answered what nobody asked")
        pending = self._pending[0]
        if pending.count:
            pending.replies.append(reply)
            if len(pending.replies) < pending.count:
                return
            reply = pending.replies
        self._pending.popleft()
        if not pending.future.done():
            pending.future.set_result(reply)

    # ----------------------------------------------------------- its ends

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._expire_overdue)

    def _expire_overdue(self) -> None:
        """Give up what is over. The connection is not given new requests: it may be dead. It is kept while somebody can
        still be answered on it, and what was asked before keeps its place in the order of replies."""
        now, self._timer, self._timer_at = self._clock(), None, float("inf")
        for pending in self._pending:
            if not pending.future.done() and pending.deadline <= now:
                pending.future.set_exception(TimeoutError("no answer"))
                self.usable = False
        deadlines = [pending.deadline for pending in self._pending if not pending.future.done()]
        if deadlines:
            self._set_timer(min(deadlines))
        elif not self.usable:
            self._loop.call_soon(self._close_unused)  # whoever gave up goes first: it may have a last word to send

    def _close_unused(self) -> None:
        if all(pending.future.done() for pending in self._pending):
            self.close()

    def _close_with(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error, self.usable = error, False
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_writer(self._sock)
        self._finalizer()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(error)

    def send_and_close(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was sent before, and hang up."""
        if data and self._error is None and not self._loop.is_closed():
            self._outgoing.append(data)
            self._flush()
        self.close()

    def close(self) -> None:
        self._close_with(ConnectionAbortedError("it was closed here"))

    def after_fork(self) -> None:
        """The selector is the parent's too: nothing may be taken out of it, so only the descriptor is replaced."""
        self._finalizer.detach()
        self._error, self.usable = ConnectionAbortedError("it is the parent's"), False
        super().after_fork()


def _read_if_alive(stream: ref[LoopStream]) -> None:
    """A connection nobody has any more is not kept by its loop."""
    if (known := stream()) is not None:
        known._read()


def _close_socket(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """From any thread, where the collector may run; a loop must not watch a descriptor that is closed."""

    def close() -> None:
        loop.remove_reader(sock)
        sock.close()

    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    try:
        if running is loop:
            close()
        else:
            loop.call_soon_threadsafe(close)
    except RuntimeError:  # the loop is closed, and watches nothing
        sock.close()


async def connect_in_loop(
    address: SocketAddress, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> LoopStream:
    """Connect, without blocking the running loop: on a thread, where looking up a name can take its time."""
    loop = asyncio.get_running_loop()
    connecting = loop.run_in_executor(None, connect_socket, address, tls, clock, deadline)
    try:
        async with asyncio.timeout(deadline - clock()):
            sock = await asyncio.shield(connecting)
    except BaseException:
        connecting.add_done_callback(_close_unwanted)
        raise
    return LoopStream(sock, parser, clock)


def _close_unwanted(connecting: asyncio.Future[socket.socket]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
