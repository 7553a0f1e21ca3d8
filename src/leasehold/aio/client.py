"""The asyncio client: the twin of `blocking.client`, awaited. Neither has logic of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from datetime import tzinfo
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, Unpack, overload

from leasehold import engines
from leasehold.aio.groups import AsyncAnyOf, AsyncElection, AsyncMultiLock
from leasehold.aio.locks import AsyncLease, AsyncLock
from leasehold.aio.records import AsyncSchedule, AsyncStatus
from leasehold.client import lease_document
from leasehold.client.base import BaseClient, semaphore_shape
from leasehold.client.decorator import LockedFunction, OnBusy
from leasehold.client.election import election_options
from leasehold.client.lock import Shape
from leasehold.client.multilock import unique_names
from leasehold.config import DAY, MAX_RESULT, Duration, LockArguments, check_keep
from leasehold.core.deadlocks import Deadlock
from leasehold.core.names import check_name
from leasehold.core.ticks import Missed
from leasehold.model import Holding, Outcome
from leasehold.records import once as once_records
from leasehold.records.access import key_lock, open_records
from leasehold.records.once import OnceArguments, OnceOptions, OnFailure, make_once
from leasehold.records.schedule import KIND as SCHEDULE
from leasehold.records.schedule import make_ticks
from leasehold.records.store import Store
from leasehold.runtime.loop import Loop

T = TypeVar("T")
S = TypeVar("S")  # of a method: its object
P = ParamSpec("P")


class AsyncRWLock:
    """Many readers or one writer of a name. Readers and writers share one queue in order of arrival, so that no writer
    starves. A task in a block of the read lock cannot wait for the write lock: that raises `SelfDeadlock`."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._name = client, name

    def read(self, **options: Unpack[LockArguments]) -> AsyncLock:
        """The shared side: any number of readers at once. Options as for `Client.lock`. Raises `Unsupported` if the
        engine has no shared locks."""
        return self._client._lock("read()", self._name, Shape("shared"), options)

    def write(self, **options: Unpack[LockArguments]) -> AsyncLock:
        """The exclusive side: the same as `client.lock(name)`. Options as for `Client.lock`."""
        return self._client._lock("write()", self._name, Shape(), options)


class Decorator(Protocol):
    """What `locked` and `once_per` return. The decorated function is awaited, and has no parameter `lease`."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[AsyncLease, P], Awaitable[T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a function of `Any` fits both
        self, fn: Callable[Concatenate[S, AsyncLease, P], Awaitable[T]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(self, fn: Callable[P, Awaitable[T]], /) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[AsyncLease, P], T], /) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(
        self, fn: Callable[Concatenate[S, AsyncLease, P], T], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]: ...

    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, Coroutine[Any, Any, T]]: ...


class SkipDecorator(Protocol):
    """What `locked` returns with `on_busy="skip"`: the decorated function returns None if the lock is busy."""

    @overload
    def __call__(
        self, fn: Callable[Concatenate[AsyncLease, P], Awaitable[T]], /
    ) -> Callable[P, Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(  # type: ignore[overload-overlap]  # a function of `Any` fits both
        self, fn: Callable[Concatenate[S, AsyncLease, P], Awaitable[T]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(self, fn: Callable[P, Awaitable[T]], /) -> Callable[P, Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(
        self, fn: Callable[Concatenate[AsyncLease, P], T], /
    ) -> Callable[P, Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(
        self, fn: Callable[Concatenate[S, AsyncLease, P], T], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T | None]]: ...

    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, Coroutine[Any, Any, T | None]]: ...


class AsyncClient(BaseClient):
    """The asyncio twin of `Client`, with the same arguments. It belongs to the event loop that uses it first; after
    that loop is closed, to the next one that uses it.

        async with leasehold.AsyncClient("redis://localhost") as client:
            async with client.lock("orders/42", ttl=30, wait=5) as lease:
                ...

    The watchdog has its own thread, so leases are renewed even while the event loop is blocked.
    """

    _runtime_type = Loop
    _engines: ClassVar = engines
    _lease_type = AsyncLease

    def lock(self, name: str, **options: Unpack[LockArguments]) -> AsyncLock:
        """A lock on `name`, to be acquired by `async with` or `acquire()`. Options and errors as for `Client.lock`;
        `reentrant` applies to the same task."""
        return self._lock("lock()", name, Shape(), options)

    def rwlock(self, name: str) -> AsyncRWLock:
        """Many readers or one writer of `name`: `.read(...)` and `.write(...)` return locks."""
        return AsyncRWLock(self, name)

    def semaphore(self, name: str, limit: int, **options: Unpack[LockArguments]) -> AsyncLock:
        """A lock with up to `limit` holders at once; `lease.slot` is the holder's slot, from 0, if the engine numbers
        them. All clients must use the same limit: acquiring with another raises `Mismatch`, unless `set_limit` has
        set one, which then counts for all. Options as for `Client.lock`."""
        return self._lock("semaphore()", name, semaphore_shape(limit), options)

    def multilock(self, names: Iterable[str], **options: Unpack[LockArguments]) -> AsyncMultiLock:
        """All of these names, or none: acquired in sorted order, before one deadline, and rolled back on failure.
        Options as for `Client.lock`; `wait` applies to all of them together."""
        return AsyncMultiLock([self._lock("multilock()", name, Shape(), options) for name in unique_names(names)])

    def any_of(self, names: Iterable[str], **options: Unpack[LockArguments]) -> AsyncLock:
        """A lock on any one of these names: the first that is granted, which `lease.name` says. Each name is attempted
        once, from a random one on; if none is free, the caller queues for all of them, with one deadline, and leaves
        the other queues when one is granted. Names that this task already holds are left out; `SelfDeadlock` if it
        holds all of them. If `wait` is over, `NotAcquired` says who holds each name.

        Options as for `lock`, except that `reentrant` and `on_unavailable="run"` raise `ConfigError`.
        """
        options_ = self._lock_options("any_of()", options)
        return AsyncAnyOf(self, AsyncLease, names, Shape(), options_)

    def election(self, name: str, **options: Unpack[LockArguments]) -> AsyncElection:
        """An election with one leader at a time. The result is one candidate: create one per candidate. Options as for
        `Client.election`."""
        return AsyncElection(self._lock("election()", name, Shape(), election_options(self.traits, options)))

    async def take_over(self, text: str) -> AsyncLease:
        """Go on with a lease that another process has handed over (`hand_over`), with the same token. This client's
        watchdog renews it from now on. Keep a reference, and release it.

        Raises `LeaseLost` if the lease has ended, or another process took it over first (`taken_over`); `Unavailable`
        if the engine does not answer: try again, but if the call without an answer has used up the text, the lease
        expires; `ConfigError` if the text is damaged, or is from another engine or namespace; `Unsupported` if grants
        of the engine die with their client.

        Not promised: a text that `leasehold acquire` printed can be taken over as well, and Leasehold cannot keep two
        processes from doing so. Pass it on to one. The holder that `inspect` shows stays the first one, and a break is
        noticed at the next renewal, because the engine notifies the client that acquired the lease.
        """
        return await lease_document.take_over(self._core, AsyncLease, text)

    @overload
    async def with_lock(self, name: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...

    @overload
    async def with_lock(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def with_lock(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, plain or async, under `lock(name)` and return its result. If `fn` has a parameter
        `lease`, it gets the lease. Raises as `async with` does."""
        return await self.lock(name).call(fn, *args, **kwargs)

    @overload
    def locked(
        self, name: str, *, on_busy: Literal["wait", "raise"] = "wait", **options: Unpack[LockArguments]
    ) -> Decorator: ...

    @overload
    def locked(self, name: str, *, on_busy: Literal["skip"], **options: Unpack[LockArguments]) -> SkipDecorator: ...

    def locked(self, name: str, *, on_busy: OnBusy = "wait", **options: Unpack[LockArguments]) -> Callable[..., Any]:
        """A decorator for plain and async functions: runs the function under a lock. The decorated function is awaited.
        The name is a template over the function's arguments, such as `@client.locked("user:{user_id}")`. Options and
        `on_busy` as for `Client.locked`."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
            locked_function = LockedFunction(fn, name, on_busy, blocking=False)
            self._lock_options("locked()", options)

            async def run(*args: Any, **kwargs: Any) -> Any:
                lock = self.lock(locked_function.format_name(args, kwargs), **locked_function.options(options))
                return await locked_function.run(lock, args, kwargs)

            return locked_function.wrap(run)

        return decorate

    @overload
    async def once(
        self, key: str, fn: Callable[..., Awaitable[T]], /, *args: Any, **options: Unpack[OnceArguments]
    ) -> T: ...

    @overload
    async def once(self, key: str, fn: Callable[..., T], /, *args: Any, **options: Unpack[OnceArguments]) -> T: ...

    async def once(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        keep: Duration | None = DAY,
        wait: Duration | None = None,
        ttl: Duration | None = None,
        on_failure: OnFailure = "retry",
        request: str = "",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> Any:
        """Run `fn(*args)`, plain or async, once for `key`, however many callers there are. All callers get its result,
        through JSON. If the lease is lost, `fn` is cancelled and the call raises `LeaseLost`. Options and other errors
        as for `Client.once`."""
        options = OnceOptions(check_keep(keep), on_failure, request, max_result)
        return await make_once(self, key, wait, ttl, store, options).run(fn, args, {})

    def once_per(
        self,
        key: str,
        *,
        keep: Duration | None = DAY,
        wait: Duration | None = None,
        ttl: Duration | None = None,
        on_failure: OnFailure = "retry",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> Decorator:
        """A decorator for plain and async functions: runs the function once for each key. The decorated function is
        awaited. The key is a template over the function's arguments, such as `@client.once_per("order:{order_id}")`.
        Options and errors as for `Client.once`."""
        options = OnceOptions(check_keep(keep), on_failure, "", max_result)

        def decorate(fn: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
            locked_function = LockedFunction(fn, key, "wait", blocking=False)

            async def run(*args: Any, **kwargs: Any) -> Any:
                return await make_once(self, locked_function.format_name(args, kwargs), wait, ttl, store, options).run(
                    fn, args, kwargs
                )

            return locked_function.wrap(run)

        return decorate

    async def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """The state of a key of `once`: running, done, failed, or expired (its runner died or lost its lease, and the
        next caller takes over). None: it never ran, or its record is no longer kept."""
        return await once_records.outcome(key_lock(self, once_records.KIND, key), open_records(self, store), key)

    def schedule(
        self,
        name: str,
        every: Duration | None = None,
        *,
        offset: Duration = 0.0,
        cron: str | None = None,
        tz: str | tzinfo | None = None,
        missed: Missed = "skip",
        late: Duration | None = None,
        most: int = 100,
        on_failure: OnFailure = "keep",
        ttl: Duration | None = None,
        store: Store | str | None = None,
    ) -> AsyncSchedule:
        """A job that runs once per tick in the whole fleet. Ticks are at the full multiples of `every` seconds since
        1970 (UTC), plus `offset`, or where `cron` says. Options as for `Client.schedule`."""
        lock = key_lock(self, SCHEDULE, name, wait=0, ttl=ttl)
        ticks = make_ticks(every, offset, cron, tz, missed, late, most)
        return AsyncSchedule(lock, open_records(self, store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> AsyncStatus:
        """A status that changes only along the transitions `moves`, such as `{"new": {"paid", "cancelled"}, "paid":
        {"shipped"}}`, one atomic step at a time. Before its first move it is in the state `start`. It takes no lock.
        `store`: as for `Client.once`."""
        return AsyncStatus(open_records(self, store), check_name(name), moves, start)

    async def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        """The holders and waiters of all names in this namespace that begin with `prefix` (`exact`: of the name
        `prefix`). Sorted by name, holders first, then the queue. A snapshot: it may already be out of date."""
        return await self._inspect(prefix, exact)

    async def deadlocks(self) -> list[Deadlock]:
        """Cycles of claims that wait for each other, in this namespace, across processes; see `Client.deadlocks` for
        what is not visible. Raises `Unsupported` if the engine keeps no queue."""
        return await self._deadlocks()

    async def break_lock(self, name: str, *, token: int, why: str | None = None) -> bool:
        """Take a grant away from its holder, for operators. `token` is the token that `inspect` showed, so that a
        successor's grant is never broken. `why` is the reason, for the event `broken`. False: that grant had already
        ended. The holder may notice only at its next renewal."""
        return await self._break(name, token, why)

    async def set_limit(self, name: str, limit: int | None, *, why: str | None = None) -> None:
        """Change the limit of the semaphore `name` while it is in use, for operators. From then on the new limit counts
        for every client, whatever limit its program passes to `semaphore`, so that no program has to be restarted. It
        stays, even while the name is idle, until it is set again. None removes it: once the name is idle, the
        programs' own limit applies again. `why` is the reason, for the event `resized`.

        A larger limit lets waiters in at once. A smaller one ends no lease: nothing is granted until fewer than `limit`
        are held. `Mismatch`: the name is in use as a lock. `Unsupported`: the engine does not have the trait
        `resizable`. `Unavailable`: no answer; the limit may have been set, so set it again.
        """
        await self._set_limit(name, limit, why)

    async def connect(self) -> None:
        """Connect now instead of at the first call. Raises `Unavailable` if the engine does not answer, `ConfigError`
        if its settings are not safe for locks. They are then known, and `require` of a lock is checked when it is
        built."""
        await self._ping()

    async def ping(self) -> float:
        """Make one round trip to the engine, and return its seconds. Raises `Unavailable` if it does not answer."""
        return await self._ping()

    def release_on_signal(self, *numbers: int) -> None:
        """End the program cleanly when one of these signals arrives (default: SIGTERM, which containers get): the event
        loop raises `SystemExit`, and `asyncio.run` cancels all tasks and waits for them, so their `async with` blocks
        release their leases. Use the client itself in an `async with` too. The exit code is 128 + the signal's number.
        Call it once, in the event loop of the main thread. `ConfigError`: the signal has a handler already."""
        self._release_on_signal(numbers, object)

    async def close(self) -> None:
        """Release all leases and send pending releases, within `call_timeout`, then close the engine. Waiting tasks get
        `ConfigError`, and so do later calls; closing again does nothing."""
        await self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _lock(self, where: str, name: str, shape: Shape, options: LockArguments) -> AsyncLock:
        return AsyncLock(self, AsyncLease, name, shape, self._lock_options(where, options))
