"""One session with the server: requests and answers of its protocol, over a socket that never blocks.

PyMySQL makes the hand-shake (`reach.py`). Its connections are not used after that: blocking ones restart their timeout
with every byte, and those of its asyncio kin wait for nobody's deadline and cannot be given up. Here every wait has the
call's deadline, and the same code serves threads and event loops. Whatever ends a call before its answer, a
cancellation too, sets the session adrift: nobody reads another call's answer. The server carries out what it was sent
one after the other, so that a release can be sent behind an attempt that is still on its way.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import finalize

from leasehold.engines.mysql.errors import MyServerError, no_answer
from leasehold.engines.sql.session import DatabaseServer, DrainingSocket, Row, SqlConnectionLost, Value
from leasehold.runtime.base import Runtime

_QUIT: Final = b"\x01\0\0\0\x01"
_QUERY: Final = 3
_MAX_PACKET: Final = 0xFFFFFF  # bytes of one packet; a longer one goes on in the next
_MORE_RESULTS: Final = 0x0008  # SERVER_MORE_RESULTS_EXISTS
_WOULD_BLOCK: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ResultSet(NamedTuple):
    """One of the results of a call: a procedure gives its rows, and then an end."""

    rows: list[Row] | None
    has_more: bool


class MySession:
    def __init__(self, sock: socket.socket, runtime: Runtime) -> None:
        self._sock, self._runtime = sock, runtime
        sock.settimeout(0)
        finalize(self, sock.close).atexit = False  # a client may be dropped without a close()
        self.server = DatabaseServer(False, "", True)
        self.unanswered = False
        self._unsent = b""
        self._buffer, self._offset = bytearray(), 0
        self._closed = False
        self.connection_id = 0  # the server's, of this session
        self.expects_interrupt = False  # an interruption is what it waits for
        self.closing_packet = b""  # sent along with a goodbye

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def set_runtime(self, runtime: Runtime) -> None:
        """To the thread that is to read it from now on."""
        self._runtime = runtime

    def usable(self) -> bool:
        if self.unanswered or self._closed:
            return False
        try:
            self._sock.recv(1)
        except _WOULD_BLOCK:
            return True
        except OSError:
            return False
        return False  # it hung up, perhaps after a last word: nobody asked for one

    async def execute(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        await self.send(statement, values, deadline)
        await self._wait_ready(deadline)  # nothing can be there yet
        found: list[Row] = []
        has_more = True
        while has_more:
            rows, has_more = await self.next_result(deadline)
            found = found or rows or []
        return found

    async def send(self, statement: bytes, values: Sequence[Value], deadline: float) -> None:
        """Send a call without waiting for its first result."""
        self.unanswered = True
        self._unsent = packet(statement, values)
        try:
            while self._unsent:
                try:
                    self._send_some()
                except _WOULD_BLOCK:
                    await self._wait_ready(deadline, write=True)
        except OSError as error:
            raise self._connection_lost(error) from error

    async def next_result(self, deadline: float) -> ResultSet:
        """The next result of the call; after the last one the session is free again."""
        try:
            result_set = await self._read_result(deadline)
        except OSError as error:
            raise self._connection_lost(error) from error
        except MyServerError as error:
            self.unanswered = False
            if not error.session_reusable and not (error.interrupted and self.expects_interrupt):
                self.close()
            raise
        if not result_set.has_more:
            self.unanswered = False
        return result_set

    def send_compensation(self, statement: bytes, values: Sequence[Value]) -> DrainingSocket | None:
        self._unsent += packet(statement, values)
        return self.hang_up()

    def hang_up(self) -> DrainingSocket | None:
        try:
            with suppress(*_WOULD_BLOCK):
                self._unsent += _QUIT
                while self._unsent:
                    self._send_some()
            if self._unsent:  # it cannot take even a goodbye
                socket.socket.shutdown(self._sock, socket.SHUT_WR)
            return DrainingSocket(self._sock.fileno(), self.server.identity)
        except OSError:  # it has
            return None
        finally:
            self._closed = True
            self._sock.close()

    def shutdown(self) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # beneath TLS, which another thread may be reading

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                if not self.unanswered:
                    self._sock.send(self.closing_packet + _QUIT)
            self._sock.close()

    def after_fork(self) -> None:
        self._closed = True
        with suppress(OSError):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._sock.fileno(), inheritable=False)
            os.close(null)
        self._sock.close()

    def _connection_lost(self, error: OSError) -> SqlConnectionLost:
        self.unanswered = False
        self.close()
        return SqlConnectionLost(error.strerror or str(error))

    # ------------------------------------------------------------- answers

    async def _read_result(self, deadline: float) -> ResultSet:
        first = await self._read_packet(deadline)
        if first[0] == 0x00:
            _, offset = _read_length(first, 1)
            _, offset = _read_length(first, offset)
            return ResultSet(None, bool(int.from_bytes(first[offset : offset + 2], "little") & _MORE_RESULTS))
        if first[0] == 0xFB:  # it asks for a file of ours
            raise ConnectionAbortedError("it said something no server of ours would say")
        columns, _ = _read_length(first, 0)
        for _ in range(columns + 1):  # what they are called, and an end
            if not self._skip_packet():
                await self._read_packet(deadline)
        rows: list[Row] = []
        while True:
            payload = self._buffered_packet() or await self._read_packet(deadline)
            if payload[0] == 0xFE and len(payload) < 9:
                return ResultSet(rows, bool(int.from_bytes(payload[3:5], "little") & _MORE_RESULTS))
            rows.append(_decode_row(payload, columns))

    async def _read_packet(self, deadline: float) -> bytes:
        while not (payload := self._buffered_packet()):
            try:
                data = self._sock.recv(65536)
            except _WOULD_BLOCK:
                await self._wait_ready(deadline)
                continue
            if not data:
                raise ConnectionResetError("the server closed it")
            del self._buffer[: self._offset]
            self._offset = 0
            self._buffer += data
        return payload

    def _skip_packet(self) -> bool:
        """Leave out the next packet, if all of it has arrived: most of an answer is the names of its columns."""
        buffer, offset = self._buffer, self._offset
        if len(buffer) < offset + 5 or buffer[offset + 4] == 0xFF:  # an error is for `_buffered_packet`
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
            raise ConnectionAbortedError("it sent an answer with nothing in it")
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


def packet(statement: bytes, values: Sequence[Value]) -> bytes:
    """A request: the statement as it is, or the call of a procedure with these values."""
    query = statement + b"(" + b", ".join(literals(values)) + b")" if values else statement
    body, parts = bytes([_QUERY]) + query, []
    for number, start in enumerate(range(0, len(body) + 1, _MAX_PACKET)):
        part = body[start : start + _MAX_PACKET]
        parts.append(len(part).to_bytes(3, "little") + bytes([number & 0xFF]) + part)
    return b"".join(parts)


def literals(values: Sequence[Value]) -> list[bytes]:
    """As the server reads them, whatever its settings: bytes in hexadecimal, columns of claims as one JSON text."""
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
    assert isinstance(value, int)
    return str(int(value)).encode()


def _text(value: str) -> bytes:
    return b"x'%b'" % value.encode().hex().encode()


# By exact type, the same: most of the 25 values in a pair are known at a glance.
_LITERAL: Final[dict[type, Callable[[Any], bytes]]] = {str: _text, int: b"%d".__mod__}


def _read_length(data: bytes, offset: int) -> tuple[int, int]:
    """A number that says by itself how long it is; and where the next begins."""
    first = data[offset]
    if first < 0xFB:
        return first, offset + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None:
        raise ConnectionAbortedError("it sent a number that is none")
    return int.from_bytes(data[offset + 1 : offset + 1 + size], "little"), offset + 1 + size


def _decode_row(data: bytes, columns: int) -> Row:
    found: list[str | None] = []
    offset = 0
    try:
        for _ in range(columns):
            if data[offset] == 0xFB:
                found.append(None)
                offset += 1
                continue
            size, offset = _read_length(data, offset)
            found.append(data[offset : offset + size].decode())
            offset += size
    except (IndexError, UnicodeDecodeError) as error:
        raise ConnectionAbortedError("it sent a row that cannot be read") from error
    return tuple(found)
