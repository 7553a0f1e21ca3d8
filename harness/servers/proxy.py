"""A TCP proxy between one client and a server, to hurt the way between them: silence, lost answers, cut connections.

Bytes are never dropped from the middle of a stream that goes on: a connection that lost some is closed when the way is
mended, as a network that came back would have it after its timeouts.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_CHUNK: Final = 65_536
_BY_RESET: Final = struct.pack("ii", 1, 0)


class ProxiedConnection:
    """One connection through the proxy: the client's side, and the server's."""

    def __init__(self, client_side: socket.socket, server_side: socket.socket) -> None:
        self.client_side, self.server_side = client_side, server_side
        self.lossy = False  # bytes, or a goodbye, were swallowed

    def other(self, side: socket.socket) -> socket.socket:
        return self.server_side if side is self.client_side else self.client_side


class Proxy:
    """Listens on a port of its own and passes everything on, unless told otherwise. Calls take effect at once."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0  # connections so far
        self.watch: Callable[[bool, bytes], None] | None = None  # told (from the client?, bytes) of what passes
        self._forward_requests = self._forward_answers = True  # whether they pass
        self._connections: set[ProxiedConnection] = set()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._closed = False
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def ports(self) -> list[int]:
        """Where the server sees its connections come from."""
        with self._lock:
            return [connection.server_side.getsockname()[1] for connection in self._connections]

    def cut(self) -> None:
        """Silence both ways. Connections stay open, new ones are accepted and hear nothing; goodbyes are not passed."""
        with self._lock:
            self._forward_requests = self._forward_answers = False

    def lose_answers(self) -> None:
        """Requests arrive, and nothing comes back."""
        self.restore()
        with self._lock:
            self._forward_answers = False

    def restore(self) -> None:
        """Pass everything on again; what lost bytes meanwhile is closed."""
        with self._lock:
            self._forward_requests = self._forward_answers = True
            for connection in [connection for connection in self._connections if connection.lossy]:
                self._close_connection(connection)

    def reset(self) -> None:
        """Close every connection on both sides, by a reset. New ones are welcome."""
        with self._lock:
            for connection in list(self._connections):
                self._close_connection(connection)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._wake_sender.send(b"!")
        self._thread.join(10)

    # ----------------------------------------------------------- its thread

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                with self._lock, suppress(OSError, KeyError):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, ProxiedConnection) and key.data in self._connections:
                        assert isinstance(key.fileobj, socket.socket)
                        self._forward(key.data, key.fileobj)
        self.reset()
        for each in (self._listener, self._wake_sender, self._wake_receiver):
            each.close()
        self._selector.close()

    def _accept(self) -> None:
        client_side, _ = self._listener.accept()
        self.accepted += 1
        client_side.setblocking(True)
        server_side = socket.socket()
        if self._forward_requests:
            try:
                server_side.connect(self._target)
            except OSError:
                server_side.close()
                _reset(client_side)
                return
        connection = ProxiedConnection(client_side, server_side)
        connection.lossy = not self._forward_requests
        self._connections.add(connection)
        for side in (client_side, server_side) if self._forward_requests else (client_side,):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(side, selectors.EVENT_READ, connection)

    def _forward(self, connection: ProxiedConnection, side: socket.socket) -> None:
        from_client = side is connection.client_side
        try:
            data = side.recv(_CHUNK)
        except OSError:
            data = b""
        if not (self._forward_requests if from_client else self._forward_answers):
            connection.lossy = True
            if not data:
                self._selector.unregister(side)
            return
        if self.watch is not None:
            self.watch(from_client, data)
        if not data:  # one side has closed: both are done, half-open connections are not needed here
            self._close_connection(connection, cleanly=True)
            return
        other = connection.other(side)
        other.settimeout(5.0)  # a paused server does not hold up the proxy for ever
        try:
            other.sendall(data)
        except OSError:
            self._close_connection(connection)

    def _close_connection(self, connection: ProxiedConnection, cleanly: bool = False) -> None:
        self._connections.discard(connection)
        for side in (connection.client_side, connection.server_side):
            with suppress(KeyError, ValueError):
                self._selector.unregister(side)
            if cleanly:
                side.close()
            else:
                _reset(side)


def _reset(side: socket.socket) -> None:
    with suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BY_RESET)
    side.close()
