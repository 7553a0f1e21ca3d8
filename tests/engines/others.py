"""Others on the stage of the tests for Redis: one that waits in line, one that is no Redis at all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from leasehold import Client, Lease


class Waiter(threading.Thread):
    """Acquires in a thread, and says when it got it."""

    def __init__(self, client: Client, name: str = "job", **options: Any) -> None:
        super().__init__(daemon=True)
        self._lock = client.lock(name, wait=60, **options)
        self.lease: Lease | None = None
        self.at = 0.0
        self.start()

    def run(self) -> None:
        self.lease = self._lock.acquire()
        self.at = time.monotonic()

    def got(self, seconds: float = 30.0) -> Lease:
        self.join(seconds)
        assert self.lease is not None, "still waiting"
        return self.lease


@contextmanager
def stranger(says: bytes) -> Iterator[int]:
    """Listens on this port, and answers whatever it hears with that."""
    door = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                near, _ = door.accept()
                with near:
                    near.recv(1000)
                    near.sendall(says)
                    near.settimeout(0.2)
                    near.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        door.shutdown(socket.SHUT_RDWR)
        door.close()
        thread.join(5)
