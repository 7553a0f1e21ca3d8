"""How requests reach one server: `call(packed, deadline)`, a reply in blocking mode, something to await under asyncio.

Blocking, there is a pool, with a connection for each call under way. Under asyncio all tasks share one connection;
calls that would hold up the others (`then`) have connections of their own, one at a time each.

Whatever ends a call early takes its connection with it: a reply still to come must never be taken for another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any, Final, Protocol, TypeAlias, cast

from leasehold.book import every
from leasehold.engines.redis.server import Server
from leasehold.engines.redis.settings import Unreached
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Runtime, Signal, settle
from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.streams import SocketStream

_IDLE: Final = 64  # connections kept while nobody uses them
_ALONE: Final = 64  # tasks of a loop that have a connection of their own at a time


Regret: TypeAlias = Callable[[], bytes] | None


class Wire(Protocol):
    """To one server."""

    server: Server

    def call(self, packed: bytes, deadline: float, regret: Regret = None) -> Any | Awaitable[Any]:
        """One request, one reply. Blocking, `regret` is sent behind a request that was given up, as the last on its
        connection, where it cannot overtake it; under asyncio `post` does that."""

    def calls(
        self, packed: bytes, count: int, deadline: float, then: bytes, regret: Regret = None
    ) -> list[Any] | Awaitable[list[Any]]:
        """Many requests at once, and all replies. `then`, if anything, follows once they are answered, on the same
        connection, which nobody else uses meanwhile; `regret` is sent there behind what was given up."""

    def post(self, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        """Send behind everything sent so far and not answered, and wait for nothing. False: cannot be done here."""

    def hang_up(self) -> None:
        """Drop all connections; the next call opens a new one."""

    def abandon(self) -> None:
        """From any thread: this server is not to be waited for any longer. Calls under way fail now."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class PoolWire:
    """Of the blocking runtime. Used by many threads: single steps on a list."""

    def __init__(self, server: Server, runtime: Runtime) -> None:
        self.server, self._runtime = server, runtime
        self._idle: list[SocketStream] = []
        self._all: dict[int, SocketStream] = {}  # for a fork
        self._most = _IDLE  # of those kept; 0: it is closed

    def call(self, packed: bytes, deadline: float, regret: Regret = None) -> Any | Awaitable[Any]:
        try:
            stream = self._idle.pop()
        except IndexError:
            return self._anew(packed, deadline, regret)
        try:
            reply = stream.call(packed, deadline)
        except BaseException as error:
            self._drop(stream, error, regret)
            raise
        if len(self._idle) < self._most:
            self._idle.append(stream)
        else:
            self._drop(stream)
        return reply

    async def _anew(self, packed: bytes, deadline: float, regret: Regret) -> Any:
        self._idle.append(await self._open(deadline))
        return await settle(self.call(packed, deadline, regret))

    async def calls(self, packed: bytes, count: int, deadline: float, then: bytes, regret: Regret = None) -> list[Any]:
        try:
            stream = self._idle.pop()
        except IndexError:
            stream = await self._open(deadline)
        try:
            replies = stream.calls(packed, count, deadline)
            if then:
                replies.append(stream.call(then, deadline))
        except BaseException as error:
            self._drop(stream, error, regret)
            raise
        if len(self._idle) < self._most:
            self._idle.append(stream)
        else:
            self._drop(stream)
        return replies

    def post(self, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        return False  # what was under way went with its connection, and `regret` behind it

    async def _open(self, deadline: float) -> SocketStream:
        stream = cast(SocketStream, await self.server.open(self._runtime, deadline))
        self._all[id(stream)] = stream
        return stream

    def _drop(self, stream: SocketStream, error: BaseException | None = None, regret: Regret = None) -> None:
        self._all.pop(id(stream), None)
        if regret is not None:
            stream.last_words(regret())
        else:
            stream.close()
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            self.hang_up()  # the server has gone: what idles here was lost with it

    def hang_up(self) -> None:
        while self._idle:
            try:
                self._drop(self._idle.pop())
            except IndexError:  # another thread was faster
                return

    def abandon(self) -> None:
        for _, stream in every(self._all):
            stream.shut()

    def close(self) -> None:
        self._most = 0
        self.hang_up()

    def after_fork(self) -> None:
        streams, self._all, self._idle = list(self._all.values()), {}, []
        for stream in streams:
            stream.after_fork()


class Opening:
    """A connection that one task makes for all who come meanwhile."""

    def __init__(self) -> None:
        self.waiting: list[Signal] = []
        self.failure: LeaseholdError | None = None  # for all of them


class SharedWire:
    """Of the asyncio runtime."""

    def __init__(self, server: Server, runtime: Runtime) -> None:
        self.server, self._runtime = server, runtime
        self._stream: LoopStream | None = None
        self._left: list[LoopStream] = []  # silent ones, on which some still wait for what they asked before
        self._spare: list[LoopStream] = []  # nobody is using them
        self._lent: list[LoopStream] = []  # each used by one task
        self._turns = Turns(runtime, _ALONE)
        self._opening: Opening | None = None  # of the shared one

    def call(self, packed: bytes, deadline: float, regret: Regret = None) -> Awaitable[Any]:
        stream = self._stream
        if stream is not None and stream.good:
            return stream.call(packed, deadline)
        return self._anew(packed, deadline)

    async def _anew(self, packed: bytes, deadline: float) -> Any:
        stream = await self._shared(deadline)
        return await stream.call(packed, deadline)

    async def _shared(self, deadline: float) -> LoopStream:
        """One task opens the connection for all. If it fails, it fails for all: a crowd does not try one by one. If it
        ran out of time, or was cancelled, the next one tries: its deadline may be a later one."""
        while self._stream is None or not self._stream.good:
            if (opening := self._opening) is not None:
                signal = self._runtime.signal()
                opening.waiting.append(signal)
                if not await signal.wait(deadline - self._runtime.now()):
                    raise Unreached(f"{self.server} cannot be reached: no connection in time", engine="redis")
                if opening.failure is not None:
                    raise copy(opening.failure) from opening.failure
                continue
            self._opening = opening = Opening()
            try:
                stream = await self._open(deadline)
                if self._stream is not None:
                    self._left = [each for each in (*self._left, self._stream) if each.open]
                self._stream = stream
            except LeaseholdError as failure:
                opening.failure = None if isinstance(failure.__cause__, TimeoutError) else failure
                raise
            finally:
                self._opening = None
                for each in opening.waiting:
                    each.set()
        return self._stream

    async def calls(self, packed: bytes, count: int, deadline: float, then: bytes, regret: Regret = None) -> list[Any]:
        if not then:
            return await (await self._shared(deadline)).calls(packed, count, deadline)
        if not await self._turns.enter(deadline):
            raise Unreached(f"{self.server} cannot be reached: no connection is free in time", engine="redis")
        try:
            self._spare = [stream for stream in self._spare if stream.good]
            stream = self._spare.pop() if self._spare else await self._open(deadline)
            self._lent.append(stream)
            try:
                replies = await stream.calls(packed, count, deadline)
                replies.append(await stream.call(then, deadline))
            except BaseException:
                stream.last_words(b"" if regret is None else regret())
                raise
            finally:
                self._lent.remove(stream)
            self._spare.append(stream)
            return replies
        finally:
            self._turns.leave()

    async def _open(self, deadline: float) -> LoopStream:
        return cast(LoopStream, await self.server.open(self._runtime, deadline))

    def post(self, packed: bytes, deadline: float, done: Callable[[Any], None]) -> bool:
        stream = self._stream
        for silent in self._left if stream is None or stream.good else (*self._left, stream):
            silent.post(packed, deadline, _nothing)
        return stream is not None and stream.good and stream.post(packed, deadline, done)

    def hang_up(self) -> None:
        for stream in (self._stream, *self._left, *self._spare):
            if stream is not None:
                stream.close()
        self._stream = None
        self._left.clear()
        self._spare.clear()

    def abandon(self) -> None:
        for stream in (self._stream, *self._left, *self._spare, *self._lent):
            if stream is not None:
                stream.shut()

    def close(self) -> None:
        self.hang_up()

    def after_fork(self) -> None:
        for stream in (self._stream, *self._left, *self._spare, *self._lent):
            if stream is not None:
                stream.after_fork()
        self._stream, self._opening, self._turns = None, None, Turns(self._runtime, _ALONE)
        for each in (self._left, self._spare, self._lent):
            each.clear()


class Turns:
    """So many tasks of a loop at a time; the others wait, first come, first served."""

    def __init__(self, runtime: Runtime, most: int) -> None:
        self._runtime, self._free = runtime, most
        self._line: deque[Signal] = deque()

    async def enter(self, deadline: float) -> bool:
        if self._free:
            self._free -= 1
            return True
        mine = self._runtime.signal()
        self._line.append(mine)
        had = False
        try:
            had = await mine.wait(deadline - self._runtime.now())
        finally:
            if not had:  # too late, or cancelled: a turn given meanwhile is passed on
                self._line.remove(mine) if mine in self._line else self.leave()
        return had

    def leave(self) -> None:
        if self._line:
            self._line.popleft().set()
        else:
            self._free += 1


def _nothing(_reply: Any) -> None:
    """On a silent connection: only an answer on another one counts."""
