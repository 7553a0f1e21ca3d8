"""The blocking lock and its lease: one line per method. Their twins are in `locks_aio`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Never, TypeVar

from leasehold.client.decorator import accepts_lease
from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease
from leasehold.client.lock import BaseLock
from leasehold.config import UNSET, Unset, refuse_unknown
from leasehold.errors import NotAcquired
from leasehold.runtime.base import run_sync

T = TypeVar("T")


class Lease(BaseLease):
    """What you hold: a fencing token, and how long to trust it. Renewed in the background until released or lost."""

    __slots__ = ()

    def verify(self) -> None:
        """Ask the engine itself, and renew. Raises `LeaseLost` if it says no, `Unavailable` if it cannot be asked."""
        run_sync(self._renew(None))

    def renew(self, ttl: float | None = None) -> None:
        """Set the life left to `ttl` seconds from now (default: the lease's own ttl). Raises as `verify` does.

        A shorter life is kept by this lease at once; the engine frees the name no earlier than it had promised.
        """
        run_sync(self._renew(ttl))

    def release(self) -> bool:
        """Give it up. True: a live lease ended by this call, and the engine confirmed it. Never raises for a silent
        engine: the release is then repeated in the background."""
        return run_sync(self._release_explicitly())

    def wait_lost(self, seconds: float | None = None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not lost."""
        return run_sync(self._wait_lost(seconds))


class Lock(BaseLock[Lease]):
    """A name to be held by one at a time (or, as read lock or semaphore, by several). Shared freely by threads."""

    __slots__ = ()

    def acquire(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> Lease:
        """A lease, or `NotAcquired` after `wait` seconds (None: never; 0: try once). Raises `Unavailable` when the
        engine does not answer; then nothing is held, and whatever was asked for is given back."""
        if unknown:
            refuse_unknown("acquire()", unknown)
        return run_sync(self._acquire(wait))

    def try_acquire(self) -> Lease | None:
        """A lease if the name is free right now, else None."""
        return run_sync(self._try_acquire())

    def locked(self) -> bool:
        """Whether somebody holds it, at the moment the engine is asked. Decide nothing by it."""
        return run_sync(self._locked())

    def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn` under the lock; it gets the lease if it has a parameter `lease`."""
        result: T = run_sync(self._call(fn, args, kwargs, accepts_lease(fn, blocking=True)))
        return result

    def as_threading(self) -> ThreadingLock:
        """The same lock in the shape of `threading.Lock` (`RLock` if reentrant), for code that expects one."""
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        entered: list[HeldLock] = []
        try:
            return self._record_enter(run_sync(self._acquire_lease(UNSET)), id(sys._getframe(1)), entered)
        except BaseException:
            self._rollback_enter(entered)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exited: list[HeldLock] = []
        try:
            run_sync(self._exit(id(sys._getframe(1)), kind, error, exited))
        except BaseException:
            self._rollback_exit(id(sys._getframe(1)), exited)
            raise


class ThreadingLock:
    """A lock with the methods of `threading.Lock`. It cannot say that it was lost but by `lease.check()`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._acquired: list[tuple[Hashable, Lease]] = []

    @property
    def lease(self) -> Lease | None:
        """What was taken last and not yet released."""
        return self._acquired[-1][1] if self._acquired else None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        try:
            lease = self._lock.acquire(wait=(None if timeout == -1 else timeout) if blocking else 0)
        except NotAcquired:
            return False
        self._acquired.append((self._lock._core.runtime.owner(), lease))
        return True

    def release(self) -> None:
        """Give up what this thread took last; else, as `threading.Lock` allows, what another thread took first.

        After a loss two threads may have taken it: the late one must not give up the other's.
        """
        if not self._acquired:
            raise RuntimeError("release unlocked lock")
        own_indexes = self._own_indexes()
        self._acquired.pop(own_indexes[-1] if own_indexes else 0)[1].release()

    def locked(self) -> bool:
        return self._lock.locked()

    # What `threading.Condition` asks of a reentrant lock.

    def _is_owned(self) -> bool:
        return bool(self._own_indexes())

    def _release_save(self) -> int:
        depth = len(self._own_indexes())
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def _own_indexes(self) -> list[int]:
        this_owner = self._lock._core.runtime.owner()
        return [index for index, (owner, _) in enumerate(self._acquired) if owner is this_owner]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
