"""HTTP/2 frames and flags (RFC 9113, sections 4.1 and 6), and gRPC's messages and calls inside them.

gRPC's own framing (PROTOCOL-HTTP2 in the grpc repository): each message has a 5-byte prefix, one byte "compressed" and
four bytes length, and a call ends with trailers that carry `grpc-status` and `grpc-message`.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from leasehold.engines.etcd.grpc.hpack import Header, ProtocolError
from leasehold.runtime.base import Signal

DATA, HEADERS, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32

OK, CANCELLED, UNKNOWN, UNAVAILABLE, UNAUTHENTICATED = 0, 1, 2, 14, 16  # gRPC status codes

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # section 3.4
MAX_INT31: Final = (1 << 31) - 1
DEFAULT_WINDOW: Final = 65_535
MAX_DATA_FRAME: Final = 16_384  # bytes in a frame we send; no peer may set a lower limit (section 4.2)
MAX_FRAME: Final = 1 << 20
MAX_REPLY: Final = 8 << 20  # bytes of all messages of one call that are kept

COMMON_HEADERS: Final = (
    Header(b"content-type", b"application/grpc"),
    Header(b"te", b"trailers"),
    Header(b"user-agent", b"leasehold"),
)


def encode_frame(frame_type: int, flags: int, stream_id: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", frame_type, flags, stream_id) + body


def strip_padding(flags: int, body: bytes) -> bytes:
    return body[1 : len(body) - body[0]] if flags & PADDED else body


def encode_message(body: bytes) -> bytes:
    return struct.pack(">BI", 0, len(body)) + body


class GrpcStatus(NamedTuple):
    code: int
    text: str = ""


class ConnectionBroken(Exception):
    """The connection failed. A call on it may or may not have been executed. Never leaves the engine."""


class GrpcStream:
    """One call: the messages received so far, and its status once it ended. A server that sends more messages than the
    call can have, or more bytes, has its connection closed."""

    def __init__(self, signal: Signal | None, max_messages: int = 1, max_bytes: int = MAX_REPLY) -> None:
        self.stream_id = 0
        self.messages: list[bytes] = []
        self.status: GrpcStatus | None = None
        self._signal = signal
        self._buffer = bytearray()
        self.unsent, self.closing, self.send_window = bytearray(), False, DEFAULT_WINDOW
        self.unacked_bytes = 0
        self._messages_left, self._max_bytes = max_messages, max_bytes
        self._bytes_in_messages = 0

    def bytes_kept(self) -> int:
        return self._bytes_in_messages + len(self._buffer)

    def on_message(self, message: bytes) -> None:
        self._messages_left -= 1
        self._bytes_in_messages += len(message)
        if self._messages_left < 0:
            raise ProtocolError("the call has more messages than it can have")
        self.messages.append(message)
        if self._signal is not None:
            self._signal.set()

    def on_end(self, status: GrpcStatus) -> None:
        if self.status is None:
            self.status = status
            if self._signal is not None:
                self._signal.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for a message or the end of the call. False: neither came in time."""
        assert self._signal is not None  # noqa: S101  # for the type checker
        return await self._signal.wait(seconds)

    def feed(self, data: bytes) -> bool:
        """Handle the payload of DATA frames: whether a message was complete. Compressed messages are refused: the
        client never asks for compression."""
        self._buffer += data
        found = False
        while len(self._buffer) >= 5:
            flag, size = struct.unpack_from(">BI", self._buffer)
            if flag:
                raise ProtocolError("gRPC message is compressed")
            if self._bytes_in_messages + size > self._max_bytes:
                raise ProtocolError("the messages of one call are too long")
            if len(self._buffer) < 5 + size:
                break
            with memoryview(self._buffer) as view:  # copied once, as a message may have megabytes
                message = bytes(view[5 : 5 + size])
            del self._buffer[: 5 + size]
            self.on_message(message)
            found = True
        return found
