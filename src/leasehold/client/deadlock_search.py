"""Finds out, while a caller waits, that it waits in a cycle: for locks with `on_deadlock="raise"`.

A search is two inspections of the namespace, the second only if the first shows a cycle: a cycle whose claims are in
both existed at one moment (`core/deadlocks.py`). A wait begins to search after `FIRST_SEARCH` seconds, and then after
pauses that grow up to `MAX_PAUSE`. All waits of a client share the results: it searches at most once in `MIN_INTERVAL`
seconds, however many of its callers wait.

One caller of a cycle must give up, and one is enough. All callers that search see the same order (`giving_up_order`).
The first in that order raises as soon as it sees the cycle. The second waits, because the first may not have asked for
"raise": it raises only if the same cycle is still there `GIVE_UP_INTERVAL` seconds later, the third after twice that
time. `GIVE_UP_INTERVAL` is longer than the pause between two searches, so each caller has its chance before the next
one gives up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

from leasehold.core.deadlocks import Deadlock, deadlocks, giving_up_order, identity, seen_in_both
from leasehold.errors import Deadlocked, LeaseholdError, ListingTooLong, Unavailable
from leasehold.model import Claim

if TYPE_CHECKING:
    from leasehold.client.core import ClientCore

FIRST_SEARCH: Final = 1.0  # seconds from the start of a wait
MAX_PAUSE: Final = 5.0  # between two searches of one wait, and up to a quarter more
MIN_INTERVAL: Final = 1.0  # between two searches of one client
GIVE_UP_INTERVAL: Final = 10.0
_MIN_LEFT: Final = 0.2  # seconds of `wait`, or it ends by itself
_INSPECT_TIMEOUT: Final = 1.0  # the caller is not woken while it inspects, and a reservation lasts three seconds

_log = logging.getLogger("leasehold.waiting")


class _Result(NamedTuple):
    began: float  # before the first inspection
    found: list[Deadlock]


class DeadlockSearches:
    """The searches of one client, shared by its waits."""

    def __init__(self, core: ClientCore) -> None:
        self._core, self._searching_until, self._warned = core, 0.0, False
        self._last = _Result(0.0, [])

    async def search(self, queued_since: float, wait_deadline: float) -> list[Deadlock] | None:
        """The deadlocks, as they were after `queued_since`. None: not known now, because the engine did not answer or
        another caller of this client is searching."""
        core, now = self._core, self._core.runtime.now()
        if self._last.began >= queued_since and now < self._last.began + MIN_INTERVAL:
            return self._last.found
        with core.mutex:
            if now < self._searching_until:
                return None
            self._searching_until = now + max(MIN_INTERVAL, 2 * _INSPECT_TIMEOUT)
        try:
            found = await self._inspect(wait_deadline)
            if found:
                found = seen_in_both(found, await self._inspect(wait_deadline))
        except LeaseholdError as error:
            # Not only for now: an API key that may not list the namespace, or more claims than a client lists.
            lasting = isinstance(error, ListingTooLong) or not isinstance(error, Unavailable)
            if lasting and not self._warned:
                self._warned = True
                _log.warning("cannot search for deadlocks, so on_deadlock='raise' has no effect: %s", error)
            return None
        self._last, self._searching_until = _Result(now, found), now + MIN_INTERVAL
        return found

    async def _inspect(self, wait_deadline: float) -> list[Deadlock]:
        core = self._core
        deadline = min(core.runtime.now() + min(_INSPECT_TIMEOUT, core.options.call_timeout), wait_deadline)
        return deadlocks(await core.engine_unless_closed().inspect(core.options.namespace, "", False, deadline))


class WaitSearch:
    """The searches of one wait."""

    def __init__(self, core: ClientCore, queued_since: float) -> None:
        self._core, self._queued_since = core, queued_since
        self._next_at, self._searches = queued_since + FIRST_SEARCH, 0
        self._cycle: frozenset[object] = frozenset()  # that was seen last
        self._seen_since = 0.0

    def seconds_left(self, now: float) -> float:
        """Until the next search."""
        return max(0.0, self._next_at - now)

    async def search_if_due(self, claim: Claim) -> None:
        """Raise `Deadlocked` if the claim waits in a cycle, and it is this caller that must give up."""
        core, runtime = self._core, self._core.runtime
        waiter = core.registry.waiting.get(claim.id_hash)
        woken = waiter is None or waiter.woken or waiter.cancelled  # then it must attempt at once
        if woken or not self._next_at <= runtime.now() < claim.wait_deadline - _MIN_LEFT:
            return
        found = await core.deadlock_searches.search(self._queued_since, claim.wait_deadline)
        now = runtime.now()
        if found is None:
            self._next_at = now + MIN_INTERVAL * (0.5 + runtime.random())
            return
        self._searches += 1
        pause = min(MAX_PAUSE, FIRST_SEARCH * 2.0 ** min(self._searches, 10))
        self._next_at = now + pause * (1 + runtime.random() / 4)
        fingerprint = claim.fingerprint
        deadlock = next((each for each in found if fingerprint in giving_up_order(each)), None)
        if deadlock is None:
            self._cycle = frozenset()
            return
        if (cycle := identity(deadlock)) != self._cycle:
            self._cycle, self._seen_since = cycle, now
        if now - self._seen_since >= GIVE_UP_INTERVAL * giving_up_order(deadlock).index(fingerprint):
            raise Deadlocked(claim.name, cycle=str(deadlock), names=tuple(wait.name for wait in deadlock.waits))
