"""`inspect`: the keys below a prefix in queue order, with the life each has left."""

from __future__ import annotations

from typing import NamedTuple

from leasehold.core.listing import ListingBudget, listed_seconds
from leasehold.core.names import owner_of
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.client_state import EtcdClientState
from leasehold.engines.etcd.queue import Entry
from leasehold.engines.etcd.rpc import RangeReader, RpcClient
from leasehold.model import Holding, HoldingState


async def list_holdings(
    client_state: EtcdClientState,
    rpc: RpcClient,
    namespace: str,
    prefix: str,
    exact: bool,
    wall: float,
    deadline: float,
) -> list[Holding]:
    root, budget = client_state.url.root, ListingBudget("etcd")
    by_name: dict[str, list[_Listed]] = {}
    reader = RangeReader(rpc, queue.names_prefix(root, namespace, prefix, exact), deadline)
    while kvs := await reader.next_page():  # in pages: a reply takes several times its size to decode
        entries = [
            entry
            for kv in kvs
            if (entry := queue.parse_entry(root, kv)) is not None and entry.value.state != "released"
        ]
        requests = [messages.LeaseId(entry.lease_id) for entry in entries]
        replies = await rpc.call_each(messages.LEASE_TTL, requests, deadline)
        for entry, reply in zip(entries, replies, strict=True):
            holder = entry.value.holder
            budget.spend(entry.name, holder.label, holder.host, holder.purpose)
            by_name.setdefault(entry.name, []).append(
                _Listed(entry._replace(key=b"", stored_value=b""), float(max(reply.ttl, 0)))
            )
    holdings: list[Holding] = []
    for name in sorted(by_name):
        listed = by_name.pop(name)  # each is dropped as soon as it is shown
        listed.sort(key=lambda each: each.entry.create_revision, reverse=True)
        ahead, only_readers, position = 0, True, 0
        while listed:
            entry, ttl = listed.pop()
            holding = _to_holding(entry, ttl, queue.is_holder(entry, ahead, only_readers), position, wall)
            position += holding.position is not None
            holdings.append(holding)
            ahead, only_readers = ahead + 1, only_readers and entry.mode == "shared"
    return holdings


class _Listed(NamedTuple):
    """An entry, and the seconds that its lease has left."""

    entry: Entry
    ttl: float


def _to_holding(entry: Entry, ttl: float, is_holder: bool, position: int, wall: float) -> Holding:
    state, value = _holding_state(entry, ttl, is_holder), entry.value
    return Holding(
        namespace=entry.namespace,
        name=entry.name,
        state=state,
        mode=entry.mode,
        kind=entry.kind,
        limit=entry.limit,
        fingerprint=value.id_hash[:16],
        holder=value.holder,
        age=listed_seconds(wall - value.written_at),
        left=listed_seconds(ttl - value.delay if state == "held" else ttl),
        token=entry.token if state in ("held", "cooling") else None,
        position=position if state == "waiting" else None,
        owner=owner_of(value.id_hash),
    )


def _holding_state(entry: Entry, ttl: float, is_holder: bool) -> HoldingState:
    if entry.value.state == "cooling":
        return "cooling"
    if not is_holder:
        return "waiting"
    if entry.value.state == "waiting":
        return "reserved"  # first in the queue, but it has not claimed the name yet
    return "held" if ttl > entry.value.delay or not entry.value.delay else "cooling"
