"""The asyncio face of what is decided by records: the twin of `once_blocking`, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar, overload

from leasehold.events import Hook
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.schedule import BaseSchedule
from leasehold.records.state_machine import BaseStatus
from leasehold.runtime.loop import Loop

T = TypeVar("T")

_LOOP: Final = Loop()


class Decorator(Protocol):
    """What a decorator takes, a function, plain or async, and what it makes: one to be awaited."""

    @overload
    def __call__(self, fn: Callable[..., Awaitable[T]], /) -> Callable[..., Awaitable[T]]: ...

    @overload
    def __call__(self, fn: Callable[..., T], /) -> Callable[..., Awaitable[T]]: ...


class AsyncSchedule(BaseSchedule):
    """A job that runs once per tick in the whole fleet. Make one in every process, with the same name and times."""

    async def run(self, fn: Callable[..., object]) -> None:
        """Run `fn`, plain or async, at every tick, as `Schedule.run` does, until `stop()`, or until it is cancelled."""
        await self._run(fn)

    async def run_due(self, fn: Callable[..., object]) -> list[datetime]:
        """Run what is due now, and return; for a loop of your own. Gives the ticks that ran here."""
        return (await self._run_due(fn))[0]


class AsyncStatus(BaseStatus):
    """A status that moves along drawn arrows, one atomic step at a time."""

    async def get(self) -> str:
        """The state it is in."""
        return await self._get()

    async def move(self, to: str, *, expected: str | Collection[str] | None = None) -> str:
        """Move it to `to`, and give the state it was in. `Conflict`: it is not in an expected state (default: any that
        has an arrow to `to`), and was not moved. `Unavailable`: whether it was moved cannot be told. Of any number of
        callers with the same step, at most one succeeds."""
        return await self._move(to, expected)


@overload
async def optimistic_async(
    fn: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    attempts: int = ...,
    on: type[BaseException] | tuple[type[BaseException], ...] = ...,
    pause: float = ...,
    most_pause: float = ...,
    name: str = ...,
    on_event: Hook | None = ...,
) -> T: ...


@overload
async def optimistic_async(
    fn: Callable[..., T],
    /,
    *args: Any,
    attempts: int = ...,
    on: type[BaseException] | tuple[type[BaseException], ...] = ...,
    pause: float = ...,
    most_pause: float = ...,
    name: str = ...,
    on_event: Hook | None = ...,
) -> T: ...


async def optimistic_async(
    fn: Callable[..., Any],
    /,
    *args: Any,
    attempts: int = 5,
    on: type[BaseException] | tuple[type[BaseException], ...] = (),
    pause: float = 0.01,
    most_pause: float = 1.0,
    name: str = "",
    on_event: Hook | None = None,
) -> Any:
    """As `optimistic`, for a function, plain or async, to be awaited."""
    return await RetryPolicy(attempts, on, pause, most_pause, name, on_event).run(_LOOP, fn, args)
