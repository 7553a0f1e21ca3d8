"""The third runtime: processes in a seeded simulation, where tests inject faults into the code under test.

A `Process` is one process on one machine, with a clock that runs slightly fast or slow, and is the runtime of the code
that runs there. A test can pause or crash it, step its wall clock, and cancel its tasks at any await. A simulated
minute takes milliseconds; see `simulator.py` for what makes a run repeatable.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Hashable
from hashlib import sha256
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from leasehold.runtime.base import Runtime
from leasehold.runtime.simulator import MAX_RESUME_DELAY, MIN_DELAY, Promise, Simulator, Task, Timer

__all__ = ["DRIFT", "Process", "Promise", "SimulatedSignal", "Simulator", "Task", "Timer"]

T = TypeVar("T")
P = ParamSpec("P")

DRIFT: Final = 0.004  # clocks run fast or slow by at most this share, so two differ by less than the drift margin
_MAX_TIMER_DELAY: Final = 0.001  # a timer never fires early, and at most this late


class SimulatedSignal:
    """A remembered wake-up for one task."""

    __slots__ = ("_process", "_promise", "_set")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._promise: Promise[bool] | None = None
        self._set = False

    def set(self) -> None:
        self._set = True
        if self._promise is not None:
            self._promise.resolve(True)

    async def wait(self, seconds: float) -> bool:
        if not self._set and seconds > 0:
            promise: Promise[bool] = Promise(self._process)
            self._promise = promise
            timer = self._process.call_later(seconds, lambda: promise.resolve(False))
            try:
                await promise
            finally:
                timer.cancel()
                self._promise = None
        woken, self._set = self._set, False
        return woken


class SimulatedInterrupt:
    """Cancels one task's body once, and recognises its own cancellation, as in the asyncio runtime."""

    __slots__ = ("_armed", "_cancels_before", "_fired", "_task")

    def __init__(self, task: Task) -> None:
        self._task, self._cancels_before = task, task.cancelling()
        self._armed, self._fired = True, False

    def fire(self) -> None:
        self._task.process.call_later(0.0, self._cancel)

    def _cancel(self) -> None:
        if self._armed and not self._fired:
            self._fired = self._task.cancel()

    def disarm(self, error: type[BaseException] | None) -> bool:
        self._armed = False
        if not self._fired:
            return False
        only_ours = self._task.uncancel() <= self._cancels_before
        return only_ours and error is not None and issubclass(error, asyncio.CancelledError)


class _SimulatedMutex:
    """Steps are atomic here, so no task ever waits for a mutex: finding it held means a deadlock."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        if self._held:
            raise RuntimeError("a mutex was held over an await, or entered twice: with threads this would hang")
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held = False

    def held_by_me(self) -> bool:
        return self._held


class Process:
    """One process on one machine, and the runtime of all code that runs in it."""

    blocking = False

    def __init__(self, simulator: Simulator, name: str, *, rate: float | None = None) -> None:
        self.simulator, self.name = simulator, name
        self.rate = 1 + simulator.random.uniform(-DRIFT, DRIFT) if rate is None else rate
        self.tasks: dict[Task, None] = {}  # in order, unlike a set
        self.paused = self.dead = False
        self.resumed_at = 0.0  # true time
        self.backlog: list[Timer] = []
        self.on_crash: list[Callable[[], None]] = []  # for peers, which see the sockets of this process close
        self._random = random.Random(simulator.random.getrandbits(64))  # noqa: S311  # not for secrets
        self._offset = simulator.random.uniform(0, 1_000_000)
        self._wall_offset = 1_700_000_000 + simulator.random.uniform(-1, 1)
        self._owner_numbers: dict[Task | None, int] = {}
        self.random_bytes = self._random.randbytes
        self.random = self._random.random

    def __repr__(self) -> str:
        return f"<process {self.name}>"

    # ------------------------------------------------------------ the runtime

    def now(self) -> float:
        return self.simulator.time * self.rate + self._offset

    def wall(self) -> float:
        return self.simulator.time + self._wall_offset

    def owner(self) -> Hashable:
        return self.simulator.current_task or self

    def blocked_task(self) -> object:
        return None

    def owner_id(self) -> str:
        # Not random: another draw would change the run of every seed that is kept because it found a bug.
        number = self._owner_numbers.setdefault(self.simulator.current_task, len(self._owner_numbers))
        return sha256(f"{self.name} {number}".encode()).hexdigest()[:8]

    def on_main_thread(self) -> bool:
        return False  # simulated programs have no exit handlers

    def bind(self) -> bool:
        return True

    async def sleep(self, seconds: float) -> None:
        promise: Promise[bool] = Promise(self)
        timer = self.call_later(seconds, lambda: promise.resolve(True))
        try:
            await promise
        finally:
            timer.cancel()

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result = fn(*args, **kwargs)
        await self.sleep(0)  # as on a worker thread: a cancellation may lose the result of a call that was made
        return result

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        raise AssertionError("there are no sockets in a simulation")

    def signal(self) -> SimulatedSignal:
        return SimulatedSignal(self)

    def mutex(self) -> _SimulatedMutex:
        return _SimulatedMutex()

    def interrupt(self) -> SimulatedInterrupt | None:
        task = self.simulator.current_task
        return None if task is None else SimulatedInterrupt(task)

    def is_stray_cancellation(self, error: BaseException) -> bool:
        task = self.simulator.current_task
        return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()

    def exit_on_signal(self, number: int, at_exit: Callable[[], object]) -> None:
        raise NotImplementedError("a simulated process gets no signals")

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self.spawn(start(self), name)

    def close(self) -> None:
        """Nothing to do: tasks started here end on their own."""

    def after_fork(self) -> None:
        """Simulated processes do not fork."""

    # ----------------------------------------------- faults and the scheduler

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> Task:
        """Start a task. In a dead process it never begins."""
        task = Task(self, coro, name)
        if self.dead:
            task.kill()
        else:
            self.tasks[task] = None
        return task

    def call_later(self, seconds: float, fn: Callable[[], object]) -> Timer:
        """Run `fn` once `seconds` have passed on this process's clock. Never early."""
        delay = self.simulator.random.uniform(0, _MAX_TIMER_DELAY if seconds > 0 else MAX_RESUME_DELAY)
        return self.simulator.schedule(max(seconds, 0.0) / self.rate + delay + MIN_DELAY, fn, self)

    def true_time(self, instant: float) -> float:
        """The true time at which this process's clock shows `instant`."""
        return (instant - self._offset) / self.rate

    def step_wall_clock(self, seconds: float) -> None:
        """Step the wall clock, as an administrator would. No lock may be affected."""
        self._wall_offset += seconds

    def pause(self) -> None:
        """Stop as if by SIGSTOP: nothing runs, timers and messages pile up, the clock continues."""
        self.paused = True

    def resume(self) -> None:
        """Continue. Timers and messages that piled up run at once, in no particular order."""
        self.paused, backlog, self.backlog = False, self.backlog, []
        self.resumed_at = self.simulator.time
        for timer in backlog:
            if timer.fn is not None:
                self.simulator.schedule(self.simulator.random.uniform(0, _MAX_TIMER_DELAY), timer.fn, self)

    def crash(self) -> None:
        """Die. From here on nothing this process does, closing its coroutines included, affects other processes."""
        if self.dead:
            return
        self.dead = True
        tasks, self.tasks = list(self.tasks), {}
        self.backlog.clear()
        for task in tasks:
            task.kill()
        for callback in self.on_crash:
            callback()
