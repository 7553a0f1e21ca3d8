"""A server that answers as a test wants it to: late, in pieces, never, or nonsense."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from leasehold.runtime.loopstream import LoopStream, dial_in_loop
from leasehold.runtime.streams import Address, SocketStream, dial
from leasehold.runtime.threads import boot_clock


class Lines:
    """The simplest protocol there is: a reply is a line. One that says `garbage` cannot be read."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> None:
        self._kept += data

    def gets(self) -> object:
        line, found, rest = self._kept.partition(b"\n")
        if not found:
            return False
        self._kept = rest
        if line == b"garbage":
            raise ValueError("garbage")
        return line


class Echo:
    """Answers each line by itself, or as `answer` says."""

    def __init__(self) -> None:
        self.answer: Callable[[socket.socket, bytes], None] = lambda near, line: near.sendall(line + b"\n")
        self.heard: list[bytes] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._door.getsockname())
        self._near: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            self._near.append(near)
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        kept = b""
        with near:
            while True:
                try:
                    data = near.recv(65536)
                    if not data:
                        return
                    *whole, kept = (kept + data).split(b"\n")
                    for line in whole:
                        self.heard.append(line)
                        self.answer(near, line)
                except OSError:
                    return

    def dial(self) -> SocketStream:
        return dial(self.address, None, Lines(), boot_clock, boot_clock() + 5.0)

    async def dial_in_loop(self) -> LoopStream:
        return await dial_in_loop(self.address, None, Lines(), boot_clock, boot_clock() + 5.0)

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for near in self._near:
            near.close()


@pytest.fixture
def lines() -> type[Lines]:
    return Lines


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()
