"""`inspect`: the keys below a prefix, put in line, with the life each has left."""

from __future__ import annotations

from itertools import groupby

from leasehold.core.names import owner
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.calls import Calls
from leasehold.engines.etcd.line import Seen
from leasehold.engines.etcd.shared import Shared
from leasehold.model import Holding, HoldingState


async def holdings(
    shared: Shared, calls: Calls, namespace: str, prefix: str, exact: bool, wall: float, deadline: float
) -> list[Holding]:
    root = shared.address.root
    begin = line.names(root, namespace, prefix, exact)
    listed = await calls.ask(wire.RANGE, wire.Range(begin, line.after(begin)), deadline)
    found = [seen for kv in listed.kvs if (seen := line.seen(root, kv)) is not None and seen.note.state != "released"]
    found.sort(key=lambda seen: (seen.name, seen.created))
    asked = [wire.LeaseId(seen.lease) for seen in found]
    lives = [max(life.ttl, 0) for life in await calls.ask_each(wire.LIFE, asked, deadline)]
    shown = []
    for _, group in groupby(zip(found, lives, strict=True), key=lambda pair: pair[0].name):
        earlier: list[Seen] = []
        place = 0
        for seen, life in group:
            holding = _holding(seen, float(life), earlier, place, wall)
            place += holding.place is not None
            shown.append(holding)
            earlier.append(seen)
    return shown


def _holding(seen: Seen, life: float, earlier: list[Seen], place: int, wall: float) -> Holding:
    state, note = _state(seen, life, earlier), seen.note
    return Holding(
        namespace=seen.namespace,
        name=seen.name,
        state=state,
        mode=seen.mode,
        kind=seen.kind,
        limit=seen.limit,
        fingerprint=note.mark[:16],
        holder=note.holder,
        age=max(0.0, wall - note.at),
        left=life - note.delay if state == "held" else life,
        token=seen.token if state in ("held", "cooling") else None,
        place=place if state == "waiting" else None,
        owner=owner(note.mark),
    )


def _state(seen: Seen, life: float, earlier: list[Seen]) -> HoldingState:
    if seen.note.state == "cooling":
        return "cooling"
    if not line.holds(seen, earlier):
        return "waiting"
    if seen.note.state == "waiting":
        return "reserved"  # its turn has come, and it has not claimed it yet
    return "held" if life > seen.note.delay or not seen.note.delay else "cooling"
