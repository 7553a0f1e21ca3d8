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

from leasehold.runtime.streams import NOT_NOW, Address, Clock, Inbox, OnSocket, Parser, connected


class _Slot:
    """Who waits for the next so many replies; 0: for one, as it is."""

    __slots__ = ("count", "deadline", "future", "replies")

    def __init__(self, future: asyncio.Future[Any], count: int, deadline: float) -> None:
        self.future, self.count, self.deadline = future, count, deadline
        self.replies: list[Any] = []


class LoopStream(OnSocket):
    """A connection on the bare socket. A transport of asyncio's could neither be let go after its loop was closed, nor
    left alone in a forked child."""

    def __init__(self, sock: socket.socket, parser: Parser, clock: Clock) -> None:
        self._sock, self._inbox, self._clock = sock, Inbox(parser), clock
        self._loop = asyncio.get_running_loop()
        self._slots: deque[_Slot] = deque()
        self._out: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._writing = False  # the kernel took no more: the loop says when it does
        self._lost: BaseException | None = None  # why it is no more
        self.good = True  # False: not to be given any new request
        sock.setblocking(False)
        self._loop.add_reader(sock, _readable, ref(self))
        self._let_go = finalize(self, _let_go, self._loop, sock)
        self._let_go.atexit = False

    def call(self, data: bytes, deadline: float) -> asyncio.Future[Any]:
        """Have one request sent; its reply is awaited."""
        return self._ask(data, 0, deadline)

    def calls(self, data: bytes, count: int, deadline: float) -> asyncio.Future[list[Any]]:
        """Have many requests sent at once; all their replies are awaited together."""
        return self._ask(data, count, deadline)

    @property
    def open(self) -> bool:
        """False: nothing that was asked here can be answered any more."""
        return self._lost is None

    def post(self, data: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        """Send, and let nobody wait; `done` gets the reply, or the error instead of one. False: it cannot be sent."""
        if self._lost is not None or self._loop.is_closed():
            return False

        def settled(future: asyncio.Future[Any]) -> None:
            done(future.exception() or future.result())

        self._ask(data, 0, deadline).add_done_callback(settled)
        self._flush()  # the loop may not turn again
        return True

    def _ask(self, data: bytes, count: int, deadline: float) -> asyncio.Future[Any]:
        future = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        if deadline < self._timer_at:
            self._watch(deadline)
        alone = not self._slots
        self._slots.append(_Slot(future, count, deadline))
        if alone:
            self._send_now(data)
        else:
            if not self._out:
                self._loop.call_soon(self._flush)
            self._out.append(data)
        return future

    def _send_now(self, data: bytes) -> None:
        """Nobody's answer is awaited: nobody gains if this one waits for the next turn, which would cost it a tenth."""
        self._out.append(data)
        try:
            self._flush()
        except BaseException as torn:  # how much of it was sent is not known
            self._slots.clear()  # its own, which nobody gets to see
            self._end(ConnectionAbortedError(f"torn in the midst of a request: {torn!r}"))
            raise

    # --------------------------------------------------- called by the loop

    def _flush(self) -> None:
        if not self._out or self._lost is not None:
            return
        data = b"".join(self._out)
        try:
            sent = self._sock.send(data)
        except NOT_NOW:
            sent = 0
        except OSError as error:
            self._end(error)
            return
        if sent == len(data):
            self._out.clear()
            if self._writing:
                self._writing = False
                self._loop.remove_writer(self._sock)
        else:
            self._out = [data[sent:]]
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)

    def _read(self) -> None:
        try:
            for reply in self._inbox.replies(self._sock):
                self._answer(reply)
        except Exception as error:  # whatever the parser calls it
            self._end(error)

    def _answer(self, reply: Any) -> None:
        if not self._slots:
            raise ConnectionAbortedError("it answered what nobody asked")
        slot = self._slots[0]
        if slot.count:
            slot.replies.append(reply)
            if len(slot.replies) < slot.count:
                return
            reply = slot.replies
        self._slots.popleft()
        if not slot.future.done():
            slot.future.set_result(reply)

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
            self._loop.call_soon(self._close_unused)  # whoever gave up goes first: it may have a last word to send

    def _close_unused(self) -> None:
        if all(slot.future.done() for slot in self._slots):
            self.close()

    def _end(self, error: BaseException) -> None:
        if self._lost is not None:
            return
        self._lost, self.good = error, False
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_writer(self._sock)
        self._let_go()
        while self._slots:
            future = self._slots.popleft().future
            if not future.done():
                future.set_exception(error)

    def last_words(self, data: bytes) -> None:
        """Send what can be sent at once, behind what was sent before, and hang up."""
        if data and self._lost is None and not self._loop.is_closed():
            self._out.append(data)
            self._flush()
        self.close()

    def close(self) -> None:
        self._end(ConnectionAbortedError("it was closed here"))

    def after_fork(self) -> None:
        """The selector is the parent's too: nothing may be taken out of it, so only the descriptor is replaced."""
        self._let_go.detach()
        self._lost, self.good = ConnectionAbortedError("it is the parent's"), False
        super().after_fork()


def _readable(stream: ref[LoopStream]) -> None:
    """A connection nobody has any more is not kept by its loop."""
    if (known := stream()) is not None:
        known._read()


def _let_go(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
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


async def dial_in_loop(
    address: Address, tls: ssl.SSLContext | None, parser: Parser, clock: Clock, deadline: float
) -> LoopStream:
    """Connect, without blocking the running loop: on a thread, where looking up a name can take its time."""
    loop = asyncio.get_running_loop()
    dialling = loop.run_in_executor(None, connected, address, tls, clock, deadline)
    try:
        async with asyncio.timeout(deadline - clock()):
            sock = await asyncio.shield(dialling)
    except BaseException:
        dialling.add_done_callback(_unwanted)
        raise
    return LoopStream(sock, parser, clock)


def _unwanted(dialling: asyncio.Future[socket.socket]) -> None:
    if not dialling.cancelled() and dialling.exception() is None:
        dialling.result().close()
