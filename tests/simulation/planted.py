"""Bugs to be planted into the code under test, each of which the simulation must find.

A simulation that finds nothing proves nothing, unless it is known to find something. Each bug here is one that somebody
once made in some lock service, as small a patch as it takes. `PLANTED` gives a context manager for each by its name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from leasehold.book import Book
from leasehold.core import timing
from leasehold.core.admission import Line
from leasehold.core.party import HELD, RESERVED, Counter
from leasehold.engines.memory import MemoryEngine, Store
from leasehold.model import Gone, Grant
from leasehold.recipes import acquiring, lock
from leasehold.recipes.lease import BaseLease

PLANTED: dict[str, Callable[[], Any]] = {}


def bug(owner: Any, attribute: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register `patched(original, *args)` under its own name as the replacement of a method."""

    def register(patched: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def planted() -> Iterator[None]:
            original = getattr(owner, attribute)
            with patch.object(owner, attribute, lambda *args, **kwargs: patched(original, *args, **kwargs)):
                yield

        PLANTED[patched.__name__] = planted
        return patched

    return register


# ------------------------------------------------------------------ in the server


@bug(Store, "_look")
def lease_forgotten(original, store, at, key):
    """A sweep takes a name for idle because nobody stands in line."""
    words = original(store, at, key)
    if key in store.lines and not store.lines[key].waiters:
        del store.lines[key]
    return words


@bug(Counter, "next")
def token_reused(_, counter, floor):
    """The wall clock alone makes the tokens."""
    counter.last = floor
    return floor


@bug(Line, "renew")
def renew_after_lapse(original, line, at, claim):
    party = line.parties.get(claim.mark)
    if party is not None and party.state == HELD and party.token == claim.token:
        party.until = max(party.until, at.now + claim.ttl)
    return original(line, at, claim)


@bug(Line, "release")
def release_without_owner_check(original, line, at, mark, min_hold, _held):
    """Whoever releases frees the name, as a plain DEL does."""
    held = next((party.mark for party in line.occupiers.values() if party.state == HELD), mark)
    return original(line, at, mark if mark in line.parties else held, min_hold)


@bug(Line, "_advance")
def reservation_end_untold(original, line, at, words, asking=None):
    original(line, at, words, asking)
    if any(party.state == RESERVED for party in line.occupiers.values()):
        words[:] = [word for word in words if word.kind != "head"]


@bug(Line, "_pass_over")
def passed_over_waiter_dropped(_, line, party):
    """Not claimed in time: out."""
    line._remove(party)


@bug(Store, "_now")
def wall_clock_used(original, store):
    moment = original(store)
    moment.now = store._runtime.wall()
    return moment


@bug(Line, "_settle")
def early_expiry(original, line, now):
    original(line, now + 0.2)


@bug(Line, "attempt")
def ghost_of_a_repeated_attempt(original, line, at, claim, client):
    """A repeated request is not recognised: it gets a place of its own beside the grant it has."""
    party = line.parties.get(claim.mark)
    if party is not None and party.state == HELD and claim.queue:
        del line.parties[claim.mark]
    return original(line, at, claim, client)


@bug(Line, "_fits")
def shared_beside_exclusive(original, line, mode):
    return original(line, mode) or (line.kind == "lock" and mode == "shared")


@bug(Line, "_change_kind")
def wrong_kind_admitted(_, line, now, claim):
    line.kind, line.limit = claim.kind, claim.limit


@bug(Line, "_cool")
def delay_forgotten(original, line, party, until, delay):
    if delay:
        line._remove(party)
    else:
        original(line, party, until, delay)


@bug(Line, "_join")
def last_come_first_served(original, line, now, claim, client):
    party = original(line, now, claim, client)
    party.ticket = -party.ticket
    return party


# ------------------------------------------------------------------ in the client


@bug(MemoryEngine, "attempt")
async def wake_up_that_grants(original, engine, claim, deadline):
    waiter = engine._book.waiting.get(claim.mark)
    if waiter is not None and waiter.go:
        return Grant(int(engine._runtime.wall() * 1_000_000), claim.ttl)
    return await original(engine, claim, deadline)


@bug(Book, "deliver")
def waiter_never_woken(original, book, kind, *args):
    if kind != "go":
        original(book, kind, *args)


@bug(Book, "owe")
def owed_release_forgotten(*_):
    """Sent once, and never again."""


@bug(BaseLease, "_answered")
def gone_ignored(original, lease, asked, claim, reply):
    if not isinstance(reply, Gone):
        original(lease, asked, claim, reply)


@bug(BaseLease, "_lose")
def loss_kept_quiet(original, lease, reason):
    lease._callbacks = None
    return original(lease, reason)


class _Trusted(float):
    """An end that is always ahead."""

    def __gt__(self, other: float) -> bool:
        return True


@contextmanager
def late_grant_handed_out() -> Iterator[None]:
    """A grant is handed out however long its answer took."""
    acquire = lock.acquire

    async def trusting(*args):
        *before, admit, renamed = args
        return await acquire(*before, lambda *what: admit(*what[:3], float(what[3]), what[4]), renamed)

    ends = SimpleNamespace(**{**vars(timing), "valid_until": lambda *end: _Trusted(timing.valid_until(*end))})
    with patch.object(acquiring, "timing", ends), patch.object(lock, "acquire", trusting):
        yield


PLANTED["late_grant_handed_out"] = late_grant_handed_out


@bug(lock, "acquire")
async def counted_from_the_answer(original, desk, *args):
    """The life of a grant is counted from when its answer came, not from when it was asked for (E8)."""

    *before, admit, renamed = args
    now = desk.runtime.now

    def late(claim, grant, asked, until, doubted):
        return admit(claim, grant, now(), timing.valid_until(now(), grant.ttl), doubted)

    return await original(desk, *before, late, renamed)
