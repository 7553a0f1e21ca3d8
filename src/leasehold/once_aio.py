"""The asyncio face of what is decided by records: the twin of `once_blocking`, awaited."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, Final, Protocol, TypeVar, overload

from leasehold import stores
from leasehold.core.names import check_name
from leasehold.core.once import MAX_RESULT
from leasehold.core.ticks import Missed
from leasehold.events import Hook
from leasehold.model import Outcome
from leasehold.recipes import once as recipe
from leasehold.recipes.calling import Task
from leasehold.recipes.keeping import KeepingClient
from leasehold.recipes.once import DAY, OnceOptions, OnFailure
from leasehold.recipes.optimistic import Terms
from leasehold.recipes.schedule import KIND as SCHEDULE
from leasehold.recipes.schedule import BaseSchedule, checked_ticks
from leasehold.recipes.status import BaseStatus
from leasehold.runtime.loop import Loop
from leasehold.store import Store

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
        return (await self._look(fn))[0]


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


class AsyncOnceClient(KeepingClient):
    """What `AsyncClient` has of it."""

    _stores: ClassVar = stores

    @overload
    async def once(
        self,
        key: str,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        keep: float | None = ...,
        wait: float | None = ...,
        ttl: float | None = ...,
        on_failure: OnFailure = ...,
        request: str = ...,
        max_result: int = ...,
        store: Store | str | None = ...,
    ) -> T: ...

    @overload
    async def once(
        self,
        key: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        keep: float | None = ...,
        wait: float | None = ...,
        ttl: float | None = ...,
        on_failure: OnFailure = ...,
        request: str = ...,
        max_result: int = ...,
        store: Store | str | None = ...,
    ) -> T: ...

    async def once(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        keep: float | None = DAY,
        wait: float | None = None,
        ttl: float | None = None,
        on_failure: OnFailure = "retry",
        request: str = "",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> Any:
        """Run `fn(*args)`, plain or async, once for `key`, as `Client.once` does. When the lease is lost, `fn` is
        cancelled and the call raises `LeaseLost`."""
        options = OnceOptions(keep, on_failure, request, max_result)
        return await self._once(key, wait, ttl, store, options).run(fn, args, {})

    def once_per(
        self,
        key: str,
        *,
        keep: float | None = DAY,
        wait: float | None = None,
        ttl: float | None = None,
        on_failure: OnFailure = "retry",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> Decorator:
        """Decorate a function, plain or async, to run once for the key that its arguments make, as `Client.once_per`
        does; what comes out is to be awaited."""
        options = OnceOptions(keep, on_failure, "", max_result)

        def decorate(fn: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            task = Task(fn, key, "wait", blocking=False)

            @wraps(fn)
            async def run(*args: Any, **kwargs: Any) -> Any:
                return await self._once(task.name(args, kwargs), wait, ttl, store, options).run(fn, args, kwargs)

            return run

        return decorate

    async def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """Where a key of `once` stands: running, done, failed, or lapsed. None: it never ran, or is no longer kept."""
        return await recipe.outcome(self._key_lock(recipe.KIND, key), self._records(store), key)

    def schedule(
        self,
        name: str,
        every: float,
        *,
        offset: float = 0.0,
        missed: Missed = "skip",
        late: float | None = None,
        most: int = 100,
        on_failure: OnFailure = "keep",
        ttl: float | None = None,
        store: Store | str | None = None,
    ) -> AsyncSchedule:
        """A job that runs once per tick in the whole fleet, as `Client.schedule`."""
        lock = self._key_lock(SCHEDULE, name, wait=0, ttl=ttl)
        ticks = checked_ticks(every, offset, missed, late, most)
        return AsyncSchedule(lock, self._records(store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> AsyncStatus:
        """A status that moves along the arrows `moves`, as `Client.status`."""
        return AsyncStatus(self._records(store), check_name(name), moves, start)


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
    return await Terms(attempts, on, pause, most_pause, name, on_event).run(_LOOP, fn, args)
