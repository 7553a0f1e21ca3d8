"""Requests by `http.client`, with deadlines: its own timeout starts again at every byte, and it looks up names without
one. For what may block: commands, and fences."""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from functools import partial
from typing import Any

from leasehold.runtime.net.blocking import SocketAddress, connect_socket
from leasehold.runtime.net.tls_socket import TlsSocket


class DeadlineConnection(http.client.HTTPConnection):
    """Each response must be complete within the timeout. A `min_rate` of bytes per second gives its body longer."""

    def __init__(
        self,
        host: str,
        port: int | None = None,
        *,
        timeout: float,
        tls: ssl.SSLContext | None = None,
        min_rate: float = float("inf"),
    ) -> None:
        self.default_port = http.client.HTTP_PORT if tls is None else http.client.HTTPS_PORT
        super().__init__(host, port, timeout)
        self._tls, self._seconds = tls, timeout
        self._create_connection = self._connect_within  # which http.client calls
        self.response_class = partial(_Response, seconds=timeout, min_rate=min_rate)  # type: ignore[assignment]

    def _connect_within(self, address: tuple[str, int], *_: Any) -> socket.socket:
        sock = connect_socket(SocketAddress(*address), None, time.monotonic, time.monotonic() + self._seconds)
        sock.settimeout(self._seconds)
        return sock

    def connect(self) -> None:
        super().connect()
        if self._tls is not None:
            self.sock = tls = TlsSocket(self.sock, self._tls, getattr(self, "_tunnel_host", None) or self.host)
            tls.shake_hands(self._seconds)
            tls.settimeout(self._seconds)


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, seconds: float, min_rate: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._reader = _Reader(sock, self.fp.detach(), time.monotonic() + seconds)
        self.fp: io.BufferedReader = io.BufferedReader(self._reader)
        self._min_rate = min_rate

    def begin(self) -> None:
        super().begin()
        self._reader.min_rate = self._min_rate  # the head has no more time, however long it is


class _Reader(io.RawIOBase):
    def __init__(self, sock: socket.socket, raw: io.RawIOBase, deadline: float) -> None:
        self._socket, self._raw, self._deadline = sock, raw, deadline
        self.min_rate = float("inf")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        received = self._raw.readinto(buffer)
        self._deadline += (received or 0) / self.min_rate
        return received

    def close(self) -> None:
        self._raw.close()  # the connection closes its socket only then
        super().close()
