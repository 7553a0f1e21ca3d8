"""The rigs of the Redis engine: a real server, started once per process, and a proxy for each machine.

`redis` is a server as it comes, `redis-aof` one with a log of every commit, `redis-replica` a primary whose replica
must have every grant (`min_replicas=1`).
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from leasehold.core.names import FORMAT, encode
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.redis import RedisServer

_ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")


class RedisRig(Rig):
    scheme = "redis"
    ttl: ClassVar[float] = 2.0
    options: ClassVar[str] = ""
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.server = self.shared()

    @classmethod
    def shared(cls) -> RedisServer:
        return _running()

    def machine(self) -> Machine:
        return RedisMachine(self.server, self.options)

    def pause(self) -> None:
        self.server.pause()

    def resume(self) -> None:
        self.server.resume()

    def restart(self) -> None:
        self.server.restart()

    def residue(self, namespace: str) -> int:
        pattern = f"{FORMAT}:{{{encode(namespace)}:*}}:*"
        found: set[bytes] = set()
        cursor = b"0"
        while True:
            cursor, keys = self.server.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found.update(keys)
            if cursor == b"0":
                return len(found)


class RedisAofRig(RedisRig):
    """What it says it has granted, it has on disk."""

    @classmethod
    def shared(cls) -> RedisServer:
        return _running_always()


class RedisReplicaRig(RedisRig):
    """A primary and its replica, which must have what is granted."""

    options: ClassVar[str] = "?min_replicas=1"
    can_restart = can_pause = False  # the conformance cases know one server; tests/engines/test_redis_replica.py both

    @classmethod
    def shared(cls) -> RedisServer:
        return pair()[0]


class RedisMachine(Machine):
    """One client's connections, through a proxy of its own."""

    def __init__(self, server: RedisServer, options: str = "") -> None:
        self._proxy = Proxy(server.port)
        super().__init__(f"redis://127.0.0.1:{self._proxy.port}{options}")

    def cut(self) -> None:
        self._proxy.cut()

    def mend(self) -> None:
        self._proxy.mend()

    def kill_session(self) -> None:
        self._proxy.reset()

    def close(self) -> None:
        self._proxy.close()


@cache
def _running() -> RedisServer:
    return RedisServer().start()


@cache
def _running_always() -> RedisServer:
    return RedisServer(*_ALWAYS).start()


@cache
def pair() -> tuple[RedisServer, RedisServer]:
    """A primary and its replica, in step."""
    primary = RedisServer().start()
    replica = RedisServer(primary=primary).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica is in step")
    return primary, replica
