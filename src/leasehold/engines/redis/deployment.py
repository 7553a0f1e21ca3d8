"""What a URL leads to, put together: the servers, how wake-ups come from them, and what the twins of a client share.

redis://  rediss://  redis+unix://   one server (topology.py)
redis+sentinel://                    the primary that sentinels name (sentinel.py)
redis+cluster://                     the nodes of a cluster (cluster.py, shards.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.engines.redis.cluster import Cluster, Slots
from leasehold.engines.redis.listener import Listener, Listening
from leasehold.engines.redis.scripts import Publishing
from leasehold.engines.redis.sentinel import Guided, Sentinel, Sentinels
from leasehold.engines.redis.several import behind_sentinels, in_cluster
from leasehold.engines.redis.shards import Shards
from leasehold.engines.redis.topology import Options, Single, Topology, single
from leasehold.runtime.base import Runtime


class Deployment(NamedTuple):
    """On the shelf of the book: shared by the twins."""

    options: Options
    listener: Listening
    topology: Callable[[Runtime], Topology]  # each twin has its own connections


def deployed(config: EngineConfig, runtime: Runtime, book: Book) -> Deployment:
    patience = config.call_timeout
    if config.scheme == "redis+sentinel":
        places = behind_sentinels(config)
        sentinels = Sentinels(places.doors, places.service, places.serve, runtime)
        listener = Guided(sentinels, runtime, book, patience)
        return Deployment(places.options, listener, partial(Sentinel, sentinels))
    if config.scheme == "redis+cluster":
        places = in_cluster(config)
        slots = Slots(places)
        return Deployment(places.options, Shards(slots, runtime, book, patience), partial(Cluster, slots))
    server, options = single(config)
    return Deployment(options, Listener(server, Publishing(), runtime, book, patience), partial(Single, server))
