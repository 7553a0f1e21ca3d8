"""The rigs of Redis Sentinel and Redis Cluster. Each client machine has a proxy for every server, and a URL that maps
the servers' addresses to the proxies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from harness.rigs.redis import RedisRig
from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from harness.servers.redis_ha import SERVICE, RedisCluster, SentinelSetup, scan_keys
from leasehold.core.names import FORMAT, encode
from leasehold.testing.conformance.rig import ClientPath, Rig

_FAILURE_TIMEOUT = 30.0  # seconds; long, because cases pause servers without wanting a failover


class _HighAvailabilityRig(Rig):
    main_rig = RedisRig
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def servers(self) -> Sequence[RedisServer]:
        """All servers that clients connect to."""
        raise NotImplementedError

    def primaries(self) -> Sequence[RedisServer]:
        raise NotImplementedError

    def pause(self) -> None:
        for server in self.servers():
            server.pause()

    def resume(self) -> None:
        for server in self.servers():
            server.resume()

    def restart(self) -> None:
        for server in self.primaries():
            server.kill()
        for server in self.primaries():
            server.start()

    def residue(self, namespace: str) -> int:
        pattern = f"{FORMAT}:{{{encode(namespace)}:*}}:*"
        return sum(len(scan_keys(server, pattern)) for server in self.primaries())


class RedisSentinelRig(_HighAvailabilityRig):
    """A primary, its replica and three sentinels."""

    scheme = "redis+sentinel"

    def __init__(self) -> None:
        super().__init__()
        self.setup = sentinel_setup()

    def servers(self) -> Sequence[RedisServer]:
        return self.setup.all

    def primaries(self) -> Sequence[RedisServer]:
        return [self.setup.primary]

    def client_path(self) -> ClientPath:
        server_proxies = [Proxy(server.port) for server in (self.setup.primary, self.setup.replica)]
        sentinel_proxies = [Proxy(server.port) for server in self.setup.sentinels]
        remap = _remap([self.setup.primary, self.setup.replica], server_proxies)
        return ProxiedMachine(
            f"redis+sentinel://{hosts(sentinel_proxies)}/{SERVICE}?remap={remap}", [*server_proxies, *sentinel_proxies]
        )


class RedisClusterRig(_HighAvailabilityRig):
    """Three nodes, each with a third of the hash slots."""

    scheme = "redis+cluster"

    def __init__(self) -> None:
        super().__init__()
        self.cluster = three_node_cluster()

    def servers(self) -> Sequence[RedisServer]:
        return self.cluster.all

    def primaries(self) -> Sequence[RedisServer]:
        return self.cluster.primaries

    def client_path(self) -> ClientPath:
        proxies = [Proxy(node.port) for node in self.cluster.all]
        url = f"redis+cluster://{hosts(proxies)}?remap={_remap(self.cluster.all, proxies)}"
        return ProxiedMachine(url, proxies)


def _remap(servers: Sequence[RedisServer], proxies: Sequence[Proxy]) -> str:
    pairs = zip(servers, proxies, strict=True)
    return ",".join(f"127.0.0.1:{server.port}=127.0.0.1:{proxy.port}" for server, proxy in pairs)


@cache
def sentinel_setup() -> SentinelSetup:
    return SentinelSetup(_FAILURE_TIMEOUT)


@cache
def three_node_cluster() -> RedisCluster:
    return RedisCluster(_FAILURE_TIMEOUT)
