"""A Redis server for the tests."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from leasehold.testing.servers.process import Server, free_ports, program, scratch


class RedisServer(Server):
    package = "redis-server"

    def __init__(self, *options: str) -> None:
        self._program = program("redis-server", package=self.package)
        super().__init__(scratch(), free_ports(1)[0])
        self._options = options

    def command(self) -> Sequence[str]:
        plain = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", self.folder, "--save", "")
        return [self._program, *plain, *self._options]

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=2) as line:
            line.sendall(b"PING\r\n")
            return line.recv(100) == b"+PONG\r\n"
