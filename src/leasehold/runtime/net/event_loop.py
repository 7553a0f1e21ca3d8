"""Requests and replies over one connection, asyncio: the twin of `blocking.py`.

A `LoopStream` is shared by all tasks of a loop. While replies are pending, the requests of one loop iteration are sent
together. One timer watches all deadlines. A caller that gives up leaves its entry in the queue of pending replies, so
no caller gets the reply of another.
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
    LONG_REPLIES,
    MAX_BATCH_SIZE,
    WOULD_BLOCK,
    BaseConnection,
    Clock,
    Parser,
    RepliesTooLong,
    ReplyReader,
    ReplyUnasked,
    SocketAddress,
    connect_socket,
    poll_to_read,
)


class _PendingReply:
    """A caller that waits for the next `count` replies as a list; count 0: for one reply, not in a list."""

    __slots__ = ("count", "deadline", "future", "received_before", "replies")

    def __init__(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        self.future, self.count, self.deadline = future, count, deadline
        self.replies: list[Any] = []
        self.received_before = 0  # bytes, when the last of the long replies was complete


class LoopStream(BaseConnection):
    """A connection on a plain socket. An asyncio transport could neither be dropped after its loop was closed, nor left
    untouched in a forked child."""

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._reply_reader, self._clock = sock, ReplyReader(parser), clock
        self._poll = poll_to_read(sock)
        self._loop = asyncio.get_running_loop()
        self._pending: deque[_PendingReply] = deque()
        self._outgoing: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._waiting_to_write = False  # the kernel's buffer was full: the loop calls _flush when it has room
        self._error: BaseException | None = None  # what ended the connection
        self.usable = True  # False: send no new requests here
        self._long_replies, self._max_batch = LONG_REPLIES, MAX_BATCH_SIZE
        sock.setblocking(False)
        self._loop.add_reader(sock, _read_if_alive, ref(self))
        self._finalizer = finalize(self, _close_socket, self._loop, sock)
        self._finalizer.atexit = False

    def call(self, data: bytes, deadline: float) -> asyncio.Future[Any]:
        """Send one request; await the result for its reply."""
        return self._send_request(data, 0, deadline)

    def calls(self, data: bytes, count: int, deadline: float) -> asyncio.Future[list[Any]]:
        """Send many requests at once; await the result for all their replies."""
        return self._send_request(data, count, deadline)

    def limit_batches(self, servers: int) -> None:
        """Each batch is sent to this many servers at once, and the replies of all are in memory."""
        self._long_replies, self._max_batch = 1, MAX_BATCH_SIZE // servers

    @property
    def open(self) -> bool:
        """False: no pending request can be answered any more."""
        return self._error is None

    def post(self, data: bytes, deadline: float, callback: Callable[[Any], None]) -> bool:
        """Send without waiting; `callback` gets the reply or the error. False: the request cannot be sent."""
        if self._error is not None or self._loop.is_closed():
            return False

        def on_done(future: asyncio.Future[Any]) -> None:
            callback(future.exception() or future.result())

        self._send_request(data, 0, deadline).add_done_callback(on_done)
        self._flush()  # the loop may not run again
        return True

    def _send_request(self, data: bytes, count: int, deadline: float) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if (was_idle := not self._pending) and self._error is None and self._poll(0):
            self._read()  # now: what has arrived is no reply to this request
        if self._error is not None:
            future.set_exception(self._error)
            return future
        if deadline < self._timer_at:
            self._set_timer(deadline)
        self._pending.append(_PendingReply(future, count, deadline))
        if was_idle:
            self._send_now(data)
        else:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            self._outgoing.append(data)
        return future

    def _send_now(self, data: bytes) -> None:
        """Send at once if no reply is pending: there is nothing to batch with, and the next loop iteration would cost
        the call a tenth of its time."""
        self._outgoing.append(data)
        try:
            self._flush()
        except BaseException as error:  # it is not known how much was sent
            self._pending.clear()  # only this request's own entry; its future is never returned
            self._close_with(ConnectionAbortedError(f"sending a request was interrupted: {error!r}"))
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
            if self._reply_reader.mid_reply and not self._pending:
                raise ReplyUnasked
        except Exception as error:  # parsers raise errors of their own
            self._close_with(error)

    def _on_reply(self, reply: Any) -> None:
        if not self._pending:
            raise ReplyUnasked
        pending = self._pending[0]
        if pending.count:
            if len(pending.replies) < self._long_replies:
                pending.received_before = self._reply_reader.received
            elif self._reply_reader.received - pending.received_before > self._max_batch:
                raise RepliesTooLong
            pending.replies.append(reply)
            if len(pending.replies) < pending.count:
                return
            reply = pending.replies
        self._pending.popleft()
        if not pending.future.done():
            pending.future.set_result(reply)

    # ------------------------------------------------- deadlines and closing

    def _set_timer(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._expire_overdue)

    def _expire_overdue(self) -> None:
        """Fail the requests whose deadline has passed. The connection may be dead, so it gets no new requests. It stays
        open while others wait for replies; the failed requests keep their position in the order of replies."""
        now, self._timer, self._timer_at = self._clock(), None, float("inf")
        for pending in self._pending:
            if not pending.future.done() and pending.deadline <= now:
                pending.future.set_exception(TimeoutError("no reply in time"))
                self.usable = False
        deadlines = [pending.deadline for pending in self._pending if not pending.future.done()]
        if deadlines:
            self._set_timer(min(deadlines))
        elif not self.usable:
            self._loop.call_soon(self._close_unused)  # later: the failed callers may first send a compensation

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
        """Send what the kernel accepts at once, behind the earlier requests, and close."""
        if data and self._error is None and not self._loop.is_closed():
            self._outgoing.append(data)
            self._flush()
        self.close()

    def close(self) -> None:
        self._close_with(ConnectionAbortedError("the client closed the connection"))

    def after_fork(self) -> None:
        """The selector is shared with the parent, so the socket must stay registered: only replace its descriptor."""
        self._finalizer.detach()
        self._error, self.usable = ConnectionAbortedError("the connection belongs to the parent process"), False
        super().after_fork()


def _read_if_alive(stream: ref[LoopStream]) -> None:
    """The loop refers to the stream weakly, so it does not keep a dropped connection alive."""
    if (known := stream()) is not None:
        known._read()


def _close_socket(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Close the socket in its loop, which must not watch a closed descriptor. The garbage collector may call this from
    any thread."""

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
    except RuntimeError:  # the loop is closed and watches nothing
        sock.close()


async def connect_in_loop(
    address: SocketAddress, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> LoopStream:
    """Connect without blocking the running loop: on a thread, because resolving the host name may block."""
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
