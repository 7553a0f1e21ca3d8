"""Multilocks, pools and elections, asyncio: one line per method. The blocking twin is `blocking.groups`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Never, Self

from leasehold.aio.locks import AsyncLease, AsyncLock
from leasehold.client.any_of import BaseAnyOf
from leasehold.client.election import BaseElection, BaseTerms
from leasehold.client.held_locks import HeldLock
from leasehold.client.multilock import BaseLeases, BaseMultiLock, MemberLock
from leasehold.config import UNSET, Duration, Unset, refuse_unknown
from leasehold.model import Term


class AsyncLeases(BaseLeases[AsyncLease]):
    """What a multilock returns: a mapping from names to leases, which are valid only together."""

    __slots__ = ()

    async def release(self) -> bool:
        """Release all of them. True: all were held, and the engine confirmed each release. Unconfirmed releases are
        retried in the background."""
        return await self._release()

    async def wait_lost(self, seconds: Duration | None = None) -> bool:
        """Wait until one of them is lost, at most `seconds`. False: none is lost."""
        return await self._wait_lost(seconds)


class AsyncMultiLock(BaseMultiLock[AsyncLease, AsyncLeases]):
    """The asyncio twin of `MultiLock`: several locks as one, even of clients of different engines. In `async with`,
    losing one of the leases cancels the body, once, and the block raises `LeaseLost`."""

    __slots__ = ()
    _lock_type: ClassVar = AsyncLock
    _leases_type: ClassVar = AsyncLeases

    async def acquire(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> AsyncLeases:
        """All leases, or an error and none. Raises as `AsyncLock.acquire` does, and `LeaseLost` if one was lost while
        waiting for another. If it is cancelled, no claim is left behind."""
        refuse_unknown("acquire()", unknown)
        return await self._acquire(wait)

    async def try_acquire(self) -> AsyncLeases | None:
        """All leases if all names are free right now, else None."""
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


class AsyncAnyOf(BaseAnyOf[AsyncLease], AsyncLock):
    """A lock on any one of several names: `lease.name` says which. From `AsyncClient.any_of`."""

    __slots__ = ()


class AsyncTerms(BaseTerms):
    """An iterator over the terms of an election, for `async for`: see `AsyncElection.observe`."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Term:
        if (term := await self._next()) is None:
            raise StopAsyncIteration
        return term


class AsyncElection(BaseElection[AsyncLease]):
    """One candidate of an election: one of any number of candidates, in any number of processes, leads at a time.

    Not promised: that a paused leader notices in time that its term has ended. Pass `term.token` with every write, and
    let the resource refuse older tokens.
    """

    async def campaign(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> AsyncLease:
        """Wait until this candidate leads, or raise `NotAcquired` after `wait` seconds (default: the election's own;
        None waits for ever, 0 tries once). The lease is the term, and its token fences the leader's writes. The term
        lasts until `resign()`, or until the lease is lost. If it is cancelled, it leaves the queue. `SelfDeadlock`:
        this candidate already leads."""
        refuse_unknown("campaign()", unknown)
        return await self._campaign(wait)

    async def resign(self) -> bool:
        """Step down. True: this candidate led. While `serve` is running, this is only a request: `serve` calls `stop`
        in its own task, releases the name and returns."""
        return await self._resign()

    def lead(self) -> AsyncLock:
        """For `async with election.lead() as term:`, which campaigns on entry and resigns on exit. If the term is lost,
        the body is cancelled, and the block raises `LeaseLost`."""
        return self._lock  # type: ignore[return-value]  # built as one

    async def serve(self, start: Callable[[AsyncLease], object], stop: Callable[[AsyncLease], object]) -> None:
        """Campaign and lead, term after term, until `resign()`. Calls `start(term)` when this candidate leads, and
        `stop(term)` when the term ends; both may be plain or async, and run in the caller's own task, alternately. If
        it is cancelled while leading, it calls `stop` and resigns. The promises are those of `Election.serve`."""
        await self._serve(start, stop)

    async def leader(self) -> Term | None:
        """The term at the moment the engine answers, or None. Do not base decisions on it: it may have ended."""
        return await self._leader()

    def observe(self, *, seconds: Duration | None = None) -> AsyncTerms:
        """Iterate over the current term and all later ones: `async for term in election.observe():`. Each comes once,
        in the order of their tokens. Ends after `seconds` (None: never). The promises are those of `Election.observe`.
        """
        return AsyncTerms(self, seconds)
