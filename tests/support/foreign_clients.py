"""A waiter in a thread, and a server that is not Redis: for the tests of the Redis and Redlock engines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leasehold import Client, Lease


class Waiter(threading.Thread):
    """Acquires in a thread and records when the lock was granted."""

    def __init__(self, client: Client, name: str = "job", **options: Any) -> None:
        super().__init__(daemon=True)
        self._lock = client.lock(name, wait=60, **options)
        self.lease: Lease | None = None
        self.granted_at = 0.0
        self.start()

    def run(self) -> None:
        self.lease = self._lock.acquire()
        self.granted_at = time.monotonic()

    def wait_granted(self, seconds: float = 30.0) -> Lease:
        self.join(seconds)
        assert self.lease is not None, "still waiting"
        return self.lease


@contextmanager
def serve_fixed_reply(reply: bytes) -> Iterator[int]:
    """A server that answers every request with `reply`. Yields its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(reply)
                    connection.settimeout(0.2)
                    connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(60)
