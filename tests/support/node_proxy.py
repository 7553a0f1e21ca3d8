"""A proxy before a Redis server: it leaves subscriptions alone, and may answer all else itself, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

_CHUNK = 65_536


class NodeProxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port: int = self._listener.getsockname()[1]
        self.answer: Callable[[bytes], Iterator[bytes]] | None = None  # to a request; None: forward
        self.cuts_off = False  # each subscription, once the client knows of it
        self.accepted = self.subscribed = 0  # connections so far
        self.sent = 0  # bytes of answers that clients have accepted
        self.refused = 0  # answers that a client did not read to the end
        self._sides: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `_accept`, which closing does not
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """End all connections; new ones are accepted."""
        sides, self._sides = self._sides, []
        for side in sides:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                for side in (client, server):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self._sides.append(side)
                threading.Thread(target=self._forward_requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._forward_answers, args=(client, server), daemon=True).start()

    def _forward_requests(self, client: socket.socket, server: socket.socket) -> None:
        is_subscribed = False
        with client, server, suppress(OSError):
            while data := client.recv(_CHUNK):
                if b"SUBSCRIBE" in data:
                    is_subscribed, self.subscribed = True, self.subscribed + 1
                if self.answer is None or is_subscribed:
                    server.sendall(data)
                    continue
                try:
                    for chunk in self.answer(data):
                        client.sendall(chunk)
                        self.sent += len(chunk)
                except OSError:
                    self.refused += 1
                    return

    def _forward_answers(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(_CHUNK):
                client.sendall(data)
                if self.cuts_off and b"subscribe" in data:
                    break
            client.shutdown(socket.SHUT_RDWR)
