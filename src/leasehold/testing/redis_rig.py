"""The rigs of the Redis engine: real servers, started once per process, and a proxy for each machine.

`redis` is a server as it comes, in real time. `redis-aof` has a log of every commit; `redis-replica` is a primary whose
replica must have every grant (`min_replicas=1`). Where the package faketime is installed, these two travel in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar
from weakref import WeakSet

from leasehold import engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import FORMAT, encode
from leasehold.engine import Engine
from leasehold.runtime.base import Runtime
from leasehold.runtime.threads import boot_clock
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.machine import ProxiedMachine, hosts
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import CLOCKS, RedisServer

ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


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
        return alone()

    def machine(self) -> Machine:
        return RedisMachine([self.server], self.options)

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def restart(self) -> None:
        self.server.restart()

    def residue(self, namespace: str) -> int:
        return len(kept(self.server, namespace))


def kept(server: RedisServer, namespace: str) -> set[bytes]:
    """The keys of a namespace, the counters apart."""
    pattern = f"{FORMAT}:{{{encode(namespace)}:*}}:*"
    found: set[bytes] = set()
    cursor = b"0"
    while True:
        cursor, keys = server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        found.update(keys)
        if cursor == b"0":
            return found


class _TravellingRig(RedisRig):
    """The clocks of its servers and of its machines move as one."""

    beside = RedisRig
    ttl: ClassVar[float] = 10.0 if CLOCKS else 2.0
    can_travel = CLOCKS

    def clock(self) -> float:
        return boot_clock() + (self.server.ahead if CLOCKS else 0.0)

    def travel(self, seconds: float) -> None:
        for server in self.servers():
            server.set_clock(server.ahead + seconds)
        for _, machine in self._machines:
            assert isinstance(machine, RedisMachine)
            machine.stir()


class RedisAofRig(_TravellingRig):
    """What it says it has granted, it has on disk."""

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return with_log()


class RedisReplicaRig(_TravellingRig):
    """A primary and its replica, which must have what is granted."""

    options: ClassVar[str] = "?min_replicas=1"
    can_restart = can_pause = False  # these cases know of one server; tests/engines/test_redis_replica.py knows both

    @classmethod
    def servers(cls) -> tuple[RedisServer, ...]:
        return pair()


class RedisMachine(ProxiedMachine):
    """One client's connections, through a proxy of its own."""

    def __init__(self, servers: Sequence[RedisServer], options: str = "", scheme: str = "redis") -> None:
        proxies = [Proxy(server.port) for server in servers]
        self._engine = engines.opener(scheme)
        super().__init__(f"{scheme}://{hosts(proxies)}{options}", proxies, self._open)
        self._books: WeakSet[Book] = WeakSet()

    def _open(self, config: EngineConfig, runtime: Runtime, book: Book) -> Engine:
        self._books.add(book)
        return self._engine(config, runtime, book)

    def stir(self) -> None:
        """The clock has jumped: whoever sleeps on it looks at it again."""
        for book in list(self._books):
            book.stir(0.0)
            for waiter in list(book.waiting.values()):
                waiter.signal.set()


@cache
def alone() -> tuple[RedisServer, ...]:
    return (RedisServer().start(),)


@cache
def with_log() -> tuple[RedisServer, ...]:
    return (RedisServer(*ALWAYS, false_clock=CLOCKS).start(),)


@cache
def pair() -> tuple[RedisServer, ...]:
    """A primary and its replica, in step."""
    primary = RedisServer(false_clock=CLOCKS).start()
    replica = RedisServer(primary=primary, false_clock=CLOCKS).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica is in step")
    return primary, replica
