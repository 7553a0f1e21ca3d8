"""A proxy between a client and its server that sends the server's last answer once more: broken, or hostile."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

_CHUNK = 65_536
_TICK = 0.02  # seconds within which it notices that it is closed


class RepeatingProxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.twice_at_once = False  # everything that the server sends is sent twice, in one piece
        self._closed = False
        self._last: dict[socket.socket, bytes] = {}  # by the connection to the client: what the server sent last
        threading.Thread(target=self._accept, daemon=True).start()

    def repeat(self) -> None:
        """Send the last answer once more, on each connection. It has arrived when this returns."""
        for client, answer in list(self._last.items()):
            with suppress(OSError):
                client.sendall(answer)

    def close(self) -> None:
        self._closed = True
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `_accept`, which closing does not
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._target)) as server, suppress(OSError):
            for side in (client, server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._closed:
                for side in select.select([client, server], [], [], _TICK)[0]:
                    if not (data := side.recv(_CHUNK)):
                        return
                    if side is client:
                        server.sendall(data)
                        continue
                    self._last[client] = data
                    client.sendall(data * 2 if self.twice_at_once else data)
        self._last.pop(client, None)
