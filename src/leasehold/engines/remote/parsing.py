"""HTTP/1.1 responses and server-sent events, for the connections of `runtime/net`: `feed` bytes, `gets` what is
complete.

A server, or a proxy before it, may send anything. So everything has a limit, and a response that leaves any doubt where
it ends is refused: its connection is closed, and the call has no answer (E5). The connection keeps the
deadline, however slowly the bytes arrive.
"""

from __future__ import annotations

from typing import Final, NamedTuple, NoReturn

MAX_HEAD: Final = 16_384  # bytes of a status line and its headers, and of the trailers of a chunked body
MAX_HEADERS: Final = 100
USUAL_BODY: Final = 1 << 20  # bytes of a body, unless the caller expects more
MAX_BODY: Final = 2 * 1024 * 1024  # of a page of a list of locks
MAX_EVENT: Final = 1 << 20  # bytes of one event of a stream
_MAX_INTERIM: Final = 8  # responses such as 100 Continue before the final one
_MAX_CHUNK_LINE: Final = 256
_EVENT_STREAM: Final = b"text/event-stream"

KEEP_ALIVE: Final = b""  # instead of an event: a comment, which only shows that the connection works


class Response(NamedTuple):
    status: int
    body: bytes  # empty if events follow
    closing: bool = False  # the server closes the connection after this
    is_stream: bool = False  # events follow


class _Head(NamedTuple):
    status: int
    keeps_alive: bool
    headers: dict[bytes, bytes]


class ResponseParser:
    """Responses in the order of the requests."""

    def __init__(self) -> None:
        self.max_body = USUAL_BODY
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._body: _Body | None = None
        self._text = bytearray()  # the decoded body
        self._interim = 0

    @property
    def mid_reply(self) -> bool:
        """Bytes of a further response have arrived. If none was asked for, the connection must be closed."""
        return bool(self._buffer) or self._head is not None

    def feed(self, data: bytes, /) -> None:
        self._buffer += data

    def gets(self) -> Response | bytes | bool:
        try:
            return self._next()
        except ConnectionError:  # its traceback would keep the bytes in memory
            self._buffer.clear()
            self._text.clear()
            raise

    def _next(self) -> Response | bytes | bool:
        return self._next_response()

    def _next_response(self) -> Response | bool:
        if self._head is None:
            self._head = self._read_head()
            if self._head is None:
                return False
        if self._body is None:
            self._body = _body_of(self._head, self.max_body)
        self._text += self._body.decode(self._buffer)
        if len(self._text) > self.max_body:
            _refuse(f"its body exceeds {self.max_body} bytes")
        if not self._body.complete:
            return False
        response = Response(self._head.status, bytes(self._text), closing=not self._head.keeps_alive)
        self._head = self._body = None
        self._text.clear()
        return response

    def _read_head(self) -> _Head | None:
        while (head := _take_head(self._buffer)) is not None and head.status < 200:
            self._interim += 1
            if self._interim > _MAX_INTERIM or head.status == 101:
                _refuse("it sent an interim response that was not asked for")
        self._interim = 0 if head is not None else self._interim
        return head


class StreamParser(ResponseParser):
    """One response whose body is a stream of events: first the `Response`, then the data of each event, or
    `KEEP_ALIVE`. A response of another kind is returned whole."""

    def __init__(self) -> None:
        super().__init__()
        self._events: _Body | None = None  # not None: the stream has begun
        self._scanned = 0  # the text up to here has no end of an event

    def _next(self) -> Response | bytes | bool:
        if self._events is None:
            return self._begin()
        self._text += self._events.decode(self._buffer)
        found = self._next_event()
        if found is None and self._events.complete:
            raise ConnectionResetError("the server ended the stream")
        return False if found is None else found

    def _begin(self) -> Response | bool:
        if self._head is None:
            self._head = head = self._read_head()
            if head is None:
                return False
            if head.status == 200 and head.headers.get(b"content-type", b"").split(b";")[0].strip() == _EVENT_STREAM:
                self._events = _body_of(head, self.max_body, may_end_with_connection=True)
                return Response(200, b"", is_stream=True)
        return self._next_response()

    def _next_event(self) -> bytes | None:
        """The next event that is complete. It ends with an empty line; a line ends with LF or CR LF."""
        while (end := self._text.find(b"\n", self._scanned)) >= 0:
            line_begin = self._text.rfind(b"\n", 0, end) + 1
            if not self._text[line_begin:end].strip(b"\r"):
                lines = bytes(self._text[:end]).splitlines()
                del self._text[: end + 1]
                self._scanned = 0
                if lines:
                    return b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
                continue  # an empty line more than needed
            self._scanned = end + 1
        if len(self._text) > MAX_EVENT:
            _refuse("an event of its stream exceeds 1 MiB")
        return None


class _Body:
    """Takes a body out of a buffer as it arrives."""

    complete = False

    def decode(self, buffer: bytearray) -> bytes:
        """What is new of the body."""
        raise NotImplementedError


class _Sized(_Body):
    def __init__(self, size: int) -> None:
        self._left = size
        self.complete = size == 0

    def decode(self, buffer: bytearray) -> bytes:
        data = bytes(buffer[: self._left])
        del buffer[: len(data)]
        self._left -= len(data)
        self.complete = self._left == 0
        return data


class _UntilClosed(_Body):
    def decode(self, buffer: bytearray) -> bytes:
        data = bytes(buffer)
        buffer.clear()
        return data


class _Chunked(_Body):
    def __init__(self) -> None:
        self._left = 0  # of the current chunk
        self._needs_line_end = False
        self._in_trailers = False
        self._trailer_size = 0

    def decode(self, buffer: bytearray) -> bytes:
        found = bytearray()
        while not self.complete:
            if self._left:
                data = buffer[: self._left]
                del buffer[: len(data)]
                found += data
                self._left -= len(data)
                if self._left:
                    break
                self._needs_line_end = True
            line = _take_line(buffer, MAX_HEAD if self._in_trailers else _MAX_CHUNK_LINE)
            if line is None:
                break
            self._on_line(line)
        return bytes(found)

    def _on_line(self, line: bytes) -> None:
        if self._in_trailers:
            self._trailer_size += len(line) + 2
            if self._trailer_size > MAX_HEAD:
                _refuse("its trailers exceed 16 KiB")
            self.complete = not line
        elif self._needs_line_end:
            if line:
                _refuse("a chunk of its body does not end where it should")
            self._needs_line_end = False
        else:
            self._left = _number(line.split(b";")[0].strip(), 16, "the size of a chunk")
            self._in_trailers = self._left == 0


def _body_of(head: _Head, max_body: int, *, may_end_with_connection: bool = False) -> _Body:
    encoding, length = head.headers.get(b"transfer-encoding"), head.headers.get(b"content-length")
    if head.status in (204, 304):
        return _Sized(0)
    if encoding is not None:
        if encoding.lower() != b"chunked" or length is not None:
            _refuse("it is not clear where its body ends")
        return _Chunked()
    if length is not None:
        size = _number(length, 10, "the length of its body")
        if size > max_body:
            _refuse(f"its body exceeds {max_body} bytes")
        return _Sized(size)
    if not may_end_with_connection:
        _refuse("it does not say where its body ends")
    return _UntilClosed()


def _take_head(buffer: bytearray) -> _Head | None:
    """The next status line with its headers, taken out of the buffer; None: it is not complete yet."""
    end = buffer.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        if len(buffer) >= MAX_HEAD:
            _refuse("its headers exceed 16 KiB")
        if buffer and not buffer.startswith(b"HTTP/1."[: len(buffer)]):
            _refuse("it is not HTTP/1.1")
        return None
    first, *lines = bytes(buffer[:end]).split(b"\r\n")
    del buffer[: end + 4]
    version, _, rest = first.partition(b" ")
    status = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not (len(status) == 3 and status.isdigit()) or rest[3:4].strip():
        _refuse("it is not HTTP/1.1")
    if len(lines) > MAX_HEADERS:
        _refuse(f"it has more than {MAX_HEADERS} headers")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            _refuse("one of its headers cannot be read")
        name, value = name.lower(), value.strip()
        if name in (b"content-length", b"transfer-encoding") and headers.get(name, value) != value:
            _refuse("it is not clear where its body ends")
        headers[name] = value
    connection = headers.get(b"connection", b"").lower()
    keeps_alive = connection == b"keep-alive" if version == b"HTTP/1.0" else b"close" not in connection
    return _Head(int(status), keeps_alive, headers)


def _take_line(buffer: bytearray, limit: int) -> bytes | None:
    end = buffer.find(b"\r\n", 0, limit)
    if end < 0:
        if len(buffer) >= limit:
            _refuse("a line of its body is too long")
        return None
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line


def _number(text: bytes, base: int, what: str) -> int:
    digits = b"0123456789abcdefABCDEF" if base == 16 else b"0123456789"
    if not 0 < len(text) <= 16 or text.strip(digits):
        _refuse(f"{what} is not a number")
    return int(text, base)


def _refuse(why: str) -> NoReturn:
    raise ConnectionAbortedError(f"the response is not one of a Leasehold server: {why}")
