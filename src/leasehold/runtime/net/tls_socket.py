"""TLS over a socket, through memory: what `ssl.SSLSocket` does, with a bounded number of bytes at a time.

OpenSSL ignores some messages, such as session tickets, and reads on. From a socket it would read as long as the server
sends them: no timeout ends that, and under asyncio it would stop the loop. It also answers some, such as a demand for
new keys (KeyUpdate); the answers are kept until the client sends something.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

_READ_SIZE: Final = 16_384  # bytes: tickets of so many take OpenSSL some ten milliseconds
_MAX_OVERHEAD: Final = 256 * 1024  # bytes of messages of TLS itself, without data between them
_MAX_ANSWERS: Final = 16 * 1024  # bytes of OpenSSL's answers to them that are kept


class TlsMemory(NamedTuple):
    """A TLS connection between two buffers."""

    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO

    @classmethod
    def begin(cls, context: ssl.SSLContext, host: str | None) -> TlsMemory:
        # Else a server could begin a second handshake (TLS 1.2), and nothing could be written until that ends.
        context.options |= ssl.OP_NO_RENEGOTIATION
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        return cls(context.wrap_bio(incoming, outgoing, server_hostname=host), incoming, outgoing)


class OverheadLimit:
    """Refuses a server that sends messages of TLS itself without end: each costs the client time, and its answers
    memory. An honest one sends a few tickets after the handshake, and seldom demands new keys."""

    __slots__ = ("_received",)

    def __init__(self) -> None:
        self._received = 0  # bytes since the last data

    def check(self, received: int, has_data: bool, answers: int) -> None:
        """`received`: how many bytes were read just now, and `has_data` whether data was among them. `answers`: how
        many bytes OpenSSL wants to send."""
        self._received = 0 if has_data else self._received + received
        if self._received > _MAX_OVERHEAD or answers > _MAX_ANSWERS:
            raise ConnectionAbortedError("the server sends messages of TLS itself without end")


class TlsSocket(socket.socket):
    """Takes the descriptor of a connected socket, and begins with `shake_hands`. One thread at a time may use it."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        timeout = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, sock.detach())
        self.settimeout(timeout)
        self._tls, self._incoming, self._outgoing = TlsMemory.begin(context, host)
        self._overhead = OverheadLimit()
        self._decrypted = bytearray()
        self._ended = False  # the server will send nothing more
        self._unsent, self._accepted = b"", 0  # encrypted, and how many bytes of the caller's that is

    @property
    def context(self) -> ssl.SSLContext:
        return self._tls.context

    def getpeercert(self) -> Mapping[str, Any] | None:
        return self._tls.getpeercert()

    def shake_hands(self, seconds: float) -> None:
        """Closes the socket if that fails."""
        until = time.monotonic() + seconds
        try:
            while not self._has_shaken_hands():
                self._set_timeout_until(until)
                super().sendall(self._outgoing.read())
                self._set_timeout_until(until)
                self._receive()
            super().sendall(self._outgoing.read())
        except BaseException:
            with suppress(OSError):
                self.settimeout(0)
                super().sendall(self._outgoing.read())  # what the client refuses
            self.close()
            raise

    def _has_shaken_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def recv(self, size: int, flags: int = 0) -> bytes:
        if not self._decrypted and not self._ended:
            self._read_until_decrypted()
        data = bytes(self._decrypted[:size])
        del self._decrypted[:size]
        return data

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def pending(self) -> int:
        """The number of bytes that `recv` returns without reading from the server."""
        return len(self._decrypted)

    @property
    def ended(self) -> bool:
        """Whether the server will send nothing more. `poll` does not show it: that was read together with data."""
        return self._ended

    def is_ready(self) -> bool:
        """Whether `recv` returns at once, whatever `poll` says."""
        return bool(self._decrypted) or self._ended

    def is_quiet(self) -> bool:
        """Whether the server has sent nothing but messages of TLS itself. Handles those that have arrived."""
        timeout = self.gettimeout()
        self.settimeout(0)
        try:
            while not self.is_ready():
                self._receive()
                self._decrypt()
        except (BlockingIOError, InterruptedError):  # nothing more has arrived
            return not self._incoming.pending
        finally:
            self.settimeout(timeout)
        return False

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._tls.write(data)
        super().sendall(self._outgoing.read())

    def send(self, data: Any, flags: int = 0) -> int:
        """After a BlockingIOError, call it again with the same data; more may follow it."""
        if not self._unsent:
            self._accepted = self._tls.write(data)
            self._unsent = self._outgoing.read()
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]
        return self._accepted

    def _read_until_decrypted(self) -> None:
        began = time.monotonic()
        if self._incoming.pending:  # such as what came with the end of the handshake
            self._decrypt()
        if not (self._decrypted or self._ended):
            self._receive()
            self._decrypt()
        if self._decrypted or self._ended:
            return
        timeout = self.gettimeout()
        if timeout == 0:
            raise ssl.SSLWantReadError("nothing but messages of TLS itself was received")
        try:
            while not (self._decrypted or self._ended):
                if timeout is not None:
                    self._set_timeout_until(began + timeout)
                self._receive()
                self._decrypt()
        finally:
            self.settimeout(timeout)

    def _receive(self) -> None:
        if data := super().recv(_READ_SIZE):
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    def _decrypt(self) -> None:
        received = self._incoming.pending
        try:
            while data := self._tls.read(_READ_SIZE):
                self._decrypted += data
                if not (self._incoming.pending or self._tls.pending()):
                    break
            else:
                self._ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLEOFError:  # many servers close without saying so
            self._ended = True
        self._overhead.check(received, bool(self._decrypted), self._outgoing.pending)

    def _set_timeout_until(self, until: float) -> None:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError("the server sent only messages of TLS itself until the deadline")
        self.settimeout(left)
