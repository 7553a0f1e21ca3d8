"""Conversion between Python values and the columns of the claim tables: microseconds, claim keys, and holdings.

`core/lock_state.py` decides what an inspection shows, as it decides everything else: the rows of a name become a
`LockState`, which expires what is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from typing import Any, Final, TypeAlias

from leasehold.core.listing import ListingBudget
from leasehold.core.lock_state import LockState
from leasehold.core.names import bucket
from leasehold.core.queue_entry import COOLING, WAITING, QueueEntry
from leasehold.model import Claim, Holder, Holding, Kind, Mode

Row: TypeAlias = tuple[Any, ...]

_SECOND: Final = 1_000_000
# One text for all claims, as a long list needs much memory.
_KINDS: Final[dict[str, Kind]] = {"lock": "lock", "semaphore": "semaphore"}
_MODES: Final[dict[str, Mode]] = {"exclusive": "exclusive", "shared": "shared"}
_BOUND: Final = 2**63  # of the numbers that a column can have
_MAX_MICROS: Final = 2**60  # 36,000 years: more, added to the current time, would overflow a column


def micros(seconds: float) -> int:
    return min(round(seconds * _SECOND), _MAX_MICROS)


def whole(text: str | int, least: int = -_BOUND) -> int:
    """A number of a reply. Raises ValueError for one that no column can have: an error would show all its digits."""
    number = int(text)
    if not least <= number < _BOUND:
        raise ValueError("out of range")
    return number


def seconds(text: str | int) -> float:
    return whole(text) / _SECOND


def key(claim: Claim) -> tuple[str, int, str, str]:
    """The first arguments of a verb: which claim it is about."""
    return (claim.namespace, bucket(claim.name), claim.name, claim.id_hash)


def holdings(namespace: str, rows: list[bytes], decode: Callable[[bytes], Row], engine: str) -> list[Holding]:
    """The holdings in the rows of `lh_inspect_v1`: name by name, holders first, then the queue. Takes the rows out of
    the list one by one, as both together may need much memory."""
    rows.sort()  # rows of one name come next to each other, because a row begins with it
    found: list[Holding] = []
    budget = ListingBudget(engine)
    for name, rows_of_name in groupby(_decoded(rows, decode), itemgetter(0)):
        first = next(rows_of_name)
        _, kind, limit, *_, now = first
        lock_state = LockState(seconds(now), _KINDS[kind], whole(limit))
        for row in chain([first], rows_of_name):
            entry = _to_entry(row)
            budget.spend(name, entry.holder.label, entry.holder.host, entry.holder.purpose)
            add_entry(lock_state, entry)
        lock_state.waiters.sort()
        lock_state.expire(seconds(now))
        found += lock_state.holdings(namespace, name, seconds(now))
    found.sort(key=attrgetter("name"))
    return found


def _decoded(rows: list[bytes], decode: Callable[[bytes], Row]) -> Iterator[Row]:
    while rows:
        yield decode(rows.pop())


def _to_entry(row: Row) -> QueueEntry:
    _, _, _, state, token, id_hash, label, host, pid, purpose, mode, delay, ticket, *times, slot, _ = row
    since, heartbeat_expires_at, until = map(seconds, times)
    entry = QueueEntry(
        id_hash,
        "",
        Holder(label, host, whole(pid), purpose),
        _MODES[mode],
        seconds(delay),
        whole(ticket),
        since,
        heartbeat_expires_at,
        whole(state, 0),
        until,
        whole(token),
    )
    entry.slot = None if slot is None else whole(slot)
    return entry


def add_entry(lock_state: LockState, entry: QueueEntry) -> None:
    """Add a queue entry to the collections that its state belongs in."""
    if entry.token:
        lock_state.holders[entry.token] = entry
        lock_state._next_expiry = min(lock_state._next_expiry, entry.expires_at)
    if entry.state != COOLING:
        lock_state.entries[entry.id_hash] = entry
    if entry.state == WAITING:
        lock_state.waiters.append((entry.ticket, entry))
