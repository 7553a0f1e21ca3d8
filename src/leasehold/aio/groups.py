"""Many locks as one, and one leader among many: the asyncio face, one line per method. Its twin is `many_blocking`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Never, Self

from leasehold.aio.locks import AsyncLease, AsyncLock
from leasehold.client.election import BaseElection, BaseTerms
from leasehold.client.held_locks import HeldLock
from leasehold.client.multilock import BaseLeases, BaseMultiLock, MemberLock
from leasehold.config import UNSET, Unset, refuse_unknown
from leasehold.model import Term


class AsyncLeases(BaseLeases[AsyncLease]):
    """As `Leases`: what a multilock gives, good together or not at all."""

    __slots__ = ()

    async def release(self) -> bool:
        """Give up all of them. True: all were held, and the engine confirmed each."""
        return await self._release()

    async def wait_lost(self, seconds: float | None = None) -> bool:
        """Wait until one of them is lost, at most `seconds`. False: none is."""
        return await self._wait_lost(seconds)


class AsyncMultiLock(BaseMultiLock[AsyncLease, AsyncLeases]):
    """As `MultiLock`. In `async with`, losing one of the leases cancels the body, once, and the block raises
    `LeaseLost`."""

    __slots__ = ()
    _lock_type: ClassVar = AsyncLock
    _leases_type: ClassVar = AsyncLeases

    async def acquire(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> AsyncLeases:
        """All of them, or `NotAcquired` after `wait` seconds, and none. Cancelled half-way, it leaves nothing."""
        refuse_unknown("acquire()", unknown)
        return await self._acquire(wait)

    async def try_acquire(self) -> AsyncLeases | None:
        """All of them if they are free right now, else None."""
        return await self._try_acquire()

    async def __aenter__(self) -> AsyncLeases:
        entered: list[MemberLock] = []
        try:
            return await self._acquire_all(UNSET, id(sys._getframe(1)), entered)
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


class AsyncTerms(BaseTerms):
    """An iterator over the terms of an election, for `async for`; see `Election.observe`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Term:
        if (term := await self._next()) is None:
            raise StopAsyncIteration
        return term


class AsyncElection(BaseElection[AsyncLease]):
    """As `Election`: who leads, one of any number of candidates. An object is one candidate."""

    async def campaign(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> AsyncLease:
        """Become the leader, as `Election.campaign` does. Cancelled, it leaves the line."""
        refuse_unknown("campaign()", unknown)
        return await self._campaign(wait)

    async def resign(self) -> bool:
        """Step down, as `Election.resign` does."""
        return await self._resign()

    def lead(self) -> AsyncLock:
        """For `async with election.lead() as term:`; when the term is lost, its body is cancelled."""
        return self._lock  # type: ignore[return-value]  # built as one

    async def serve(self, start: Callable[[AsyncLease], object], stop: Callable[[AsyncLease], object]) -> None:
        """Campaign and lead, as `Election.serve` does; plain and async functions. Cancelled, it stops and resigns."""
        await self._serve(start, stop)

    async def leader(self) -> Term | None:
        """Who leads at the moment the engine is asked. Decide nothing by it."""
        return await self._leader()

    def observe(self, *, seconds: float | None = None) -> AsyncTerms:
        """Terms as they come, as `Election.observe` gives them: `async for term in election.observe():`."""
        return AsyncTerms(self, seconds)
