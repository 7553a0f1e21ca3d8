"""`inspect`: holders and waiters, display only. It decides nothing and changes nothing.

The result is not a snapshot of one moment: queues are read one after the other. Ages are by the leader's clock as this
client last saw it, or by the client's own clock if it has never written anything.
"""

from __future__ import annotations

from typing import Any, Final

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import GetChildren, GetData, Sync

from leasehold.core.names import owner_of
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.attempt import queue_path
from leasehold.engines.zookeeper.kazoo_adapter import Reply
from leasehold.engines.zookeeper.nodes import ROOT, TOKEN_BASE, NodeQueue
from leasehold.engines.zookeeper.session import ZookeeperSession
from leasehold.model import Holder, Holding
from leasehold.runtime.base import Runtime

_BATCH: Final = 200  # requests in one pipeline
_UNKNOWN_HOLDER: Final = Holder("unknown")


async def list_holdings(
    session: ZookeeperSession, runtime: Runtime, namespace: str, prefix: str, exact: bool, deadline: float
) -> list[Holding]:
    async def ask(requests: list[Any]) -> list[Reply]:
        found: list[Reply] = []
        for start in range(0, len(requests), _BATCH):
            found += await session.pipeline(runtime, requests[start : start + _BATCH], deadline)
        return found

    root = session.url.chroot + ROOT
    # The sync makes a lagging follower catch up, so that this sees everything that was confirmed to any client before.
    _, root_reply, base = await ask(
        [Sync(root), GetChildren(root, None), GetData(session.url.chroot + TOKEN_BASE, None)]
    )
    offset = nodes.parse_base((base.get(NoNodeError) or (b"0", None))[0])
    decoded_names = (nodes.name_of(namespace, queue) for queue in root_reply.get(NoNodeError) or ())
    names = sorted(name for name in decoded_names if name and (name == prefix if exact else name.startswith(prefix)))
    found: list[Holding] = []
    children = await ask([GetChildren(queue_path(session, namespace, name), None) for name in names])
    for name, reply in zip(names, children, strict=True):
        queue, parent = NodeQueue(reply.get(NoNodeError) or ()), queue_path(session, namespace, name)
        if not queue.nodes:
            continue
        slots_reply, *node_replies = await ask(
            [GetData(parent, None), *(GetData(f"{parent}/{n.name}", None) for n in queue.nodes)]
        )
        slot_by_id_hash = {
            id_hash: slot
            for slot, (id_hash, _) in enumerate(slots.parse_slots((slots_reply.get(NoNodeError) or (b"", None))[0]))
        }
        now = session.leader_clock_offset + runtime.now() if session.leader_clock_offset else runtime.wall()
        for index, (node, node_reply) in enumerate(zip(queue.nodes, node_replies, strict=True)):
            data, stat = node_reply.get(NoNodeError) or (b"", None)
            if stat is None:
                continue
            node_data, holds = nodes.parse_data(data), queue.holds(index)
            kind, limit = node.kind_and_limit
            found.append(
                Holding(
                    namespace=namespace,
                    name=name,
                    state=("reserved" if node_data.waits else "held") if holds else "waiting",
                    mode=nodes.mode_of(node),
                    kind=kind,
                    limit=limit,
                    fingerprint=node.id_hash[:16],
                    holder=node_data.holder or _UNKNOWN_HOLDER,
                    age=max(0.0, now - stat.ctime / 1000),
                    left=max(0.0, min(node_data.ttl, node_data.ttl - (now - stat.mtime / 1000)))
                    if holds
                    else WAITER_TTL,
                    token=offset + stat.czxid if holds else None,
                    slot=slot_by_id_hash.get(node.id_hash) if holds and kind == "semaphore" else None,
                    position=None if holds else queue.position(index),
                    owner=owner_of(node.id_hash),
                    since_grant=False,
                )
            )
    return found
