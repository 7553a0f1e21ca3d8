"""The rigs of the ZooKeeper engine: one server, and an ensemble of three. Each client machine has its own proxies.

Servers are started once per run or process, and kept. Sessions are as long as the servers' ticks allow, so that a busy
machine does not lose one. Short sessions are tested in tests/engines/zookeeper.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from kazoo.client import KazooClient

from harness import probe
from harness.servers.folders import scratch
from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.process import free_ports
from harness.servers.proxy import Proxy
from harness.servers.shared import shared
from harness.servers.zookeeper import Ensemble, Zookeeper
from leasehold import engines
from leasehold.config import EngineConfig
from leasehold.core.names import encode
from leasehold.engines.base import Engine
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.zookeeper.nodes import ROOT
from leasehold.engines.zookeeper.session import ZookeeperSession
from leasehold.runtime.base import Runtime
from leasehold.testing.conformance.rig import ClientPath, Rig


@shared
def shared_server() -> Zookeeper:
    """The server."""
    return Zookeeper(scratch(), free_ports(1)[0]).start()


@cache
def shared_ensemble() -> Ensemble:
    """The ensemble, started once per process."""
    return Ensemble().started


class ZookeeperRig(Rig):
    scheme = "zookeeper"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    own_server: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.servers = self.shared_servers()

    def shared_servers(self) -> list[Zookeeper]:
        return [shared_server(own=self.own_server)]

    def client_path(self) -> ClientPath:
        return ZookeeperMachine([server.port for server in self.servers])

    def pause(self) -> None:
        for server in self.servers:
            server.pause()

    def resume(self) -> None:
        for server in self.servers:
            server.resume()

    def restart(self) -> None:
        for server in self.servers:
            server.kill()
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.await_ready()

    def residue(self, namespace: str) -> int:
        client = KazooClient(",".join(f"127.0.0.1:{server.port}" for server in self.servers))
        client.start()
        try:
            if not client.exists(ROOT):
                return 0
            names = [key for key in client.get_children(ROOT) if key.startswith(f"{encode(namespace)}:")]
            return len(names)
        finally:
            client.stop()
            client.close()


class ZookeeperEnsembleRig(ZookeeperRig):
    main_rig = ZookeeperRig
    can_lose_minority = True

    def shared_servers(self) -> list[Zookeeper]:
        return shared_ensemble().members

    def lose_minority(self) -> None:
        shared_ensemble().leader().kill()

    def restart_lost_members(self) -> None:
        shared_ensemble().restore()


class ZookeeperMachine(ProxiedMachine):
    def __init__(self, ports: list[int]) -> None:
        proxies = [Proxy(port) for port in ports]
        super().__init__(f"zookeeper://{hosts(proxies)}", proxies, self._open)
        self._ports = ports
        self._sessions: list[ZookeeperSession] = []

    def _open(self, config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> Engine:
        engine = engines.opener("zookeeper")(config, runtime, registry)
        session = registry.shared["zookeeper"]
        assert isinstance(session, ZookeeperSession)
        if session not in self._sessions:
            self._sessions.append(session)
        return engine

    def kill_session(self) -> None:
        """End the session as any client with its password can: connect to the same session, and close it. The owner is
        cut off meanwhile, because otherwise it would reconnect and take the session back."""
        self.cut()
        for session in self._sessions:
            if known := probe.kazoo_session(session):
                duplicate = KazooClient(f"127.0.0.1:{self._ports[0]}", client_id=known)
                duplicate.start()
                duplicate.stop()
                duplicate.close()
        self.restore()
