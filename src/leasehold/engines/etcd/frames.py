"""The pieces of gRPC over HTTP/2: frames, the messages inside them, and one call as it goes along."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from leasehold.engines.etcd.hpack import Header, Undecodable
from leasehold.runtime.base import Signal

DATA, HEADERS, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32

OK, CANCELLED, UNKNOWN, UNAVAILABLE, UNAUTHENTICATED = 0, 1, 2, 14, 16  # of gRPC's codes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MOST: Final = (1 << 31) - 1
USUAL_WINDOW: Final = 65_535
PIECE: Final = 16_384  # of a frame we send; also the least that a peer may limit us to
LONGEST_FRAME: Final = 1 << 20
_LONGEST_MESSAGE: Final = 1 << 26

ALWAYS: Final = (
    Header(b"content-type", b"application/grpc"),
    Header(b"te", b"trailers"),
    Header(b"user-agent", b"leasehold"),
)


def frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, number) + body


def unpadded(flags: int, body: bytes) -> bytes:
    return body[1 : len(body) - body[0]] if flags & PADDED else body


def message(body: bytes) -> bytes:
    return struct.pack(">BI", 0, len(body)) + body


class Status(NamedTuple):
    code: int
    text: str = ""


class Broken(Exception):
    """The connection is of no more use. Whether a call on it was carried out is not known. Never leaves the engine."""


class Stream:
    """One call: what was said back so far, and how it ended."""

    def __init__(self, signal: Signal | None) -> None:
        self.number = 0
        self.messages: list[bytes] = []
        self.status: Status | None = None
        self._signal = signal
        self._parts = bytearray()
        self.unsent, self.closing, self.window = bytearray(), False, USUAL_WINDOW
        self.unread = 0

    def heard(self, message: bytes) -> None:
        self.messages.append(message)
        if self._signal is not None:
            self._signal.set()

    def over(self, status: Status) -> None:
        if self.status is None:
            self.status = status
            if self._signal is not None:
                self._signal.set()

    async def wait(self, seconds: float) -> bool:
        """Until something was said or it is over. False: neither."""
        assert self._signal is not None
        return await self._signal.wait(seconds)

    def take(self, data: bytes) -> None:
        """Bytes of messages; each is led by a flag (compressed, which nobody asked for) and its length."""
        self._parts += data
        while len(self._parts) >= 5:
            flag, size = struct.unpack_from(">BI", self._parts)
            if flag or size > _LONGEST_MESSAGE:
                raise Undecodable("a message that is compressed, or longer than any of ours")
            if len(self._parts) < 5 + size:
                return
            message = bytes(self._parts[5 : 5 + size])
            del self._parts[: 5 + size]
            self.heard(message)
