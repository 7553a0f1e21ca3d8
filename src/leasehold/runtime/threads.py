"""Blocking mode: every await returns at once or blocks the caller's own thread. No loop, no switch of threads."""

from __future__ import annotations

import _thread
import atexit
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime, logging_errors, run_sync
from leasehold.runtime.polling import POLLIN, POLLOUT, new_poll

T = TypeVar("T")
P = ParamSpec("P")

# Must count suspend: the leases of a laptop that slept for an hour have expired. On Linux, CLOCK_MONOTONIC stops then,
# as does `time.monotonic` on macOS. Windows has only that one, and it counts.
if sys.platform == "win32":
    boot_clock: Callable[[], float] = time.monotonic
else:
    boot_clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME if sys.platform == "linux" else time.CLOCK_MONOTONIC)

_LONGEST_POLL = 1_000_000.0  # seconds: poll() takes milliseconds as a 32-bit number


def check_signal(number: int) -> None:
    """Raise ConfigError unless this thread may set a handler, and the signal has none."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("signal handlers can be set in the main thread only: call release_on_signal() there")
    try:
        present = signal.getsignal(number)
    except (TypeError, ValueError):
        raise ConfigError(f"release_on_signal() takes signals, such as signal.SIGTERM, not {number!r}") from None
    if present is not signal.SIG_DFL:
        raise ConfigError(
            f"{signal.Signals(number).name} has a handler already: let that one end the program, so that `with` blocks "
            "and the client's close() release the leases"
        )


class ThreadSignal:
    """A plain lock used as a binary semaphore. Unlike an Event, a finaliser may set it while it interrupts a set()."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        try:
            self._lock.release()
        except RuntimeError:  # already set, and not yet consumed by a wait
            return

    async def wait(self, seconds: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))


class ThreadMutex(_thread.RLock):  # type: ignore[misc]  # typeshed calls it final; it is not
    """The interpreter's own reentrant lock, which records its owner."""

    __slots__ = ()
    held_by_me = _thread.RLock._is_owned  # type: ignore[attr-defined]


class _ThreadKey:
    """Unlike a plain `object()`, it can be referenced weakly."""

    __slots__ = ("__weakref__",)


class _Owner(threading.local):
    """One key per thread, as long as the thread lives. Thread idents are reused after that, so they do not serve."""

    def __init__(self) -> None:
        self.key = _ThreadKey()
        self.id = os.urandom(4).hex()


_owner = _Owner()


def _after_fork_in_child() -> None:
    _owner.id = os.urandom(4).hex()  # the thread in the parent keeps the old id


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class Threads:
    """The runtime of `Client`, and of every watchdog."""

    blocking = True

    def __init__(self, clock: Callable[[], float] = boot_clock) -> None:
        self.now = clock
        self.wall = time.time
        # Not buffered: a cloned virtual machine would have the same buffer, and both clones would use the same ids.
        self.random_bytes = os.urandom
        self.random = random.Random().random  # noqa: S311  # not for secrets

    def owner(self) -> Hashable:
        return _owner.key

    def blocked_task(self) -> object:
        # A program that has not imported asyncio, or whose other thread is just doing so, runs no event loop.
        asyncio = sys.modules.get("asyncio")
        running_loop = getattr(asyncio, "_get_running_loop", None)
        if asyncio is None or running_loop is None or (loop := running_loop()) is None:
            return None
        task: object = asyncio.current_task(loop)
        return task or loop

    def owner_id(self) -> str:
        return _owner.id

    def on_main_thread(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def bind(self) -> bool:
        return True

    async def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        poll = new_poll()
        poll.register(descriptor, (POLLIN if read else 0) | (POLLOUT if write else 0))
        return bool(poll.poll(max(0.0, min(seconds, _LONGEST_POLL)) * 1000))

    def signal(self) -> ThreadSignal:
        return ThreadSignal()

    def mutex(self) -> ThreadMutex:
        return ThreadMutex()

    def interrupt(self) -> None:
        return None  # a thread cannot be interrupted from outside: its code calls check()

    def is_stray_cancellation(self, error: BaseException) -> bool:
        return isinstance(error, getattr(sys.modules.get("asyncio"), "CancelledError", ()))  # a thread has no other

    def exit_on_signal(self, number: int, at_exit: Callable[[], object]) -> None:
        def end_program(*_: object) -> None:
            signal.signal(number, signal.SIG_IGN)  # a second one must not interrupt the release
            atexit.register(at_exit)
            sys.exit(128 + number)

        check_signal(number)
        signal.signal(number, end_program)

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        def run() -> None:
            run_sync(start(self))

        threading.Thread(target=run, name=name, daemon=True).start()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        try:
            threading.Thread(target=run_sync, args=(logging_errors(work, name),), name=name, daemon=True).start()
        except RuntimeError:  # the interpreter ends, or has no thread left
            work.close()

    def close(self) -> None:
        """Nothing to do: threads started here end on their own."""

    def after_fork(self) -> None:
        """Nothing to do: this runtime keeps no threads."""
