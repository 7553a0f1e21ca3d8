"""The blocking face: every call runs on the caller's own thread. Its twin is `aio`; neither holds any logic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, Unpack, overload

from leasehold import engines
from leasehold.config import LockArguments
from leasehold.core.deadlocks import Deadlock
from leasehold.locks_blocking import Lease, Lock, ThreadingLock
from leasehold.many_blocking import Election, Leases, MultiLock
from leasehold.model import Holding
from leasehold.once_blocking import OnceClient
from leasehold.recipes.calling import OnBusy, Task
from leasehold.recipes.client import semaphore_shape
from leasehold.recipes.election import election_options
from leasehold.recipes.lock import Shape
from leasehold.recipes.multilock import distinct
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads

__all__ = ["Client", "Election", "Lease", "Leases", "Lock", "MultiLock", "RWLock", "ThreadingLock"]

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


class Client(OnceClient):
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
        return MultiLock([self._lock("multilock()", name, Shape(), options) for name in distinct(names)])

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
            task = Task(fn, name, on_busy, blocking=True)
            self._options_of("locked()", options)

            @wraps(fn)
            def run(*args: Any, **kwargs: Any) -> T | None:
                lock = self.lock(task.name(args, kwargs), **task.options(options))
                result: T | None = step(task.run(lock, args, kwargs))
                return result

            return run

        return decorate

    def inspect(self, prefix: str = "", exact: bool = False) -> list[Holding]:
        """Who holds and who waits, by name: every claim in this namespace whose name begins with `prefix`."""
        return step(self._inspect(prefix, exact))

    def deadlocks(self) -> list[Deadlock]:
        """Who waits for each other in a circle, in this namespace, in any process: the claims, and the way out. What
        threads and tasks wait for besides locks is not seen; `Unsupported` where the engine keeps no line."""
        return step(self._deadlocks())

    def break_lock(self, name: str, *, token: int) -> bool:
        """Take a lock from its holder. The token names what was seen, so that a successor is never hit. False: that
        grant is over already."""
        return step(self._break(name, token))

    def connect(self) -> None:
        """Connect now rather than at the first call. Raises `Unavailable`."""
        step(self._ping())

    def ping(self) -> float:
        """One round trip to the engine, in seconds. Raises `Unavailable`."""
        return step(self._ping())

    def close(self) -> None:
        """Release what is held and what is owed, within `call_timeout`; then let go of the engine."""
        step(self._close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self, where: str, name: str, shape: Shape, options: LockArguments) -> Lock:
        return Lock(self, Lease, name, shape, self._options_of(where, options))
