"""ZooKeeper as plain processes: one server, or an ensemble of three whose members can be partitioned."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

from harness.servers.folders import scratch
from harness.servers.process import Server, free_ports, poll, program
from harness.servers.proxy import Proxy
from leasehold.testing.conformance.rig import Absent

_JARS: Final = (  # by name: loading the whole folder takes five times as long
    *("zookeeper", "zookeeper-jute", "slf4j-api", "slf4j-log4j12", "log4j-1.2", "netty-all", "metrics-core"),
    *("snappy-java", "commons-cli", "commons-io", "jackson-core", "jackson-databind", "jackson-annotations"),
    *("netty-buffer", "netty-codec", "netty-common", "netty-handler", "netty-resolver", "netty-transport"),  # for TLS
)
_FOLDER: Final = "/usr/share/java"

TICK: Final = 500  # ms; a session lasts 2 to 20 ticks
SWEEP_INTERVAL: Final = 500  # ms between sweeps of empty container nodes; the default is a minute


def class_path() -> str:
    jars = [f"{_FOLDER}/{jar}.jar" for jar in _JARS]
    if not os.path.exists(jars[0]):
        raise Absent("ZooKeeper is not installed: run apt-get install zookeeper")
    return ":".join(["/etc/zookeeper/conf", *jars])


def four_letter_command(port: int, command: str, seconds: float = 2.0, host: str = "127.0.0.1") -> str:
    """The answer of a server to a four-letter command."""
    with socket.create_connection((host, port), seconds) as connection:
        connection.settimeout(seconds)
        connection.sendall(command.encode())
        return b"".join(iter(lambda: connection.recv(65_536), b"")).decode()


class Zookeeper(Server):
    package = "zookeeper"
    host: str = "127.0.0.1"

    def __init__(
        self,
        folder: str,
        port: int,
        settings: Mapping[str, object] | None = None,
        properties: Mapping[str, object] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port)
        self._properties, self._environment = dict(properties or {}), dict(environment or {})
        self.data = os.path.join(folder, "data")
        os.makedirs(self.data, exist_ok=True)
        self._java = program("java", package="zookeeper")
        self._class_path = class_path()
        lines = {
            "tickTime": TICK,
            "dataDir": self.data,
            "clientPort": port,
            "clientPortAddress": self.host,
            "maxClientCnxns": 0,
            "4lw.commands.whitelist": "*",
            "admin.enableServer": "false",
            **(settings or {}),
        }
        with open(os.path.join(folder, "zoo.cfg"), "w") as file:
            file.writelines(f"{name}={value}\n" for name, value in lines.items())

    def command(self) -> Sequence[str]:
        given = {"root.logger": "WARN,CONSOLE", "forceSync": "no", **self._properties}
        return [
            self._java,
            *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *(f"-Dzookeeper.{name}={value}" for name, value in given.items()),
            f"-Dznode.container.checkIntervalMs={SWEEP_INTERVAL}",
            *("-cp", self._class_path, "org.apache.zookeeper.server.quorum.QuorumPeerMain"),
            os.path.join(self.folder, "zoo.cfg"),
        ]

    def set_id(self, number: int) -> None:
        """Set its number in the ensemble."""
        with open(os.path.join(self.data, "myid"), "w") as file:
            file.write(str(number))

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def ready(self) -> bool:
        # Not `ruok`, which answers before there is a quorum.
        return "Mode:" in four_letter_command(self.port, "srvr", host=self.host)

    def mode(self) -> str:
        """leader, follower or standalone; empty if it does not accept requests."""
        try:
            found = four_letter_command(self.port, "srvr", host=self.host)
        except OSError:
            return ""
        return found.partition("Mode: ")[2].partition("\n")[0]

    def counter(self, name: str) -> int:
        """One of the server's own counters, such as packets_received."""
        found = dict(
            line.split("\t", 1) for line in four_letter_command(self.port, "mntr").splitlines() if "\t" in line
        )
        return int(found[f"zk_{name}"])


class Ensemble:
    """Three members. `partitionable`: each reaches the others through its own proxies, so that one can be partitioned
    from the rest. Only partition a follower: members exchange their addresses, so the followers may reach a leader
    without the proxies."""

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        environments: Sequence[Mapping[str, str]] = ({}, {}, {}),
        partitionable: bool = False,
    ) -> None:
        class_path()
        self._partitionable = partitionable
        ports = free_ports(9)
        self._client_ports, self._peer_ports = ports[:3], [ports[3:5], ports[5:7], ports[7:9]]
        self._settings = {"initLimit": 10, "syncLimit": 5, "standaloneEnabled": "false", **(settings or {})}
        self._proxies: dict[tuple[int, int], list[Proxy]] = {}
        self.members = [self._member(index, environments[index]) for index in range(3)]

    def _member(self, index: int, environment: Mapping[str, str]) -> Zookeeper:
        view: dict[str, object] = {}
        for other in range(3):
            ports = self._peer_ports[other]
            if other != index and self._partitionable:
                self._proxies[index, other] = proxies = [Proxy(port) for port in ports]
                ports = [proxy.port for proxy in proxies]
            view[f"server.{other + 1}"] = f"127.0.0.1:{ports[0]}:{ports[1]}"
        member = Zookeeper(scratch(), self._client_ports[index], {**self._settings, **view}, None, environment)
        member.set_id(index + 1)
        return member

    @cached_property
    def started(self) -> Ensemble:
        for member in self.members:
            member.launch()
        for member in self.members:
            member.await_ready()
        return self

    @property
    def ports(self) -> list[int]:
        return self._client_ports

    def leader(self) -> Zookeeper:
        found: list[Zookeeper] = []

        def has_one_leader() -> bool:
            found[:] = [member for member in self.members if member.running and member.mode() == "leader"]
            return len(found) == 1

        poll(has_one_leader, 60, lambda: "the ensemble has one leader")
        return found[0]

    def follower(self) -> Zookeeper:
        self.leader()
        return next(member for member in self.members if member.mode() == "follower")

    def partition(self, member: Zookeeper) -> None:
        """Cut one member off from the others; clients still reach all of them."""
        assert self._partitionable
        for pair, proxies in self._proxies.items():
            if self.members.index(member) in pair:
                for proxy in proxies:
                    proxy.cut()

    def restore(self) -> None:
        """End all faults. Returns when all members run and there is a leader."""
        for proxies in self._proxies.values():
            for proxy in proxies:
                proxy.restore()
        for member in self.members:
            member.resume()
            if not member.running:
                member.launch()
        for member in self.members:
            member.await_ready()
        self.leader()

    def kill(self) -> None:
        for member in self.members:
            member.kill()
        for proxies in self._proxies.values():
            for proxy in proxies:
                proxy.close()
