"""The servers of the engine tests, with paths for record stores. Each is started once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from harness.rigs import postgresql, with_own_server
from harness.rigs.etcd import EtcdRig
from harness.rigs.redis import AOF_ALWAYS
from harness.rigs.redis_ha import RedisClusterRig, RedisSentinelRig
from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.machine import ProxiedMachine
from harness.servers.mysql import MariaDB
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from leasehold.testing.conformance.rig import Rig


class MySQL(MariaDB):
    """A MariaDB with an account for stores in the database `test`."""

    def ready(self) -> bool:
        if not super().ready():
            return False
        self.run("create user if not exists t identified by 't'", "grant all on test.* to t")
        return True


class StoreServer:
    """One server with this URL, in which `{port}` is a proxy's."""

    def __init__(self, server: Any, url: str) -> None:
        self.server, self._url = server, url

    def path(self) -> ProxiedMachine:
        """A path of its own to the server."""
        proxy = Proxy(self.server.port)
        return ProxiedMachine(self._url.format(port=proxy.port), [proxy])

    def restart(self) -> None:
        self.server.restart()


class RigServer:
    """The servers of a rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def path(self) -> ProxiedMachine:
        path = self._rig.client_path()
        assert isinstance(path, ProxiedMachine)
        return path

    def restart(self) -> None:
        self._rig.restart()


_SERVERS: dict[str, Callable[[], StoreServer | RigServer]] = {
    "postgresql": lambda: StoreServer(postgresql.server.own(), "postgresql://postgres@127.0.0.1:{port}/postgres"),
    "mysql": lambda: StoreServer(MySQL().start(), "mysql://t:t@127.0.0.1:{port}/test"),
    "redis": lambda: StoreServer(RedisServer(*AOF_ALWAYS).start(), "redis://127.0.0.1:{port}/0"),
    "redis+sentinel": lambda: RigServer(RedisSentinelRig()),
    "redis+cluster": lambda: RigServer(RedisClusterRig()),
    "etcd": lambda: RigServer(with_own_server(EtcdRig)()),
    "zookeeper": lambda: RigServer(with_own_server(ZookeeperRig)()),
}


@cache
def server(kind: str) -> StoreServer | RigServer:
    """The server of this kind."""
    return _SERVERS[kind]()


@cache
def url(kind: str) -> str:
    """Its URL, for tests that inject no faults."""
    return server(kind).path().url
