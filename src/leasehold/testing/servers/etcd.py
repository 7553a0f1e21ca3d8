"""etcd as a plain process."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence
from typing import ClassVar

from leasehold.testing.servers.process import Server, program


class Etcd(Server):
    """One member. `peers` are the ports on which the members of its cluster talk to each other, its own at `place`."""

    package: ClassVar[str] = "etcd-server"

    def __init__(self, folder: str, port: int, peers: Sequence[int], place: int = 0) -> None:
        super().__init__(folder, port)
        self.peers, self.place = list(peers), place
        self._program = program("etcd", package=self.package)

    def command(self) -> Sequence[str]:
        client, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peers[self.place]}"
        names = ",".join(f"e{place}=http://127.0.0.1:{port}" for place, port in enumerate(self.peers))
        usual = {
            "--name": f"e{self.place}",
            "--data-dir": os.path.join(self.folder, "data"),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": peer,
            "--initial-advertise-peer-urls": peer,
            "--initial-cluster": names,
            "--logger": "zap",
        }
        return [self._program, *(word for pair in usual.items() for word in pair)]

    def ready(self) -> bool:
        """True only with a leader."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as answer:
            return b'"true"' in answer.read()
