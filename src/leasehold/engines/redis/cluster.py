"""`redis+cluster://`: many servers, each with some of the slots that names fall into.

The bucket of a name is its hash tag, so all its keys are in one slot, and every verb is still one script on one server.
Which server has a slot is read from any node (`CLUSTER SLOTS`), and corrected by what servers say (MOVED). While a slot
moves, a server refuses a script that does not find all its keys (ASK, TRYAGAIN), and no script of ours ever does: see
`Requests.name`. It is asked again until its deadline: nobody decides about a name of which only a part is there (E1).
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from leasehold.engines.redis.connections import Connections
from leasehold.engines.redis.discovery import DiscoveryNode, SingleFlight, announced_address, query_in_turn
from leasehold.engines.redis.scripts import SHARDED_PUBSUB
from leasehold.engines.redis.server import RedisEndpoint, encode_command, is_error_reply
from leasehold.engines.redis.server_settings import NotPermitted, Unreachable
from leasehold.engines.redis.topology import Rejected, make_connections, rediscover
from leasehold.engines.redis.url import MultiServerUrl
from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

_SLOT_COUNT: Final = 16_384
_DISCOVERY_REQUEST: Final = (encode_command("CLUSTER", "INFO") + encode_command("CLUSTER", "SLOTS"), 2)
_MAX_REDIRECTS: Final = 3  # redirections that are followed without a pause
_MAP_MAX_AGE: Final = 1.0  # seconds after which one that has moved is a reason to read the whole map


def slot_of(tag: str) -> int:
    """Of a hash tag, with its braces."""
    return crc_hqx(tag[1:-1].encode(), 0) % _SLOT_COUNT


class NodeSlotMap(NamedTuple):
    """As one node sees it. A higher epoch is later; one that is not well has lost sight of the others."""

    healthy: bool
    epoch: int
    owners: list[SocketAddress | None]


class SlotMap:
    """Which server has which slot, as far as this client knows. Shared by its twins and its listeners."""

    def __init__(self, url: MultiServerUrl) -> None:
        self._url = url
        self._servers: dict[SocketAddress, RedisEndpoint] = {}
        self._nodes: dict[SocketAddress, DiscoveryNode] = {}
        self._epoch = 0
        self.owners: list[SocketAddress | None] = [None] * _SLOT_COUNT
        self.stale = True  # some node is to be asked before that is used
        self.found_at = 0.0

    def server(self, address: SocketAddress) -> RedisEndpoint:
        """Always the same for an address."""
        return self._servers.get(address) or self._servers.setdefault(address, self._url.make_server(address))

    async def find(self, runtime: Runtime, deadline: float, preferred: SocketAddress | None = None) -> None:
        """Read the map anew from the first node that is well. Raises Unreached with what each of them said."""
        known_nodes = [self._node(address) for address in dict.fromkeys(self.owners) if address is not None]
        start = int(runtime.random() * len(known_nodes))  # clients do not all ask the same
        candidates = [*known_nodes[start:], *known_nodes[:start], *self._url.nodes]
        if preferred is not None:
            candidates.insert(0, self._node(preferred))
        nodes = {node.address: node for node in candidates}.values()
        answers = await query_in_turn(nodes, _DISCOVERY_REQUEST, self._parse_reply, self._is_current, runtime, deadline)
        if not answers:
            text = f"no node of the Redis cluster says where names are: {answers.describe_errors()}"
            raise NotPermitted(text) if answers.config_error_count == len(nodes) else Unreachable(text, engine="redis")
        best = max(answers, key=lambda each: each[:2])
        self._epoch, self.owners, self.stale, self.found_at = best.epoch, best.owners, False, runtime.now()

    def apply_moved(self, error: Exception, server: RedisEndpoint) -> SocketAddress:
        """Note what a MOVED says, by this server: without a host it means another port of its own."""
        try:
            _, slot, target = str(error).split()[:3]
            host, _, port = target.rpartition(":")
            address = announced_address(host.strip("[]") or server.address.host, port)
            number = range(_SLOT_COUNT)[int(slot)]
        except (ValueError, IndexError) as bad:
            raise Unreachable(f"the cluster answered {str(error)[:80]!r}, which leads nowhere", engine="redis") from bad
        self.owners[number] = address
        return address

    def _is_current(self, answers: list[NodeSlotMap]) -> bool:
        return answers[-1].healthy and answers[-1].epoch >= self._epoch

    def _node(self, address: SocketAddress) -> DiscoveryNode:
        return self._nodes.get(address) or self._nodes.setdefault(address, self._url.make_node(address))

    def _parse_reply(self, node: DiscoveryNode, replies: list[Any]) -> NodeSlotMap:
        info, slot_ranges = replies
        for reply in replies:
            if is_error_reply(reply, "ERR This instance has cluster support disabled"):
                raise ConfigError(f"{node} is not part of a cluster: for a server alone the URL begins with redis://")
            if isinstance(reply, Exception):
                raise node.map_error(reply)
        owners: list[SocketAddress | None] = [None] * _SLOT_COUNT
        try:
            lines = info.decode().split("\r\n")
            fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
            for first, last, (host, port, *_), *_ in slot_ranges:
                name = host.decode() if host else ""
                address = announced_address(name if name not in ("", "?") else node.address.host, port)
                owners[first : last + 1] = [address] * (last + 1 - first)
            if len(owners) != _SLOT_COUNT:
                raise ValueError("a slot out of range")
            return NodeSlotMap(fields["cluster_state"] == "ok", int(fields["cluster_current_epoch"]), owners)
        except (TypeError, ValueError, KeyError, AttributeError) as bad:
            raise Unreachable(f"{node} answered what no node of a cluster answers", engine="redis") from bad


class ClusterTopology:
    """The topology."""

    pubsub_commands = SHARDED_PUBSUB
    names_can_move = True
    survives: Literal["nothing"] = "nothing"  # a replica that is promoted need not have the last grant

    def __init__(self, slot_map: SlotMap, runtime: Runtime) -> None:
        self._slot_map, self._runtime, self._single_flight = slot_map, runtime, SingleFlight(runtime)
        self._connections: dict[SocketAddress, Connections] = {}

    def connections(self, tag: str) -> Connections | None:
        if self._slot_map.stale:
            return None
        owner = self._slot_map.owners[slot_of(tag)]
        if owner is None:
            return None
        return self._connections.get(owner) or self._connections_to(owner)

    def _connections_to(self, address: SocketAddress) -> Connections:
        return self._connections.setdefault(address, make_connections(self._slot_map.server(address), self._runtime))

    async def find(self, deadline: float) -> None:
        await self._single_flight.run(lambda: self._slot_map.find(self._runtime, deadline), deadline)

    async def all_connections(self, deadline: float) -> Iterable[Connections]:
        while self._slot_map.stale:  # another may have asked for this one, in vain
            await self.find(deadline)
        return [
            self._connections_to(address) for address in dict.fromkeys(self._slot_map.owners) if address is not None
        ]

    async def redirect(self, tag: str, rejected: Rejected, tries: int, deadline: float) -> Connections | None:
        error, slot_map = rejected.error, self._slot_map
        if not rejected.retryable:
            return None
        if rejected.connections is None or not is_error_reply(error, "MOVED") or tries >= _MAX_REDIRECTS:
            return await rediscover(self, self._runtime, tag, rejected, tries, deadline)
        if self._runtime.now() > slot_map.found_at + _MAP_MAX_AGE:  # it may not be the only slot that has moved
            with suppress(Unreachable):
                await self.find(deadline)
        return self._connections_to(
            slot_map.apply_moved(error, rejected.connections.server)
        )  # not every node knows it yet

    def mark_stale(self, connections: Connections) -> None:
        self._slot_map.stale = True

    def is_replaced(self, connections: Connections) -> bool:
        return False  # a node knows which slots it has

    def close(self) -> None:
        for connections in self._connections.values():
            connections.close()

    def after_fork(self) -> None:
        self._single_flight = SingleFlight(self._runtime)
        for connections in self._connections.values():
            connections.after_fork()
