"""A cluster of etcd on loopback: one member or three, each a process of its own."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from typing import Any, ClassVar

from leasehold.testing.servers.process import Server, free_ports, poll, program, scratch


class Etcd(Server):
    """One member. `peers` are the ports on which the members of its cluster talk to each other, its own at `place`."""

    package: ClassVar[str] = "etcd-server"

    def __init__(self, folder: str, port: int, peers: Sequence[int], place: int = 0, *more: str) -> None:
        super().__init__(folder, port)
        self.peers, self.place, self.more = list(peers), place, more
        self.data = os.path.join(folder, "data")
        self._program = program("etcd", package=self.package)

    def command(self) -> Sequence[str]:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peers[self.place]}"
        names = ",".join(f"e{place}=http://127.0.0.1:{port}" for place, port in enumerate(self.peers))
        usual = {
            "--name": f"e{self.place}",
            "--data-dir": self.data,
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": names,
            "--initial-cluster-token": f"t{self.peers[0]}",
            "--heartbeat-interval": "100",
            "--election-timeout": "1000",
            "--logger": "zap",
        }
        given = dict(zip(self.more[::2], self.more[1::2], strict=True))
        return [self._program, *(word for pair in {**usual, **given}.items() for word in pair)]

    def ready(self) -> bool:
        """True only with a leader."""
        return '"true"' in self.get("/health")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        """Among it `leader`, and in `header` who this member is."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/maintenance/status", b"{}")
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            found: dict[str, Any] = json.load(answer)
        return found

    @property
    def leads(self) -> bool:
        status = self.status()
        return bool(status.get("leader") == status["header"]["member_id"])


class Cluster:
    """Members that know each other."""

    def __init__(self, size: int, *more: str) -> None:
        ports = free_ports(2 * size)
        self.members = [Etcd(scratch(), ports[place], ports[size:], place, *more) for place in range(size)]

    def start(self) -> Cluster:
        """All that do not run, on the data that are there."""
        for member in self.members:
            member.resume()
            if not member.running:
                member.launch()
        for member in self.members:
            member.await_ready()
        return self

    def leader(self) -> Etcd:
        found: list[Etcd] = []

        def one() -> bool:
            found[:] = [member for member in self.members if member.running and member.leads]
            return len(found) == 1

        poll(one, 60, lambda: "the cluster has one leader")
        return found[0]

    def followers(self) -> list[Etcd]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{member.port}" for member in self.members)
