"""The blocking lock and its lease: one line per method. The asyncio twin is `aio.locks`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from types import TracebackType
from typing import Any, Never, TypeVar

from leasehold.client.decorator import accepted_parameters
from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease
from leasehold.client.lock import REENTRANT_ADVICE, BaseLock
from leasehold.config import UNSET, Duration, Unset, refuse_unknown
from leasehold.errors import NotAcquired
from leasehold.runtime.base import run_sync

T = TypeVar("T")


class Lease(BaseLease):
    """What you hold: a fencing token, and how long to trust it.

    The watchdog renews it in the background until it is released or lost. It belongs to no thread: pass it on freely,
    and keep a reference. A lease that is garbage-collected while held is released, with a `ResourceWarning`.

    Not promised: that a paused process notices a loss in time. Call `check()` before every step that matters, and let
    the resource refuse older tokens.
    """

    __slots__ = ()

    def verify(self) -> None:
        """Ask the engine, and renew. Raises `LeaseLost` if the engine no longer has the grant, `Unavailable` if it does
        not answer."""
        run_sync(self._renew(None))

    def renew(self, ttl: Duration | None = None) -> None:
        """Set the remaining life to `ttl` seconds from now (default: the lease's own), for this and later renewals.
        Raises as `verify` does.

        A shorter ttl applies to this lease at once; the engine still keeps the name until the end it granted before.
        """
        run_sync(self._renew(ttl))

    def ensure(self, seconds: Duration) -> None:
        """Return when the lease can be trusted for at least `seconds` more: at once and without I/O if that is already
        so, else after a renewal. Call it before a step that takes long and during which renewals may fail.

        A renewal never shortens the lease. If `seconds` need a longer ttl than the lease's, the ttl is raised and stays
        so: the watchdog renews with it from then on, and a holder that dies keeps the name for that long. To set it
        back, call `renew(ttl)` after the step.

        Raises as `verify` does, and `ConfigError` if no lease of this client can last so long: because of `max_ttl`,
        `max_hold`, or the session of the engine (ZooKeeper).
        """
        run_sync(self._ensure(seconds))

    def release(self) -> bool:
        """Release the lease. True: this call ended a live lease, and the engine confirmed it. False: the lease ended
        before (if the engine no longer had the grant, `state` is now LOST), or the engine did not answer: then the
        watchdog retries the release in the background. Never raises for these."""
        return run_sync(self._release_explicitly())

    def hand_over(self) -> str:
        """A text with which another process goes on with this lease: `client.take_over(text)`. Here the lease ends
        (RELEASED) without a release: its `with` block is left without an error, and the name stays held.

        From now until it is taken over, nothing renews the lease: it lives for `remaining` seconds, which the text has
        as `left`. Call `ensure(seconds)` first if that may be too short. A text can be taken over once, however many
        processes have it. It contains a secret: a process that has it can also renew and release the lease, as the
        commands `leasehold renew` and `leasehold release` do.

        The lock must be built with `require={"outlives"}`: without it, the grant may end with this process. Raises
        `ConfigError` otherwise, `LeaseLost`, and `Unavailable` if the engine does not answer: then the lease is still
        held here.
        """
        from leasehold.client import lease_document  # only here: it would slow `import leasehold` down

        return run_sync(lease_document.hand_over(self))

    def wait_lost(self, seconds: Duration | None = None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not lost, or was released."""
        return run_sync(self._wait_lost(seconds))


class Lock(BaseLock[Lease]):
    """A name that one holder can have at a time (as a read lock or semaphore: several). Threads may share it.

    `with lock as lease:` acquires and releases; its body never runs without the lease. If the lease is lost before the
    body ends, leaving the block raises `LeaseLost`; if the body itself raised, the loss is added to that exception as a
    note.
    """

    _deadlock_advice = REENTRANT_ADVICE
    __slots__ = ()

    def acquire(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> Lease:
        """A lease, or `NotAcquired` after `wait` seconds (default: the lock's own; None waits for ever, 0 tries once).

        `Unavailable`: the engine did not answer. `Mismatch`: the name is in use as another kind or with another limit.
        `SelfDeadlock`: this thread already holds the name in a `with` block. However it fails, nothing is held, and no
        claim is left behind. If this thread already holds a reentrant lock, returns the same lease again.
        """
        if unknown:
            refuse_unknown("acquire()", unknown)
        return run_sync(self._acquire(wait))

    def try_acquire(self) -> Lease | None:
        """A lease if the name is free and has no waiters, else None. Raises as `acquire` does, except `NotAcquired`."""
        return run_sync(self._try_acquire())

    def locked(self) -> bool:
        """Whether the name is held at the moment the engine answers. Do not base decisions on it: acquire the lock."""
        return run_sync(self._locked())

    def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` under the lock and return its result. If `fn` has a parameter `lease`, it gets the
        lease. Raises as `with` does."""
        result: T = run_sync(self._call(fn, args, kwargs, accepted_parameters(fn, True, "lease")))
        return result

    def as_threading(self) -> ThreadingLock:
        """The same lock with the interface of `threading.Lock` (`RLock` if reentrant), for code that expects one."""
        return ThreadingLock(self)

    def __enter__(self) -> Lease:
        entered: list[HeldLock] = []
        try:
            lease = run_sync(self._acquire_lease(UNSET, entered=entered))
            return self._record_enter(lease, id(sys._getframe(1)), entered)
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
    """A lock with the interface of `threading.Lock`. It can report a lost lease only through `lease.check()`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._acquired: list[tuple[Hashable, Lease]] = []

    @property
    def lease(self) -> Lease | None:
        """The lease acquired last and not yet released, or None."""
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
        """Release what this thread acquired last; else, as `threading.Lock` allows, what another thread acquired first.

        After a loss two threads may have acquired it: the late one must not release the other's.
        """
        if not self._acquired:
            raise RuntimeError("release unlocked lock")
        own_indexes = self._own_indexes()
        self._acquired.pop(own_indexes[-1] if own_indexes else 0)[1].release()

    def locked(self) -> bool:
        return self._lock.locked()

    # `threading.Condition` calls these three on a reentrant lock.

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
