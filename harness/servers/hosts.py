"""Hosts of their own for the members of a cluster: network namespaces on one bridge, which can be partitioned.

For root, inside `unshare -n -m`, so that nothing is left outside. Proxies do not work for ZooKeeper, because its
members exchange their addresses and connect directly.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Final

from harness.servers.etcd import Etcd
from harness.servers.folders import scratch
from harness.servers.redis import RedisServer
from harness.servers.zookeeper import Zookeeper

SUBNET: Final = "10.77.0"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607


def isolate_mounts() -> None:
    """Keep the names of namespaces, which are files below /run, from the rest of the machine."""
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)  # noqa: S607


def create_bridge() -> None:
    isolate_mounts()
    ip("link", "set", "lo", "up")
    ip("link", "add", "bridge", "type", "bridge")
    ip("addr", "add", f"{SUBNET}.1/24", "dev", "bridge")
    ip("link", "set", "bridge", "up")


class Host:
    """A network namespace connected to the bridge."""

    def __init__(self, index: int) -> None:
        self.address, self._namespace, veth = f"{SUBNET}.{index + 2}", f"m{index}", f"p{index}"
        ip("netns", "add", self._namespace)
        ip("link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        ip("link", "set", veth, "master", "bridge", "up")
        for arguments in (
            ["addr", "add", f"{self.address}/24", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            ["link", "set", "lo", "up"],
        ):
            ip("-n", self._namespace, *arguments)

    def netns_command(self, arguments: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._namespace, *arguments]

    def partition_from(self, others: Sequence[Host], verb: str = "add") -> None:
        """Drop all packets in both directions; with `verb="del"`, end that."""
        for other in others:
            ip("-n", self._namespace, "route", verb, "blackhole", f"{other.address}/32")
            ip("-n", other._namespace, "route", verb, "blackhole", f"{self.address}/32")


class EtcdMember(Etcd):
    """One of three members, on its own host."""

    def __init__(self, host: Host, index: int, *options: str) -> None:
        super().__init__(scratch(), 2379, [2380] * 3, index, *options)
        self.netns_host, self.host = host, host.address

    def command(self) -> list[str]:
        arguments = list(super().command())
        names = ",".join(f"e{index}=http://{SUBNET}.{index + 2}:2380" for index in range(3))
        arguments[arguments.index("--initial-cluster") + 1] = names
        arguments[arguments.index("--initial-cluster-token") + 1] = "partition"
        # As etcd 3.5 does by itself: a member that was cut off does not cause an election when it is back.
        return self.netns_host.netns_command([*arguments, "--pre-vote"])


class RedisNode(RedisServer):
    """A Redis server on its own host."""

    def __init__(self, host: Host, *options: str) -> None:
        self.netns_host, self.host = host, host.address
        super().__init__(*options, "--protected-mode", "no")

    def command(self) -> Sequence[str]:
        return self.netns_host.netns_command(super().command())


class ZookeeperMember(Zookeeper):
    """One of three members, on its own host."""

    def __init__(self, host: Host, index: int) -> None:
        self.netns_host, self.host = host, host.address
        view = {f"server.{number + 1}": f"{SUBNET}.{number + 2}:2888:3888" for number in range(3)}
        limits = {"initLimit": 10, "syncLimit": 5, "standaloneEnabled": "false"}
        super().__init__(scratch(), 2181, {**limits, **view})
        self.set_id(index + 1)

    def command(self) -> list[str]:
        return self.netns_host.netns_command(super().command())

    @property
    def leads(self) -> bool:
        return self.mode() == "leader"
