"""The rigs of the Redis engine: real servers, started once per process, and a proxy for each machine.

`redis` is a server as it comes, in real time. `redis-aof` has a log of every commit; `redis-replica` is a primary whose
replica must have every grant (`min_replicas=1`). Where the package faketime is installed, these two travel in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar
from weakref import WeakSet

from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from leasehold import engines
from leasehold.config import EngineConfig
from leasehold.core.names import FORMAT, encode
from leasehold.engines.base import Engine
from leasehold.engines.registry import ClaimRegistry
from leasehold.runtime.base import Runtime
from leasehold.runtime.threads import boot_clock
from leasehold.testing.conformance.rig import ClientPath, Rig

AOF_ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


class RedisRig(Rig):
    scheme = "redis"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    options: ClassVar[str] = ""
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.server = self.servers()[0]

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        """The one to ask, and its replicas."""
        return single_server()

    def client_path(self) -> ClientPath:
        return RedisMachine([self.server], self.options)

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def restart(self) -> None:
        self.server.restart()

    def residue(self, namespace: str) -> int:
        return len(namespace_keys(self.server, namespace))


def namespace_keys(server: RedisServer, namespace: str) -> set[bytes]:
    """The keys of a namespace, the counters apart."""
    pattern = f"{FORMAT}:{{{encode(namespace)}:*}}:*"
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, keys = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        found.update(keys)
        if cursor == b"0":
            return found


class _FakeClockRig(RedisRig):
    """The clocks of its servers and of its machines move as one."""

    main_rig = RedisRig
    ttl: ClassVar[float] = 10.0 if CAN_FAKE_CLOCK else 2.0
    can_advance_clock = CAN_FAKE_CLOCK

    def clock(self) -> float:
        return boot_clock() + (self.server.clock_offset if CAN_FAKE_CLOCK else 0.0)

    def advance_clock(self, seconds: float) -> None:
        for server in self.servers():
            server.set_clock(server.clock_offset + seconds)
        for _, machine in self._machines:
            assert isinstance(machine, RedisMachine)
            machine.wake_sleepers()


class RedisAofRig(_FakeClockRig):
    """What it says it has granted, it has on disk."""

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return server_with_aof()


class RedisReplicaRig(_FakeClockRig):
    """A primary and its replica, which must have what is granted."""

    options: ClassVar[str] = "?min_replicas=1"
    can_restart = can_pause = False  # these cases know of one server; tests/engines/test_redis_replica.py knows both

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return primary_and_replica()


class RedisMachine(ProxiedMachine):
    """One client's connections, through a proxy of its own."""

    def __init__(self, servers: Sequence[RedisServer], options: str = "", scheme: str = "redis") -> None:
        proxies = [Proxy(server.port) for server in servers]
        self._open_engine = engines.opener(scheme)
        super().__init__(f"{scheme}://{hosts(proxies)}{options}", proxies, self._open)
        self._registries: WeakSet[ClaimRegistry] = WeakSet()

    def _open(self, config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> Engine:
        self._registries.add(registry)
        return self._open_engine(config, runtime, registry)

    def wake_sleepers(self) -> None:
        """The clock has jumped: whoever sleeps on it looks at it again."""
        for registry in list(self._registries):
            registry.wake_watchdog(0.0)
            for waiter in list(registry.waiting.values()):
                waiter.signal.set()


@cache
def single_server() -> tuple[RedisServer, ...]:
    return (RedisServer().start(),)


@cache
def server_with_aof() -> tuple[RedisServer, ...]:
    return (RedisServer(*AOF_ALWAYS, fake_clock=CAN_FAKE_CLOCK).start(),)


@cache
def primary_and_replica() -> tuple[RedisServer, ...]:
    """A primary and its replica, in step."""
    primary = RedisServer(fake_clock=CAN_FAKE_CLOCK).start()
    replica = RedisServer(primary=primary, fake_clock=CAN_FAKE_CLOCK).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica is in step")
    return primary, replica
