"""`inspect`: holders and waiters, for display only. It decides nothing and changes nothing.

The result is not a snapshot of one moment: queues are read one after the other. Ages are by the leader's clock as this
client last saw it, or by the client's own clock if it has never written anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Sync

from leasehold.core.listing import ListingBudget, listed_seconds
from leasehold.core.names import owner_of
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.attempt import queue_path
from leasehold.engines.zookeeper.kazoo_adapter import Reply
from leasehold.engines.zookeeper.nodes import ROOT, TOKEN_BASE, NodeQueue
from leasehold.engines.zookeeper.requests import GetChildren, GetData, GetFewChildren, GetShortData
from leasehold.engines.zookeeper.session import ZookeeperSession
from leasehold.model import Holder, Holding
from leasehold.runtime.base import Runtime

_BATCH: Final = 200  # requests in one pipeline
_UNKNOWN_HOLDER: Final = Holder("unknown")


class QueueNodes(NamedTuple):
    """The nodes of one queue that still existed when they were read, with data and stat, and the slots of a
    semaphore."""

    name: str
    queue: NodeQueue
    nodes: list[tuple[int, bytes, Any]]  # the index in the queue, the data and the stat of each
    slot_by_id_hash: dict[str, int]


async def list_holdings(
    session: ZookeeperSession, runtime: Runtime, namespace: str, prefix: str, exact: bool, deadline: float
) -> list[Holding]:
    reader = QueueReader(session, runtime, namespace, deadline, ListingBudget("zookeeper"))
    token_base, queues = await reader.read_queues(prefix, exact)
    found: list[Holding] = []
    budget = ListingBudget("zookeeper")
    queues.reverse()
    while queues:  # each is dropped once it is listed
        name, node_names = queues.pop()
        queue_nodes = await reader.read_nodes(name, NodeQueue(node_names))
        now = session.leader_clock_offset + runtime.now() if session.leader_clock_offset else runtime.wall()
        found += [
            budget.spend_holding(_to_holding(namespace, queue_nodes, index, data, stat, token_base, now))
            for index, data, stat in queue_nodes.nodes
        ]
    return found


@dataclass(frozen=True, slots=True)
class QueueReader:
    session: ZookeeperSession
    runtime: Runtime
    namespace: str
    deadline: float
    budget: ListingBudget

    async def read_queues(self, prefix: str, exact: bool) -> tuple[int, list[tuple[str, list[str]]]]:
        """The token base, and the nodes of each name that has any, by name."""
        root, base_path = self.session.url.chroot + ROOT, self.session.url.chroot + TOKEN_BASE
        # The sync makes a lagging follower catch up, so that this sees everything that was confirmed to any client.
        _, root_reply, base = await self._ask([Sync(root), GetChildren(root, None), GetData(base_path, None)])
        decoded_names = (nodes.name_of(self.namespace, child) for child in root_reply.get(NoNodeError) or ())
        names = sorted(
            name for name in decoded_names if name and (name == prefix if exact else name.startswith(prefix))
        )
        queues = []
        for start in range(0, len(names), _BATCH):
            batch = names[start : start + _BATCH]
            replies = await self._ask([GetFewChildren(self._path(name), None) for name in batch])
            for name, reply in zip(batch, replies, strict=True):
                if (children := reply.get(NoNodeError)) is None and reply.error is None:
                    (alone,) = await self._ask([GetChildren(self._path(name), None)])
                    children = alone.get(NoNodeError)
                if nodes_of_name := [child for child in children or () if nodes.parse_name(child)]:
                    for _ in nodes_of_name:
                        self.budget.spend(name)
                    queues.append((name, nodes_of_name))
        return nodes.parse_base((base.get(NoNodeError) or (b"0", None))[0]), queues

    async def read_nodes(self, name: str, queue: NodeQueue) -> QueueNodes:
        parent = self._path(name)
        reads = [GetData(parent, None), *(GetShortData(f"{parent}/{node_name}", None) for node_name in queue.names)]
        slots_reply, *replies = await self._ask(reads)
        assigned = slots.parse_slots((slots_reply.get(NoNodeError) or (b"", None))[0])
        contents = [(index, *found) for index, reply in enumerate(replies) if (found := reply.get(NoNodeError))]
        return QueueNodes(name, queue, contents, {id_hash: slot for slot, (id_hash, _) in enumerate(assigned)})

    def _path(self, name: str) -> str:
        return queue_path(self.session, self.namespace, name)

    async def _ask(self, requests: list[Any]) -> list[Reply]:
        replies: list[Reply] = []
        for start in range(0, len(requests), _BATCH):
            replies += await self.session.pipeline(self.runtime, requests[start : start + _BATCH], self.deadline)
        return replies


def _to_holding(
    namespace: str, queue_nodes: QueueNodes, index: int, data: bytes, stat: Any, token_base: int, now: float
) -> Holding:
    """`now`: by the leader's clock."""
    node, holds, node_data = queue_nodes.queue.node(index), queue_nodes.queue.holds(index), nodes.parse_data(data)
    kind, limit = node.kind_and_limit
    left = min(node_data.ttl, node_data.ttl - (now - stat.mtime / 1000))
    return Holding(
        namespace=namespace,
        name=queue_nodes.name,
        state=("reserved" if node_data.waits else "held") if holds else "waiting",
        mode=nodes.mode_of(node),
        kind=kind,
        limit=limit,
        fingerprint=node.id_hash[:16],
        holder=node_data.holder or _UNKNOWN_HOLDER,
        age=listed_seconds(now - stat.ctime / 1000),
        left=listed_seconds(left) if holds else WAITER_TTL,
        token=token_base + stat.czxid if holds else None,
        slot=queue_nodes.slot_by_id_hash.get(node.id_hash) if holds and kind == "semaphore" else None,
        position=None if holds else queue_nodes.queue.position(index),
        owner=owner_of(node.id_hash),
        since_grant=False,
    )
