"""The rigs of Redis behind sentinels and of a Redis cluster. Each machine has a proxy for every server, and a URL that
says where to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

from leasehold.core.names import FORMAT, encode
from leasehold.testing.redis_rig import RedisRig
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.machine import ProxiedMachine, hosts
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.redis_several import SERVICE, RedisCluster, Watched, scanned

_PATIENT = 30.0  # seconds: cases pause servers, and mean no fail-over by it


class _SeveralRig(Rig):
    beside = RedisRig
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def servers(self) -> Sequence[RedisServer]:
        """All that clients talk to."""
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
        return sum(len(scanned(server, pattern)) for server in self.primaries())


class RedisSentinelRig(_SeveralRig):
    """A primary, its replica, three sentinels."""

    scheme = "redis+sentinel"

    def __init__(self) -> None:
        super().__init__()
        self.watched = watched()

    def servers(self) -> Sequence[RedisServer]:
        return self.watched.all

    def primaries(self) -> Sequence[RedisServer]:
        return [self.watched.primary]

    def machine(self) -> Machine:
        serving = [Proxy(server.port) for server in (self.watched.primary, self.watched.replica)]
        asked = [Proxy(server.port) for server in self.watched.sentinels]
        remap = _remap([self.watched.primary, self.watched.replica], serving)
        return ProxiedMachine(f"redis+sentinel://{hosts(asked)}/{SERVICE}?remap={remap}", [*serving, *asked])


class RedisClusterRig(_SeveralRig):
    """Three nodes, each with a third of the names."""

    scheme = "redis+cluster"

    def __init__(self) -> None:
        super().__init__()
        self.cluster = trio()

    def servers(self) -> Sequence[RedisServer]:
        return self.cluster.all

    def primaries(self) -> Sequence[RedisServer]:
        return self.cluster.primaries

    def machine(self) -> Machine:
        proxies = [Proxy(node.port) for node in self.cluster.all]
        url = f"redis+cluster://{hosts(proxies)}?remap={_remap(self.cluster.all, proxies)}"
        return ProxiedMachine(url, proxies)


def _remap(servers: Sequence[RedisServer], proxies: Sequence[Proxy]) -> str:
    pairs = zip(servers, proxies, strict=True)
    return ",".join(f"127.0.0.1:{server.port}=127.0.0.1:{proxy.port}" for server, proxy in pairs)


@cache
def watched() -> Watched:
    return Watched(_PATIENT)


@cache
def trio() -> RedisCluster:
    return RedisCluster(_PATIENT)
