"""A host that poses as a MySQL server without TLS, and asks for the password itself."""

from __future__ import annotations

import socket
import struct
import threading

SECRET = "s3cret-word"
GREETING = b"\n8.0.1\0" + struct.pack("<I", 7) + b"12345678\0" + b"\xff\xf7\x21\2\0\xff\xc1\x15" + bytes(10)
SWITCHES = {"mysql_clear_password": b"\xfemysql_clear_password\0", "dialog": b"\xfedialog\0\4Password: "}


class PasswordThief:
    """Greets as a MySQL server without TLS, and then asks for another way to sign in."""

    def __init__(self, switch: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._switch = switch
        self.received = b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.sendall(_packet(0, GREETING + b"123456789012\0mysql_native_password\0"))
            self.received += connection.recv(65_536)
            connection.sendall(_packet(2, self._switch))
            while data := connection.recv(65_536):
                self.received += data

    def close(self) -> None:
        self._listener.close()


def _packet(number: int, body: bytes) -> bytes:
    return len(body).to_bytes(3, "little") + bytes([number]) + body
