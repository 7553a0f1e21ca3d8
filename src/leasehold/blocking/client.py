"""The blocking client: every call runs on the caller's own thread. Its asyncio twin is `aio.client`; neither has logic
of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from leasehold import engines
from leasehold.blocking.locks import Lease, Lock
from leasehold.client.base import BaseClient, semaphore_shape
from leasehold.client.decorator import LockedFunction, OnBusy
from leasehold.client.lock import Shape
from leasehold.config import DAY, MAX_RESULT, Duration, LockArguments, check_keep
from leasehold.core.names import check_name
from leasehold.model import Holding, Outcome
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads

# Groups and records are imported by the methods that need them: a program that only locks names starts sooner.
if TYPE_CHECKING:
    from datetime import tzinfo

    from leasehold.blocking.groups import Election, MultiLock
    from leasehold.blocking.records import Schedule, Status
    from leasehold.core.deadlocks import Deadlock
    from leasehold.core.ticks import Missed
    from leasehold.records.once import OnFailure
    from leasehold.records.store import Store

T = TypeVar("T")
S = TypeVar("S")  # of a method: its object
P = ParamSpec("P")


class RWLock:
    """Many readers or one writer of a name. Readers and writers share one queue in order of arrival, so that no writer
    starves. A thread in a block of the read lock cannot wait for the write lock: that raises `SelfDeadlock`."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def read(self, **options: Unpack[LockArguments]) -> Lock:
        """The shared side: any number of readers at once. Options as for `Client.lock`. Raises `Unsupported` if the
        engine has no shared locks."""
        return self._client._lock("read()", self._name, Shape("shared"), options)

    def write(self, **options: Unpack[LockArguments]) -> Lock:
        """The exclusive side: the same as `client.lock(name)`. Options as for `Client.lock`."""
        return self._client._lock("write()", self._name, Shape(), options)


class Decorator(Protocol):
    """What `locked` and `once_per` return. The decorated function has no parameter `lease`."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Lease, P], T], /) -> Callable[P, T]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[S, Lease, P], T], /) -> Callable[Concatenate[S, P], T]: ...

    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T]: ...


class SkipDecorator(Protocol):
    """What `locked` returns with `on_busy="skip"`: the decorated function returns None if the lock is busy."""

    @overload
    def __call__(self, fn: Callable[Concatenate[Lease, P], T], /) -> Callable[P, T | None]: ...

    @overload
    def __call__(self, fn: Callable[Concatenate[S, Lease, P], T], /) -> Callable[Concatenate[S, P], T | None]: ...

    @overload
    def __call__(self, fn: Callable[P, T], /) -> Callable[P, T | None]: ...


class Client(BaseClient):
    """One engine, one watchdog, any number of threads. Close it, or use it in a `with`, to release all its leases.

        with leasehold.Client("redis://localhost") as client:
            with client.lock("orders/42", ttl=30, wait=5) as lease:
                ...

    url           selects the engine by its scheme (default: `$LEASEHOLD_URL`; if that is not set, SQLite in the user's
                  state directory, which excludes processes of one user on one machine); or a pool that has the
                  settings: a redis-py client, a psycopg_pool, an engine of SQLAlchemy. It is not used itself
    namespace     separates applications: the same name in two namespaces is two locks
    holder        label of the holder, for display only (default: host and process id)
    ttl           seconds a grant lives without a renewal, for locks that do not set their own
    call_timeout  the longest a single call to the engine may take, in seconds; a wait may take many calls
    on_event      is called with every `Event`
    max_ttl       the longest ttl to accept (default: 24 hours), because a holder that dies keeps the name for its ttl
    breaker       True: after 5 calls in a row without an answer, new attempts raise `Unavailable` at once, with
                  `retry_in`, and one call a second is sent; renewals and releases always are
    password      of the user in the URL: a text, or a function that returns one. The function is called for every new
                  connection, so the password may change; it should return quickly. For a lock server: the API key
    drift         how far the clocks of client and engine may drift apart, as a share of the time measured: leases are
                  trusted for their ttl less this share, and at least 2 ms (default: 0.01; at most 0.5)
    engine        replaces the engine that the URL selects: for tests and for authors of engines
    runtime       replaces the runtime and its clock: for tests

    Durations are seconds, texts such as "30s" or "1h30m", or `timedelta`, here and in all other calls.

    Raises `ConfigError` for a bad value, an unknown scheme or an unknown option in the URL. Does not connect yet: see
    `connect`. After a fork the child can use the client; leases of the parent are LOST there.
    """

    _runtime_type = Threads
    _engines: ClassVar = engines
    _lease_type = Lease

    def lock(self, name: str, **options: Unpack[LockArguments]) -> Lock:
        """A lock on `name`, to be acquired by `with` or `acquire()`. Keyword options, all optional:

        ttl        seconds a grant lives without a renewal (default: the client's)
        wait       seconds to wait in the queue: None waits for ever (default), 0 tries once
        holder     label of the holder, for display only (default: the client's)
        purpose    purpose of the lock, for display only
        min_hold   seconds to hold the name at least, even if it is released earlier
        max_hold   seconds after which the lease is lost
        delay      extra seconds the engine holds the name after a lease is lost, for resources that check no tokens
        reentrant  the same thread may acquire it again, and gets the same lease
        require    promises that the engine must make, such as {"fencing", "fair"}
        on_unavailable  if the engine does not answer: "raise" raises `Unavailable` (default), "wait" retries until
                   `wait` is over, "run" returns a lease that is not `guaranteed`: nothing excludes other holders then
        group      the label `group` of its metrics (default: the name without its ids)
        strict     the lease is LOST as soon as one renewal fails or is overdue, instead of AT_RISK until its time is up
        on_deadlock  "raise": while the caller waits, search for deadlocks, and raise `Deadlocked` if it is in one and
                   its turn to give up has come; "wait": wait on (default)

        Raises `ConfigError` for a bad value, `TypeError` for an unknown option, `Unsupported` if the engine cannot do
        what the options ask for.
        """
        return self._lock("lock()", name, Shape(), options)

    def rwlock(self, name: str) -> RWLock:
        """Many readers or one writer of `name`: `.read(...)` and `.write(...)` return locks."""
        return RWLock(self, name)

    def semaphore(self, name: str, limit: int, **options: Unpack[LockArguments]) -> Lock:
        """A lock with up to `limit` holders at once; `lease.slot` is the holder's slot, from 0, if the engine numbers
        them. All clients must use the same limit: acquiring with another raises `Mismatch`, unless `set_limit` has
        set one, which then counts for all. Options as for `lock`."""
        return self._lock("semaphore()", name, semaphore_shape(limit), options)

    def multilock(self, names: Iterable[str], **options: Unpack[LockArguments]) -> MultiLock:
        """All of these names, or none: acquired in sorted order, before one deadline, and rolled back on failure.
        Options as for `lock`; `wait` applies to all of them together. To combine locks of other kinds or of several
        clients, create a `MultiLock` yourself."""
        from leasehold.blocking.groups import MultiLock
        from leasehold.client.multilock import unique_names

        return MultiLock([self._lock("multilock()", name, Shape(), options) for name in unique_names(names)])

    def any_of(self, names: Iterable[str], **options: Unpack[LockArguments]) -> Lock:
        """A lock on any one of these names: the first that is granted, which `lease.name` says. Each name is attempted
        once, from a random one on; if none is free, the caller queues for all of them, with one deadline, and leaves
        the other queues when one is granted. Names that this thread already holds are left out; `SelfDeadlock` if it
        holds all of them. If `wait` is over, `NotAcquired` says who holds each name.

        Options as for `lock`, except that `reentrant` and `on_unavailable="run"` raise `ConfigError`.
        """
        from leasehold.blocking.groups import AnyOf

        options_ = self._lock_options("any_of()", options)
        return AnyOf(self, Lease, names, Shape(), options_)

    def election(self, name: str, **options: Unpack[LockArguments]) -> Election:
        """An election with one leader at a time. The result is one candidate: create one per candidate. Options as for
        `lock`, except `reentrant`; `max_hold` is the longest a term lasts. Raises `Unsupported` if the engine has no
        fencing tokens."""
        from leasehold.blocking.groups import Election
        from leasehold.client.election import election_options

        return Election(self._lock("election()", name, Shape(), election_options(self.traits, options)))

    def take_over(self, text: str) -> Lease:
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
        from leasehold.client import lease_document

        return run_sync(lease_document.take_over(self._core, Lease, text))

    def with_lock(self, name: str, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` under `lock(name)` and return its result. If `fn` has a parameter `lease`, it gets
        the lease. Raises as `with` does."""
        return self.lock(name).call(fn, *args, **kwargs)

    @overload
    def locked(
        self, name: str, *, on_busy: Literal["wait", "raise"] = "wait", **options: Unpack[LockArguments]
    ) -> Decorator: ...

    @overload
    def locked(self, name: str, *, on_busy: Literal["skip"], **options: Unpack[LockArguments]) -> SkipDecorator: ...

    def locked(self, name: str, *, on_busy: OnBusy = "wait", **options: Unpack[LockArguments]) -> Callable[..., Any]:
        """A decorator: runs the function under a lock. The name is a template over the function's arguments, such as
        `@client.locked("user:{user_id}")`. If the function has a parameter `lease`, it gets the lease, and callers and
        its signature leave `lease` out. Type checkers know that only if it is the first parameter (after `self`).

        on_busy  if the lock is busy: "wait" waits as the option `wait` says, "raise" raises `NotAcquired` at once,
                 "skip" returns None without running the function

        Options as for `lock`. If the template does not fit the function, decorating raises `ConfigError`.
        """

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            locked_function = LockedFunction(fn, name, on_busy, blocking=True)
            self._lock_options("locked()", options)

            def run(*args: Any, **kwargs: Any) -> Any:
                lock = self.lock(locked_function.format_name(args, kwargs), **locked_function.options(options))
                return run_sync(locked_function.run(lock, args, kwargs))

            return locked_function.wrap(run)

        return decorate

    def once(
        self,
        key: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        keep: Duration | None = DAY,
        wait: Duration | None = None,
        ttl: Duration | None = None,
        on_failure: OnFailure = "retry",
        request: str = "",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> T:
        """Run `fn(*args)` once for `key`, however many callers there are. All callers get its result, through JSON. If
        `fn` has a parameter `lease`, it gets the lease.

        keep        seconds the result is kept, None for ever; after that the key may run again
        wait        seconds to wait while another caller runs it: None waits for ever, 0 does not wait
        ttl         seconds after which another caller takes over from a runner that died (default: the client's)
        on_failure  "retry": the next caller runs it again; "keep": all callers get `RunFailed` until `keep` is over
        request     a text that identifies the request, such as a hash: another one under the same key is refused
        max_result  the largest result, in bytes of JSON; 0: no result is kept, and all callers get None
        store       where the record is kept: a URL or a store object (default: next to the client's locks)

        Raises what `fn` raises in the call that ran it. `NotAcquired`: another caller was still running it when `wait`
        was over. `RunFailed`: it failed before, and the failure is kept. `Mismatch`: the key belongs to another
        `request`. `StaleToken`: this runner lost its lease and another took over, so its result is not kept.

        Not promised: that what such a runner did outside the store is undone. Commit the effect together with the
        record (`stores.within`), or let the resource check the token.
        """
        from leasehold.records.once import OnceOptions, make_once

        options = OnceOptions(check_keep(keep), on_failure, request, max_result)
        return run_sync(make_once(self, key, wait, ttl, store, options).run(fn, args, {}))  # type: ignore[no-any-return]

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
        """A decorator: runs the function once for each key. The key is a template over the function's arguments, such
        as `@client.once_per("order:{order_id}")`. Options and errors as for `once`."""
        from leasehold.records.once import OnceOptions, make_once

        options = OnceOptions(check_keep(keep), on_failure, "", max_result)

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            locked_function = LockedFunction(fn, key, "wait", blocking=True)

            def run(*args: Any, **kwargs: Any) -> Any:
                call = make_once(self, locked_function.format_name(args, kwargs), wait, ttl, store, options)
                return run_sync(call.run(fn, args, kwargs))

            return locked_function.wrap(run)

        return decorate

    def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """The state of a key of `once`: running, done, failed, or expired (its runner died or lost its lease, and the
        next caller takes over). None: it never ran, or its record is no longer kept."""
        from leasehold.records import once as once_records
        from leasehold.records.access import key_lock, open_records

        return run_sync(once_records.outcome(key_lock(self, once_records.KIND, key), open_records(self, store), key))

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
    ) -> Schedule:
        """A job that runs once per tick in the whole fleet. Ticks are at the full multiples of `every` seconds since
        1970 (UTC), plus `offset`, or where `cron` says. Create the same schedule in every process and call its `run`.

        cron        instead of `every`: minute, hour, day, month and weekday, such as "30 4 * * 1-5", or "@daily"
        tz          the time zone of `cron`, such as "Europe/Berlin" (default: UTC)
        missed      which missed ticks are run later: "skip" (none), "last" (only the latest) or "all", in order
        late        with "skip", a tick is missed when it is this many seconds old (default: half of the time until
                    the next); a new schedule begins with the next tick if the current one is older
        most        with "all", the most ticks to catch up with
        on_failure  "keep": a tick that failed is not run again; "retry": the next process that checks runs it again
        ttl         seconds after which another process takes over from a runner that died (default: the client's)
        store       where the records of ticks are kept: a URL or a store object (default: next to the client's locks)
        """
        from leasehold.blocking.records import Schedule
        from leasehold.records.access import key_lock, open_records
        from leasehold.records.schedule import KIND, make_ticks

        lock = key_lock(self, KIND, name, wait=0, ttl=ttl)
        ticks = make_ticks(every, offset, cron, tz, missed, late, most)
        return Schedule(lock, open_records(self, store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> Status:
        """A status that changes only along the transitions `moves`, such as `{"new": {"paid", "cancelled"}, "paid":
        {"shipped"}}`, one atomic step at a time. Before its first move it is in the state `start`. It takes no lock.
        `store`: as for `once`."""
        from leasehold.blocking.records import Status
        from leasehold.records.access import open_records

        return Status(open_records(self, store), check_name(name), moves, start)

    def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        """The holders and waiters of all names in this namespace that begin with `prefix` (`exact`: of the name
        `prefix`). Sorted by name, holders first, then the queue. A snapshot: it may already be out of date."""
        return run_sync(self._inspect(prefix, exact))

    def deadlocks(self) -> list[Deadlock]:
        """Cycles of claims that wait for each other, in this namespace, across processes. Each shows its claims, and
        the grant to break to resolve it. Only detects threads or tasks that wait for one lock while holding another:
        waits on anything else are not visible. Raises `Unsupported` if the engine keeps no queue."""
        return run_sync(self._deadlocks())

    def break_lock(self, name: str, *, token: int, why: str | None = None) -> bool:
        """Take a grant away from its holder, for operators. `token` is the token that `inspect` showed, so that a
        successor's grant is never broken. `why` is the reason, for the event `broken`. False: that grant had already
        ended.

        Not promised: that the holder stops at once. It may notice only at its next renewal; a fence refuses its token
        as soon as the resource has seen a newer one.
        """
        return run_sync(self._break(name, token, why))

    def set_limit(self, name: str, limit: int | None, *, why: str | None = None) -> None:
        """Change the limit of the semaphore `name` while it is in use, for operators. From then on the new limit counts
        for every client, whatever limit its program passes to `semaphore`, so that no program has to be restarted. It
        stays, even while the name is idle, until it is set again. None removes it: once the name is idle, the
        programs' own limit applies again. `why` is the reason, for the event `resized`.

        A larger limit lets waiters in at once. A smaller one ends no lease: nothing is granted until fewer than `limit`
        are held. `Mismatch`: the name is in use as a lock. `Unsupported`: the engine does not have the trait
        `resizable`. `Unavailable`: no answer; the limit may have been set, so set it again.
        """
        run_sync(self._set_limit(name, limit, why))

    def connect(self) -> None:
        """Connect now instead of at the first call. Raises `Unavailable` if the engine does not answer, `ConfigError`
        if its settings are not safe for locks. They are then known, and `require` of a lock is checked when it is
        built."""
        run_sync(self._ping())

    def ping(self) -> float:
        """Make one round trip to the engine, and return its seconds. Raises `Unavailable` if it does not answer."""
        return run_sync(self._ping())

    def release_on_signal(self, *numbers: int) -> None:
        """End the program cleanly when one of these signals arrives (default: SIGTERM, which containers get): the main
        thread raises `SystemExit`, so its `with` blocks end and release their leases; when all threads that are not
        daemons have ended, the client is closed, which releases all other leases. The exit code is 128 + the signal's
        number. Call it once, in the main thread. `ConfigError`: the signal has a handler already."""
        self._release_on_signal(numbers, self.close)

    def close(self) -> None:
        """Release all leases and send pending releases, within `call_timeout`, then close the engine. Waiting threads
        get `ConfigError`, and so do later calls; closing again does nothing."""
        run_sync(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, where: str, name: str, shape: Shape, options: LockArguments) -> Lock:
        return Lock(self, Lease, name, shape, self._lock_options(where, options))
