"""asyncio mode: coroutines are awaited in the caller's loop; the watchdog still has its own thread."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime, logging_errors
from leasehold.runtime.threads import ThreadMutex, Threads, boot_clock, check_signal

T = TypeVar("T")
P = ParamSpec("P")


class LoopSignal:
    """A remembered wake-up for one task, set from any thread."""

    __slots__ = ("_future", "_loop", "_set")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[bool] | None = None
        self._set = False

    def set(self) -> None:
        self._set = True  # remembered even if the loop is closed or too busy to run the callback
        _call_soon(self._loop, self._wake)

    def _wake(self) -> None:
        if self._set:  # else a wait has already consumed this wake-up, without sleeping
            self._end_wait()

    def _end_wait(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(True)

    async def wait(self, seconds: float) -> bool:
        if not self._set and seconds > 0:
            self._future = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._end_wait)
            try:
                await self._future
            finally:
                timer.cancel()
                self._future = None
        woken, self._set = self._set, False
        return woken


class TaskInterrupt:
    """Cancels one task's body once, and recognises its own cancellation, as `asyncio.timeout` does."""

    __slots__ = ("_armed", "_cancels_before", "_fired", "_loop", "_task")

    def __init__(self, task: asyncio.Task[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._task, self._loop = task, loop
        self._cancels_before = task.cancelling()
        self._armed, self._fired = True, False

    def fire(self) -> None:
        _call_soon(self._loop, self._cancel)

    def _cancel(self) -> None:
        if self._armed and not self._fired:
            self._fired = True
            self._task.cancel()

    def disarm(self, error: type[BaseException] | None) -> bool:
        self._armed = False
        if not self._fired:
            return False
        # If other code has cancelled the task as well, that cancellation must propagate.
        only_ours = self._task.uncancel() <= self._cancels_before
        return only_ours and error is not None and issubclass(error, asyncio.CancelledError)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop is closed: no task is waiting any more
        return


class Loop:
    """The runtime of `AsyncClient`. Belongs to the loop that used it first, until that loop is closed."""

    blocking = False

    def __init__(self, clock: Callable[[], float] = boot_clock) -> None:
        self._threads = threads = Threads(clock)
        self.now, self.wall = threads.now, threads.wall
        self.random_bytes, self.random = threads.random_bytes, threads.random
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._owner_ids: WeakKeyDictionary[asyncio.Task[Any], str] = WeakKeyDictionary()

    def _task(self) -> asyncio.Task[Any] | None:
        """The running task, looked up in the loop this runtime is bound to: finding the running loop first costs a
        system call. Without a task there (not bound yet, or moved to another loop), look in the running loop."""
        return asyncio.current_task(self._loop) or asyncio.current_task()

    def owner(self) -> Hashable:
        return self._task() or self._threads.owner()

    def blocked_task(self) -> object:
        return None

    def owner_id(self) -> str:
        task = self._task()
        if task is None:
            return self._threads.owner_id()
        owner_id = self._owner_ids.get(task)
        if owner_id is None:
            owner_id = self._owner_ids[task] = os.urandom(4).hex()
        return owner_id

    def on_main_thread(self) -> bool:
        return self._threads.on_main_thread()

    def bind(self) -> bool:
        running = asyncio.get_running_loop()
        if running is self._loop:
            return True
        if self._loop is not None and not self._loop.is_closed():
            raise ConfigError(
                "this AsyncClient belongs to another event loop that is still open: create one client per loop, "
                "or close the first loop before using the client in the next"
            )
        first, self._loop = self._loop is None, running
        if not first:  # else the worker, if there is one, runs calls of this very loop
            self._end_worker(wait=True)  # calls started by the old loop end before its connections are dropped
        return first

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._worker is None:  # one thread, so that a blocking driver has one caller at a time
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="leasehold-call")
        return await asyncio.get_running_loop().run_in_executor(self._worker, partial(fn, *args, **kwargs))

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def finish(is_ready: bool) -> None:
            if not future.done():
                future.set_result(is_ready)

        timer = loop.call_later(max(0.0, seconds), finish, False)
        try:
            if read:
                loop.add_reader(descriptor, finish, True)
            if write:
                loop.add_writer(descriptor, finish, True)
            return await future
        finally:
            timer.cancel()
            loop.remove_reader(descriptor)
            loop.remove_writer(descriptor)

    def signal(self) -> LoopSignal:
        return LoopSignal()

    def mutex(self) -> ThreadMutex:
        return ThreadMutex()

    def interrupt(self) -> TaskInterrupt | None:
        task = self._task()
        return None if task is None else TaskInterrupt(task, task.get_loop())

    def is_stray_cancellation(self, error: BaseException) -> bool:
        task = self._task()
        return isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()

    def exit_on_signal(self, number: int, at_exit: Callable[[], object]) -> None:
        loop = asyncio.get_running_loop()

        def end_program() -> None:
            loop.add_signal_handler(number, lambda: None)  # a second one must not interrupt the release
            sys.exit(128 + number)  # leaves the loop; `asyncio.run` then cancels all tasks and waits for them

        check_signal(number)
        loop.add_signal_handler(number, end_program)

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self._threads.start_thread(start, name)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            self._start_task(asyncio.get_running_loop(), work, name)
        except RuntimeError:  # not inside a loop: a finaliser on another thread, or the loop has ended
            if self._loop is None or self._loop.is_closed():
                work.close()
            else:
                _call_soon(self._loop, partial(self._start_task, self._loop, work, name))

    def _start_task(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None], name: str) -> None:
        task = loop.create_task(logging_errors(work, name), name=name)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        self._end_worker(wait=False)

    def _end_worker(self, wait: bool) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=wait, cancel_futures=wait)
            self._worker = None

    def after_fork(self) -> None:
        self._loop = self._worker = None
        self._owner_ids.clear()
        self._tasks.clear()
