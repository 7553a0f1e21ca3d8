"""What recipes and engines need of the world: a clock, a way to wait, and a way to run something aside.

Recipes and engines are written once, as coroutines, against this protocol. There are three runtimes: `threads`,
where nothing ever suspends and `run_sync` runs a coroutine to its end on the caller's own thread; `loop` for asyncio;
and `simulated`, a seeded world with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


class Signal(Protocol):
    """A remembered wake-up for one waiter."""

    def set(self) -> None:
        """Wake the waiter, or let its next `wait` return at once. From any thread, also inside a finaliser."""

    async def wait(self, seconds: float) -> bool:
        """Wait until set, at most `seconds`; takes the wake-up with it. False: the time passed."""


class Interrupt(Protocol):
    """Cancels the body of an `async with` from another thread, as `asyncio.timeout` does from a timer."""

    def fire(self) -> None:
        """Cancel the task that made this, at its next turn, unless disarmed by then. From any thread."""

    def disarm(self, error: type[BaseException] | None) -> bool:
        """Called by that task when it leaves the body. True: `error` is the cancellation fired here, and only that."""


class Mutex(Protocol):
    """A short lock, never held over an await.

    A finaliser or a signal handler may run between any two steps of a thread, also of one that is inside. It would
    wait for itself; so a guard is reentrant, and whoever cannot be entered twice asks `held_by_me` first.
    """

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...

    def held_by_me(self) -> bool:
        """Whether the running thread is inside already."""


class Runtime(Protocol):
    blocking: bool

    def now(self) -> float:
        """Seconds on a clock that never steps and counts suspend. The only clock that decides anything."""

    def wall(self) -> float:
        """Seconds since 1970, as this machine believes: a floor for tokens, a column for people, nothing else."""

    def random_bytes(self, size: int) -> bytes:
        """Unguessable bytes, for secret ids."""

    def random(self) -> float:
        """A random number in [0, 1), for jitter."""

    def owner(self) -> Hashable:
        """The thread or task that is running."""

    def owner_id(self) -> str:
        """What others may know of it: eight hex digits of its own, another in a forked child."""

    def bind(self) -> bool:
        """Check that this runtime may be used from here. False: it moved to another loop, connections must be new."""

    async def sleep(self, seconds: float) -> None: ...

    async def call(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking function without blocking the other tasks."""

    async def wait_fd(self, descriptor: int, seconds: float, *, read: bool = True, write: bool = False) -> bool:
        """Wait until a socket's descriptor can be read or written, as asked for. False: the time passed.

        For drivers that never block: the same code then serves threads and loops. An error counts as ready.
        """

    def signal(self) -> Signal: ...

    def mutex(self) -> Mutex: ...

    def interrupt(self) -> Interrupt | None:
        """For the task that is running; None where a body cannot be interrupted from outside."""

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        """Run `start(runtime)` on a thread of its own, with a blocking runtime (simulated: in this very process)."""

    def close(self) -> None:
        """Let helper threads go. The runtime may be used again."""

    def after_fork(self) -> None:
        """In a forked child: neither the parent's threads nor its loop are here."""


def run_sync(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends. Blocking mode's only engine room."""
    try:
        coro.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # a cast would cost a call
    coro.close()
    raise AssertionError("an engine suspended in blocking mode: use the runtime, not asyncio")


async def maybe_await(value: T | Awaitable[T]) -> T:
    """Take a value or something to be awaited: drivers give one in blocking mode, the other under asyncio."""
    if hasattr(type(value), "__await__"):
        return await value  # type: ignore[misc, no-any-return]
    return value  # type: ignore[return-value]
