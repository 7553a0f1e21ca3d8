"""One HTTP/2 connection for gRPC (RFC 9113): preface (section 3.4), streams and flow control (5), frames (6), error
codes (7), requests and trailers (8.1). It carries many calls and streams at once, and one thread reads it.

Why not grpcio: its core has threads and locks of its own, and does not survive a fork. A forked child with a new
channel hung or crashed if a call or stream was open at the fork, and sometimes even if all had just been closed. With
our own socket the child only closes its copy of the descriptor.

Callers write their frames themselves, while they hold the mutex; the reader thread passes the replies on. A connection
is never repaired: any error (`fail`) ends it and every call on it, and the next call opens a new one.
"""

from __future__ import annotations

import logging
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote_to_bytes
from weakref import ref

from leasehold.core.texts import server_text
from leasehold.engines.etcd.grpc import connect, frames
from leasehold.engines.etcd.grpc.frames import ConnectionBroken, GrpcStatus, GrpcStream, encode_frame, strip_padding
from leasehold.engines.etcd.grpc.hpack import HeaderDecoder, ProtocolError, encode_literal
from leasehold.engines.etcd.url import Endpoint
from leasehold.errors import Reentered
from leasehold.runtime.base import Mutex, Runtime, log_unexpected
from leasehold.runtime.net.tls_socket import OverheadLimit, TlsMemory
from leasehold.runtime.polling import POLLIN, POLLOUT, new_poll

_log = logging.getLogger("leasehold.etcd")

_WINDOW_UPDATE_AFTER: Final = 1 << 20  # bytes received before the client sends a WINDOW_UPDATE
_SETTINGS: Final = struct.pack(">HIHI", 2, 0, 4, frames.MAX_INT31)  # ENABLE_PUSH 0, and the largest window
_CANCEL: Final = 8  # error code (section 7)
_MAX_HEADER_BLOCK: Final = 1 << 16  # bytes per call, compressed; etcd sends about a hundred
_MAX_SETTINGS: Final = 1 << 14  # bytes of one frame; etcd sends twelve
# Frames in a minute without a message or the end of a call: the client answers some, and each costs time. A call that
# was given up may still be answered with some five hundred. Headers count once more for every 64 bytes, as decoding
# takes longer.
_MAX_OVERHEAD: Final = 10_000
_OVERHEAD_PERIOD: Final = 60.0  # seconds: an idle watch gets only answers to pings, for days
_MAX_KEPT: Final = 16 << 20  # bytes of replies to all open calls
_LARGE_REPLY: Final = 1 << 16  # bytes
_MAX_ERROR_TEXT: Final = 4096  # bytes of the server's error text that are decoded
_SEND_TIMEOUT: Final = 0.1  # seconds to wait for a full socket: short, because the wait may block an event loop
_PING_AFTER: Final = 6.0  # seconds without a byte while calls are open; etcd refuses pings less than 5 s apart
_PING_TIMEOUT: Final = 4.0


class GrpcConnection:
    """Call `open` first. The reader thread calls `tick` after every read and every poll timeout."""

    def __init__(self, runtime: Runtime, authority: str, tls: bool) -> None:
        self._now = runtime.now
        self._mutex: Mutex = runtime.mutex()
        self._header_prefix = (
            b"\x83" + (b"\x87" if tls else b"\x86") + encode_literal(b":authority", authority.encode())
        )
        self._header_blocks: dict[str, bytes] = {}
        self._socket: socket.socket | None = None
        self._tls: TlsMemory | None = None
        self._tls_overhead, self._overhead, self._overhead_since = OverheadLimit(), 0, self._now()
        self._decoder = HeaderDecoder()
        self._streams: dict[int, GrpcStream] = {}
        self._next_stream_id = 1
        self._send_window, self._initial_stream_window, self._unacked_bytes = (
            frames.DEFAULT_WINDOW,
            frames.DEFAULT_WINDOW,
            0,
        )
        self._buffer = bytearray()
        self._partial_headers: tuple[int, int, bytearray] | None = None  # headers without END_HEADERS yet
        self._received_at = self._now()
        self._pinged_at: float | None = None
        self.bytes_received = 0  # shows callers whether the server sends anything at all
        self.failure: str | None = None
        self.going_away = False  # the server sent GOAWAY: no new calls
        self.tick: Callable[[], float | None] | None = None
        self._has_reader = False  # a reader thread runs, and closes the socket

    def open(
        self, endpoint: Endpoint, addresses: Sequence[str], context: ssl.SSLContext | None, deadline: float
    ) -> None:
        """Connect to one of the endpoint's addresses. Blocks until `deadline` at most. Raises OSError."""
        sock = connect.open_socket(addresses, endpoint.port, self._now, deadline)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._tls = connect.tls_handshake(sock, context, endpoint.host, self._now, deadline)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        self._socket = sock
        with self._mutex:
            self._write(frames.PREFACE + encode_frame(frames.SETTINGS, 0, 0, _SETTINGS))
            self._write(
                encode_frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", frames.MAX_INT31 - frames.DEFAULT_WINDOW))
            )

    # ------------------------------------------------------------- callers

    def start(self, stream: GrpcStream, path: str, metadata: bytes, body: bytes | None, end: bool) -> None:
        """Send the headers of a call and its (first) message, without waiting for a reply. `metadata`: the encoded
        headers that are not the same in every call of the method. Raises ConnectionBroken."""
        if self._mutex.held_by_me():  # a signal handler interrupted this thread while it wrote a frame
            raise Reentered
        block = self._method_header_block(path) + metadata
        with self._mutex:
            if self.failure is not None or self.going_away:
                raise ConnectionBroken(self.failure or "the connection accepts no new calls")
            stream.stream_id, self._next_stream_id = self._next_stream_id, self._next_stream_id + 2
            stream.send_window = self._initial_stream_window
            self._streams[stream.stream_id] = stream
            stream.unsent += b"" if body is None else frames.encode_message(body)
            stream.closing = end
            self._write(
                encode_frame(frames.HEADERS, frames.END_HEADERS, stream.stream_id, block)
                + self._sendable_frames(stream)
            )

    def _method_header_block(self, path: str) -> bytes:
        """The headers that are the same in every call of a method, encoded once."""
        if (block := self._header_blocks.get(path)) is None:
            block = self._header_prefix + encode_literal(b":path", path.encode())
            block += b"".join(encode_literal(*header) for header in frames.COMMON_HEADERS)
            self._header_blocks[path] = block
        return block

    def send(self, stream: GrpcStream, body: bytes) -> None:
        """Send a further message of a call that is still open. Raises ConnectionBroken."""
        if self._mutex.held_by_me():
            raise Reentered
        with self._mutex:
            if self.failure is not None:
                raise ConnectionBroken(self.failure)
            stream.unsent += frames.encode_message(body)
            self._write(self._sendable_frames(stream))

    def cancel(self, stream: GrpcStream) -> None:
        """Stop waiting for this call. The server may execute it nevertheless."""
        stream.on_end(GrpcStatus(frames.CANCELLED))
        if self._mutex.held_by_me():
            return
        with self._mutex:
            if self._streams.pop(stream.stream_id, None) is not None and self.failure is None:
                with suppress(ConnectionBroken):
                    self._write(encode_frame(frames.RST_STREAM, 0, stream.stream_id, struct.pack(">I", _CANCEL)))

    def fail(self, reason: str) -> None:
        """End the connection and all calls on it."""
        self.failure = self.failure or reason
        self._close_socket()
        for stream in list(self._streams.values()):
            stream.on_end(GrpcStatus(frames.UNAVAILABLE, self.failure))

    def close_descriptor(self) -> None:
        """In a forked child: close our copy of the descriptor and send nothing; the parent still uses the socket."""
        if self._socket is not None:
            self._socket.close()
        self.failure, self._socket = "the connection belongs to the parent of this forked process", None

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None and self._has_reader:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes it
        elif self._socket is not None:
            self._socket.close()

    def _sendable_frames(self, stream: GrpcStream) -> bytes:
        """As much of the call's unsent data as both flow-control windows allow."""
        out = bytearray()
        while stream.unsent:
            size = min(len(stream.unsent), self._send_window, stream.send_window, frames.MAX_DATA_FRAME)
            if size <= 0:
                return bytes(out)
            piece = bytes(stream.unsent[:size])
            del stream.unsent[:size]
            self._send_window -= size
            stream.send_window -= size
            is_last = stream.closing and not stream.unsent
            out += encode_frame(frames.DATA, frames.END_STREAM if is_last else 0, stream.stream_id, piece)
        return bytes(out)

    def _write(self, data: bytes) -> None:
        """The caller holds the mutex. A partly sent frame would corrupt the connection, so any error ends it."""
        try:
            if self._tls is not None:
                self._tls[0].write(data)
                data = self._tls[2].read()
            while data:
                assert self._socket is not None  # noqa: S101  # for the type checker
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    poll = new_poll()  # not select(): the descriptor may be 1024 or higher
                    poll.register(self._socket, POLLOUT)
                    if not poll.poll(_SEND_TIMEOUT * 1000):
                        raise ConnectionError("the server does not read what is sent to it") from None
        except (OSError, ValueError) as error:
            self.fail(_error_text(error))
            raise ConnectionBroken(self.failure) from error
        except BaseException:
            self.fail("interrupted while writing a frame")
            raise

    # -------------------------------------------------------------- reader

    def make_reader(self) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        """What the reader thread runs until the connection fails or is garbage-collected. Raises ConnectionBroken."""
        if self._socket is None or self.failure is not None:  # failed since it was opened: the socket is closed
            raise ConnectionBroken(self.failure)
        self._has_reader = True
        return _make_reader(self._socket, ref(self))

    def receive(self, data: bytes) -> None:
        """Handle bytes from the socket."""
        self.bytes_received += len(data)
        self._received_at, self._pinged_at = self._now(), None
        if self._received_at > self._overhead_since + _OVERHEAD_PERIOD:
            self._overhead, self._overhead_since = 0, self._received_at
        try:
            if self._tls is None:
                self._read_frames(data)
            else:
                decrypted, ended = self._decrypt(self._tls, data)
                self._read_frames(decrypted)
                if ended:  # the socket may stay open
                    self.fail("the server closed the connection")
        except (ProtocolError, struct.error, IndexError, ssl.SSLError) as error:
            self.fail(f"the server sent invalid HTTP/2: {error}")
        except ConnectionAbortedError as error:
            self.fail(str(error))
        except ConnectionBroken:
            return

    def _decrypt(self, memory: TlsMemory, data: bytes) -> tuple[bytes, bool]:
        """What is new, and whether the server has ended TLS."""
        out, ended = bytearray(), False
        with self._mutex:
            memory.incoming.write(data)
            try:
                while part := memory.tls.read(65_536):
                    out += part
                ended = True
            except ssl.SSLWantReadError:
                self._tls_overhead.check(len(data), bool(out), memory.outgoing.pending)
        return bytes(out), ended

    def _read_frames(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if size > frames.MAX_FRAME:
                raise ProtocolError("frame longer than 1 MiB; check that the port is that of etcd")
            if len(self._buffer) < 9 + size:
                return
            frame_type, flags, stream_id = (
                self._buffer[3],
                self._buffer[4],
                int.from_bytes(self._buffer[5:9], "big"),
            )
            body = bytes(self._buffer[9 : 9 + size])
            del self._buffer[: 9 + size]
            self._on_frame(frame_type, flags, stream_id & 0x7FFFFFFF, body)

    def ping_if_idle(self) -> None:
        """If calls are open and nothing was received for a while, ping the server, and fail if it does not reply."""
        if not self._streams or self._now() - self._received_at < _PING_AFTER:
            return
        if self._pinged_at is None:
            self._pinged_at = self._now()
            with self._mutex, suppress(ConnectionBroken):
                self._write(encode_frame(frames.PING, 0, 0, bytes(8)))
        elif self._now() - self._pinged_at > _PING_TIMEOUT:
            self.fail("the server did not answer a ping")

    def poll_timeout(self) -> float:
        """How long the reader may sleep."""
        next_tick = self.tick() if self.tick is not None else None
        default = 1.0 if self._streams else 60.0
        return default if next_tick is None else max(0.0, min(default, next_tick))

    def _on_frame(self, frame_type: int, flags: int, stream_id: int, body: bytes) -> None:
        self._overhead += 1 + (len(body) >> 6 if frame_type in (frames.HEADERS, frames.CONTINUATION) else 0)
        if self._overhead > _MAX_OVERHEAD:
            raise ProtocolError("frames without end, and no reply")
        if self._partial_headers is not None and frame_type != frames.CONTINUATION:
            raise ProtocolError("expected a CONTINUATION frame")
        if frame_type == frames.DATA:
            self._on_data(self._streams.get(stream_id), stream_id, flags, body)
        elif frame_type == frames.HEADERS:
            body = strip_padding(flags, body)
            self._on_headers(stream_id, flags, bytearray(body[5:] if flags & frames.PRIORITY else body))
        elif frame_type == frames.CONTINUATION:
            if self._partial_headers is None or self._partial_headers[0] != stream_id:
                raise ProtocolError("CONTINUATION frame without a HEADERS frame")
            headers_stream_id, first_flags, block = self._partial_headers
            block += body
            self._on_headers(headers_stream_id, first_flags | flags & frames.END_HEADERS, block)
        elif frame_type == frames.SETTINGS and not flags & frames.ACK:
            self._on_settings(body)
        elif frame_type == frames.PING and not flags & frames.ACK:
            with self._mutex:
                self._write(encode_frame(frames.PING, frames.ACK, 0, body))
        elif frame_type == frames.WINDOW_UPDATE:
            self._on_window_update(stream_id, struct.unpack(">I", body)[0] & frames.MAX_INT31)
        elif frame_type == frames.RST_STREAM:
            self._end_stream(
                stream_id, GrpcStatus(frames.UNAVAILABLE, f"the server reset the call ({struct.unpack('>I', body)[0]})")
            )
        elif frame_type == frames.GOAWAY:
            self._on_goaway(struct.unpack_from(">I", body)[0] & frames.MAX_INT31)
        elif frame_type == frames.PUSH_PROMISE:
            raise ProtocolError("PUSH_PROMISE frame although push is disabled")

    def _on_data(self, stream: GrpcStream | None, stream_id: int, flags: int, body: bytes) -> None:
        payload = strip_padding(flags, body)  # checked also if the call is over, or has not begun
        self._unacked_bytes += len(body)
        window_updates = b""
        if self._unacked_bytes >= _WINDOW_UPDATE_AFTER:
            window_updates += encode_frame(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacked_bytes))
            self._unacked_bytes = 0
        if stream is not None:
            stream.unacked_bytes += len(body)
            if stream.unacked_bytes >= _WINDOW_UPDATE_AFTER and not flags & frames.END_STREAM:
                window_updates += encode_frame(
                    frames.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", stream.unacked_bytes)
                )
                stream.unacked_bytes = 0
            if stream.feed(payload):
                self._overhead = 0
            if stream.bytes_kept() > _LARGE_REPLY and self._bytes_kept() > _MAX_KEPT:
                raise ProtocolError("the replies to all calls are too long")
            if flags & frames.END_STREAM:
                self._end_stream(stream_id, GrpcStatus(frames.UNKNOWN, "the call ended without a status"))
        if window_updates:
            with self._mutex:
                self._write(window_updates)

    def _bytes_kept(self) -> int:
        return sum(stream.bytes_kept() for stream in list(self._streams.values()))

    def _on_headers(self, stream_id: int, flags: int, block: bytearray) -> None:
        if len(block) > _MAX_HEADER_BLOCK:
            raise ProtocolError("header block longer than 64 KiB")
        if not flags & frames.END_HEADERS:
            self._partial_headers = (stream_id, flags, block)
            return
        self._partial_headers = None
        headers = dict(self._decoder.decode(bytes(block)))
        status, code = headers.get(b":status", b"200"), headers.get(b"grpc-status", b"")
        if code.isdigit() and (code != b"0" or flags & frames.END_STREAM):
            text = unquote_to_bytes(headers.get(b"grpc-message", b"")[:_MAX_ERROR_TEXT])
            self._end_stream(stream_id, GrpcStatus(int(code[:9]), server_text(text)))
        elif status != b"200":
            self._end_stream(
                stream_id,
                GrpcStatus(frames.UNAVAILABLE, f"answered with HTTP status {server_text(status[:3])}"),
            )
        elif flags & frames.END_STREAM:
            self._end_stream(stream_id, GrpcStatus(frames.UNKNOWN, "the call ended without a status"))

    def _on_settings(self, body: bytes) -> None:
        if len(body) > _MAX_SETTINGS:
            raise ProtocolError("too many settings")
        window = dict(struct.iter_unpack(">HI", body)).get(4, self._initial_stream_window)
        with self._mutex:
            for stream in self._streams.values():
                stream.send_window += window - self._initial_stream_window
            self._initial_stream_window = window
            self._write(encode_frame(frames.SETTINGS, frames.ACK, 0, b""))

    def _on_window_update(self, stream_id: int, increment: int) -> None:
        with self._mutex:
            if stream_id and (stream := self._streams.get(stream_id)):
                stream.send_window += increment
                streams = [stream]
            else:
                self._send_window += 0 if stream_id else increment
                streams = list(self._streams.values())
            if sendable := b"".join(self._sendable_frames(stream) for stream in streams):
                self._write(sendable)

    def _end_stream(self, stream_id: int, status: GrpcStatus) -> None:
        if (stream := self._streams.pop(stream_id, None)) is not None:
            self._overhead = 0
            stream.on_end(status)

    def _on_goaway(self, last_stream_id: int) -> None:
        self.going_away = True
        for stream_id in [stream_id for stream_id in list(self._streams) if stream_id > last_stream_id]:
            self._end_stream(stream_id, GrpcStatus(frames.UNAVAILABLE, "the server is closing this connection"))


def _error_text(error: Exception) -> str:
    return server_text(getattr(error, "strerror", None) or error) or type(error).__name__


def _make_reader(
    sock: socket.socket, connection: ref[GrpcConnection]
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Holds only a weak reference, so that an unused connection can be collected; its `__del__` wakes this thread."""

    async def read(_: Runtime) -> None:
        with sock:
            try:
                await read_until_end()
            except Exception as error:
                live_connection = connection()
                # After a failure the socket may be closed, and polling it is an error.
                if live_connection is not None and live_connection.failure is None:
                    log_unexpected(_log, "the reader of a connection", error)
                    live_connection.fail(f"unexpected error: {_error_text(error)}")

    async def read_until_end() -> None:
        poll = new_poll()
        poll.register(sock, POLLIN)
        timeout = 1.0
        while True:
            readable = poll.poll(timeout * 1000)
            live_connection = connection()
            if live_connection is None or live_connection.failure is not None:
                return
            if readable:
                try:
                    data = sock.recv(65_536)
                except BlockingIOError:
                    continue
                except OSError as error:
                    data, live_connection.failure = b"", live_connection.failure or _error_text(error)
                if not data:
                    live_connection.fail("the server closed the connection")
                    return
                live_connection.receive(data)
            else:
                live_connection.ping_if_idle()
            timeout = live_connection.poll_timeout()
            del live_connection

    return read
