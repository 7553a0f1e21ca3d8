"""`redis+cluster://`: many nodes, each with some of the hash slots.

The bucket of a name is its hash tag, so all its keys are in one slot, and every verb is still one script on one node.
The client reads from any node which node has which slot (`CLUSTER SLOTS`), and corrects that by MOVED replies. While a
slot moves, a node refuses a script that does not find all its keys (ASK, TRYAGAIN), and our scripts never do: see
`RedisRequests.name_keys`. The client retries until the deadline: no script decides about a name that a node has only in
part (E1).
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple, TypeVar

from leasehold.engines.redis.connections import Connections
from leasehold.engines.redis.discovery import DiscoveryNode, SingleFlight, announced_address, query_in_turn
from leasehold.engines.redis.scripts import SHARDED_PUBSUB
from leasehold.engines.redis.server import RedisEndpoint, encode_command, is_error_reply
from leasehold.engines.redis.server_settings import NotPermitted, Unreachable, info_fields
from leasehold.engines.redis.topology import Rejected, make_connections, rediscover
from leasehold.engines.redis.url import MultiServerUrl
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

T = TypeVar("T")

_SLOT_COUNT: Final = 16_384
_DISCOVERY_REQUEST: Final = (encode_command("CLUSTER", "INFO") + encode_command("CLUSTER", "SLOTS"), 2)
_MAX_NODES: Final = 1_000  # with slots: as many as Redis recommends at most
_MAX_FORMER_NODES: Final = 16  # that are remembered, or kept connections to
_MAX_REDIRECTS: Final = 3  # that are followed without a pause
_MAP_MAX_AGE: Final = 1.0  # seconds; if the map is older, a MOVED makes the client read it again


def slot_of(tag: str) -> int:
    """The slot of a hash tag, given with its braces."""
    return crc_hqx(tag[1:-1].encode(), 0) % _SLOT_COUNT


class NodeSlotMap(NamedTuple):
    """The slots as one node sees them. A higher epoch is later. A node that is not healthy has lost contact with the
    others."""

    healthy: bool
    epoch: int
    owners: list[SocketAddress | None]


class SlotMap:
    """Which node has which slot, as far as this client knows. Shared by its engine instances and listeners."""

    def __init__(self, url: MultiServerUrl) -> None:
        self._url = url
        self._servers: dict[SocketAddress, RedisEndpoint] = {}
        self._nodes: dict[SocketAddress, DiscoveryNode] = {}
        self._epoch = 0
        self.owners: list[SocketAddress | None] = [None] * _SLOT_COUNT
        self.stale = True  # must be read again before it is used
        self.found_at = 0.0
        self._new_addresses = 0  # to which nodes redirected since then

    def server(self, address: SocketAddress) -> RedisEndpoint:
        """The same object for the same address."""
        return self._servers.get(address) or self._servers.setdefault(address, self._url.make_server(address))

    async def find(self, runtime: Runtime, deadline: float, preferred: SocketAddress | None = None) -> None:
        """Read the map from the first healthy node. Raises `Unreachable` with each node's error."""
        known_nodes = [self._node(address) for address in dict.fromkeys(self.owners) if address is not None]
        start = int(runtime.random() * len(known_nodes))  # spreads the clients over the nodes
        candidates = [*known_nodes[start:], *known_nodes[:start], *self._url.nodes]
        if preferred is not None:
            candidates.insert(0, self._node(preferred))
        nodes = {node.address: node for node in candidates}.values()
        answers = await query_in_turn(nodes, _DISCOVERY_REQUEST, self._parse_reply, self._is_current, runtime, deadline)
        if not answers:
            text = f"no node of the Redis cluster returned its slots: {answers.describe_errors()}"
            raise NotPermitted(text) if answers.config_error_count == len(nodes) else Unreachable(text, engine="redis")
        best = max(answers, key=lambda each: each[:2])
        self._epoch, self.owners, self.stale, self.found_at = best.epoch, best.owners, False, runtime.now()
        self._new_addresses = 0
        self.forget_former(self._servers)
        self.forget_former(self._nodes)

    def forget_former(self, known: dict[SocketAddress, T]) -> list[T]:
        """Take the addresses that have no slots out of a table, if there are many: a broken or hostile node can
        redirect clients to ever new ones."""
        live = set(self.owners)
        former = [address for address in list(known) if address not in live]
        if len(former) <= _MAX_FORMER_NODES:
            return []
        # Another thread may do the same at this moment.
        return [found for address in former if (found := known.pop(address, None)) is not None]

    def apply_moved(self, error: Exception, server: RedisEndpoint) -> SocketAddress:
        """Enter a MOVED reply of this server into the map. Without a host it means another port of the same host."""
        try:
            _, slot, target = str(error).split()[:3]
            host, _, port = target.rpartition(":")
            address = announced_address(host.strip("[]") or server.address.host, port)
            number = range(_SLOT_COUNT)[int(slot)]
        except (ValueError, IndexError):
            raise Unreachable(f"invalid redirect: {server.map_error(error)}", engine="redis") from error
        self.owners[number] = address
        self._new_addresses += address not in self._servers
        self.stale |= self._new_addresses > _MAX_FORMER_NODES  # reading the map forgets those without slots
        return address

    def _is_current(self, answers: list[NodeSlotMap]) -> bool:
        return answers[-1].healthy and answers[-1].epoch >= self._epoch

    def _node(self, address: SocketAddress) -> DiscoveryNode:
        return self._nodes.get(address) or self._nodes.setdefault(address, self._url.make_node(address))

    def _parse_reply(self, node: DiscoveryNode, replies: list[Any]) -> NodeSlotMap:
        info, slot_ranges = replies
        for reply in replies:
            if is_error_reply(reply, "ERR This instance has cluster support disabled"):
                raise ConfigError(f"{node} is not part of a cluster; for a single server use a redis:// URL")
            if isinstance(reply, Exception):
                raise node.map_error(reply)
        owners: list[SocketAddress | None] = [None] * _SLOT_COUNT
        try:
            fields, slots = info_fields(info), 0
            for first, last, (host, port, *_), *_ in slot_ranges:
                slots += last + 1 - first
                if not 0 <= first <= last < _SLOT_COUNT or slots > _SLOT_COUNT:
                    raise ValueError("slot out of range, or given twice")
                name = host.decode() if host else ""
                address = announced_address(name if name not in ("", "?") else node.address.host, port)
                owners[first : last + 1] = [address] * (last + 1 - first)
            if len(set(owners)) > _MAX_NODES:
                raise ValueError("too many nodes")
            return NodeSlotMap(fields["cluster_state"] == "ok", int(fields["cluster_current_epoch"]), owners)
        except (TypeError, ValueError, KeyError, AttributeError) as bad:
            raise Unreachable(f"unexpected reply from {node} to CLUSTER INFO or SLOTS", engine="redis") from bad


class ClusterTopology:
    """The topology of a cluster: each node has some of the buckets."""

    pubsub_commands = SHARDED_PUBSUB
    names_can_move = True
    survives: Literal["nothing"] = "nothing"  # a promoted replica may lack the last grant

    def __init__(self, slot_map: SlotMap, runtime: Runtime) -> None:
        self._slot_map, self._runtime, self._single_flight = slot_map, runtime, SingleFlight(runtime)
        self._connections: dict[SocketAddress, Connections] = {}

    def connections(self, tag: str) -> Connections | None:
        if self._slot_map.stale:
            return None
        owner = self._slot_map.owners[slot_of(tag)]
        if owner is None:
            return None
        return self._connections_to(owner)

    def _connections_to(self, address: SocketAddress) -> Connections:
        if (known := self._connections.get(address)) is not None:
            return known
        self._close_former()  # also here: a listener may be the one that reads the map
        return self._connections.setdefault(address, make_connections(self._slot_map.server(address), self._runtime))

    def _close_former(self) -> None:
        for connections in self._slot_map.forget_former(self._connections):
            connections.close()

    async def find(self, deadline: float) -> None:
        await self._single_flight.run(lambda: self._slot_map.find(self._runtime, deadline), deadline)
        self._close_former()

    async def all_connections(self, deadline: float) -> Iterable[Connections]:
        while self._slot_map.stale:  # find() may have joined another call that failed
            await self.find(deadline)
        return [
            self._connections_to(address) for address in dict.fromkeys(self._slot_map.owners) if address is not None
        ]

    async def redirect(self, tag: str, rejected: Rejected, tries: int, deadline: float) -> Connections:
        error, slot_map = rejected.error, self._slot_map
        if rejected.connections is None or not is_error_reply(error, "MOVED") or tries >= _MAX_REDIRECTS:
            return await rediscover(self, self._runtime, tag, rejected, tries, deadline)
        if self._runtime.now() > slot_map.found_at + _MAP_MAX_AGE:  # other slots may have moved too
            with suppress(Unreachable):
                await self.find(deadline)
        # Even after find(): not every node knows of the move yet.
        return self._connections_to(slot_map.apply_moved(error, rejected.connections.server))

    def mark_stale(self, connections: Connections) -> None:
        self._slot_map.stale = True

    def is_replaced(self, connections: Connections) -> bool:
        return False  # a node knows itself which slots it has

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()

    def after_fork(self) -> None:
        self._single_flight = SingleFlight(self._runtime)
        for connections in self._connections.values():
            connections.after_fork()
