"""Multilocks, pools and elections, blocking: one line per method. The asyncio twin is `aio.groups`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Never, Self

from leasehold.blocking.locks import Lease, Lock
from leasehold.client.any_of import BaseAnyOf
from leasehold.client.election import BaseElection, BaseTerms
from leasehold.client.held_locks import HeldLock
from leasehold.client.multilock import BaseLeases, BaseMultiLock, MemberLock
from leasehold.config import UNSET, Duration, Unset, refuse_unknown
from leasehold.model import Term
from leasehold.runtime.base import run_sync


class Leases(BaseLeases[Lease]):
    """What a multilock returns: a mapping from names to leases, which are valid only together."""

    __slots__ = ()

    def release(self) -> bool:
        """Release all of them. True: all were held, and the engine confirmed each release. Unconfirmed releases are
        retried in the background."""
        return run_sync(self._release())

    def wait_lost(self, seconds: Duration | None = None) -> bool:
        """Wait until one of them is lost, at most `seconds`. False: none is lost."""
        return run_sync(self._wait_lost(seconds))


class MultiLock(BaseMultiLock[Lease, Leases]):
    """Several locks as one, even of clients of different engines: `MultiLock([old.lock("a"), new.lock("a")])`.

    The locks are sorted, so the order of the list does not matter and two multilocks cannot deadlock each other. They
    are acquired one after the other, before one deadline: `wait` seconds for all (default: the shortest `wait` of the
    locks). If one fails, the others are released without waiting. If a lease is lost during a `with` block, leaving the
    block raises `LeaseLost`.
    """

    __slots__ = ()
    _lock_type: ClassVar = Lock
    _leases_type: ClassVar = Leases

    def acquire(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> Leases:
        """All leases, or an error and none. Raises as `Lock.acquire` does, and `LeaseLost` if one was lost while
        waiting for another."""
        refuse_unknown("acquire()", unknown)
        return run_sync(self._acquire(wait))

    def try_acquire(self) -> Leases | None:
        """All leases if all names are free right now, else None."""
        return run_sync(self._try_acquire())

    def __enter__(self) -> Leases:
        entered: list[MemberLock] = []
        try:
            return run_sync(self._acquire_all(UNSET, id(sys._getframe(1)), entered))
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


class AnyOf(BaseAnyOf[Lease], Lock):
    """A lock on any one of several names: `lease.name` says which. From `Client.any_of`."""

    __slots__ = ()


class Terms(BaseTerms):
    """An iterator over the terms of an election: see `Election.observe`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Term:
        if (term := run_sync(self._next())) is None:
            raise StopIteration
        return term


class Election(BaseElection[Lease]):
    """One candidate of an election: one of any number of candidates, in any number of processes, leads at a time.

    Not promised: that a paused leader notices in time that its term has ended. Pass `term.token` with every write, and
    let the resource refuse older tokens.
    """

    def campaign(self, *, wait: Duration | Unset | None = UNSET, **unknown: Never) -> Lease:
        """Wait until this candidate leads, or raise `NotAcquired` after `wait` seconds (default: the election's own;
        None waits for ever, 0 tries once). The lease is the term, and its token fences the leader's writes. The term
        lasts until `resign()`, or until the lease is lost. `SelfDeadlock`: this candidate already leads."""
        refuse_unknown("campaign()", unknown)
        return run_sync(self._campaign(wait))

    def resign(self) -> bool:
        """Step down. True: this candidate led. May be called from any thread and from a signal handler. While `serve`
        is running, this is only a request: `serve` calls `stop` on its own thread, releases the name and returns."""
        return run_sync(self._resign())

    def lead(self) -> Lock:
        """For `with election.lead() as term:`, which campaigns on entry and resigns on exit. If the term is lost during
        the block, leaving it raises `LeaseLost`."""
        return self._lock  # type: ignore[return-value]  # built as one

    def serve(self, start: Callable[[Lease], object], stop: Callable[[Lease], object]) -> None:
        """Campaign and lead, term after term, until `resign()`. Calls `start(term)` when this candidate leads, and
        `stop(term)` when the term ends.

        Both run on the caller's own thread, alternately. A `start` that returned is followed by exactly one `stop`, and
        in one process two terms of one election never overlap. `start` should return soon. On resigning, `stop` runs
        before the name is released: that is the time to drain. After a loss it runs as soon as possible, but another
        leader may exist already (`term.held` is False). An exception in either ends `serve`. If the engine does not
        answer, `serve` keeps campaigning.
        """
        run_sync(self._serve(start, stop))

    def leader(self) -> Term | None:
        """The term at the moment the engine answers, or None. Do not base decisions on it: it may have ended."""
        return run_sync(self._leader())

    def observe(self, *, seconds: Duration | None = None) -> Terms:
        """Iterate over the current term and all later ones: each once, in the order of their tokens. Ends after
        `seconds` (None: never).

        The observer polls. A term stays visible for at least a second, or for its ttl if that is shorter, so an
        observer that polls in time misses none. If it could not, the next term says so: `term.missed`. If the engine
        does not answer, the observer retries.
        """
        return Terms(self, seconds)
