"""A server that answers as a test requires: late, in pieces, never, or with garbage."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from leasehold.runtime.net.blocking import SocketAddress, SocketStream, connect_blocking
from leasehold.runtime.net.event_loop import LoopStream, connect_in_loop
from leasehold.runtime.threads import boot_clock


class LineProtocol:
    """The simplest protocol: a reply is a line. The line `garbage` cannot be parsed."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data

    @property
    def mid_reply(self) -> bool:
        return bool(self._buffer)

    def gets(self) -> object:
        line, found, remainder = self._buffer.partition(b"\n")
        if not found:
            return False
        self._buffer = remainder
        if line == b"garbage":
            raise ValueError("garbage")
        return line


class EchoServer:
    """Echoes each line, unless a test replaces `answer`."""

    def __init__(self) -> None:
        self.answer: Callable[[socket.socket, bytes], None] = lambda connection, line: connection.sendall(line + b"\n")
        self.received: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = SocketAddress(*self._listener.getsockname())
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        buffer = b""
        with connection:
            while True:
                try:
                    data = connection.recv(65536)
                    if not data:
                        return
                    *complete_lines, buffer = (buffer + data).split(b"\n")
                    for line in complete_lines:
                        self.received.append(line)
                        self.answer(connection, line)
                except OSError:
                    return

    def connect(self) -> SocketStream:
        return connect_blocking(self.address, None, LineProtocol(), boot_clock, boot_clock() + 5.0)

    async def connect_in_loop(self) -> LoopStream:
        return await connect_in_loop(self.address, None, LineProtocol(), boot_clock, boot_clock() + 5.0)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture
def line_protocol() -> type[LineProtocol]:
    return LineProtocol


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    echo = EchoServer()
    yield echo
    echo.close()
