"""The asyncio lock and its lease: one line per method. Their twins are in `locks_blocking`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Never, TypeVar, overload

from leasehold.client.decorator import accepts_lease
from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease
from leasehold.client.lock import BaseLock
from leasehold.config import UNSET, Unset, refuse_unknown

T = TypeVar("T")


class AsyncLease(BaseLease):
    """As `Lease`: what you hold, renewed in the background, also while the loop is blocked."""

    __slots__ = ()

    async def verify(self) -> None:
        """Ask the engine itself, and renew. Raises `LeaseLost` or `Unavailable`."""
        await self._renew(None)

    async def renew(self, ttl: float | None = None) -> None:
        """Set the life left to `ttl` seconds from now, as `Lease.renew` does."""
        await self._renew(ttl)

    async def release(self) -> bool:
        """Give it up, as `Lease.release` does. Cancelled half-way, it is repeated in the background."""
        return await self._release_explicitly()

    async def wait_lost(self, seconds: float | None = None) -> bool:
        """Wait until the lease is lost, at most `seconds`. False: it is not lost."""
        return await self._wait_lost(seconds)


class AsyncLock(BaseLock[AsyncLease]):
    """As `Lock`: a name to be held by one at a time. In `async with`, losing the lease cancels the body and the block
    raises `LeaseLost`, as `asyncio.timeout` does with its error."""

    __slots__ = ()

    async def acquire(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> AsyncLease:
        """A lease, or `NotAcquired` after `wait` seconds (None: never; 0: try once). Cancelled, it leaves the line."""
        if unknown:
            refuse_unknown("acquire()", unknown)
        return await self._acquire(wait)

    async def try_acquire(self) -> AsyncLease | None:
        """A lease if the name is free right now, else None."""
        return await self._try_acquire()

    async def locked(self) -> bool:
        """Whether somebody holds it, at the moment the engine is asked. Decide nothing by it."""
        return await self._locked()

    @overload
    async def call(self, fn: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T: ...

    @overload
    async def call(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    async def call(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `fn`, plain or async, under the lock; it gets the lease if it has a parameter `lease`."""
        return await self._call(fn, args, kwargs, accepts_lease(fn, blocking=False))

    async def __aenter__(self) -> AsyncLease:
        entered: list[HeldLock] = []
        try:
            return self._record_enter(await self._acquire_lease(UNSET), id(sys._getframe(1)), entered)
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
