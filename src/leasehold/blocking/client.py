"""The blocking face: every call runs on the caller's own thread. Its twin is `aio`; neither holds any logic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, Unpack, overload

from leasehold import engines
from leasehold.blocking.groups import Election, MultiLock
from leasehold.blocking.locks import Lease, Lock
from leasehold.blocking.records import Schedule, Status
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
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads

T = TypeVar("T")


class RWLock:
    """Many readers or one writer of a name, first come, first served, so that no writer starves."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def read(self, **options: Unpack[LockArguments]) -> Lock:
        """The shared side: held by any number of readers at once. Options as for `Client.lock`."""
        return self._client._lock("read()", self._name, Shape("shared"), options)

    def write(self, **options: Unpack[LockArguments]) -> Lock:
        """The exclusive side: the same as `client.lock(name)`. Options as for `Client.lock`."""
        return self._client._lock("write()", self._name, Shape(), options)


class Client(BaseClient):
    """One engine, one watchdog, any number of threads. Close it, or use it in a `with`, to release what it holds.

    `url` names the engine (default: `$LEASEHOLD_URL`); `ttl` is what locks get that ask for none; no call to the engine
    takes longer than `call_timeout` seconds; `on_event` is called with every `Event`. `engine` and `runtime` replace
    the engine that the URL names and the clock it runs by: for tests and for authors of engines.
    """

    _runtime_type = Threads
    _engines: ClassVar = engines
    _lease_type = Lease

    def lock(self, name: str, **options: Unpack[LockArguments]) -> Lock:
        """A lock on `name`. Keyword options, all optional:

        ttl        seconds a grant lives unrenewed (default: the client's)
        wait       seconds to stand in line: None for ever (default), 0 tries once
        holder     who holds it, in words for people
        purpose    what for
        min_hold   keep the name at least so long, also when released earlier
        max_hold   after so long the lease is lost
        delay      the engine keeps the name so much longer than a lost lease trusts it
        reentrant  the same thread may take it again, and gets the same lease
        require    words such as {"fencing", "fair"}: refused here if the engine does not promise them
        """
        return self._lock("lock()", name, Shape(), options)

    def rwlock(self, name: str) -> RWLock:
        """Many readers or one writer: `.read(...)` and `.write(...)` give locks."""
        return RWLock(self, name)

    def semaphore(self, name: str, limit: int, **options: Unpack[LockArguments]) -> Lock:
        """A lock with `limit` holders at once; `lease.slot` says which of them. Options as for `lock`."""
        return self._lock("semaphore()", name, semaphore_shape(limit), options)

    def multilock(self, names: Iterable[str], **options: Unpack[LockArguments]) -> MultiLock:
        """All of these names, or none: sorted, one deadline, rolled back on failure. Options as for `lock`; `wait` is
        for all of them together. `MultiLock` itself takes locks of any shape and of several clients."""
        return MultiLock([self._lock("multilock()", name, Shape(), options) for name in unique_names(names)])

    def election(self, name: str, **options: Unpack[LockArguments]) -> Election:
        """An election of one leader at a time. Options as for `lock`; `max_hold` is the longest a term lasts."""
        return Election(self._lock("election()", name, Shape(), election_options(self.traits, options)))

    def with_lock(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` under the lock; it gets the lease if it has a parameter `lease`."""
        return self.lock(name).call(fn, *args, **kwargs)

    @overload
    def locked(
        self, name: str, *, on_busy: Literal["wait", "raise"] = "wait", **options: Unpack[LockArguments]
    ) -> Callable[[Callable[..., T]], Callable[..., T]]: ...

    @overload
    def locked(
        self, name: str, *, on_busy: Literal["skip"], **options: Unpack[LockArguments]
    ) -> Callable[[Callable[..., T]], Callable[..., T | None]]: ...

    def locked(
        self, name: str, *, on_busy: OnBusy = "wait", **options: Unpack[LockArguments]
    ) -> Callable[[Callable[..., T]], Callable[..., T | None]]:
        """Decorate a function to run under a lock whose name its arguments make: `@client.locked("user:{user_id}")`.

        on_busy: "wait" stands in line as `wait` says, "raise" raises `NotAcquired` at once, "skip" returns None.
        """

        def decorate(fn: Callable[..., T]) -> Callable[..., T | None]:
            locked_function = LockedFunction(fn, name, on_busy, blocking=True)
            self._lock_options("locked()", options)

            @wraps(fn)
            def run(*args: Any, **kwargs: Any) -> T | None:
                lock = self.lock(locked_function.format_name(args, kwargs), **locked_function.options(options))
                result: T | None = run_sync(locked_function.run(lock, args, kwargs))
                return result

            return run

        return decorate

    def once(
        self,
        key: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        keep: float | None = DAY,
        wait: float | None = None,
        ttl: float | None = None,
        on_failure: OnFailure = "retry",
        request: str = "",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> T:
        """Run `fn(*args)` once for `key`, however many call; everybody gets its result, through JSON.

        keep        seconds the result is kept, None for ever; after that the key may run again
        wait        seconds to wait for another caller who runs it: None for ever, 0 raises `NotAcquired` at once
        ttl         so long after a runner died the next takes over (default: the client's)
        on_failure  "retry": the next caller runs it again; "keep": all get `RunFailed` until `keep` is over
        request     a text that stands for what is asked: another one under the same key raises `Mismatch`
        max_result  bytes of JSON; 0: no result is kept, all get None
        store       where the record is kept: a URL, a store, or by default beside the client's locks

        A runner whose lease was lost and taken over gets `StaleToken`: its result is not kept. Not promised: that what
        it did outside the store is undone. Let it commit with the record (`stores.within`), or fence it by the token.
        """
        options = OnceOptions(keep, on_failure, request, max_result)
        return run_sync(make_once(self, key, wait, ttl, store, options).run(fn, args, {}))  # type: ignore[no-any-return]

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
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorate a function to run once for the key that its arguments make: `@client.once_per("order:{order_id}")`.
        Options as for `once`."""
        options = OnceOptions(keep, on_failure, "", max_result)

        def decorate(fn: Callable[..., T]) -> Callable[..., T]:
            locked_function = LockedFunction(fn, key, "wait", blocking=True)

            @wraps(fn)
            def run(*args: Any, **kwargs: Any) -> T:
                call = make_once(self, locked_function.format_name(args, kwargs), wait, ttl, store, options)
                result: T = run_sync(call.run(fn, args, kwargs))
                return result

            return run

        return decorate

    def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """Where a key of `once` stands: running, done, failed, or lapsed. None: it never ran, or is no longer kept."""
        return run_sync(recipe.outcome(key_lock(self, recipe.KIND, key), open_records(self, store), key))

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
    ) -> Schedule:
        """A job for every `every` seconds, `offset` after the full multiples since 1970 (UTC), once in the whole fleet.

        missed      what becomes of ticks at whose time nobody ran: "skip", "last" (only the latest), or "all", in order
        late        so many seconds after its time a tick is still run, where missed ones are skipped (default: every/2)
        most        so many missed ticks are caught up with at most
        on_failure  "keep": a tick that failed is over; "retry": the next to look runs it again
        """
        lock = key_lock(self, SCHEDULE, name, wait=0, ttl=ttl)
        ticks = make_ticks(every, offset, missed, late, most)
        return Schedule(lock, open_records(self, store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> Status:
        """A status with the arrows `moves`, such as `{"new": {"paid", "cancelled"}, "paid": {"shipped"}}`; a name that
        was never moved is in the state `start`."""
        return Status(open_records(self, store), check_name(name), moves, start)

    def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        """Who holds and who waits, by name: every claim in this namespace whose name begins with `prefix`."""
        return run_sync(self._inspect(prefix, exact))

    def deadlocks(self) -> list[Deadlock]:
        """Who waits for each other in a circle, in this namespace, in any process: the claims, and the way out. What
        threads and tasks wait for besides locks is not seen; `Unsupported` where the engine keeps no line."""
        return run_sync(self._deadlocks())

    def break_lock(self, name: str, *, token: int) -> bool:
        """Take a lock from its holder. The token names what was seen, so that a successor is never hit. False: that
        grant is over already."""
        return run_sync(self._break(name, token))

    def connect(self) -> None:
        """Connect now rather than at the first call. Raises `Unavailable`."""
        run_sync(self._ping())

    def ping(self) -> float:
        """One round trip to the engine, in seconds. Raises `Unavailable`."""
        return run_sync(self._ping())

    def close(self) -> None:
        """Release what is held and what is owed, within `call_timeout`; then let go of the engine."""
        run_sync(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, where: str, name: str, shape: Shape, options: LockArguments) -> Lock:
        return Lock(self, Lease, name, shape, self._lock_options(where, options))
