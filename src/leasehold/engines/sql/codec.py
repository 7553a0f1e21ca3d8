"""Conversion between Python values and the columns of the claim tables: microseconds, claim keys, and holdings.

`core/lock_state.py` decides what an inspection shows, as it decides everything else: the rows of a name become a
`LockState`, which expires what is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from leasehold.core.lock_state import LockState
from leasehold.core.names import bucket
from leasehold.core.queue_entry import COOLING, WAITING, QueueEntry
from leasehold.model import Claim, Holder, Holding

_SECOND: Final = 1_000_000
_MAX_MICROS: Final = 2**60  # 36,000 years: more, added to the current time, would overflow a column


def micros(seconds: float) -> int:
    return min(round(seconds * _SECOND), _MAX_MICROS)


def seconds(text: str | int) -> float:
    return int(text) / _SECOND


def key(claim: Claim) -> tuple[str, int, str, str]:
    """The first arguments of a verb: which claim it is about."""
    return (claim.namespace, bucket(claim.name), claim.name, claim.id_hash)


def holdings(namespace: str, rows: Iterable[Sequence[Any]]) -> list[Holding]:
    """The holdings in the rows of `lh_inspect_v1`: name by name, holders first, then the queue."""
    lock_states: dict[str, LockState] = {}
    now_by_name: dict[str, float] = {}
    for row in rows:
        name, kind, limit, state, token, id_hash, label, host, pid, purpose, mode, delay, ticket, *times, slot, now = (
            row
        )
        since, heartbeat_expires_at, until = map(seconds, times)
        now_by_name[name] = seconds(now)
        lock_state = lock_states.setdefault(name, LockState(now_by_name[name], kind, int(limit)))
        holder = Holder(label, host, int(pid), purpose)
        entry = QueueEntry(
            id_hash,
            "",
            holder,
            mode,
            seconds(delay),
            int(ticket),
            since,
            heartbeat_expires_at,
            int(state),
            until,
            int(token),
        )
        entry.slot = None if slot is None else int(slot)
        add_entry(lock_state, entry)
    found: list[Holding] = []
    for name in sorted(lock_states):
        lock_states[name].waiters.sort()
        lock_states[name].expire(now_by_name[name])
        found += lock_states[name].holdings(namespace, name, now_by_name[name])
    return found


def add_entry(lock_state: LockState, entry: QueueEntry) -> None:
    """Add a queue entry to the collections that its state belongs in."""
    if entry.token:
        lock_state.holders[entry.token] = entry
        lock_state._next_expiry = min(lock_state._next_expiry, entry.expires_at)
    if entry.state != COOLING:
        lock_state.entries[entry.id_hash] = entry
    if entry.state == WAITING:
        lock_state.waiters.append((entry.ticket, entry))
