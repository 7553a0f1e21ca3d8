"""The rigs of the etcd engine: one member, and a cluster of three. Each client machine has its own proxies.

Members are started once per run or process, and kept.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from harness.servers.etcd import Cluster
from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.proxy import Proxy
from harness.servers.shared import shared
from leasehold.config import EngineConfig
from leasehold.core.names import FORMAT
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.rpc import ClusterMemory, RpcClient
from leasehold.engines.etcd.url import parse_url
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.rig import ClientPath, Rig


@shared
def single_member_cluster() -> Cluster:
    """The cluster of one member."""
    return Cluster(1).start()


@cache
def three_member_cluster() -> Cluster:
    """The cluster of three members, started once per process."""
    return Cluster(3).start()


class EtcdRig(Rig):
    scheme = "etcd"
    ttl: ClassVar[float] = 2.0  # the shortest that etcd grants
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_count = can_restart = True

    own_server: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.cluster = self.shared_cluster()

    def shared_cluster(self) -> Cluster:
        return single_member_cluster(own=self.own_server)

    def client_path(self) -> ClientPath:
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
        calls = RpcClient(parse_url(EngineConfig.parse(f"etcd://{self.cluster.hosts}", 5.0)), runtime, ClusterMemory())
        begin = queue.names_prefix(f"{FORMAT}/", namespace, "", exact=False)
        try:
            return run_sync(
                calls.call(
                    messages.RANGE, messages.RangeRequest(begin, messages.range_end(begin), 1), runtime.now() + 10
                )
            ).total
        finally:
            calls.close()


class EtcdClusterRig(EtcdRig):
    main_rig = EtcdRig
    can_lose_minority = True

    def shared_cluster(self) -> Cluster:
        return three_member_cluster().start()

    def lose_minority(self) -> None:
        self.cluster.leader().kill()

    def restart_lost_members(self) -> None:
        self.cluster.start()


class EtcdMachine(ProxiedMachine):
    def __init__(self, ports: list[int]) -> None:
        proxies = [Proxy(port) for port in ports]
        super().__init__(f"etcd://{hosts(proxies)}", proxies)
