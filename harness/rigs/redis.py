"""The rigs of the Redis engine: real servers, started once per run or process, and a proxy for each client machine.

`redis` is a server with default settings, in real time. `redis-aof` writes every command to an append-only file.
`redis-replica` is a primary whose replica must confirm every grant (`min_replicas=1`). `valkey` is `redis` on a Valkey
server, with its own scheme in the URL. If the package faketime is
installed, the clocks of the last two can be advanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar
from weakref import WeakSet

from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer, ValkeyServer
from harness.servers.shared import shared
from leasehold import engines
from leasehold.config import SCHEME_ALIASES, EngineConfig
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

    own_server: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.server = self.servers()[0]

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        """The primary first, then its replicas."""
        return single_server(own=cls.own_server)

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


class ValkeyRig(RedisRig):
    """The same engine on a Valkey server."""

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return valkey_server(own=cls.own_server)

    def client_path(self) -> ClientPath:
        return RedisMachine([self.server], scheme="valkey")


def namespace_keys(server: RedisServer, namespace: str) -> set[bytes]:
    """The keys of a namespace, without the counters."""
    pattern = f"{FORMAT}:{{{encode(namespace)}:*}}:*"
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, keys = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        found.update(keys)
        if cursor == b"0":
            return found


class _FakeClockRig(RedisRig):
    """The clocks of its servers and client machines are advanced together."""

    main_rig = RedisRig
    ttl: ClassVar[float] = 10.0 if CAN_FAKE_CLOCK else 2.0
    can_advance_clock = CAN_FAKE_CLOCK

    def clock(self) -> float:
        return boot_clock() + (self.server.clock_offset if CAN_FAKE_CLOCK else 0.0)

    def advance_clock(self, seconds: float) -> None:
        for server in self.servers():
            server.set_clock(server.clock_offset + seconds)
        for _, machine in self._client_paths:
            assert isinstance(machine, RedisMachine)
            machine.wake_sleepers()


class RedisAofRig(_FakeClockRig):
    """Every grant is on disk before it is answered."""

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return server_with_aof()


class RedisReplicaRig(_FakeClockRig):
    """A primary and its replica, which must have every grant."""

    options: ClassVar[str] = "?min_replicas=1"
    can_restart = can_pause = False  # those cases expect one server; tests/engines/redis/test_replica.py tests both

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return primary_and_replica()


class RedisMachine(ProxiedMachine):
    """One client's connections, through its own proxies."""

    def __init__(self, servers: Sequence[RedisServer], options: str = "", scheme: str = "redis") -> None:
        proxies = [Proxy(server.port) for server in servers]
        self._open_engine = engines.opener(SCHEME_ALIASES.get(scheme, scheme))
        super().__init__(f"{scheme}://{hosts(proxies)}{options}", proxies, self._open)
        self._registries: WeakSet[ClaimRegistry] = WeakSet()

    def _open(self, config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> Engine:
        self._registries.add(registry)
        return self._open_engine(config, runtime, registry)

    def wake_sleepers(self) -> None:
        """The clock was advanced: wake the watchdog and all waiters, so that they read it again."""
        for registry in list(self._registries):
            registry.wake_watchdog(0.0)
            for waiter in list(registry.waiting.values()):
                waiter.signal.set()


@shared
def single_server() -> tuple[RedisServer, ...]:
    return (RedisServer().start(),)


@shared
def valkey_server() -> tuple[RedisServer, ...]:
    return (ValkeyServer().start(),)


@cache
def server_with_aof() -> tuple[RedisServer, ...]:
    return (RedisServer(*AOF_ALWAYS, fake_clock=CAN_FAKE_CLOCK).start(),)


@cache
def primary_and_replica() -> tuple[RedisServer, ...]:
    """A primary and its replica, connected."""
    primary = RedisServer(fake_clock=CAN_FAKE_CLOCK).start()
    replica = RedisServer(primary=primary, fake_clock=CAN_FAKE_CLOCK).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica is online")
    return primary, replica
