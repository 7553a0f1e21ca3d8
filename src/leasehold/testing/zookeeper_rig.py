"""The rigs of the ZooKeeper engine: one server, and an ensemble of three; each machine behind proxies of its own.

Servers are started once per process and kept. Sessions are as long as their ticks allow, so that a busy machine does
not lose one by being slow; what a short session does is in tests/engines.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from kazoo.client import KazooClient

from leasehold import engines
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import encode
from leasehold.engine import Engine
from leasehold.engines.zookeeper.nodes import ROOT
from leasehold.engines.zookeeper.session import Session
from leasehold.runtime.base import Runtime
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.machine import ProxiedMachine, hosts
from leasehold.testing.servers.process import free_ports, scratch
from leasehold.testing.servers.proxy import Proxy
from leasehold.testing.servers.zookeeper import Ensemble, Zookeeper


@cache
def alone() -> Zookeeper:
    """The one server of this process."""
    return Zookeeper(scratch(), free_ports(1)[0]).start()


@cache
def ensemble() -> Ensemble:
    """The three servers of this process."""
    return Ensemble().started


class ZookeeperRig(Rig):
    scheme = "zookeeper"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.servers = self.started()

    def started(self) -> list[Zookeeper]:
        return [alone()]

    def machine(self) -> Machine:
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
        asked = KazooClient(",".join(f"127.0.0.1:{server.port}" for server in self.servers))
        asked.start()
        try:
            if not asked.exists(ROOT):
                return 0
            names = [key for key in asked.get_children(ROOT) if key.startswith(f"{encode(namespace)}:")]
            return len(names)
        finally:
            asked.stop()
            asked.close()


class ZookeeperEnsembleRig(ZookeeperRig):
    beside = ZookeeperRig
    can_lose_minority = True

    def started(self) -> list[Zookeeper]:
        return ensemble().members

    def lose_minority(self) -> None:
        ensemble().leader().kill()

    def regain(self) -> None:
        ensemble().heal()


class ZookeeperMachine(ProxiedMachine):
    def __init__(self, ports: list[int]) -> None:
        proxies = [Proxy(port) for port in ports]
        super().__init__(f"zookeeper://{hosts(proxies)}", proxies, self._open)
        self._ports = ports
        self._sessions: list[Session] = []

    def _open(self, config: EngineConfig, runtime: Runtime, book: Book) -> Engine:
        engine = engines.opener("zookeeper")(config, runtime, book)
        session = book.shelf["zookeeper"]
        assert isinstance(session, Session)
        if session not in self._sessions:
            self._sessions.append(session)
        return engine

    def kill_session(self) -> None:
        """As somebody who knows the session's password may do it: come in its name, and say goodbye. Its owner must not
        hear of it before that: it would connect anew, and take the session back."""
        self.cut()
        for session in self._sessions:
            if session._keeper is not None and session._keeper.client_id:
                thief = KazooClient(f"127.0.0.1:{self._ports[0]}", client_id=session._keeper.client_id)
                thief.start()
                thief.stop()
                thief.close()
        self.mend()
