"""What a simulation is made of: one true time, all that is to happen in it, and tasks that wait for it.

`simulated.py` puts processes into this world and makes each of them a runtime. The same seed gives the same run, so a
failure can be looked at as often as needed: nothing here reads a real clock, a hash order or an address. A step between
two awaits is atomic, and time passes only while everybody waits.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

if TYPE_CHECKING:
    from leasehold.runtime.simulated import Process

T = TypeVar("T")

TURN: Final = 0.0001  # a task that may go on does so within this
NEXT: Final = 1e-9  # the least time between cause and effect, so that every loop of retries ends


class Timer:
    """Something that will happen, unless called off."""

    __slots__ = ("fn", "process")

    def __init__(self, fn: Callable[[], object], process: Process | None) -> None:
        self.fn: Callable[[], object] | None = fn
        self.process = process

    def cancel(self) -> None:
        self.fn = None


class World:
    """Everything there is: the time, the chances, and what happens next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.time = 0.0
        self.random = random.Random(seed)
        self.current: Task | None = None
        self.events = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._number = 0
        self._failure: BaseException | None = None

    def after(self, seconds: float, fn: Callable[[], object], process: Process | None = None) -> Timer:
        """Have `fn` run so many true seconds from now; as part of a process, only while that one runs."""
        timer = Timer(fn, process)
        self._number += 1
        heappush(self._heap, (self.time + max(seconds, NEXT), self._number, timer))
        return timer

    def run(self, seconds: float) -> None:
        """Let so much time pass. What a task did not catch is raised here."""
        end, heap = self.time + seconds, self._heap
        while heap and heap[0][0] <= end:
            self.time, _, timer = heappop(heap)
            self._fire(timer)
        self.time = end

    def finish(self, task: Task, seconds: float) -> Any:
        """Run until a task has ended, and give its result or raise its error; TimeoutError if that takes longer."""
        end, heap = self.time + seconds, self._heap
        task.watched = True
        while not task.done:
            if not heap or heap[0][0] > end:
                raise TimeoutError(f"{task} has not ended after {seconds} simulated seconds")
            self.time, _, timer = heappop(heap)
            self._fire(timer)
        return task.result()

    def fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _fire(self, timer: Timer) -> None:
        fn, process = timer.fn, timer.process
        if fn is None:
            return
        if process is not None:
            if process.dead:
                return
            if process.paused:
                process.backlog.append(timer)
                return
        timer.fn = None
        self.events += 1
        fn()
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error


class Promise(Generic[T]):
    """What one task waits for: kept once, with a value or an error; what comes later is dropped."""

    __slots__ = ("_error", "_process", "_value", "kept", "task")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._value: T | None = None
        self._error: BaseException | None = None
        self.kept = False
        self.task: Task | None = None

    def keep(self, value: T) -> None:
        if not self.kept:
            self.kept, self._value = True, value
            self._wake()

    def fail(self, error: BaseException) -> None:
        if not self.kept:
            self.kept, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self.task is not None:
            self.task.wake()

    def __await__(self) -> Generator[Promise[Any], None, T]:
        if not self.kept:
            if self._process.dead:
                raise GeneratorExit  # a `finally` in a crashed process gets no further than its first await
            yield self
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Task:
    """A coroutine of a process, with asyncio's ways where the code under test could tell: cancel, cancelling."""

    def __init__(self, process: Process, coro: Coroutine[Any, Any, Any], name: str) -> None:
        self.process, self.name = process, name
        self.done = self.watched = False
        self.awaits = 0
        self.cancel_at: int | None = None  # the number of the await at which to cancel it, for exhaustive injection
        self._coro = coro
        self._world = process.world
        self._cancelling = 0
        self._throw = self._woken = False
        self._parked: Promise[Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._joined: list[Promise[bool]] = []
        self.wake()

    def __repr__(self) -> str:
        return f"<{self.process.name}/{self.name}>"

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> bool:
        """Raise CancelledError at whatever it awaits, even if that has come in the meantime."""
        if self.done:
            return False
        self._cancelling += 1
        self._throw = True
        self.wake()
        return True

    def cancelling(self) -> int:
        return self._cancelling

    def uncancel(self) -> int:
        self._cancelling = max(0, self._cancelling - 1)
        return self._cancelling

    async def ended(self) -> None:
        """Wait until it has ended, however it did."""
        if not self.done:
            waiter = self._world.current
            promise: Promise[bool] = Promise(self.process if waiter is None else waiter.process)
            self._joined.append(promise)
            await promise

    def wake(self) -> None:
        if not self._woken:
            self._woken = True
            self._world.after(self._world.random.uniform(0, TURN), self._step, self.process)

    def _step(self) -> None:
        self._woken = False
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.task = None
        before, self._world.current = self._world.current, self
        try:
            if self._throw:
                self._throw = False
                awaited: Promise[Any] = self._coro.throw(asyncio.CancelledError())
            else:
                awaited = self._coro.send(None)
        except StopIteration as end:
            self._end(end.value, None)
        except BaseException as error:
            self._end(None, error)
        else:
            self._park(awaited)
        finally:
            self._world.current = before

    def _park(self, awaited: Promise[Any]) -> None:
        if not isinstance(awaited, Promise):
            raise TypeError(f"{self} awaited {awaited!r}: in a simulation everything is awaited through its runtime")
        self._parked, awaited.task = awaited, self
        self.awaits += 1
        if self.awaits == self.cancel_at:
            self.cancel()
        elif awaited.kept or self._throw:
            self.wake()

    def _end(self, value: Any, error: BaseException | None) -> None:
        self.done, self._value, self._error = True, value, error
        self.process.tasks.pop(self, None)
        for promise in self._joined:
            promise.keep(True)
        told = self.watched or self.process.dead or isinstance(error, asyncio.CancelledError)
        if error is not None and not told:
            error.add_note(f"in {self}, at {self._world.time:.6f} of seed {self._world.seed}")
            self._world.fail(error)

    def kill(self) -> None:
        """End with the process: close the coroutine, which runs its `except` and `finally`."""
        self.done, self._error = True, asyncio.CancelledError()
        for promise in self._joined:
            promise.keep(True)
        before, self._world.current = self._world.current, self
        try:
            if before is not self:  # one that crashes its own process ends at its next await
                self._coro.close()
        finally:
            self._world.current = before
