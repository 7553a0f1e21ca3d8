"""What tests read and change inside the Redis engine, on one server, with Sentinel or on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from leasehold.engines.redis import bounded_reader, discovery, health
from leasehold.engines.redis.bounded_reader import BoundedReader
from leasehold.engines.redis.cluster import ClusterTopology, NodeSlotMap, SlotMap
from leasehold.engines.redis.cluster_pubsub import ClusterSubscriptions, NodeListener
from leasehold.engines.redis.connections import BlockingPool, TaskSemaphore
from leasehold.engines.redis.discovery import DiscoveryNode
from leasehold.engines.redis.engine import RedisEngine
from leasehold.engines.redis.pubsub import PubSubListener
from leasehold.engines.redis.sentinel import Primary, SentinelPubSub, SentinelSet, SentinelTopology, SwitchWatcher
from leasehold.engines.redis.server import RedisEndpoint
from leasehold.engines.redis.topology import SingleServer
from leasehold.engines.registry import RecheckTimer
from tests.support import probe
from tests.support.probe import AnyClient, Place

AnyEngine: TypeAlias = AnyClient | RedisEngine

MAX_NODE_SECONDS = Place(discovery, "_MAX_NODE_SECONDS")  # for one node of those that are asked for the primary

# Steps that tests watch, or during which they do harm.
CHECK_HEADER = Place(BoundedReader, "_check_header")  # of each part of a reply
END_OF_QUEUE_REPLY = Place(bounded_reader, "_end_of_queue_reply")  # finds replies that need no further check
OPEN = Place(RedisEndpoint, "_open")  # a connection
PARSE_PRIMARY = Place(SentinelSet, "_parse_reply")

# Functions that the listener's thread calls.
ON_DISCONNECT = Place(PubSubListener, "_on_disconnect")
ON_NOTIFICATION = Place(PubSubListener, "_on_notification")
LISTENER_STEPS = [
    Place(PubSubListener, "_open"),
    Place(PubSubListener, "_subscribe_commands"),
    Place(PubSubListener, "_on_subscribed"),
    ON_NOTIFICATION,
    ON_DISCONNECT,
]
NODE_LISTENER_STEPS = [
    Place(NodeListener, "_open"),
    Place(NodeListener, "_subscribe_commands"),
    Place(NodeListener, "_on_subscribed"),
    Place(NodeListener, "_on_notification"),
]
SENTINEL_LISTENER_STEPS = [
    Place(SentinelSet, "open"),
    ON_NOTIFICATION,
    Place(SwitchWatcher, "_open"),
    Place(SwitchWatcher, "_on_push"),
]

find_differences = health._differences
ReportedPrimary = health._Reported


def engine_of(user: AnyEngine) -> RedisEngine:
    return cast(RedisEngine, probe.engine(user))


def subscriptions(client: AnyClient) -> Any:
    """What the client listens with, which its two engine instances share: of another class for each deployment."""
    return probe.engine_state(client)["redis"].subscriptions


# ------------------------------------------------------------------- servers


def drop_connections(user: AnyEngine) -> None:
    """Of a client with Sentinel: let the next call connect to the primary that is known."""
    connections = cast(SentinelTopology, engine_of(user)._topology)._connections
    assert connections is not None
    connections.drop_connections()


def only_server(user: AnyEngine) -> RedisEndpoint:
    return cast(SingleServer, engine_of(user)._topology)._server


def known_by_cluster_client(user: AnyEngine) -> tuple[Any, ...]:
    """What a client of a cluster remembers for each node: connections, servers, nodes that it may ask."""
    found = cast(ClusterTopology, engine_of(user)._topology)
    return found._connections, found._slot_map._servers, found._slot_map._nodes


def node_listeners(client: AnyClient) -> Mapping[Any, NodeListener]:
    """Of a client of a cluster: its listeners, by the node's address."""
    return cast(ClusterSubscriptions, subscriptions(client))._listeners


def requested_subscriptions(listener: NodeListener) -> int:
    """How many are not confirmed yet."""
    return len(listener._pending)


def parse_slots(slot_map: SlotMap, node: DiscoveryNode, replies: list[Any]) -> NodeSlotMap:
    return slot_map._parse_reply(node, replies)


# ------------------------------------------------------------------ Sentinel


def switch_watcher(client: AnyClient) -> SwitchWatcher:
    """The listener that sentinels tell of a new primary."""
    return cast(SentinelPubSub, subscriptions(client))._switch_watcher


def watched_sentinel(client: AnyClient) -> int:
    """The index of the sentinel that the client has subscribed to."""
    return switch_watcher(client)._node_index


def sentinels(client: AnyClient) -> SentinelSet:
    return cast(SentinelPubSub, subscriptions(client))._sentinels


def update_primary(sentinels: SentinelSet, latest: Primary) -> None:
    """As if sentinels had reported it."""
    sentinels._update_primary(latest)


# --------------------------------------------------------------- connections


def idle_connections(pool: BlockingPool) -> int:
    return len(pool._idle)


def all_connections(pool: BlockingPool) -> int:
    return len(pool._all)


def free_permits(semaphore: TaskSemaphore) -> int:
    return semaphore._free


def planned_rechecks(timer: RecheckTimer) -> int:
    """How many entries the timer keeps, also those that do not count any more."""
    return len(timer._due)
