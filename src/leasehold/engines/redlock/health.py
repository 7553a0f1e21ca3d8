"""The health of a Redlock engine: of each node, as for a Redis server. It is up while a majority of the nodes is."""

from __future__ import annotations

from leasehold.config import EngineConfig
from leasehold.engines.probe import Health, describe_down
from leasehold.engines.redis.health import probe_servers
from leasehold.engines.redlock.url import parse_nodes
from leasehold.runtime.base import Runtime


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    members = await probe_servers(parse_nodes(config), runtime, deadline)
    # A replica has the votes of its primary, and refuses writes: it does not count.
    reachable = sum(each.up and each.role != "replica" for each in members)
    up = 2 * reachable > len(members)
    error = f"only {reachable} of {len(members)} nodes can vote: {describe_down(members)}"
    return Health("redlock", up, members, voting=len(members), reachable=reachable, error=None if up else error)
