"""Connections to one server: `call(packed, deadline)` returns a reply in blocking mode, an awaitable under asyncio.

In blocking mode there is a pool, with one connection for each call in flight. Under asyncio all tasks share one
connection. Calls that would delay the others (`follow_up`) use connections of their own, one call at a time each.

If a call ends early, its connection is closed: its late reply must never be taken for the reply to another call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from copy import copy
from typing import Any, Final, Protocol, TypeAlias, cast

from leasehold.engines.redis.server import CONNECTION_ERRORS, RedisEndpoint, nothing_to_confirm
from leasehold.engines.redis.server_settings import Unreachable
from leasehold.engines.registry import snapshot_items
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Runtime, Signal, maybe_await
from leasehold.runtime.net.blocking import SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_MAX_IDLE: Final = 64  # unused connections that are kept
_MAX_EXCLUSIVE: Final = 64  # tasks of a loop that may use a connection of their own at the same time


Compensation: TypeAlias = Callable[[], bytes] | None


class Connections(Protocol):
    """The connections of one engine instance to one server."""

    server: RedisEndpoint

    def call(self, packed: bytes, deadline: float, compensation: Compensation = None) -> Any | Awaitable[Any]:
        """One request, one reply. In blocking mode `compensation` is sent after a request that was given up, as the
        last on its connection, so it cannot overtake the request. Under asyncio `post` does that."""

    def calls(
        self, packed: bytes, count: int, deadline: float, follow_up: bytes, compensation: Compensation = None
    ) -> list[Any] | Awaitable[list[Any]]:
        """Many requests at once, and all replies. `follow_up`, if not empty, is sent after the replies on the same
        connection, which no other call uses meanwhile; if there is nothing to confirm, it is not sent, and its
        reply is None. `compensation` is sent there after requests that were given up."""

    def post(self, packed: bytes, deadline: float, on_reply: Callable[[Any], None]) -> bool:
        """Send after all requests in flight, without waiting. False: not possible here."""

    def drop_connections(self) -> None:
        """Drop all connections; the next call opens a new one."""

    def abort(self) -> None:
        """From any thread: stop waiting for this server. Calls in flight fail now."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class BlockingPool:
    """For the blocking runtime. Used by many threads: each access to the list is one atomic step."""

    def __init__(self, server: RedisEndpoint, runtime: Runtime) -> None:
        self.server, self._runtime = server, runtime
        self._idle: list[SocketStream] = []
        self._all: dict[int, SocketStream] = {}  # also those in use, for `abort` and `after_fork`
        self._max_idle = _MAX_IDLE  # 0: the pool is closed

    def call(self, packed: bytes, deadline: float, compensation: Compensation = None) -> Any | Awaitable[Any]:
        try:
            stream = self._idle.pop()
        except IndexError:
            return self._call_on_new(packed, deadline, compensation)
        try:
            reply = stream.call(packed, deadline)
        except BaseException as error:
            self._drop(stream, error, compensation)
            raise
        self._idle.append(stream)
        if len(self._idle) > self._max_idle:
            self._drop_one()
        return reply

    async def _call_on_new(self, packed: bytes, deadline: float, compensation: Compensation) -> Any:
        self._idle.append(await self._open(deadline))
        return await maybe_await(self.call(packed, deadline, compensation))

    async def calls(
        self, packed: bytes, count: int, deadline: float, follow_up: bytes, compensation: Compensation = None
    ) -> list[Any]:
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = await self._open(deadline)
        try:
            replies = stream.calls(packed, count, deadline)
            if follow_up:
                replies.append(None if nothing_to_confirm(replies) else stream.call(follow_up, deadline))
        except BaseException as error:
            self._drop(stream, error, compensation)
            raise
        self._idle.append(stream)
        if len(self._idle) > self._max_idle:
            self._drop_one()
        return replies

    def post(self, packed: bytes, deadline: float, on_reply: Callable[[Any], None]) -> bool:
        return False  # a call that was given up sent its `compensation` and closed its connection

    async def _open(self, deadline: float) -> SocketStream:
        stream = cast(SocketStream, await self.server.open(self._runtime, deadline))
        self._all[id(stream)] = stream
        return stream

    def _drop(
        self, stream: SocketStream, error: BaseException | None = None, compensation: Compensation = None
    ) -> None:
        self._all.pop(id(stream), None)
        # After a broken connection or an unreadable reply the executor repeats the attempt with the same id, on another
        # connection: a compensation on this one could arrive later and release the repeated grant.
        repeated = isinstance(error, CONNECTION_ERRORS) and not isinstance(error, TimeoutError)
        if compensation is not None and not repeated:
            stream.send_and_close(compensation())
        else:
            stream.close()
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            self.drop_connections()  # the server is gone, and the idle connections with it

    def drop_connections(self) -> None:
        while self._idle:
            self._drop_one()

    def _drop_one(self) -> None:
        with suppress(IndexError):  # another thread was faster
            self._drop(self._idle.pop())

    def abort(self) -> None:
        for _, stream in snapshot_items(self._all):
            stream.shutdown()

    def close(self) -> None:
        self._max_idle = 0
        self.drop_connections()

    def after_fork(self) -> None:
        streams, self._all, self._idle = list(self._all.values()), {}, []
        for stream in streams:
            stream.after_fork()


class PendingConnect:
    """A connection that one task opens for all tasks that need it meanwhile."""

    def __init__(self) -> None:
        self.waiters: list[Signal] = []
        self.failure: LeaseholdError | None = None  # raised in all of them


class SharedConnection:
    """For the asyncio runtime."""

    def __init__(self, server: RedisEndpoint, runtime: Runtime) -> None:
        self.server, self._runtime = server, runtime
        self._stream: LoopStream | None = None
        self._draining: list[LoopStream] = []  # unresponsive, but some calls still wait for their replies
        self._idle: list[LoopStream] = []  # connections of one task each, now unused
        self._in_use: list[LoopStream] = []  # each used by one task
        self._semaphore = TaskSemaphore(runtime, _MAX_EXCLUSIVE)
        self._pending_connect: PendingConnect | None = None  # for the shared connection

    def call(self, packed: bytes, deadline: float, compensation: Compensation = None) -> Awaitable[Any]:
        stream = self._stream
        if stream is not None and stream.usable:
            return stream.call(packed, deadline)
        return self._call_on_new(packed, deadline)

    async def _call_on_new(self, packed: bytes, deadline: float) -> Any:
        stream = await self._get_shared(deadline)
        return await stream.call(packed, deadline)

    async def _get_shared(self, deadline: float) -> LoopStream:
        """One task opens the connection for all. If that fails, it fails for all of them: they do not retry one by one.
        If the task timed out or was cancelled, the next task tries: its deadline may be later."""
        while self._stream is None or not self._stream.usable:
            if (pending := self._pending_connect) is not None:
                signal = self._runtime.signal()
                pending.waiters.append(signal)
                if not await signal.wait(deadline - self._runtime.now()):
                    raise Unreachable(f"{self.server} cannot be reached: connecting timed out", engine="redis")
                if pending.failure is not None:
                    raise copy(pending.failure) from pending.failure
                continue
            self._pending_connect = pending = PendingConnect()
            try:
                stream = await self._open(deadline)
                if self._stream is not None:
                    self._draining = [each for each in (*self._draining, self._stream) if each.open]
                self._stream = stream
            except LeaseholdError as failure:
                pending.failure = None if isinstance(failure.__cause__, TimeoutError) else failure
                raise
            finally:
                self._pending_connect = None
                for each in pending.waiters:
                    each.set()
        return self._stream

    async def calls(
        self, packed: bytes, count: int, deadline: float, follow_up: bytes, compensation: Compensation = None
    ) -> list[Any]:
        if not follow_up:
            return await (await self._get_shared(deadline)).calls(packed, count, deadline)
        if not await self._semaphore.acquire(deadline):
            raise Unreachable(f"{self.server} cannot be reached: no connection became free in time", engine="redis")
        try:
            self._idle = [stream for stream in self._idle if stream.usable]
            stream = self._idle.pop() if self._idle else await self._open(deadline)
            self._in_use.append(stream)
            try:
                replies = await stream.calls(packed, count, deadline)
                replies.append(None if nothing_to_confirm(replies) else await stream.call(follow_up, deadline))
            except BaseException:
                stream.send_and_close(b"" if compensation is None else compensation())
                raise
            finally:
                self._in_use.remove(stream)
            self._idle.append(stream)
            return replies
        finally:
            self._semaphore.release()

    async def _open(self, deadline: float) -> LoopStream:
        return cast(LoopStream, await self.server.open(self._runtime, deadline))

    def post(self, packed: bytes, deadline: float, on_reply: Callable[[Any], None]) -> bool:
        stream = self._stream
        for draining in self._draining if stream is None or stream.usable else (*self._draining, stream):
            draining.post(packed, deadline, _ignore_reply)
        return stream is not None and stream.usable and stream.post(packed, deadline, on_reply)

    def drop_connections(self) -> None:
        for stream in (self._stream, *self._draining, *self._idle):
            if stream is not None:
                stream.close()
        self._stream = None
        self._draining.clear()
        self._idle.clear()

    def abort(self) -> None:
        for stream in (self._stream, *self._draining, *self._idle, *self._in_use):
            if stream is not None:
                stream.shutdown()

    def close(self) -> None:
        self.drop_connections()

    def after_fork(self) -> None:
        for stream in (self._stream, *self._draining, *self._idle, *self._in_use):
            if stream is not None:
                stream.after_fork()
        self._stream, self._pending_connect, self._semaphore = None, None, TaskSemaphore(self._runtime, _MAX_EXCLUSIVE)
        for streams in (self._draining, self._idle, self._in_use):
            streams.clear()


class TaskSemaphore:
    """Admits `limit` tasks of a loop at a time; the others wait in order of arrival."""

    def __init__(self, runtime: Runtime, limit: int) -> None:
        self._runtime, self._free = runtime, limit
        self._queue: deque[Signal] = deque()

    async def acquire(self, deadline: float) -> bool:
        if self._free:
            self._free -= 1
            return True
        signal = self._runtime.signal()
        self._queue.append(signal)
        acquired = False
        try:
            acquired = await signal.wait(deadline - self._runtime.now())
        finally:
            if not acquired:  # timed out or cancelled: pass on a permit that arrived meanwhile
                self._queue.remove(signal) if signal in self._queue else self.release()
        return acquired

    def release(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._free += 1


def _ignore_reply(_reply: Any) -> None:
    """For an unresponsive connection: only the reply on the current one counts."""
