"""What client code and engines need from their surroundings: a clock, a way to wait, and a way to start a thread.

Client code and engines are written once, as coroutines, against this protocol. There are three runtimes: `threads`,
where nothing ever suspends and `run_sync` runs a coroutine to its end on the caller's own thread; `loop` for asyncio;
and `simulated`, a seeded simulation with a virtual clock.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable
from contextlib import suppress
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

from leasehold.core.timing import STABLE_AFTER, backoff

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger("leasehold.runtime")

_RESTART_PAUSE = 0.05  # seconds before a thread that failed starts again; doubled after each failure in a row
_MAX_RESTART_PAUSE = 2.0


class Signal(Protocol):
    """A remembered wake-up for one waiter."""

    def set(self) -> None:
        """Wake the waiter, or let its next `wait` return at once. From any thread, even inside a finaliser."""

    async def wait(self, seconds: float) -> bool:
        """Wait until set, at most `seconds`, and consume the wake-up. False: the time passed."""


class Interrupt(Protocol):
    """Cancels the body of an `async with` from another thread, as `asyncio.timeout` does from a timer."""

    def fire(self) -> None:
        """Cancel the task that made this, when the loop next runs, unless disarmed by then. From any thread."""

    def disarm(self, error: type[BaseException] | None) -> bool:
        """Called by that task when it leaves the body. True: `error` is the cancellation fired here and no other."""


class Mutex(Protocol):
    """A short lock, never held over an await.

    A finaliser or a signal handler may run between any two steps of a thread, even while that thread holds the mutex,
    and would then wait for itself. So a mutex is reentrant, and code that must not be reentered checks `held_by_me`
    first.
    """

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...

    def held_by_me(self) -> bool:
        """Whether the running thread already holds the mutex."""


class Runtime(Protocol):
    blocking: bool

    def now(self) -> float:
        """Seconds on a clock that never steps and counts suspend. All decisions use this clock."""

    def wall(self) -> float:
        """Seconds since 1970 by this machine's clock. Only for display and as a lower bound for tokens."""

    def random_bytes(self, size: int) -> bytes:
        """Unguessable bytes, for secret ids."""

    def random(self) -> float:
        """A random number in [0, 1), for jitter."""

    def owner(self) -> Hashable:
        """The thread or task that is running."""

    def blocked_task(self) -> object:
        """In blocking mode: the asyncio task whose event loop this thread runs, and now blocks. Else None."""

    def owner_id(self) -> str:
        """The public name of that thread or task: eight random hex digits, different in a forked child."""

    def on_main_thread(self) -> bool:
        """Whether the interpreter's main thread is running: the one that calls exit handlers."""

    def bind(self) -> bool:
        """Check that this runtime may be used from here. False: it moved to another loop and needs new connections."""

    async def sleep(self, seconds: float) -> None: ...

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function without blocking the other tasks."""

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        """Wait until a socket's descriptor is readable (`read`) or writable (`write`). False: the time passed.

        For drivers that never block, so that the same code serves threads and loops. An error counts as ready.
        """

    def signal(self) -> Signal: ...

    def mutex(self) -> Mutex: ...

    def interrupt(self) -> Interrupt | None:
        """An interrupt for the running task; None if this runtime cannot interrupt a body from outside."""

    def is_stray_cancellation(self, error: BaseException) -> bool:
        """Whether it is asyncio's cancellation, but not of the running task: its code awaited what was cancelled."""

    def exit_on_signal(self, number: int, at_exit: Callable[[], object]) -> None:
        """When this signal arrives, end the program as `sys.exit(128 + number)` does. `at_exit` is called at the end in
        blocking mode; under asyncio all tasks are cancelled. Raises ConfigError if a handler cannot be set here."""

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `start(runtime)` on its own thread, with a blocking runtime (simulated: as a task of this process)."""

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> object:
        """Start `work` and return at once: as a task of the running loop, or on a short thread of its own. Its errors
        are logged. If it cannot start, because the loop or the program has ended, it is dropped."""

    def close(self) -> None:
        """End helper threads. The runtime may be used again."""

    def after_fork(self) -> None:
        """Called in a forked child, which has neither the parent's threads nor its loop."""


def run_sync(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, to its end. All of blocking mode runs through here."""
    try:
        coro.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # a cast would cost a call
    coro.close()
    raise AssertionError("an engine suspended in blocking mode: use the runtime, not asyncio")


def restarting(
    start: Callable[[Runtime], Coroutine[Any, Any, None]], log: logging.Logger, thread: str
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """What a thread runs that must not end by an error: an unexpected one is logged, and `start` is called again."""

    async def run(runtime: Runtime) -> None:
        failures = 0
        while True:
            began = runtime.now()
            try:
                return await start(runtime)
            except Exception as error:
                log_unexpected(log, thread, error)
            failures = 0 if runtime.now() > began + STABLE_AFTER else failures + 1
            await runtime.sleep(backoff(failures, _RESTART_PAUSE, _MAX_RESTART_PAUSE, 0.5 + runtime.random() / 2))

    return run


async def logging_errors(work: Coroutine[Any, Any, None], name: str) -> None:
    """What `spawn` runs: no caller is left to see an error."""
    try:
        await work
    except Exception as error:
        with suppress(Exception):  # as in `log_unexpected`
            _log.error("unexpected error in %s", name, exc_info=error)


def log_unexpected(log: logging.Logger, thread: str, error: BaseException) -> None:
    with suppress(Exception):  # a log handler of the program may fail as well, and must not end the thread
        log.error("unexpected error in %s; restarting", thread, exc_info=error)


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Return a value, or await it if it is awaitable: drivers return values in blocking mode, awaitables in asyncio."""
    if hasattr(type(value), "__await__"):
        return await value  # type: ignore[misc, no-any-return]
    return value  # type: ignore[return-value]
