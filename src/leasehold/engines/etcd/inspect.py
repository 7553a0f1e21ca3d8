"""`inspect`: the keys below a prefix in queue order, with the life each has left."""

from __future__ import annotations

from itertools import groupby

from leasehold.core.names import owner_of
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.client_state import EtcdClientState
from leasehold.engines.etcd.queue import Entry
from leasehold.engines.etcd.rpc import RpcClient
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
    root = client_state.url.root
    begin = queue.names_prefix(root, namespace, prefix, exact)
    listed = await rpc.call(messages.RANGE, messages.RangeRequest(begin, queue.range_end(begin)), deadline)
    entries = [
        entry
        for kv in listed.kvs
        if (entry := queue.parse_entry(root, kv)) is not None and entry.value.state != "released"
    ]
    entries.sort(key=lambda entry: (entry.name, entry.create_revision))
    requests = [messages.LeaseId(entry.lease_id) for entry in entries]
    ttls = [max(ttl.ttl, 0) for ttl in await rpc.call_each(messages.LEASE_TTL, requests, deadline)]
    holdings = []
    for _, group in groupby(zip(entries, ttls, strict=True), key=lambda pair: pair[0].name):
        earlier: list[Entry] = []
        position = 0
        for entry, ttl in group:
            holding = _to_holding(entry, float(ttl), earlier, position, wall)
            position += holding.position is not None
            holdings.append(holding)
            earlier.append(entry)
    return holdings


def _to_holding(entry: Entry, ttl: float, earlier: list[Entry], position: int, wall: float) -> Holding:
    state, value = _holding_state(entry, ttl, earlier), entry.value
    return Holding(
        namespace=entry.namespace,
        name=entry.name,
        state=state,
        mode=entry.mode,
        kind=entry.kind,
        limit=entry.limit,
        fingerprint=value.id_hash[:16],
        holder=value.holder,
        age=max(0.0, wall - value.written_at),
        left=ttl - value.delay if state == "held" else ttl,
        token=entry.token if state in ("held", "cooling") else None,
        position=position if state == "waiting" else None,
        owner=owner_of(value.id_hash),
    )


def _holding_state(entry: Entry, ttl: float, earlier: list[Entry]) -> HoldingState:
    if entry.value.state == "cooling":
        return "cooling"
    if not queue.is_holder(entry, earlier):
        return "waiting"
    if entry.value.state == "waiting":
        return "reserved"  # first in the queue, but it has not claimed the name yet
    return "held" if ttl > entry.value.delay or not entry.value.delay else "cooling"
