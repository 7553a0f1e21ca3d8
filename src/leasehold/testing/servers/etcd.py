"""A cluster of etcd on loopback: one member or three, each a process of its own."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Sequence
from typing import ClassVar

from leasehold.testing.servers.process import Server, free_ports, program, scratch


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
            "--unsafe-no-fsync": "",  # takes no value; a crash of the machine is nobody's test
        }
        given = dict(zip(self.more[::2], self.more[1::2], strict=True))
        return [self._program, *(word for pair in {**usual, **given}.items() for word in pair if word)]

    def ready(self) -> bool:
        """True only with a leader."""
        return '"true"' in self.get("/health")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:  # noqa: S310
            return str(answer.read().decode())

    def status(self) -> dict[str, str]:
        """Among it `leader`, and in `header` who this member is."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/maintenance/status", b"{}")  # noqa: S310
        with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
            found: dict[str, str] = json.load(answer)
        return found

    @property
    def leads(self) -> bool:
        status = self.status()
        return status.get("leader") == status["header"]["member_id"]  # type: ignore[index]


def cluster(size: int, *more: str) -> list[Etcd]:
    """Members that know each other, started."""
    ports = free_ports(2 * size)
    members = [Etcd(scratch(), ports[place], ports[size:], place, *more) for place in range(size)]
    for member in members:
        member.spawn()
    for member in members:
        member.await_ready()
    return members
