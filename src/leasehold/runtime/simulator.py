"""The scheduler of a simulation: one true time, the events scheduled in it, and the tasks that wait for them.

`simulated.py` adds processes and makes each of them a runtime. The same seed gives the same run, so a failure can be
replayed as often as needed: nothing here depends on a real clock, a hash order or a memory address. A step between two
awaits is atomic, and time passes only while every task waits.
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

MAX_RESUME_DELAY: Final = 0.0001  # a task that is ready resumes within this
MIN_DELAY: Final = 1e-9  # the least time between cause and effect, so that every retry loop reaches its deadline


class Timer:
    """A scheduled event, unless cancelled."""

    __slots__ = ("fn", "process")

    def __init__(self, fn: Callable[[], object], process: Process | None) -> None:
        self.fn: Callable[[], object] | None = fn
        self.process = process

    def cancel(self) -> None:
        self.fn = None


class Simulator:
    """The simulated time, the random generator, and the queue of events."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.time = 0.0
        self.random = random.Random(seed)  # noqa: S311  # not for secrets
        self.current_task: Task | None = None
        self.event_count = 0
        self._heap: list[tuple[float, int, Timer]] = []
        self._timer_number = 0
        self._failure: BaseException | None = None

    def schedule(self, seconds: float, fn: Callable[[], object], process: Process | None = None) -> Timer:
        """Run `fn` in `seconds` of true time. With a process: once it is not paused, and not if it is dead."""
        timer = Timer(fn, process)
        self._timer_number += 1
        heappush(self._heap, (self.time + max(seconds, MIN_DELAY), self._timer_number, timer))
        return timer

    def run(self, seconds: float) -> None:
        """Let `seconds` pass. An exception that a task did not catch is raised here."""
        end, heap = self.time + seconds, self._heap
        while heap and heap[0][0] <= end:
            self.time, _, timer = heappop(heap)
            self._fire(timer)
        self.time = end

    def run_until_complete(self, task: Task, seconds: float) -> Any:
        """Run until a task ends; return its result or raise its error. TimeoutError after `seconds`."""
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
        self.event_count += 1
        fn()
        if self._failure is not None:
            error, self._failure = self._failure, None
            raise error


class Promise(Generic[T]):
    """What one task awaits. Resolved once, with a value or an error; later results are dropped."""

    __slots__ = ("_error", "_process", "_value", "done", "task")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._value: T | None = None
        self._error: BaseException | None = None
        self.done = False
        self.task: Task | None = None

    def resolve(self, value: T) -> None:
        if not self.done:
            self.done, self._value = True, value
            self._wake()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.done, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self.task is not None:
            self.task.wake()

    def __await__(self) -> Generator[Promise[Any], None, T]:
        if not self.done:
            if self._process.dead:
                raise GeneratorExit  # in a crashed process a `finally` ends at its first await
            yield self
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class Task:
    """A coroutine of a process. Like an asyncio task where the code under test could notice: cancel, cancelling."""

    def __init__(self, process: Process, coro: Coroutine[Any, Any, Any], name: str) -> None:
        self.process, self.name = process, name
        self.done = self.watched = False
        self.await_count = 0
        self.cancel_at: int | None = None  # the number of the await at which to cancel it, for exhaustive injection
        self._coro = coro
        self._simulator = process.simulator
        self._cancelling = 0
        self._cancel_pending = self._wake_pending = False
        self._awaiting: Promise[Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._joiners: list[Promise[bool]] = []
        self.wake()

    def __repr__(self) -> str:
        return f"<{self.process.name}/{self.name}>"

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> bool:
        """Raise CancelledError at the task's await, even if the awaited result has arrived in the meantime."""
        if self.done:
            return False
        self._cancelling += 1
        self._cancel_pending = True
        self.wake()
        return True

    def cancelling(self) -> int:
        return self._cancelling

    def uncancel(self) -> int:
        self._cancelling = max(0, self._cancelling - 1)
        return self._cancelling

    async def join(self) -> None:
        """Wait until the task has ended, whatever the outcome."""
        if not self.done:
            waiter = self._simulator.current_task
            promise: Promise[bool] = Promise(self.process if waiter is None else waiter.process)
            self._joiners.append(promise)
            await promise

    def wake(self) -> None:
        if not self._wake_pending:
            self._wake_pending = True
            self._simulator.schedule(self._simulator.random.uniform(0, MAX_RESUME_DELAY), self._resume, self.process)

    def _resume(self) -> None:
        self._wake_pending = False
        promise, self._awaiting = self._awaiting, None
        if promise is not None:
            promise.task = None
        previous, self._simulator.current_task = self._simulator.current_task, self
        try:
            if self._cancel_pending:
                self._cancel_pending = False
                awaited: Promise[Any] = self._coro.throw(asyncio.CancelledError())
            else:
                awaited = self._coro.send(None)
        except StopIteration as stop:
            self._finish(stop.value, None)
        except BaseException as error:
            self._finish(None, error)
        else:
            self._suspend(awaited)
        finally:
            self._simulator.current_task = previous

    def _suspend(self, awaited: Promise[Any]) -> None:
        if not isinstance(awaited, Promise):
            raise TypeError(f"{self} awaited {awaited!r}: in a simulation, await only what the runtime provides")
        self._awaiting, awaited.task = awaited, self
        self.await_count += 1
        if self.await_count == self.cancel_at:
            self.cancel()
        elif awaited.done or self._cancel_pending:
            self.wake()

    def _finish(self, value: Any, error: BaseException | None) -> None:
        self.done, self._value, self._error = True, value, error
        self.process.tasks.pop(self, None)
        for promise in self._joiners:
            promise.resolve(True)
        is_expected = self.watched or self.process.dead or isinstance(error, asyncio.CancelledError)
        if error is not None and not is_expected:
            error.add_note(f"in {self}, at {self._simulator.time:.6f} of seed {self._simulator.seed}")
            self._simulator.fail(error)

    def kill(self) -> None:
        """End with the process: close the coroutine, which runs its `except` and `finally`."""
        self.done, self._error = True, asyncio.CancelledError()
        for promise in self._joiners:
            promise.resolve(True)
        previous, self._simulator.current_task = self._simulator.current_task, self
        try:
            if previous is not self:  # a task that crashes its own process ends at its next await
                self._coro.close()
        finally:
            self._simulator.current_task = previous
