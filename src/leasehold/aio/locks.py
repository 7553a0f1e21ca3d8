"""The asyncio lock and its lease: one line per method. The blocking twin is `blocking.locks`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Never, TypeVar, overload

from leasehold.client import lease_document
from leasehold.client.decorator import accepted_parameters
from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease
from leasehold.client.lock import REENTRANT_ADVICE, BaseLock
from leasehold.config import UNSET, Duration, Unset, refuse_unknown

T = TypeVar("T")


class AsyncLease(BaseLease):
    """What you hold: a fencing token, and how long to trust it.

    The watchdog renews it in the background until it is released or lost, even while the event loop is blocked. It
    belongs to no task: pass it on freely, and keep a reference. A lease that is garbage-collected while held is
    released, with a `ResourceWarning`.

    Not promised: that a paused process notices a loss in time. Call `check()` before every step that matters, and let
    the resource refuse older tokens.
    """

    __slots__ = ()

    async def verify(self) -> None:
        """Ask the engine, and renew. Raises `LeaseLost` if the engine no longer has the grant, `Unavailable` if it does
        not answer."""
        await self._renew(None)

    async def renew(self, ttl: Duration | None = None) -> None:
        """Set the remaining life to `ttl` seconds from now (default: the lease's own), for this and later renewals.
        Raises as `verify` does.

        A shorter ttl applies to this lease at once; the engine still keeps the name until the end it granted before.
        """
        await self._renew(ttl)

    async def ensure(self, seconds: Duration) -> None:
        """Return when the lease can be trusted for at least `seconds` more: at once and without I/O if that is already
        so, else after a renewal. Call it before a step that takes long and during which renewals may fail.

        A renewal never shortens the lease. If `seconds` need a longer ttl than the lease's, the ttl is raised and stays
        so: the watchdog renews with it from then on, and a holder that dies keeps the name for that long. To set it
        back, call `renew(ttl)` after the step.

        Raises as `verify` does, and `ConfigError` if no lease of this client can last so long: because of `max_ttl`,
        `max_hold`, or the session of the engine (ZooKeeper).
        """
        await self._ensure(seconds)

    async def release(self) -> bool:
        """Release the lease. True: this call ended a live lease, and the engine confirmed it. False: the lease ended
        before (if the engine no longer had the grant, `state` is now LOST), or the engine did not answer: then the
        watchdog retries the release in the background, even if this is cancelled. Never raises for these."""
        return await self._release_explicitly()

    async def hand_over(self) -> str:
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
        return await lease_document.hand_over(self)

    async def wait_lost(self, seconds: Duration | None = None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not lost, or was released."""
        return await self._wait_lost(seconds)


class AsyncLock(BaseLock[AsyncLease]):
    """A name that one holder can have at a time (as a read lock or semaphore: several). Tasks may share it.

    `async with lock as lease:` acquires and releases; its body never runs without the lease. If the lease is lost, the
    body is cancelled and the block raises `LeaseLost`, just as `asyncio.timeout` raises `TimeoutError`.
    """

    _deadlock_advice = REENTRANT_ADVICE
    __slots__ = ()

    async def acquire(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> AsyncLease:
        """A lease, or `NotAcquired` after `wait` seconds (default: the lock's own; None waits for ever, 0 tries once).

        `Unavailable`: the engine did not answer. `Mismatch`: the name is in use as another kind or with another limit.
        `SelfDeadlock`: this task already holds the name in an `async with` block. However it fails, even if it is
        cancelled, nothing is held, and no claim is left behind. If this task already holds a reentrant lock, returns
        the same lease again.
        """
        if unknown:
            refuse_unknown("acquire()", unknown)
        return await self._acquire(wait)

    async def try_acquire(self) -> AsyncLease | None:
        """A lease if the name is free and has no waiters, else None. Raises as `acquire` does, except `NotAcquired`."""
        return await self._try_acquire()

    async def locked(self) -> bool:
        """Whether the name is held at the moment the engine answers. Do not base decisions on it: acquire the lock."""
        return await self._locked()

    @overload
    async def call(self, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...

    @overload
    async def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn(*args, **kwargs)`, plain or async, under the lock and return its result. If `fn` has a parameter
        `lease`, it gets the lease. Raises as `async with` does."""
        return await self._call(fn, args, kwargs, accepted_parameters(fn, False, "lease"))

    async def __aenter__(self) -> AsyncLease:
        entered: list[HeldLock] = []
        try:
            lease = await self._acquire_lease(UNSET, entered=entered)
            return self._record_enter(lease, id(sys._getframe(1)), entered)
        except BaseException:
            self._rollback_enter(entered)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exited: list[HeldLock] = []
        try:
            await self._exit(id(sys._getframe(1)), kind, error, exited)
        except BaseException:
            self._rollback_exit(id(sys._getframe(1)), exited)
            raise
