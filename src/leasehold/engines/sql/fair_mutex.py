"""A mutex for one connection or one claim: callers get it in order of arrival, and none waits beyond its deadline.

Callers that others wait for may come first, in order of their arrival. After a few of them, one of the other callers
has its turn. On a lock server, the callers that call on behalf of different API keys take turns.

caller = mutex.new_caller()
try:
    await mutex.acquire(caller, deadline)
    ...
finally:
    mutex.release(caller)  # always, even if acquire() failed
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from contextvars import ContextVar
from typing import Final

from leasehold.errors import Reentered, Unavailable
from leasehold.runtime.base import Mutex, Runtime, Signal

# For whom the running task calls. A lock server sets it: one of its callers must not hold up the renewals of others.
ON_BEHALF_OF: Final[ContextVar[str]] = ContextVar("leasehold_on_behalf_of", default="")

_MAX_OVERTAKING: Final = 4  # calls: a hand-over takes two of them, and one that may be overtaken, the join


class Caller:
    """One use of the mutex: by a thread or a task, from before `acquire` until `release`."""

    __slots__ = ("on_behalf_of", "owner", "signal")

    def __init__(self, runtime: Runtime) -> None:
        self.owner, self.on_behalf_of = runtime.owner(), ON_BEHALF_OF.get()
        self.signal: Signal | None = None


class _Queue:
    """Waiting callers in order of arrival; those on behalf of different keys take turns."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Caller]] = {}  # the key whose turn it is comes first

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def append(self, caller: Caller) -> None:
        self._waiting.setdefault(caller.on_behalf_of, deque()).append(caller)

    def popleft(self) -> Caller:
        key, callers = next(iter(self._waiting.items()))
        del self._waiting[key]
        found = callers.popleft()
        if callers:
            self._waiting[key] = callers  # at the end
        return found

    def remove(self, caller: Caller) -> None:
        callers = self._waiting.get(caller.on_behalf_of, deque())
        with suppress(ValueError):
            callers.remove(caller)
            if not callers:
                del self._waiting[caller.on_behalf_of]


class FairMutex:
    def __init__(self, runtime: Runtime, engine: str, subject: str = "the connection") -> None:
        self._runtime, self._engine, self._subject = runtime, engine, subject
        self.after_fork()

    def after_fork(self) -> None:
        self._mutex: Mutex = self._runtime.mutex()
        self._waiting_first, self._waiting = _Queue(), _Queue()
        self._overtaking = 0  # how many came first in a row while others waited
        self._current: Caller | None = None

    @property
    def is_free(self) -> bool:
        return self._current is None

    def is_held_by(self, caller: Caller) -> bool:
        return self._current is caller

    def new_caller(self) -> Caller:
        return Caller(self._runtime)

    async def acquire(self, caller: Caller, deadline: float, *, first: bool = False) -> None:
        """`first`: before the callers that are not, but for one in five turns. Else many first callers could keep the
        others waiting past their deadlines: renewals too, on a lock server that a client floods with releases."""
        with self._mutex:
            if self._current is None:
                self._current = caller
                return
            if self._current.owner == caller.owner:  # a finaliser or signal handler, during its own thread's call
                raise Reentered
            caller.signal = self._runtime.signal()
            (self._waiting_first if first else self._waiting).append(caller)
        await caller.signal.wait(deadline - self._runtime.now())
        if self._current is not caller:
            raise Unavailable(
                f"other calls of this client kept {self._subject} busy until the deadline", engine=self._engine
            )

    def release(self, caller: Caller) -> None:
        with self._mutex:
            if self._current is not caller:
                self._waiting_first.remove(caller)
                self._waiting.remove(caller)
                return
            self._current = self._next()
            if self._current is not None and self._current.signal is not None:
                self._current.signal.set()

    def _next(self) -> Caller | None:
        if self._waiting_first and (not self._waiting or self._overtaking < _MAX_OVERTAKING):
            self._overtaking = self._overtaking + 1 if self._waiting else 0
            return self._waiting_first.popleft()
        self._overtaking = 0
        return self._waiting.popleft() if self._waiting else None
