"""A proxy before a ZooKeeper server that answers transactions itself, once it is told how."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Final

from kazoo.protocol.serialization import Transaction

END: Final = struct.pack(">i?i", -1, True, -1)  # of the results of a transaction


def failed(error: int) -> bytes:
    """The result of an operation that failed."""
    return struct.pack(">i?ii", -1, False, error, error)


class MultiForger:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.results: bytes | None = None  # None: forward the server's
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `_accept`, which closing does not
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server, transactions = socket.create_connection(("127.0.0.1", self._target)), set[int]()
                for source, to in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, to, transactions), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, transactions: set[int]) -> None:
        is_request, is_first = source.getpeername()[1] != self._target, True
        with suppress(OSError), source, to, source.makefile("rb") as file:
            while head := file.read(4):
                body = file.read(*struct.unpack(">i", head))
                if not is_first and is_request and struct.unpack_from(">i", body, 4)[0] == Transaction.type:
                    transactions.add(struct.unpack_from(">i", body)[0])
                elif not is_first and self.results is not None and struct.unpack_from(">i", body)[0] in transactions:
                    body = body[:12] + bytes(4) + self.results  # number, zxid, no error
                is_first = False  # it opens the session
                to.sendall(struct.pack(">i", len(body)) + body)
