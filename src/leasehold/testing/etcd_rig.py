"""The rigs of the etcd engine: one member, and a cluster of three; each machine behind proxies of its own.

Members are started once per process and kept.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from leasehold.config import EngineConfig
from leasehold.core.names import FORMAT
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls, Login
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.testing.rig import Machine, Rig
from leasehold.testing.servers.etcd import Cluster
from leasehold.testing.servers.machine import ProxiedMachine, hosts
from leasehold.testing.servers.proxy import Proxy


@cache
def alone() -> Cluster:
    """The one member of this process."""
    return Cluster(1).start()


@cache
def trio() -> Cluster:
    """The three members of this process."""
    return Cluster(3).start()


class EtcdRig(Rig):
    scheme = "etcd"
    ttl: ClassVar[float] = 2.0  # the least there is
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.cluster = self.started()

    def started(self) -> Cluster:
        return alone()

    def machine(self) -> Machine:
        return EtcdMachine([member.port for member in self.cluster.members])

    def pause(self) -> None:
        for member in self.cluster.members:
            member.pause()

    def resume(self) -> None:
        for member in self.cluster.members:
            member.resume()

    def restart(self) -> None:
        self.cluster.kill()
        self.cluster.start()

    def residue(self, namespace: str) -> int:
        runtime = Threads()
        asked = Calls(address(EngineConfig.parse(f"etcd://{self.cluster.hosts}", 5.0)), runtime, Login())
        begin = line.names(f"{FORMAT}/", namespace, "", exact=False)
        try:
            return step(asked.ask(wire.RANGE, wire.Range(begin, line.after(begin)), runtime.now() + 10)).total
        finally:
            asked.close()


class EtcdClusterRig(EtcdRig):
    beside = EtcdRig
    can_lose_minority = True

    def started(self) -> Cluster:
        return trio().start()

    def lose_minority(self) -> None:
        self.cluster.leader().kill()

    def regain(self) -> None:
        self.cluster.start()


class EtcdMachine(ProxiedMachine):
    def __init__(self, ports: list[int]) -> None:
        proxies = [Proxy(port) for port in ports]
        super().__init__(f"etcd://{hosts(proxies)}", proxies)
