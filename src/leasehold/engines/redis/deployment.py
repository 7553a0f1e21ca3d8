"""Builds topology and subscriptions from a URL, and what a client's engine instances share.

redis://  rediss://  redis+unix://   one server (topology.py)
redis+sentinel://                    the primary as reported by sentinels (sentinel.py)
redis+cluster://                     the nodes of a cluster (cluster.py, cluster_pubsub.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from leasehold.config import EngineConfig
from leasehold.engines.redis.cluster import ClusterTopology, SlotMap
from leasehold.engines.redis.cluster_pubsub import ClusterSubscriptions
from leasehold.engines.redis.pubsub import PubSubListener, Subscriptions
from leasehold.engines.redis.scripts import PubSubCommands
from leasehold.engines.redis.sentinel import SentinelPubSub, SentinelSet, SentinelTopology
from leasehold.engines.redis.topology import RedisOptions, SingleServer, Topology, parse_single_server
from leasehold.engines.redis.url import parse_cluster_url, parse_sentinel_url
from leasehold.engines.registry import ClaimRegistry
from leasehold.runtime.base import Runtime


class Deployment(NamedTuple):
    """In `ClaimRegistry.shared`: shared by the client's engine instances."""

    options: RedisOptions
    subscriptions: Subscriptions
    make_topology: Callable[[Runtime], Topology]  # each engine instance has its own connections


def make_deployment(config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> Deployment:
    call_timeout = config.call_timeout
    if config.scheme == "redis+sentinel":
        url = parse_sentinel_url(config)
        sentinels = SentinelSet(url.nodes, url.service, url.make_server, runtime)
        subscriptions = SentinelPubSub(sentinels, runtime, registry, call_timeout)
        return Deployment(url.options, subscriptions, partial(SentinelTopology, sentinels))
    if config.scheme == "redis+cluster":
        url = parse_cluster_url(config)
        slot_map = SlotMap(url)
        return Deployment(
            url.options,
            ClusterSubscriptions(slot_map, runtime, registry, call_timeout),
            partial(ClusterTopology, slot_map),
        )
    server, options = parse_single_server(config)
    return Deployment(
        options,
        PubSubListener(server, PubSubCommands(), runtime, registry, call_timeout),
        partial(SingleServer, server),
    )
