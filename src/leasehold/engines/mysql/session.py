"""One session with the server: requests and replies of its protocol, over a non-blocking socket.

PyMySQL makes the handshake (`connect.py`). Its connections are not used after that: blocking ones restart their timeout
with every byte, and those of the asyncio drivers have no deadline and cannot be given up. Here every wait has the
call's deadline, and the same code serves threads and event loops. If anything ends a call before its reply, even a
cancellation, the session is `unanswered` and no further call uses it: so no call reads another call's reply. The server
executes requests in order, so that a release can be sent behind an attempt that has no reply yet.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import finalize

from leasehold.core.texts import server_text
from leasehold.engines.mysql.errors import ENGINE, MyServerError, no_answer
from leasehold.engines.sql.session import (
    BUSY,
    CLOSED,
    IDLE,
    DrainingSocket,
    Listing,
    Row,
    SqlConnectionLost,
    SqlSession,
    Value,
    Values,
)
from leasehold.errors import ListingTooLong
from leasehold.runtime.base import Runtime

_MAX_REPLY_SIZE: Final = 1 << 20  # bytes: of hundreds of claims
_QUIT: Final = b"\x01\0\0\0\x01"
_QUERY: Final = 3
_MAX_REPLY_VALUES: Final = 1 << 14  # in the rows of one reply: each takes up to a hundred bytes of memory
_RESULT_COST: Final = 64  # values that a result counts as, even without rows
_MAX_COLUMNS: Final = 64  # `inspect` has 17
_HEADER_SIZE: Final = 4  # bytes before each packet
_MAX_PACKET: Final = 0xFFFFFF  # bytes of one packet; longer data continues in the next
_MORE_RESULTS: Final = 0x0008  # SERVER_MORE_RESULTS_EXISTS
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ResultSet(NamedTuple):
    """One of the results of a call: a procedure returns its rows, and then a final result without rows."""

    rows: list[Row] | None
    has_more: bool


class MySession(SqlSession):
    def __init__(self, sock: socket.socket, runtime: Runtime) -> None:
        super().__init__()
        self._sock, self._runtime = sock, runtime
        sock.settimeout(0)
        finalize(self, sock.close).atexit = False  # a client may be dropped without close()
        self._unsent = b""
        self._buffer, self._offset = bytearray(), 0
        self._bytes_left, self._values_left = _MAX_REPLY_SIZE, _MAX_REPLY_VALUES  # of the current reply
        self.connection_id = 0  # the server's number of this session
        self.expects_interrupt = False  # KILL QUERY is the expected end of its statements
        self.closing_packet = b""  # sent before the final COM_QUIT

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    @property
    def sock(self) -> socket.socket:
        """With TLS, a `TlsSocket`."""
        return self._sock

    def set_runtime(self, runtime: Runtime) -> None:
        """Hand the session over to the thread that reads it from now on."""
        self._runtime = runtime

    def usable(self) -> bool:
        if self.state is not IDLE or self._offset < len(self._buffer):  # more came with the last reply than it has
            return False
        try:
            self._sock.recv(1)
        except _WOULD_BLOCK:
            return True
        except OSError:
            return False
        return False  # the server closed the connection, perhaps after an unsolicited error packet

    async def execute(self, statement: bytes, values: Values, deadline: float) -> list[Row]:
        await self.send(statement, values, deadline)
        await self._wait_ready(deadline)  # the reply cannot have arrived yet
        found: list[Row] = []
        has_more = True
        while has_more:
            rows, has_more = await self.next_result(deadline)
            found = found or rows or []
        return found

    async def list_rows(self, statement: bytes, values: Values, deadline: float) -> list[bytes]:
        await self.send(statement, values, deadline)
        listing, has_more = Listing(ENGINE), True
        try:
            while has_more:
                _, has_more = await self.next_result(deadline, listing)
        except ListingTooLong:
            self.close()
            raise
        return listing.rows

    async def send(self, statement: bytes, values: Values, deadline: float) -> None:
        """Send a call without waiting for its first result."""
        self.transition(BUSY)
        self._bytes_left, self._values_left = _MAX_REPLY_SIZE, _MAX_REPLY_VALUES
        self._unsent = packet(statement, values)
        try:
            while self._unsent:
                try:
                    self._send_some()
                except _WOULD_BLOCK:
                    await self._wait_ready(deadline, write=True)
        except OSError as error:
            raise self._connection_lost(error) from error

    async def next_result(self, deadline: float, listing: Listing | None = None) -> ResultSet:
        """The next result of the call. After the last one the session is ready for another call. Rows go to the
        listing, if there is one."""
        try:
            result_set = await self._read_result(deadline, listing)
        except OSError as error:
            raise self._connection_lost(error) from error
        except MyServerError as error:
            self.transition(IDLE)
            if not error.session_reusable and not (error.interrupted and self.expects_interrupt):
                self.close()
            raise
        if not result_set.has_more:
            self.transition(IDLE)
        return result_set

    def _send_last(self, statement: bytes, values: Values) -> None:
        self._unsent += packet(statement, values)  # sent by `_close_our_side`

    def _close_our_side(self) -> DrainingSocket | None:
        try:
            with suppress(*_WOULD_BLOCK):
                self._unsent += _QUIT
                while self._unsent:
                    self._send_some()
            if self._unsent:  # the send buffer is full
                socket.socket.shutdown(self._sock, socket.SHUT_WR)
            return DrainingSocket(self._sock.fileno())
        except OSError:  # the server has already hung up
            return None
        finally:
            self._sock.close()

    def shutdown(self) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # below TLS, which another thread may be using

    def close(self) -> None:
        with suppress(OSError):
            if self.state is IDLE:
                self._sock.send(self.closing_packet + _QUIT)
        self._sock.close()
        self.transition(CLOSED)

    def after_fork(self) -> None:
        self.transition(CLOSED)
        with suppress(OSError):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._sock.fileno(), inheritable=False)
            os.close(null)
        self._sock.close()

    def _connection_lost(self, error: OSError) -> SqlConnectionLost:
        self.close()
        return SqlConnectionLost(server_text(error.strerror or error))

    # ------------------------------------------------------------- answers

    async def _read_result(self, deadline: float, listing: Listing | None) -> ResultSet:
        self._values_left -= _RESULT_COST
        if self._values_left < 0:
            raise ConnectionAbortedError("the server sent too many results")
        first = await self._read_packet(deadline)
        if first[0] == 0x00:  # no rows
            _, offset = _read_length(first, 1)
            _, offset = _read_length(first, offset)
            return ResultSet(None, bool(int.from_bytes(first[offset : offset + 2], "little") & _MORE_RESULTS))
        if first[0] == 0xFB:  # LOCAL INFILE
            raise ConnectionAbortedError("the server unexpectedly asked for a local file")
        columns, _ = _read_length(first, 0)
        if columns > _MAX_COLUMNS:
            raise ConnectionAbortedError(f"the server announced {columns} columns")
        for _ in range(columns + 1):  # the column definitions and their end
            if not self._skip_packet():
                await self._read_packet(deadline)
        rows: list[Row] = []
        while True:
            payload = self._buffered_packet() or await self._read_packet(deadline)
            if payload[0] == 0xFE and len(payload) < 9:
                return ResultSet(rows, bool(int.from_bytes(payload[3:5], "little") & _MORE_RESULTS))
            if listing is not None:
                listing.add(payload)
                self._bytes_left += _HEADER_SIZE + len(payload)
                continue
            self._values_left -= columns + 1
            if self._values_left < 0:
                raise ConnectionAbortedError("the server sent too many rows")
            rows.append(decode_row(payload))

    async def _read_packet(self, deadline: float) -> bytes:
        tried = False
        while not (payload := self._buffered_packet()):
            if tried and self._runtime.now() >= deadline:  # a server may send without end, also what TLS ignores
                raise no_answer(0.0)
            tried = True
            try:
                data = self._sock.recv(65536)
            except _WOULD_BLOCK:
                await self._wait_ready(deadline)
                continue
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._bytes_left -= len(data)
            if self._bytes_left < 0:
                raise ConnectionAbortedError("the server sent too long a reply")
            del self._buffer[: self._offset]
            self._offset = 0
            self._buffer += data
        return payload

    def _skip_packet(self) -> bool:
        """Skip the next packet, if all of it has arrived: most of a reply is column definitions."""
        buffer, offset = self._buffer, self._offset
        if len(buffer) < offset + 5 or buffer[offset + 4] == 0xFF:  # `_buffered_packet` raises the error
            return False
        offset += 4 + (buffer[offset] | buffer[offset + 1] << 8 | buffer[offset + 2] << 16)
        if len(buffer) < offset:
            return False
        self._offset = offset
        return True

    def _buffered_packet(self) -> bytes | None:
        """The next packet, if all of it has arrived."""
        buffer, offset, payload = self._buffer, self._offset, b""
        while True:
            start = offset + 4
            offset = start + int.from_bytes(buffer[offset : offset + 3], "little")
            if len(buffer) < start or len(buffer) < offset:
                return None
            payload += buffer[start:offset]
            if offset - start < _MAX_PACKET:
                break
        self._offset = offset
        if not payload:
            raise ConnectionAbortedError("the server sent an empty packet")
        if payload[0] == 0xFF:
            text = payload[9:] if payload[3:4] == b"#" else payload[3:]
            raise MyServerError(int.from_bytes(payload[1:3], "little"), text.decode(errors="replace").strip())
        return payload

    def _send_some(self) -> None:
        self._unsent = self._unsent[self._sock.send(self._unsent) :]

    async def _wait_ready(self, deadline: float, write: bool = False) -> None:
        began = self._runtime.now()
        if not await self._runtime.wait_fd(self._sock.fileno(), deadline - began, write=write):
            raise no_answer(deadline - began)


# ------------------------------------------------------------------ values


def packet(statement: bytes, values: Values) -> bytes:
    """A request: the statement as it is, or, with values, a procedure call with these arguments."""
    query = statement + b"(" + b", ".join(literals(values)) + b")" if values else statement
    body, parts = bytes([_QUERY]) + query, []
    for number, start in enumerate(range(0, len(body) + 1, _MAX_PACKET)):
        part = body[start : start + _MAX_PACKET]
        parts.append(len(part).to_bytes(3, "little") + bytes([number & 0xFF]) + part)
    return b"".join(parts)


def literals(values: Values) -> list[bytes]:
    """SQL literals that do not depend on the server's settings: text in hexadecimal, columns of claims as one JSON."""
    if not isinstance(values[0], list):
        return [(_LITERAL.get(type(value)) or literal)(value) for value in values]
    columns = [value for value in values if isinstance(value, list)]
    found = [literal(value) for value in values if not isinstance(value, list)]
    rows = [
        [cell.encode().hex() if isinstance(cell, str) else cell for cell in row] for row in zip(*columns, strict=True)
    ]
    return [b"'" + json.dumps(rows, separators=(",", ":")).encode() + b"'", *found]


def literal(value: Value) -> bytes:
    if value is None:
        return b"null"
    if isinstance(value, str):
        return _text(value)
    assert isinstance(value, int)  # noqa: S101  # for the type checker
    return str(int(value)).encode()


def _text(value: str) -> bytes:
    return b"x'%b'" % value.encode().hex().encode()


# The same by exact type, without the type checks: an acquire and release pair has 25 values.
_LITERAL: Final[dict[type, Callable[[Any], bytes]]] = {str: _text, int: b"%d".__mod__}


def _read_length(data: bytes, offset: int) -> tuple[int, int]:
    """A length-encoded integer, and the offset behind it."""
    first = data[offset] if offset < len(data) else 0xFF
    if first < 0xFB:
        return first, offset + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None or len(data) < offset + 1 + size:
        raise ConnectionAbortedError("the server sent an invalid length")
    return int.from_bytes(data[offset + 1 : offset + 1 + size], "little"), offset + 1 + size


def decode_row(data: bytes) -> Row:
    found: list[str | None] = []
    offset = 0
    try:
        while offset < len(data):
            if data[offset] == 0xFB:
                found.append(None)
                offset += 1
                continue
            size, offset = _read_length(data, offset)
            found.append(data[offset : offset + size].decode())
            offset += size
    except UnicodeDecodeError as error:
        raise ConnectionAbortedError("the server sent a row that cannot be decoded") from error
    return tuple(found)
