"""gRPC over HTTP/2 on one plain socket: many calls at once, streams among them, read by one thread.

Why not grpcio: its core has threads and locks of its own, and does not survive a fork. A child with a new channel hung
or crashed whenever a call or a stream was open at that moment, and now and then when all had been closed just before. A
socket of ours is let go in the child, and that is all.

Whoever calls writes its frames itself, under the guard; the reader hands out what comes back. A connection is never
mended: whatever is wrong with it (`fail`) ends it and every call on it, and the next call opens another.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote_to_bytes
from weakref import ref

from leasehold.engines.etcd import dialing, frames
from leasehold.engines.etcd.address import Endpoint
from leasehold.engines.etcd.frames import Broken, Status, Stream, frame, unpadded
from leasehold.engines.etcd.hpack import Decoder, Header, Undecodable, plain
from leasehold.errors import Reentered
from leasehold.runtime.base import Guard, Runtime

_REFILL: Final = 1 << 20  # bytes read before the peer is told that it may send so many more
_SETTINGS: Final = struct.pack(">HIHI", 2, 0, 4, frames.MOST)  # no pushes; a window that never fills
_CANCEL: Final = 8
_LONGEST_HEADERS: Final = 1 << 16  # of one call, as sent; etcd's have a hundred bytes
_LONGEST_WORDS: Final = 500  # of what it says about an error, which people will read
_FULL_WAIT: Final = 0.1  # that a caller waits for a full socket: an event loop may be the one that waits
_PING_AFTER: Final = 6.0  # of silence with calls open; etcd takes offence at less than 5
_PING_WAIT: Final = 4.0


class Connection:
    """`open` first. `tick` is called on the reader's thread, now and then and after everything heard."""

    def __init__(self, runtime: Runtime, authority: str, tls: bool) -> None:
        self._now = runtime.now
        self._guard: Guard = runtime.guard()
        self._lead = b"\x83" + (b"\x87" if tls else b"\x86") + plain(b":authority", authority.encode())
        self._blocks: dict[str, bytes] = {}
        self._socket: socket.socket | None = None
        self._tls: dialing.Tls | None = None
        self._decoder = Decoder()
        self._streams: dict[int, Stream] = {}
        self._next = 1
        self._window, self._stream_window, self._unread = frames.USUAL_WINDOW, frames.USUAL_WINDOW, 0
        self._buffer = bytearray()
        self._block: tuple[int, int, bytearray] | None = None  # headers that go on in the next frame
        self._heard_at = self._now()
        self._pinged_at: float | None = None
        self.heard = 0  # bytes so far: whether there is any life in it
        self.broken: str | None = None
        self.leaving = False  # the peer takes no new calls
        self.tick: Callable[[], float | None] | None = None
        self._read = False  # by a thread, which then is the one to close the socket

    def open(self, to: Endpoint, numbers: Sequence[str], context: ssl.SSLContext | None, deadline: float) -> None:
        """Connect to one of these numbers of it; blocks until then at most. Raises OSError."""
        made = dialing.reach(numbers, to.port, self._now, deadline)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is not None:
                self._tls = dialing.shake_hands(made, context, to.host, self._now, deadline)
            made.setblocking(False)
        except BaseException:
            made.close()
            raise
        self._socket = made
        with self._guard:
            self._write(frames.PREFACE + frame(frames.SETTINGS, 0, 0, _SETTINGS))
            self._write(frame(frames.WINDOW, 0, 0, struct.pack(">I", frames.MOST - frames.USUAL_WINDOW)))

    # ------------------------------------------------------------- callers

    def start(self, stream: Stream, path: str, metadata: list[Header], body: bytes | None, end: bool) -> None:
        """Send the headers of a call, and its (first) message. Never waits. Raises Broken."""
        if self._guard.mine():  # a signal handler, in the midst of this very thread's frame
            raise Reentered
        block = self._begun(path) + b"".join(plain(*header) for header in metadata)
        with self._guard:
            if self.broken is not None or self.leaving:
                raise Broken(self.broken or "this connection takes no new calls")
            stream.number, self._next = self._next, self._next + 2
            stream.window = self._stream_window
            self._streams[stream.number] = stream
            stream.unsent += b"" if body is None else frames.message(body)
            stream.closing = end
            self._write(frame(frames.HEADERS, frames.END_HEADERS, stream.number, block) + self._due(stream))

    def _begun(self, path: str) -> bytes:
        """The headers that are the same in every call of a method."""
        if (block := self._blocks.get(path)) is None:
            block = self._lead + plain(b":path", path.encode())
            block += b"".join(plain(*header) for header in frames.ALWAYS)
            self._blocks[path] = block
        return block

    def send(self, stream: Stream, body: bytes) -> None:
        """A further message of a call that was not ended."""
        if self._guard.mine():
            raise Reentered
        with self._guard:
            if self.broken is not None:
                raise Broken(self.broken)
            stream.unsent += frames.message(body)
            self._write(self._due(stream))

    def cancel(self, stream: Stream) -> None:
        """Nobody waits for this call any more. It may be carried out all the same."""
        stream.over(Status(frames.CANCELLED))
        if self._guard.mine():
            return
        with self._guard:
            if self._streams.pop(stream.number, None) is not None and self.broken is None:
                with suppress(Broken):
                    self._write(frame(frames.RESET, 0, stream.number, struct.pack(">I", _CANCEL)))

    def fail(self, why: str) -> None:
        """End it, and all calls on it."""
        self.broken = self.broken or why
        self._let_go()
        for stream in list(self._streams.values()):
            stream.over(Status(frames.UNAVAILABLE, self.broken))

    def drop(self) -> None:
        """In a forked child: the parent goes on using it, so no goodbye, only our descriptor."""
        if self._socket is not None:
            self._socket.close()
        self.broken, self._socket = "it belongs to the parent of this forked process", None

    def __del__(self) -> None:
        if getattr(self, "_socket", None) is not None:
            self._let_go()

    def _let_go(self) -> None:
        if self._socket is not None and self._read:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes it
        elif self._socket is not None:
            self._socket.close()

    def _due(self, stream: Stream) -> bytes:
        """As much of what a call has to send as both windows allow."""
        out = bytearray()
        while stream.unsent:
            size = min(len(stream.unsent), self._window, stream.window, frames.PIECE)
            if size <= 0:
                return bytes(out)
            piece = bytes(stream.unsent[:size])
            del stream.unsent[:size]
            self._window -= size
            stream.window -= size
            last = stream.closing and not stream.unsent
            out += frame(frames.DATA, frames.END_STREAM if last else 0, stream.number, piece)
        return bytes(out)

    def _write(self, data: bytes) -> None:
        """Under the guard. A frame sent by half would garble all that follow."""
        try:
            if self._tls is not None:
                self._tls[0].write(data)
                data = self._tls[2].read()
            while data:
                assert self._socket is not None
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    poll = select.poll()  # not select(): a descriptor may have any number
                    poll.register(self._socket, select.POLLOUT)
                    if not poll.poll(_FULL_WAIT * 1000):
                        raise ConnectionError("the other side takes nothing any more") from None
        except (OSError, ValueError) as error:
            self.fail(_words(error))
            raise Broken(self.broken) from error
        except BaseException:
            self.fail("interrupted in the midst of a frame")
            raise

    # -------------------------------------------------------------- reader

    def reader(self) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        """What the reading thread runs, until the connection is broken or nobody has it any more."""
        assert self._socket is not None
        self._read = True
        return _reader(self._socket, ref(self))

    def hear(self, data: bytes) -> None:
        """Bytes from the socket."""
        self.heard += len(data)
        self._heard_at, self._pinged_at = self._now(), None
        try:
            if self._tls is not None:
                data = self._decrypt(data)
            self._buffer += data
            while len(self._buffer) >= 9:
                size = int.from_bytes(self._buffer[:3], "big")
                if size > frames.LONGEST_FRAME:
                    raise Undecodable("a frame longer than was allowed")
                if len(self._buffer) < 9 + size:
                    return
                kind, flags, number = self._buffer[3], self._buffer[4], int.from_bytes(self._buffer[5:9], "big")
                body = bytes(self._buffer[9 : 9 + size])
                del self._buffer[: 9 + size]
                self._frame(kind, flags, number & 0x7FFFFFFF, body)
        except (Undecodable, struct.error, IndexError, ssl.SSLError) as error:
            self.fail(f"this is not HTTP/2 as gRPC speaks it: {error}")
        except Broken:
            return

    def _decrypt(self, data: bytes) -> bytes:
        assert self._tls is not None
        tls, inward, _ = self._tls
        out = bytearray()
        with self._guard:
            inward.write(data)
            with suppress(ssl.SSLWantReadError):
                while part := tls.read(65_536):
                    out += part
        return bytes(out)

    def silent(self) -> None:
        """Nothing was heard for a while: see that the other side still lives, while anybody waits for it."""
        if not self._streams or self._now() - self._heard_at < _PING_AFTER:
            return
        if self._pinged_at is None:
            self._pinged_at = self._now()
            with self._guard, suppress(Broken):
                self._write(frame(frames.PING, 0, 0, bytes(8)))
        elif self._now() - self._pinged_at > _PING_WAIT:
            self.fail("the other side has fallen silent")

    def patience(self) -> float:
        """How long the reader may sleep."""
        due = self.tick() if self.tick is not None else None
        usual = 1.0 if self._streams else 60.0
        return usual if due is None else max(0.0, min(usual, due))

    def _frame(self, kind: int, flags: int, number: int, body: bytes) -> None:
        if self._block is not None and kind != frames.CONTINUATION:
            raise Undecodable("headers that do not go on")
        if kind == frames.DATA:
            self._data(self._streams.get(number), number, flags, body)
        elif kind == frames.HEADERS:
            body = unpadded(flags, body)
            self._headers(number, flags, bytearray(body[5:] if flags & frames.PRIORITY else body))
        elif kind == frames.CONTINUATION:
            if self._block is None or self._block[0] != number:
                raise Undecodable("headers that go on without a beginning")
            begun, first, block = self._block
            block += body
            self._headers(begun, first | flags & frames.END_HEADERS, block)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(body)
        elif kind == frames.PING and not flags & frames.ACK:
            with self._guard:
                self._write(frame(frames.PING, frames.ACK, 0, body))
        elif kind == frames.WINDOW:
            self._opened(number, struct.unpack(">I", body)[0] & frames.MOST)
        elif kind == frames.RESET:
            self._end(number, Status(frames.UNAVAILABLE, f"the server reset the call ({struct.unpack('>I', body)[0]})"))
        elif kind == frames.GOAWAY:
            self._goaway(struct.unpack_from(">I", body)[0] & frames.MOST)
        elif kind == frames.PUSH:
            raise Undecodable("a push, which was not allowed")

    def _data(self, stream: Stream | None, number: int, flags: int, body: bytes) -> None:
        self._unread += len(body)
        refill = b""
        if self._unread >= _REFILL:
            refill += frame(frames.WINDOW, 0, 0, struct.pack(">I", self._unread))
            self._unread = 0
        if stream is not None:
            stream.unread += len(body)
            if stream.unread >= _REFILL and not flags & frames.END_STREAM:
                refill += frame(frames.WINDOW, 0, number, struct.pack(">I", stream.unread))
                stream.unread = 0
            stream.take(unpadded(flags, body))
            if flags & frames.END_STREAM:
                self._end(number, Status(frames.UNKNOWN, "the call ended without a status"))
        if refill:
            with self._guard:
                self._write(refill)

    def _headers(self, number: int, flags: int, block: bytearray) -> None:
        if len(block) > _LONGEST_HEADERS:
            raise Undecodable("headers that do not end")
        if not flags & frames.END_HEADERS:
            self._block = (number, flags, block)
            return
        self._block = None
        found = dict(self._decoder.decode(bytes(block)))
        status, code = found.get(b":status", b"200"), found.get(b"grpc-status", b"")
        if code.isdigit() and (code != b"0" or flags & frames.END_STREAM):
            text = unquote_to_bytes(found.get(b"grpc-message", b"")[:_LONGEST_WORDS]).decode(errors="replace")
            self._end(number, Status(int(code[:9]), "".join(each if each.isprintable() else "?" for each in text)))
        elif status != b"200":
            self._end(
                number, Status(frames.UNAVAILABLE, f"answered with HTTP status {status[:3].decode(errors='replace')}")
            )
        elif flags & frames.END_STREAM:
            self._end(number, Status(frames.UNKNOWN, "the call ended without a status"))

    def _settings(self, body: bytes) -> None:
        with self._guard:
            for name, value in struct.iter_unpack(">HI", body):
                if name == 4:
                    for stream in self._streams.values():
                        stream.window += value - self._stream_window
                    self._stream_window = value
            self._write(frame(frames.SETTINGS, frames.ACK, 0, b""))

    def _opened(self, number: int, more: int) -> None:
        with self._guard:
            if number and (stream := self._streams.get(number)):
                stream.window += more
                waiting = [stream]
            else:
                self._window += 0 if number else more
                waiting = list(self._streams.values())
            if due := b"".join(self._due(stream) for stream in waiting):
                self._write(due)

    def _end(self, number: int, status: Status) -> None:
        if (stream := self._streams.pop(number, None)) is not None:
            stream.over(status)

    def _goaway(self, last: int) -> None:
        self.leaving = True
        for number in [number for number in list(self._streams) if number > last]:
            self._end(number, Status(frames.UNAVAILABLE, "the server is closing this connection"))


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _reader(source: socket.socket, connection: ref[Connection]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Holds the connection weakly: one nobody has any more must be able to go. Then its socket wakes this thread."""

    async def read(_: Runtime) -> None:
        poll = select.poll()
        poll.register(source, select.POLLIN)
        patience = 1.0
        with source:
            while True:
                ready = poll.poll(patience * 1000)
                known = connection()
                if known is None or known.broken is not None:
                    return
                if ready:
                    try:
                        data = source.recv(65_536)
                    except BlockingIOError:
                        continue
                    except OSError as error:
                        data, known.broken = b"", known.broken or _words(error)
                    if not data:
                        known.fail("the server closed the connection")
                        return
                    known.hear(data)
                else:
                    known.silent()
                patience = known.patience()
                del known

    return read
