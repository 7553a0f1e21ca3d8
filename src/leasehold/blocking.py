"""The blocking face: every call runs on the caller's own thread. Its twin is `aio`; neither holds any logic."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Literal, Never, Self, TypeVar, Unpack, overload

from leasehold import engines
from leasehold.config import UNSET, LockArguments, Unset, refuse_unknown
from leasehold.errors import NotAcquired
from leasehold.model import Holding
from leasehold.recipes.calling import OnBusy, Task, wants_lease
from leasehold.recipes.client import BaseClient, semaphore_shape
from leasehold.recipes.entries import Entry
from leasehold.recipes.lease import BaseLease
from leasehold.recipes.lock import BaseLock, Shape
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads

T = TypeVar("T")


class Lease(BaseLease):
    """What you hold: a fencing token, and how long to trust it. Renewed in the background until released or lost."""

    __slots__ = ()

    def verify(self) -> None:
        """Ask the engine itself, and renew. Raises `LeaseLost` if it says no, `Unavailable` if it cannot be asked."""
        step(self._renew(None))

    def renew(self, ttl: float | None = None) -> None:
        """Set the life left to `ttl` seconds from now (default: the lease's own ttl). Raises as `verify` does.

        A shorter life is kept by this lease at once; the engine frees the name no earlier than it had promised.
        """
        step(self._renew(ttl))

    def release(self) -> bool:
        """Give it up. True: a live lease ended by this call, and the engine confirmed it. Never raises for a silent
        engine: the release is then repeated in the background."""
        return step(self._release_by_hand())

    def wait_lost(self, seconds: float | None = None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not lost."""
        return step(self._wait_lost(seconds))


class Lock(BaseLock[Lease]):
    """A name to be held by one at a time (or, as read lock or semaphore, by several). Shared freely by threads."""

    __slots__ = ()

    def acquire(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> Lease:
        """A lease, or `NotAcquired` after `wait` seconds (None: never; 0: try once). Raises `Unavailable` when the
        engine does not answer; then nothing is held, and whatever was asked for is given back."""
        refuse_unknown("acquire()", unknown)
        return step(self._acquire(wait))

    def try_acquire(self) -> Lease | None:
        """A lease if the name is free right now, else None."""
        return step(self._try_acquire())

    def locked(self) -> bool:
        """Whether somebody holds it, at the moment the engine is asked. Decide nothing by it."""
        return step(self._locked())

    def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn` under the lock; it gets the lease if it has a parameter `lease`."""
        result: T = step(self._call(fn, args, kwargs, wants_lease(fn, blocking=True)))
        return result

    def as_threading(self) -> ThreadingLock:
        """The same lock in the shape of `threading.Lock` (`RLock` if reentrant), for code that expects one."""
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        frame = id(sys._getframe(1))
        entered: list[Entry] = []
        try:
            return step(self._enter(frame, entered))
        except BaseException:
            self._undo(entered)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        frame = id(sys._getframe(1))
        left: list[Entry] = []
        try:
            step(self._leave(frame, kind, error, left))
        except BaseException:
            self._abandon(frame, left)
            raise


class ThreadingLock:
    """A lock with the methods of `threading.Lock`. It cannot say that it was lost but by `lease.check()`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._taken: list[tuple[Hashable, Lease]] = []

    @property
    def lease(self) -> Lease | None:
        """What was taken last and not yet released."""
        return self._taken[-1][1] if self._taken else None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        try:
            lease = self._lock.acquire(wait=(None if timeout == -1 else timeout) if blocking else 0)
        except NotAcquired:
            return False
        self._taken.append((self._lock._desk.runtime.owner(), lease))
        return True

    def release(self) -> None:
        """Give up what this thread took last; else, as `threading.Lock` allows, what another thread took first.

        After a loss two threads may have taken it: the late one must not give up the other's.
        """
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        own = self._own()
        self._taken.pop(own[-1] if own else 0)[1].release()

    def locked(self) -> bool:
        return self._lock.locked()

    # What `threading.Condition` asks of a reentrant lock.

    def _is_owned(self) -> bool:
        return bool(self._own())

    def _release_save(self) -> int:
        depth = len(self._own())
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def _own(self) -> list[int]:
        me = self._lock._desk.runtime.owner()
        return [index for index, (owner, _) in enumerate(self._taken) if owner is me]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


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
