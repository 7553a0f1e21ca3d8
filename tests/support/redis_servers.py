"""What several test files ask of a Redis server and of its clients."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import hiredis

from harness.servers.process import poll
from harness.servers.redis import RedisServer
from leasehold import Client


class TlsServer(RedisServer):
    """It accepts TLS alone."""

    def command(self) -> Sequence[str]:
        return [*super().command(), "--port", "0", "--tls-port", str(self.port)]

    def ready(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True


def url(server: RedisServer, options: str = "", user: str = "") -> str:
    return f"redis://{user}127.0.0.1:{server.port}{options}"


def remaining_keys(server: RedisServer) -> list[bytes]:
    """All keys except the counters of buckets."""
    return [key for key in server.ask("KEYS", "*") if key.count(b":") > 2]


def has_waiters(client: Client, count: int = 1) -> bool:
    return sum(holding.state == "waiting" for holding in client.inspect()) == count


def wait_until_queued(client: Client, name: str, count: int = 1) -> None:
    poll(
        lambda: sum(each.state == "waiting" for each in client.inspect(name)) == count,
        60,
        lambda: f"{count} claims wait for {name}",
    )


def send_raw(node, data: bytes) -> object:
    """Send this on a new connection, as a late message arrives, and return the reply."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
        connection.sendall(data)
        reader = hiredis.Reader()
        while (reply := reader.gets()) is False:
            reader.feed(connection.recv(65_536))
    return reply
