"""Connections to the servers of a URL, in both modes: one call in, one answer out.

In blocking mode there is a pool, with one connection for each call in flight. Under asyncio each server has a few
connections; calls that come while all are in use leave together in one request. So an idle client waits for nothing,
and a busy one sends batches.

If a call ends early, no other call gets its answer: in blocking mode its connection is closed; under asyncio the
connection discards that answer when it arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy
from typing import Final, NoReturn

from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.remote.parsing import MAX_BODY, USUAL_BODY, Response, ResponseParser
from leasehold.engines.remote.servers import Connections, NotConnected, Server, StaleConnection, read_answers
from leasehold.engines.remote.wire import Json
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.net.blocking import SocketStream, connect_blocking
from leasehold.runtime.net.event_loop import LoopStream, connect_in_loop

_MAX_IDLE: Final = 64  # unused connections that are kept, per server
_MAX_CONNECTIONS: Final = 8  # of a loop to one server
_MAX_BATCH: Final = 128  # calls of one request


def _max_body(calls: Sequence[Json]) -> int:
    """The longest answer to expect: only a list of locks is long."""
    return MAX_BODY if any(map(_is_list, calls)) else USUAL_BODY


def _is_list(call: Json) -> bool:
    return bool(call["do"] == "inspect")


class BlockingPool:
    """For the blocking runtime. Used by many threads: each access to a list is one atomic step."""

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, engine: str) -> None:
        self._runtime, self._registry, self._engine = runtime, registry, engine
        self._idle: dict[Server, list[tuple[SocketStream, ResponseParser]]] = {}
        self._all: dict[int, SocketStream] = {}  # also those in use, for `after_fork`
        self._max_idle = _MAX_IDLE  # 0: the pool is closed

    async def call(self, server: Server, call: Json, deadline: float, reuse: bool = True) -> Json:
        idle = self._idle.setdefault(server, [])
        found = self._take_idle(idle) if reuse else None
        stream, parser = found or self._open(server, deadline)
        try:
            parser.max_body = _max_body([call])
            request = server.calls_request(self._registry.client_id, [call], deadline - self._runtime.now())
            response: Response = stream.call(request, deadline)
        except BaseException as error:
            self._drop(stream)
            if found and isinstance(error, OSError) and not isinstance(error, TimeoutError):
                raise StaleConnection(str(error)) from error
            raise
        if response.closing or parser.mid_reply or len(idle) >= self._max_idle:
            self._drop(stream)
        else:
            idle.append((stream, parser))
        return read_answers(response.status, response.body, 1, self._engine)[0]

    def _take_idle(self, idle: list[tuple[SocketStream, ResponseParser]]) -> tuple[SocketStream, ResponseParser] | None:
        while True:
            try:
                found = idle.pop()
            except IndexError:
                return None
            if found[0].quiet():
                return found
            self._drop(found[0])  # closed by the server, or out of step

    def _open(self, server: Server, deadline: float) -> tuple[SocketStream, ResponseParser]:
        parser = ResponseParser()
        try:
            stream = connect_blocking(server.address, server.tls, parser, self._runtime.now, deadline)
        except OSError as error:
            _raise_not_connected(error)
        self._all[id(stream)] = stream
        return stream, parser

    def _drop(self, stream: SocketStream) -> None:
        self._all.pop(id(stream), None)
        stream.close()

    def close(self) -> None:
        self._max_idle = 0
        for _, idle in snapshot_items(self._idle):
            while idle:
                try:
                    self._drop(idle.pop()[0])
                except IndexError:  # another thread was faster
                    break

    def after_fork(self) -> None:
        streams, self._all, self._idle = list(self._all.values()), {}, {}
        for stream in streams:
            stream.after_fork()


class _Entry:
    """A call that waits for its answer."""

    __slots__ = ("abandoned", "call", "deadline", "result", "signal")

    def __init__(self, call: Json, deadline: float, signal: Signal) -> None:
        self.call, self.deadline, self.signal = call, deadline, signal
        self.result: Json | Exception | None = None  # None: not sent, because all connections were lost
        self.abandoned = False

    def finish(self, result: Json | Exception | None) -> None:
        self.result = result
        self.signal.set()


class _Pool:
    """The connections of a loop to one server."""

    def __init__(self) -> None:
        self.idle: list[LoopStream] = []
        self.count = 0  # open, or being opened
        self.queue: deque[_Entry] = deque()


class LoopConnections:
    """For the asyncio runtime."""

    def __init__(self, runtime: Runtime, registry: ClaimRegistry, engine: str) -> None:
        self._runtime, self._registry, self._engine = runtime, registry, engine
        self._pools: dict[Server, _Pool] = {}
        self._all: dict[LoopStream, ResponseParser] = {}

    async def call(self, server: Server, call: Json, deadline: float, reuse: bool = True) -> Json:
        pool = self._pools.setdefault(server, _Pool()) if reuse else _Pool()
        while True:
            entry = _Entry(call, deadline, self._runtime.signal())
            try:
                await self._send(server, pool, entry)
                if not await entry.signal.wait(deadline - self._runtime.now()):
                    raise TimeoutError("no reply in time")
            finally:
                entry.abandoned = True
                if not reuse:
                    self._close_idle(pool)
            if isinstance(entry.result, Exception):
                raise copy(entry.result) from entry.result  # other calls of the same request raise it too
            if entry.result is not None:
                return entry.result

    async def _send(self, server: Server, pool: _Pool, entry: _Entry) -> None:
        """Send the call, or leave it in the queue for the next connection that is free."""
        while pool.idle:
            stream = pool.idle.pop()
            if stream.usable:
                self._post(server, pool, stream, [entry], is_new=False)
                return
            self._lose(pool, stream)
        if pool.count >= _MAX_CONNECTIONS:
            pool.queue.append(entry)
            return
        pool.count += 1
        try:
            parser = ResponseParser()
            stream = await connect_in_loop(server.address, server.tls, parser, self._runtime.now, entry.deadline)
        except BaseException as error:
            pool.count -= 1
            self._release_queue(pool)
            if isinstance(error, OSError):
                _raise_not_connected(error)
            raise
        self._all[stream] = parser
        self._post(server, pool, stream, [entry], is_new=True)

    def _post(self, server: Server, pool: _Pool, stream: LoopStream, entries: list[_Entry], is_new: bool) -> None:
        now = self._runtime.now()
        deadline = max(entry.deadline for entry in entries)
        calls = [
            entry.call
            if entry.deadline == deadline
            else {**entry.call, "within": round(max(entry.deadline - now, 0), 3)}
            for entry in entries
        ]

        if (parser := self._all.get(stream)) is not None:
            parser.max_body = _max_body(calls)

        def on_reply(reply: Response | BaseException) -> None:
            self._finish(server, pool, stream, entries, reply, is_new)

        if not stream.post(server.calls_request(self._registry.client_id, calls, deadline - now), deadline, on_reply):
            on_reply(ConnectionResetError("the connection is closed"))

    def _finish(
        self,
        server: Server,
        pool: _Pool,
        stream: LoopStream,
        entries: list[_Entry],
        reply: Response | BaseException,
        is_new: bool,
    ) -> None:
        results: list[Json] | Exception
        if isinstance(reply, Response):
            try:
                results = read_answers(reply.status, reply.body, len(entries), self._engine)
            except LeaseholdError as error:
                results = error
        elif isinstance(reply, OSError) and (is_new or isinstance(reply, TimeoutError)):
            results = reply
        else:
            results = StaleConnection(str(reply))
        for number, entry in enumerate(entries):
            entry.finish(results if isinstance(results, Exception) else results[number])
        if isinstance(reply, Response) and not reply.closing and stream.usable:
            pool.idle.append(stream)
        else:
            self._lose(pool, stream)
        self._send_queued(server, pool)

    def _send_queued(self, server: Server, pool: _Pool) -> None:
        while pool.queue and pool.idle:
            entries: list[_Entry] = []
            lists = 0
            while pool.queue and len(entries) < _MAX_BATCH:
                entry = pool.queue.popleft()
                if entry.abandoned:
                    continue
                if _is_list(entry.call) and (lists := lists + 1) > 1:  # a request may have one
                    pool.queue.appendleft(entry)
                    break
                entries.append(entry)
            if entries:
                self._post(server, pool, pool.idle.pop(), entries, is_new=False)
        self._release_queue(pool)

    def _release_queue(self, pool: _Pool) -> None:
        """Connections were lost: let as many queued calls open new ones."""
        missing = 0 if pool.idle else _MAX_CONNECTIONS - pool.count
        while pool.queue and missing > 0:
            entry = pool.queue.popleft()
            if not entry.abandoned:
                entry.finish(None)
                missing -= 1

    def _lose(self, pool: _Pool, stream: LoopStream) -> None:
        pool.count -= 1
        self._all.pop(stream, None)
        stream.close()

    def _close_idle(self, pool: _Pool) -> None:
        while pool.idle:
            self._lose(pool, pool.idle.pop())

    def close(self) -> None:
        for stream in list(self._all):
            stream.close()
        self._all.clear()
        self._pools.clear()

    def after_fork(self) -> None:
        for stream in self._all:
            stream.after_fork()
        self._all.clear()
        self._pools.clear()


def new_connections(runtime: Runtime, registry: ClaimRegistry, engine: str) -> Connections:
    return (BlockingPool if runtime.blocking else LoopConnections)(runtime, registry, engine)


def _raise_not_connected(error: OSError) -> NoReturn:
    reason = "connecting timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
    raise NotConnected(reason) from error
