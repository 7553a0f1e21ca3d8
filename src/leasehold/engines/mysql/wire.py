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

from leasehold.engines.mysql.meaning import MyFailed, silent
from leasehold.engines.sql.wire import Lost, Row, Server, Tail, Value
from leasehold.runtime.base import Runtime

_QUIT: Final = b"\x01\0\0\0\x01"
_QUERY: Final = 3
_LARGEST: Final = 0xFFFFFF  # bytes of one packet; a longer one goes on in the next
_MORE: Final = 0x0008  # SERVER_MORE_RESULTS_EXISTS
_NOT_YET: Final = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Answer(NamedTuple):
    """One of the results of a call: a procedure gives its rows, and then an end."""

    rows: list[Row] | None
    more: bool


class MySession:
    def __init__(self, sock: socket.socket, runtime: Runtime) -> None:
        self._sock, self._runtime = sock, runtime
        sock.settimeout(0)
        finalize(self, sock.close).atexit = False  # a client may be dropped without a close()
        self.server = Server(False, "", True)
        self.adrift = False
        self._unsent = b""
        self._buffer, self._at = bytearray(), 0
        self._closed = False
        self.number = 0  # the server's, of this session
        self.sleeps = False  # an interruption is what it waits for
        self.last_words = b""  # sent along with a goodbye

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    def move(self, runtime: Runtime) -> None:
        """To the thread that is to read it from now on."""
        self._runtime = runtime

    def usable(self) -> bool:
        if self.adrift or self._closed:
            return False
        try:
            self._sock.recv(1)
        except _NOT_YET:
            return True
        except OSError:
            return False
        return False  # it hung up, perhaps after a last word: nobody asked for one

    async def ask(self, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        await self.begin(statement, values, deadline)
        await self._arrive(deadline)  # nothing can be there yet
        found: list[Row] = []
        more = True
        while more:
            rows, more = await self.result(deadline)
            found = found or rows or []
        return found

    async def begin(self, statement: bytes, values: Sequence[Value], deadline: float) -> None:
        """Send a call without waiting for its first result."""
        self.adrift = True
        self._unsent = packet(statement, values)
        try:
            while self._unsent:
                try:
                    self._push()
                except _NOT_YET:
                    await self._arrive(deadline, write=True)
        except OSError as error:
            raise self._lost(error) from error

    async def result(self, deadline: float) -> Answer:
        """The next result of the call; after the last one the session is free again."""
        try:
            answer = await self._result(deadline)
        except OSError as error:
            raise self._lost(error) from error
        except MyFailed as error:
            self.adrift = False
            if not error.untouched and not (error.interrupted and self.sleeps):
                self.close()
            raise
        if not answer.more:
            self.adrift = False
        return answer

    def regret(self, statement: bytes, values: Sequence[Value]) -> Tail | None:
        self._unsent += packet(statement, values)
        return self.leave()

    def leave(self) -> Tail | None:
        try:
            with suppress(*_NOT_YET):
                self._unsent += _QUIT
                while self._unsent:
                    self._push()
            if self._unsent:  # it cannot take even a goodbye
                socket.socket.shutdown(self._sock, socket.SHUT_WR)
            return Tail(self._sock.fileno(), self.server.place)
        except OSError:  # it has
            return None
        finally:
            self._closed = True
            self._sock.close()

    def shut(self) -> None:
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # beneath TLS, which another thread may be reading

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                if not self.adrift:
                    self._sock.send(self.last_words + _QUIT)
            self._sock.close()

    def abandon(self) -> None:
        self._closed = True
        with suppress(OSError):
            null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            os.dup2(null, self._sock.fileno(), inheritable=False)
            os.close(null)
        self._sock.close()

    def _lost(self, error: OSError) -> Lost:
        self.adrift = False
        self.close()
        return Lost(error.strerror or str(error))

    # ------------------------------------------------------------- answers

    async def _result(self, deadline: float) -> Answer:
        first = await self._packet(deadline)
        if first[0] == 0x00:
            _, at = _length(first, 1)
            _, at = _length(first, at)
            return Answer(None, bool(int.from_bytes(first[at : at + 2], "little") & _MORE))
        if first[0] == 0xFB:  # it asks for a file of ours
            raise ConnectionAbortedError("it said something no server of ours would say")
        columns, _ = _length(first, 0)
        for _ in range(columns + 1):  # what they are called, and an end
            if not self._skipped():
                await self._packet(deadline)
        rows: list[Row] = []
        while True:
            each = self._whole() or await self._packet(deadline)
            if each[0] == 0xFE and len(each) < 9:
                return Answer(rows, bool(int.from_bytes(each[3:5], "little") & _MORE))
            rows.append(_row(each, columns))

    async def _packet(self, deadline: float) -> bytes:
        while not (whole := self._whole()):
            try:
                data = self._sock.recv(65536)
            except _NOT_YET:
                await self._arrive(deadline)
                continue
            if not data:
                raise ConnectionResetError("the server closed it")
            del self._buffer[: self._at]
            self._at = 0
            self._buffer += data
        return whole

    def _skipped(self) -> bool:
        """Leave out the next packet, if all of it has arrived: most of an answer is the names of its columns."""
        buffer, at = self._buffer, self._at
        if len(buffer) < at + 5 or buffer[at + 4] == 0xFF:  # an error is for `_whole`
            return False
        at += 4 + (buffer[at] | buffer[at + 1] << 8 | buffer[at + 2] << 16)
        if len(buffer) < at:
            return False
        self._at = at
        return True

    def _whole(self) -> bytes | None:
        """The next packet, if all of it has arrived."""
        buffer, at, whole = self._buffer, self._at, b""
        while True:
            start = at + 4
            at = start + int.from_bytes(buffer[at : at + 3], "little")
            if len(buffer) < start or len(buffer) < at:
                return None
            whole += buffer[start:at]
            if at - start < _LARGEST:
                break
        self._at = at
        if not whole:
            raise ConnectionAbortedError("it sent an answer with nothing in it")
        if whole[0] == 0xFF:
            text = whole[9:] if whole[3:4] == b"#" else whole[3:]
            raise MyFailed(int.from_bytes(whole[1:3], "little"), text.decode(errors="replace").strip())
        return whole

    def _push(self) -> None:
        self._unsent = self._unsent[self._sock.send(self._unsent) :]

    async def _arrive(self, deadline: float, write: bool = False) -> None:
        began = self._runtime.now()
        if not await self._runtime.ready(self._sock.fileno(), deadline - began, write=write):
            raise silent(deadline - began)


# ------------------------------------------------------------------ values


def packet(statement: bytes, values: Sequence[Value]) -> bytes:
    """A request: the statement as it is, or the call of a procedure with these values."""
    said = statement + b"(" + b", ".join(literals(values)) + b")" if values else statement
    body, parts = bytes([_QUERY]) + said, []
    for number, start in enumerate(range(0, len(body) + 1, _LARGEST)):
        part = body[start : start + _LARGEST]
        parts.append(len(part).to_bytes(3, "little") + bytes([number & 0xFF]) + part)
    return b"".join(parts)


def literals(values: Sequence[Value]) -> list[bytes]:
    """As the server reads them, whatever its settings: bytes in hexadecimal, columns of claims as one JSON text."""
    if not isinstance(values[0], list):
        return [(_LITERAL.get(type(value)) or literal)(value) for value in values]
    columns = [value for value in values if isinstance(value, list)]
    found = [literal(value) for value in values if not isinstance(value, list)]
    rows = [
        [each.encode().hex() if isinstance(each, str) else each for each in row] for row in zip(*columns, strict=True)
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


def _length(data: bytes, at: int) -> tuple[int, int]:
    """A number that says by itself how long it is; and where the next begins."""
    first = data[at]
    if first < 0xFB:
        return first, at + 1
    size = {0xFC: 2, 0xFD: 3, 0xFE: 8}.get(first)
    if size is None:
        raise ConnectionAbortedError("it sent a number that is none")
    return int.from_bytes(data[at + 1 : at + 1 + size], "little"), at + 1 + size


def _row(data: bytes, columns: int) -> Row:
    found: list[str | None] = []
    at = 0
    try:
        for _ in range(columns):
            if data[at] == 0xFB:
                found.append(None)
                at += 1
                continue
            size, at = _length(data, at)
            found.append(data[at : at + size].decode())
            at += size
    except (IndexError, UnicodeDecodeError) as error:
        raise ConnectionAbortedError("it sent a row that cannot be read") from error
    return tuple(found)
