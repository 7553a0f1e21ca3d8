"""Values on their way to a table of claims and back: microseconds, replies, and holdings.

An inspection is decided by `core/admission.py`, as everything is: rows become a `Line`, which ends what is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from leasehold.core.admission import Line
from leasehold.core.names import bucket
from leasehold.core.party import COOLING, WAITING, Party
from leasehold.model import Claim, Holder, Holding

_SECOND: Final = 1_000_000
_FOR_EVER: Final = 2**60  # 36,000 years: more would not fit in a column beside the time


def micros(seconds: float) -> int:
    return min(round(seconds * _SECOND), _FOR_EVER)


def seconds(text: str | int) -> float:
    return int(text) / _SECOND


def key(claim: Claim) -> tuple[str, int, str, str]:
    """How every verb is told which claim it is about."""
    return (claim.namespace, bucket(claim.name), claim.name, claim.mark)


def holdings(namespace: str, rows: Iterable[Sequence[Any]]) -> list[Holding]:
    """What `inspect` shows of rows as `lh_inspect_v1` gives them: holders, then the line, name by name."""
    lines: dict[str, Line] = {}
    nows: dict[str, float] = {}
    for row in rows:
        name, kind, most, state, token, mark, label, host, pid, purpose, mode, delay, ticket, *times, slot, now = row
        since, beat, until = map(seconds, times)
        nows[name] = seconds(now)
        line = lines.setdefault(name, Line(nows[name], kind, int(most)))
        holder = Holder(label, host, int(pid), purpose)
        party = Party(mark, "", holder, mode, seconds(delay), int(ticket), since, beat, int(state), until, int(token))
        party.slot = None if slot is None else int(slot)
        place(line, party)
    found: list[Holding] = []
    for name in sorted(lines):
        lines[name].waiters.sort()
        lines[name].tidy(nows[name])
        found += lines[name].holdings(namespace, name, nows[name])
    return found


def place(line: Line, party: Party) -> None:
    """Put a party where its state says it stands."""
    if party.token:
        line.occupiers[party.token] = party
        line._next_end = min(line._next_end, party.until)
    if party.state != COOLING:
        line.parties[party.mark] = party
    if party.state == WAITING:
        line.waiters.append((party.ticket, party))
