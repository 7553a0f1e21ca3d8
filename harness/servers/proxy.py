"""A TCP proxy between one client and a server that injects network faults: silence, lost answers, delays, resets.

A connection never continues after bytes of its stream were dropped: it is closed when the network is restored, as it
would be by timeouts in a real network.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

_CHUNK: Final = 65_536
_BY_RESET: Final = struct.pack("ii", 1, 0)


class ProxiedConnection:
    """One connection through the proxy: the client's side, and the server's."""

    def __init__(self, client_side: socket.socket, server_side: socket.socket) -> None:
        self.client_side, self.server_side = client_side, server_side
        self.lossy = False  # bytes, or the end of the stream, were dropped
        self.due = 0.0  # when the last delayed request is forwarded

    def other(self, side: socket.socket) -> socket.socket:
        return self.server_side if side is self.client_side else self.client_side


class Proxy:
    """Listens on its own port and forwards everything until a fault is injected. Calls take effect at once."""

    def __init__(self, port: int, host: str = "127.0.0.1", listen_port: int = 0) -> None:
        self.target = (host, port)  # of new connections
        self._listener = socket.create_server(("127.0.0.1", listen_port), backlog=200)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0  # connections so far
        self.watch: Callable[[bool, bytes], None] | None = None  # called with (from_client, data) for forwarded data
        self.delay: Callable[[], float] | None = None  # seconds by which to delay the next request
        self._delayed: list[tuple[float, int, ProxiedConnection, bytes]] = []  # a heap: when due, number of the request
        self._delayed_count = 0
        self._forward_requests = self._forward_answers = True
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
        """The source ports of the connections, as the server sees them."""
        with self._lock:
            return [connection.server_side.getsockname()[1] for connection in self._connections]

    @property
    def has_lost_bytes(self) -> bool:
        """Whether a connection has lost some, and so ends when the network is restored."""
        with self._lock:
            return any(connection.lossy for connection in self._connections)

    def next_target(self) -> tuple[str, int]:
        """Where the proxy connects for the client that it has just accepted."""
        return self.target

    def cut(self) -> None:
        """Forward nothing, in both directions. Connections stay open, even if one side closes; new ones are silent."""
        with self._lock:
            self._forward_requests = self._forward_answers = False

    def lose_answers(self) -> None:
        """Forward requests, but no answers."""
        self.restore()
        with self._lock:
            self._forward_answers = False

    def restore(self) -> None:
        """Forward everything again. Connections that lost bytes are closed."""
        with self._lock:
            self._forward_requests = self._forward_answers = True
            for connection in [connection for connection in self._connections if connection.lossy]:
                self._close_connection(connection)

    def reset(self) -> None:
        """Reset every connection on both sides. New ones are accepted."""
        with self._lock:
            for connection in list(self._connections):
                self._close_connection(connection)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._wake_sender.send(b"!")
        self._thread.join(10)

    # ----------------------------------------------------------- the proxy's thread

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(self._next_due()):
                with self._lock, suppress(OSError, KeyError):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, ProxiedConnection) and key.data in self._connections:
                        assert isinstance(key.fileobj, socket.socket)
                        self._forward(key.data, key.fileobj)
            self._forward_delayed()
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
                server_side.connect(self.next_target())
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
        if from_client and (self.delay is not None or connection.due > time.monotonic()):
            connection.due = max(connection.due, time.monotonic() + (self.delay() if self.delay else 0.0))
            self._delayed_count += 1
            heapq.heappush(self._delayed, (connection.due, self._delayed_count, connection, data))
            if not data:
                self._selector.unregister(side)
        else:
            self._send(connection, side, data)

    def _next_due(self) -> float | None:
        return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None

    def _forward_delayed(self) -> None:
        while self._next_due() == 0.0:
            _, _, connection, data = heapq.heappop(self._delayed)
            with self._lock, suppress(OSError):
                if connection in self._connections and self._forward_requests:
                    self._send(connection, connection.client_side, data)
                connection.lossy |= not self._forward_requests

    def _send(self, connection: ProxiedConnection, side: socket.socket, data: bytes) -> None:
        if not data:  # one side has closed: close both, as half-open connections are not needed here
            self._close_connection(connection, cleanly=True)
            return
        other = connection.other(side)
        other.settimeout(5.0)  # a paused server must not block the proxy for ever
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
