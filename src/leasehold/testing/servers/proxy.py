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


class Link:
    """One connection through the proxy: the client's side, and the server's."""

    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.lossy = False  # bytes, or a goodbye, were swallowed

    def other(self, side: socket.socket) -> socket.socket:
        return self.far if side is self.near else self.near


class Proxy:
    """Listens on a port of its own and passes everything on, unless told otherwise. Calls take effect at once."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._door = socket.create_server(("127.0.0.1", 0), backlog=200)
        self._door.setblocking(False)
        self.port: int = self._door.getsockname()[1]
        self.accepted = 0  # connections so far
        self.watch: Callable[[bool, bytes], None] | None = None  # told (from the client?, bytes) of what passes
        self._requests = self._answers = True  # whether they pass
        self._links: set[Link] = set()
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        self._closed = False
        self._selector.register(self._door, selectors.EVENT_READ, None)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def ports(self) -> list[int]:
        """Where the server sees its connections come from."""
        with self._lock:
            return [link.far.getsockname()[1] for link in self._links]

    def cut(self) -> None:
        """Silence both ways. Connections stay open, new ones are accepted and hear nothing; goodbyes are not passed."""
        with self._lock:
            self._requests = self._answers = False

    def lose_answers(self) -> None:
        """Requests arrive, and nothing comes back."""
        self.mend()
        with self._lock:
            self._answers = False

    def mend(self) -> None:
        """Pass everything on again; what lost bytes meanwhile is closed."""
        with self._lock:
            self._requests = self._answers = True
            for link in [link for link in self._links if link.lossy]:
                self._drop(link)

    def reset(self) -> None:
        """Close every connection on both sides, by a reset. New ones are welcome."""
        with self._lock:
            for link in list(self._links):
                self._drop(link)

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._alarm.send(b"!")
        self._thread.join(10)

    # ----------------------------------------------------------- its thread

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                with self._lock, suppress(OSError, KeyError):
                    if key.fileobj is self._door:
                        self._welcome()
                    elif isinstance(key.data, Link) and key.data in self._links:
                        assert isinstance(key.fileobj, socket.socket)
                        self._pass(key.data, key.fileobj)
        self.reset()
        for each in (self._door, self._alarm, self._bell):
            each.close()
        self._selector.close()

    def _welcome(self) -> None:
        near, _ = self._door.accept()
        self.accepted += 1
        near.setblocking(True)
        far = socket.socket()
        if self._requests:
            try:
                far.connect(self._target)
            except OSError:
                far.close()
                _reset(near)
                return
        link = Link(near, far)
        link.lossy = not self._requests
        self._links.add(link)
        for side in (near, far) if self._requests else (near,):
            side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(side, selectors.EVENT_READ, link)

    def _pass(self, link: Link, side: socket.socket) -> None:
        outward = side is link.near
        try:
            data = side.recv(_CHUNK)
        except OSError:
            data = b""
        if not (self._requests if outward else self._answers):
            link.lossy = True
            if not data:
                self._selector.unregister(side)
            return
        if self.watch is not None:
            self.watch(outward, data)
        if not data:  # one side has closed: both are done, half-open connections are not needed here
            self._drop(link, gently=True)
            return
        other = link.other(side)
        other.settimeout(5.0)  # a paused server does not hold up the proxy for ever
        try:
            other.sendall(data)
        except OSError:
            self._drop(link)

    def _drop(self, link: Link, gently: bool = False) -> None:
        self._links.discard(link)
        for side in (link.near, link.far):
            with suppress(KeyError, ValueError):
                self._selector.unregister(side)
            if gently:
                side.close()
            else:
                _reset(side)


def _reset(side: socket.socket) -> None:
    with suppress(OSError):
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _BY_RESET)
    side.close()
