"""Many locks as one, and one leader among many: the blocking face, one line per method. Its twin is `many_aio`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Never, Self

from leasehold.blocking.locks import Lease, Lock
from leasehold.client.election import BaseElection, BaseTerms
from leasehold.client.held_locks import HeldLock
from leasehold.client.multilock import BaseLeases, BaseMultiLock, MemberLock
from leasehold.config import UNSET, Unset, refuse_unknown
from leasehold.model import Term
from leasehold.runtime.base import run_sync


class Leases(BaseLeases[Lease]):
    """What a multilock gives: leases by name, good together or not at all."""

    __slots__ = ()

    def release(self) -> bool:
        """Give up all of them. True: all were held, and the engine confirmed each."""
        return run_sync(self._release())

    def wait_lost(self, seconds: float | None = None) -> bool:
        """Wait until one of them is lost, at most `seconds`. False: none is."""
        return run_sync(self._wait_lost(seconds))


class MultiLock(BaseMultiLock[Lease, Leases]):
    """Several locks as one, also of clients of different engines: `MultiLock([old.lock("a"), new.lock("a")])`.

    Sorted here, so that the order of the list does not matter; taken one after the other before one deadline, `wait`
    (default: the shortest of the locks' own); rolled back without waiting if one of them fails.
    """

    __slots__ = ()
    _lock_type: ClassVar = Lock
    _leases_type: ClassVar = Leases

    def acquire(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> Leases:
        """All of them, or `NotAcquired` after `wait` seconds, and none. Raises as `Lock.acquire` does, and `LeaseLost`
        when one was lost while it stood in line for another."""
        refuse_unknown("acquire()", unknown)
        return run_sync(self._acquire(wait))

    def try_acquire(self) -> Leases | None:
        """All of them if they are free right now, else None."""
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


class Terms(BaseTerms):
    """An iterator over the terms of an election; see `Election.observe`."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Term:
        if (term := run_sync(self._next())) is None:
            raise StopIteration
        return term


class Election(BaseElection[Lease]):
    """Who leads: one of any number of candidates, in any number of processes. An object is one candidate."""

    def campaign(self, *, wait: float | Unset | None = UNSET, **unknown: Never) -> Lease:
        """Become the leader, or `NotAcquired` after `wait` seconds (None: never; 0: try once). The lease is the term,
        its token the fence. It leads until `resign()`, or until the lease is lost."""
        refuse_unknown("campaign()", unknown)
        return run_sync(self._campaign(wait))

    def resign(self) -> bool:
        """Step down. True: this candidate led. `serve` is only told here: it drains and releases on its own thread, and
        then returns. So this may be called from any thread, and from a signal handler."""
        return run_sync(self._resign())

    def lead(self) -> Lock:
        """For `with election.lead() as term:`, which campaigns, and resigns when its body is done."""
        return self._lock  # type: ignore[return-value]  # built as one

    def serve(self, start: Callable[[Lease], object], stop: Callable[[Lease], object]) -> None:
        """Campaign and lead, term after term, until `resign()`: `start(term)` when it leads, `stop(term)` at the end.

        Both run here, on the caller's own thread, in turns: no stop without a start, no start without a stop, and no
        two terms of one election at once in one process. `start` is to return soon; `stop` runs as soon as the term is
        lost, and before it is given up when it is resigned: that is the time to drain. An error in one of them ends it.
        """
        run_sync(self._serve(start, stop))

    def leader(self) -> Term | None:
        """Who leads at the moment the engine is asked. Decide nothing by it."""
        return run_sync(self._leader())

    def observe(self, *, seconds: float | None = None) -> Terms:
        """Terms as they come, the one under way first: tokens rise, no term comes twice. Ends after `seconds`.

        A term is in view for a second at least, or as long as its ttl if that is shorter: none is missed by an observer
        that gets to look as often. One that did not says so: `term.missed`. An engine that does not answer is asked
        again.
        """
        return Terms(self, seconds)
