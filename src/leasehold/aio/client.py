"""The asyncio face: the twin of `blocking`, awaited. Neither holds any logic."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, Unpack, overload

from leasehold import engines
from leasehold.aio.groups import AsyncElection, AsyncMultiLock
from leasehold.aio.locks import AsyncLease, AsyncLock
from leasehold.aio.records import AsyncSchedule, AsyncStatus, Decorator
from leasehold.client.base import BaseClient, semaphore_shape
from leasehold.client.decorator import LockedFunction, OnBusy
from leasehold.client.election import election_options
from leasehold.client.lock import Shape
from leasehold.client.multilock import unique_names
from leasehold.config import LockArguments
from leasehold.core.deadlocks import Deadlock
from leasehold.core.names import check_name
from leasehold.core.once import MAX_RESULT
from leasehold.core.ticks import Missed
from leasehold.model import Holding, Outcome
from leasehold.records import once as recipe
from leasehold.records.access import key_lock, open_records
from leasehold.records.once import DAY, OnceOptions, OnFailure, make_once
from leasehold.records.schedule import KIND as SCHEDULE
from leasehold.records.schedule import make_ticks
from leasehold.records.store import Store
from leasehold.runtime.loop import Loop

T = TypeVar("T")


class AsyncRWLock:
    """Many readers or one writer of a name, first come, first served, so that no writer starves."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._name = client, name

    def read(self, **options: Unpack[LockArguments]) -> AsyncLock:
        """The shared side: held by any number of readers at once. Options as for `AsyncClient.lock`."""
        return self._client._lock("read()", self._name, Shape("shared"), options)

    def write(self, **options: Unpack[LockArguments]) -> AsyncLock:
        """The exclusive side: the same as `client.lock(name)`. Options as for `AsyncClient.lock`."""
        return self._client._lock("write()", self._name, Shape(), options)


class _SkipDecorator(Protocol):
    """What `locked` gives with `on_busy="skip"`: None when it was busy."""

    @overload
    def __call__(self, fn: Callable[..., Awaitable[T]], /) -> Callable[..., Awaitable[T | None]]: ...

    @overload
    def __call__(self, fn: Callable[..., T], /) -> Callable[..., Awaitable[T | None]]: ...


class AsyncClient(BaseClient):
    """As `Client`, for one event loop: the one that uses it first, and after that one is closed, the next.

    Its watchdog is a thread of its own, so a blocked loop loses no lease.
    """

    _runtime_type = Loop
    _engines: ClassVar = engines
    _lease_type = AsyncLease

    def lock(self, name: str, **options: Unpack[LockArguments]) -> AsyncLock:
        """A lock on `name`. Options as for `Client.lock`; `reentrant` is by task."""
        return self._lock("lock()", name, Shape(), options)

    def rwlock(self, name: str) -> AsyncRWLock:
        """Many readers or one writer: `.read(...)` and `.write(...)` give locks."""
        return AsyncRWLock(self, name)

    def semaphore(self, name: str, limit: int, **options: Unpack[LockArguments]) -> AsyncLock:
        """A lock with `limit` holders at once; `lease.slot` says which of them. Options as for `lock`."""
        return self._lock("semaphore()", name, semaphore_shape(limit), options)

    def multilock(self, names: Iterable[str], **options: Unpack[LockArguments]) -> AsyncMultiLock:
        """All of these names, or none, as `Client.multilock` does."""
        return AsyncMultiLock([self._lock("multilock()", name, Shape(), options) for name in unique_names(names)])

    def election(self, name: str, **options: Unpack[LockArguments]) -> AsyncElection:
        """An election of one leader at a time, as `Client.election` gives."""
        return AsyncElection(self._lock("election()", name, Shape(), election_options(self.traits, options)))

    @overload
    async def with_lock(self, name: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...

    @overload
    async def with_lock(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def with_lock(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, plain or async, under the lock; given the lease if it has a parameter `lease`."""
        return await self.lock(name).call(fn, *args, **kwargs)

    @overload
    def locked(
        self, name: str, *, on_busy: Literal["wait", "raise"] = "wait", **options: Unpack[LockArguments]
    ) -> Decorator: ...

    @overload
    def locked(self, name: str, *, on_busy: Literal["skip"], **options: Unpack[LockArguments]) -> _SkipDecorator: ...

    def locked(self, name: str, *, on_busy: OnBusy = "wait", **options: Unpack[LockArguments]) -> Callable[..., Any]:
        """Decorate a function, plain or async, as `Client.locked` does; what comes out is to be awaited."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
            locked_function = LockedFunction(fn, name, on_busy, blocking=False)
            self._lock_options("locked()", options)

            @wraps(fn)
            async def run(*args: Any, **kwargs: Any) -> Any:
                lock = self.lock(locked_function.format_name(args, kwargs), **locked_function.options(options))
                return await locked_function.run(lock, args, kwargs)

            return run

        return decorate

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
        return await make_once(self, key, wait, ttl, store, options).run(fn, args, {})

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
            locked_function = LockedFunction(fn, key, "wait", blocking=False)

            @wraps(fn)
            async def run(*args: Any, **kwargs: Any) -> Any:
                return await make_once(self, locked_function.format_name(args, kwargs), wait, ttl, store, options).run(
                    fn, args, kwargs
                )

            return run

        return decorate

    async def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """Where a key of `once` stands: running, done, failed, or lapsed. None: it never ran, or is no longer kept."""
        return await recipe.outcome(key_lock(self, recipe.KIND, key), open_records(self, store), key)

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
        lock = key_lock(self, SCHEDULE, name, wait=0, ttl=ttl)
        ticks = make_ticks(every, offset, missed, late, most)
        return AsyncSchedule(lock, open_records(self, store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> AsyncStatus:
        """A status that moves along the arrows `moves`, as `Client.status`."""
        return AsyncStatus(open_records(self, store), check_name(name), moves, start)

    async def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        """Who holds and who waits, by name: every claim in this namespace whose name begins with `prefix`."""
        return await self._inspect(prefix, exact)

    async def deadlocks(self) -> list[Deadlock]:
        """Who waits for each other in a circle, as `Client.deadlocks` tells."""
        return await self._deadlocks()

    async def break_lock(self, name: str, *, token: int) -> bool:
        """Take a lock from its holder, as `Client.break_lock` does."""
        return await self._break(name, token)

    async def connect(self) -> None:
        """Connect now rather than at the first call. Raises `Unavailable`."""
        await self._ping()

    async def ping(self) -> float:
        """One round trip to the engine, in seconds. Raises `Unavailable`."""
        return await self._ping()

    async def close(self) -> None:
        """Release what is held and what is owed, within `call_timeout`; then let go of the engine."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _lock(self, where: str, name: str, shape: Shape, options: LockArguments) -> AsyncLock:
        return AsyncLock(self, AsyncLease, name, shape, self._lock_options(where, options))
