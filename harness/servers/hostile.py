"""A proxy that answers in the server's place: floods, lies, half answers and silence, in each engine's own protocol.

Until `attack` it forwards everything. During an attack it forwards nothing: each connection gets the hostile answer, as
soon as the client has sent a request on it, or at once.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain, count, islice, repeat
from typing import Final, NamedTuple

_CHUNK: Final = 65_536
_TICK: Final = 0.02  # seconds within which an attack begins and ends
_DRIP: Final = 0.05  # seconds between two bytes


class Answer(NamedTuple):
    name: str
    chunks: Callable[[], Iterator[bytes]]
    hold: bool = True  # afterwards the connection stays open, and silent; False: it is closed
    floods: bool = False  # sends as fast as the client reads, without end
    reply: Callable[[bytes], bytes] | None = None  # to everything that the client sends, after the chunks
    forged: bool = False  # a large reply to a statement, with rows that take several times as much memory


class HostileProxy:
    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port: int = self._listener.getsockname()[1]
        self._answer: Answer | None = None
        self._at_once = self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def attack(self, answer: Answer, *, at_once: bool = False) -> None:
        """`at_once`: also on connections on which the client is only listening, and before it says anything."""
        self._at_once, self._answer = at_once, answer

    def relent(self) -> None:
        """Forward again. Connections that were attacked are closed."""
        self._answer = None

    def close(self) -> None:
        self._closed = True
        self._answer = None
        self._listener.shutdown(socket.SHUT_RDWR)  # ends `_accept`, which closing does not
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket() as server, suppress(OSError):
            if self._answer is None:
                server.connect(("127.0.0.1", self._target))
                for side in (client, server):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while not self._closed:
                answer = self._answer
                if answer is not None and self._at_once:
                    self._send(answer, client, b"")
                    return
                sides = [client] if answer is not None else [client, server]
                for side in select.select(sides, [], [], _TICK)[0]:
                    if self._answer is not answer:  # the attack has just begun or ended
                        break
                    if not (data := side.recv(_CHUNK)):
                        return
                    if answer is not None:
                        self._send(answer, client, data)
                        return
                    (server if side is client else client).sendall(data)

    def _send(self, answer: Answer, client: socket.socket, data: bytes) -> None:
        client.settimeout(_TICK)
        for chunk in answer.chunks():
            self._send_chunk(answer, client, chunk)
            if self._answer is not answer:
                return
        while answer.hold and self._answer is answer:
            if answer.reply is not None:
                self._send_chunk(answer, client, answer.reply(data))
            data = b""
            with suppress(TimeoutError):
                if not (data := client.recv(_CHUNK)):
                    return

    def _send_chunk(self, answer: Answer, client: socket.socket, chunk: bytes) -> None:
        rest = memoryview(chunk)
        while rest and self._answer is answer:
            with suppress(TimeoutError):
                rest = rest[client.send(rest) :]


# ---------------------------------------------------------------- answers


def once(*chunks: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: iter(chunks)


def flood(name: str, chunk: bytes, begin: bytes = b"") -> Answer:
    """The chunk again and again, in large pieces: as fast as the client reads."""
    large = chunk * max(1, _CHUNK // len(chunk))
    return Answer(name, lambda: chain([begin], repeat(large)), floods=True)


def many_items(reply: Callable[[bytes], bytes], begin: bytes = b"") -> Answer:
    """Replies that the client understands, with as many of the smallest items as it accepts, or more."""
    return Answer("many items", once(begin) if begin else once(), reply=reply)


def drip(data: bytes) -> Callable[[], Iterator[bytes]]:
    def chunks() -> Iterator[bytes]:
        for byte in chain(data, repeat(0)):
            yield bytes([byte])
            threading.Event().wait(_DRIP)

    return chunks


TLS_ALERT: Final = b"\x15\x03\x03\x00\x02\x02\x0a"  # what a TLS port says to a plain client
ESCAPES: Final = "\x1b]0;title\x07 \u202e\u2066 \ud800".encode("utf-8", "surrogatepass") + b"\xff" + b"x" * 5000

COMMON: Final = (
    Answer("close", once(), hold=False),
    Answer("silence", once()),
    Answer("garbage", lambda: iter([os.urandom(300), os.urandom(70_000)])),
    flood("zeros", b"\0"),
    Answer("drip", drip(b"")),
    Answer("tls", once(TLS_ALERT), hold=False),
    Answer("http", once(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), hold=False),
)


def _redis(servers: int = 1) -> Iterator[Answer]:
    """`servers`: that the client asks at once."""
    yield Answer("a billion elements", once(b"*1000000000\r\n"))
    yield Answer("four billion elements", once(b"*4294967295\r\n"))
    yield flood("deep nesting", b"*1\r\n")
    yield flood("long string", b"x", b"$1000000000\r\n")
    yield flood("long line", b"x", b"+")
    yield flood("endless replies", b"*3\r\n:1\r\n:1\r\n:1\r\n")
    yield flood("endless messages", b"*3\r\n$7\r\nmessage\r\n$1\r\nx\r\n$9\r\ngo 1 x xx\r\n")
    yield flood("wrong types", b"+OK\r\n$-1\r\n*-1\r\n*0\r\n:-5\r\n")
    yield Answer("truncated", once(b"*3\r\n:1\r\n$20\r\nabc"), hold=False)
    yield flood("error text", b"-ERR " + ESCAPES + b"\r\n")
    yield many_items(partial(_redis_items, 131_000 // servers, 20_000 if servers == 1 else 4_000))


def _redis_items(lists: int, page: int, data: bytes) -> bytes:
    """Names without end to SCAN, and a list of empty lists to all other commands."""
    out = []
    for command in re.findall(rb"\*\d+\r\n\$\d+\r\n([A-Za-z]+)\r\n", data):
        if command == b"SCAN":
            found = re.search(rb"lh1:\{([^:]*):", data)
            namespace, cursor = found[1] if found else b"", b"%d" % random.randrange(1, 10**9)
            names = [b"lh1:{%b:7}:%b-%d" % (namespace, cursor, number) for number in range(page)]
            listed = b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in names)
            out.append(b"*2\r\n$%d\r\n%b\r\n*%d\r\n" % (len(cursor), cursor, len(names)) + listed)
        else:
            out.append(b"*%d\r\n" % lists + b"*0\r\n" * lists)
    return b"".join(out)


def _zookeeper() -> Iterator[Answer]:
    def frame(body: bytes) -> bytes:
        return struct.pack(">i", len(body)) + body

    session = struct.pack(">iiq", 0, 10_000, 7) + frame(b"p" * 16) + b"\0"
    yield flood("two gigabytes", b"\0", struct.pack(">i", 0x7FFFFFFF))
    yield Answer("negative length", once(struct.pack(">i", -5) + bytes(100)))
    yield flood("endless replies", frame(struct.pack(">iqi", 1, 1, 0) + bytes(100)), frame(session))
    yield flood("endless pings", frame(struct.pack(">iqi", -2, 1, 0)), frame(session))
    yield flood("endless events", frame(struct.pack(">iqiii", -1, 1, 0, 3, 3) + frame(b"/a")), frame(session))
    yield Answer("a billion children", once(frame(session), frame(struct.pack(">iqii", 1, 1, 0, 1_000_000_000))))
    yield Answer("unknown error", once(frame(session), *(frame(struct.pack(">iqi", xid, 1, -999)) for xid in range(9))))
    yield Answer("truncated", once(frame(session)[:20]), hold=False)

    stat = struct.pack(">qqqqiiiqiiq", 1, 1, 1000, 1000, 0, 0, 0, 0, 5, 0, 1)
    claims = b"".join(frame(b"l-x-%064x-%010d" % (number, number)) for number in range(50_000))
    null_texts = struct.pack(">i", 2_000_000) + b"\xff" * 8_000_000
    namespaces = [b""]

    def reply_with(children: bytes) -> Callable[[bytes], bytes]:
        def reply(data: bytes) -> bytes:
            """To each request in the data."""
            out = []
            if found := re.search(rb"/lh1/([^/:]+):", data):
                namespaces[0] = found[1]
            while len(data) >= 12:
                size, xid, kind = struct.unpack_from(">iii", data)
                is_root = data[12 : 4 + size].endswith(b"/lh1\0")
                data = data[4 + size :]
                if xid == 0:
                    out.append(frame(session))
                    continue
                if is_root and children is not null_texts:
                    names = b"".join(frame(b"%b:%05d" % (namespaces[0], number)) for number in range(50_000))
                    body = struct.pack(">i", 50_000) + names
                else:
                    bodies = {4: frame(b"7" * (1 << 20)), 8: children, 12: children, 9: frame(b"/"), 15: frame(b"/x")}
                    body = bodies.get(kind, b"")
                out.append(frame(struct.pack(">iqi", xid, 5, 0) + body + stat))
            return b"".join(out)

        return reply

    yield many_items(reply_with(struct.pack(">i", 50_000) + claims))
    yield Answer("null texts", once(), reply=reply_with(null_texts))


def _etcd() -> Iterator[Answer]:
    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body

    settings = frame(4, 0, 0, b"")
    streams = range(1, 200, 2)
    error = b"\x88\x00\x0bgrpc-status\x0214\x00\x0cgrpc-message" + _long_string(ESCAPES)
    yield flood("long frame", b"\0", settings + b"\xff\xff\xff\0\0\0\0\0\1")
    yield flood("long message", frame(0, 0, 1, bytes(16_000)), settings + frame(0, 0, 1, b"\0\xff\xff\xff\xff"))
    yield flood("endless messages", b"".join(frame(0, 0, stream, b"\0\0\0\0\0" * 99) for stream in streams))
    yield many_items(_EtcdItems(frame).reply, settings)
    yield flood("endless headers", frame(9, 0, 1, b"\x88" * 1000), settings + frame(1, 0, 1, b"\x88"))
    yield flood("endless pings", frame(6, 0, 0, bytes(8)), settings)
    yield flood("endless settings", settings)
    yield Answer("error text", once(settings, *(frame(1, 5, stream, error) for stream in streams)))
    yield Answer("truncated", once(settings, frame(0, 0, 1, b"abc")[:10]), hold=False)


class _EtcdItems:
    """Lists without end: each page of keys begins where the request asks for it, and says that there are more."""

    def __init__(self, frame: Callable[[int, int, int, bytes], bytes]) -> None:
        self._frame = frame
        holder = b'"holder":["w","h",1,""]'
        fields = b'"state":"held","token_base":0,"delay":0.0,%b,"written_at":1.0}' % holder
        self._value = b'{"id_hash":"' + b"ab" * 36 + b'",' + fields
        self._header = self._field(1, b"\x08\x01\x10\x02\x18\x03")
        self._txn = self._header + b"\x10\x01" + self._field(3, self._field(1, self._header)) * 4
        keys = b"".join(self._field(2, self._kv(b"key", b"v" * 150)) for _ in range(11_900))
        self._txn += self._field(3, self._field(1, self._header + keys))

    @staticmethod
    def _varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    def _field(self, number: int, body: bytes) -> bytes:
        return bytes([number << 3 | 2]) + self._varint(len(body)) + body

    def _kv(self, key: bytes, value: bytes) -> bytes:
        revision = self._varint(1 << 40)
        return (
            self._field(1, key) + b"\x10" + revision + b"\x18" + revision + self._field(5, value) + b"\x30" + revision
        )

    def reply(self, data: bytes) -> bytes:
        """To each call in the data: its headers, and the message behind them."""
        out = []
        data = data.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        path = b""
        while len(data) >= 9:
            size, kind, stream = int.from_bytes(data[:3], "big"), data[3], int.from_bytes(data[5:9], "big")
            body, data = data[9 : 9 + size], data[9 + size :]
            if kind == 1:
                path = body
            elif kind == 0 and size > 5:
                message = self._message(path, body[5:])
                message = b"\0" + struct.pack(">I", len(message)) + message
                out.append(self._frame(1, 4, stream, b"\x88"))
                out += [self._frame(0, 0, stream, message[at : at + 16_000]) for at in range(0, len(message), 16_000)]
                out.append(self._frame(1, 5, stream, b"\x00\x0bgrpc-status\x010"))
        return b"".join(out)

    def _message(self, path: bytes, request: bytes) -> bytes:
        if b"KV/Txn" in path:
            return self._txn
        if b"KV/Range" not in path:
            return self._header + b"\x10\x05\x18\x14"  # a lease of 20 s
        begin = request[2 : 2 + request[1]]
        prefix, _, last = begin.partition(b":")
        number = int(last[:8], 16) if len(last) >= 8 else 0
        names = (b"%b:%08x/l/x/ab0" % (prefix, number + 1 + step) for step in range(500))
        return self._header + b"".join(self._field(2, self._kv(name, self._value)) for name in names) + b"\x18\x01"


def _long_string(text: bytes) -> bytes:
    """A string of at least 255 bytes in a header block (RFC 7541, sections 5.1 and 5.2)."""
    length = len(text) - 127
    return bytes([127, length & 127 | 128, length >> 7]) + text


def _postgresql() -> Iterator[Answer]:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack(">I", len(body) + 4) + body

    columns = message(b"T", struct.pack(">H", 1) + b"a\0" + struct.pack(">IHIHIH", 0, 0, 25, 0, 0, 0))
    row = message(b"D", struct.pack(">HI", 1, 5) + b"abcde")
    accepted = message(b"R", struct.pack(">I", 0)) + message(b"S", b"server_encoding\0UTF8\0")
    accepted += message(b"K", struct.pack(">II", 7, 7)) + message(b"Z", b"I")
    notice = message(b"N", b"SNOTICE\0C00000\0Mhello\0\0")
    notification = message(b"A", struct.pack(">I", 7) + b'lh_x\0["reserved","ab",1,"n","m"]\0')
    error = message(b"E", b"SFATAL\0CXX000\0M" + ESCAPES + b"\0\0")
    for begin, when in ((b"", ""), (accepted, " after the login")):
        yield flood(f"long row{when}", b"\0", begin + b"D" + struct.pack(">I", 0x3FFFFFFF))
        yield flood(f"endless rows{when}", row, begin + b"1\0\0\0\4" + b"2\0\0\0\4" + columns)
        yield flood(f"endless notices{when}", notice, begin)
    yield flood("long parameter", b"\0", accepted[:9] + b"S" + struct.pack(">I", 0x3FFFFFFF))
    yield flood("endless notifications", notification, b"1\0\0\0\4")
    yield Answer("error text", once(error), hold=False)
    yield Answer("no result", once(accepted, message(b"Z", b"I") * 9))
    yield Answer("truncated", once(columns[:9]), hold=False)
    for name, result in _postgresql_results():
        yield Answer(
            name, once(), reply=_postgresql_replies(result), forged=not name.startswith(("many items", "copy"))
        )


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack(">I", len(body) + 4) + body


def _columns(count: int) -> bytes:
    return _message(b"T", struct.pack(">H", count) + (b"\0" + struct.pack(">IHIHIH", 0, 0, 25, 0, 0, 0)) * count)


def _row(*values: bytes | None) -> bytes:
    fields = (b"\xff" * 4 if value is None else struct.pack(">I", len(value)) + value for value in values)
    return _message(b"D", struct.pack(">H", len(values)) + b"".join(fields))


_DONE: Final = _message(b"C", b"SELECT 1\0") + _message(b"Z", b"I")
_LARGE: Final = (8 << 20) - 1000  # bytes
_EMOJI: Final = "\U0001f512".encode()  # one in a text makes Python take four bytes for each of its characters


def _postgresql_results() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """What makes libpq or Python take several times as much memory as the server has sent."""

    def listed(one_name: bool) -> bytes:
        rows = (json.dumps([value.decode() for value in row]).encode() for row in _holdings(one_name))
        return _columns(1) + b"".join(map(_row, rows))

    yield "many items", partial(listed, False)
    yield "many items of one name", partial(listed, True)
    yield "many short values", lambda: _columns(18) + _row(*[b"ab"] * 18) * (_LARGE // 115)
    yield "many nulls", lambda: _columns(18) + _row(*[None] * 18) * (_LARGE // 79)
    yield "many short rows", lambda: _columns(1) + _row(b"ab") * (_LARGE // 13)
    yield "many rows without values", lambda: _columns(0) + _row() * (_LARGE // 7)
    yield "many columns", lambda: _columns(65_535) + _row(*[b""] * 65_535) * 26
    yield "many columns of a short reply", lambda: _columns(20_000) + _row(*[None] * 20_000) * 6
    yield "many values of a short reply", lambda: _columns(18) + _row(*[b"ab"] * 18) * 9_000
    yield "many long texts", lambda: _columns(1) + _row(_EMOJI + b"x" * 100_000) * 80
    yield "long text", lambda: _columns(1) + _row(_EMOJI + b"x" * _LARGE)
    yield "long text of a short reply", lambda: _columns(1) + _row(_EMOJI + b"x" * 1_000_000)
    yield "many results", lambda: (_columns(1) + _row(b"ab") + _message(b"C", b"\0")) * 20_000
    yield "copy out", lambda: _message(b"H", b"\0\0\0") + _message(b"d", b"ab") * 100_000
    yield "copy in", lambda: _message(b"G", b"\0\0\0")
    yield "copy both", lambda: _message(b"W", b"\0\0\0")
    yield "long error", lambda: _message(b"E", b"SERROR\0CXX000\0M" + _EMOJI + b"x" * 1_000_000 + b"\0\0")
    one = _columns(1) + _row(b"1")
    yield "many notifications", lambda: _message(b"A", bytes(6)) * 20_000 + one
    numbers = count()
    yield (
        "many parameters",
        lambda: b"".join(_message(b"S", b"%x\0\0" % number) for number in islice(numbers, 3_000)) + one,
    )


def _postgresql_replies(result: Callable[[], bytes]) -> Callable[[bytes], bytes]:
    """This result to every statement."""
    accepted = _message(b"R", struct.pack(">I", 0)) + _message(b"S", b"server_encoding\0UTF8\0")
    accepted += _message(b"K", struct.pack(">II", 7, 7)) + _message(b"Z", b"I")

    def reply(data: bytes) -> bytes:
        if not data or data[0] == 0:
            return b"" if not data else b"N" if data[4:8] == b"\x04\xd2\x16\x2f" else accepted
        return (b"1\0\0\0\4" if data[:1] == b"P" else b"") + b"2\0\0\0\4" + result() + _DONE

    return reply


def _holdings(one_name: bool = False) -> Iterator[tuple[bytes, ...]]:
    """The rows of `inspect`, with short texts, in no order: almost as many as it lists."""
    for number in random.Random(7).sample(range(34_000), 34_000):
        times = b"1700000000000000", b"1700000000000000", b"1900000000000000", b"0", b"1700000000000000"
        holder = b"w", b"h", b"1", b""
        yield (
            b"00000" if one_name else b"%05d" % number,
            b"lock",
            b"1",
            b"0" if one_name else b"2",
            b"0" if one_name else b"%d" % number,
            b"%024x" % number,
            *holder,
            b"exclusive",
            b"0",
            b"%d" % number,
            *times,
        )


def _mysql() -> Iterator[Answer]:
    def packet(number: int, body: bytes) -> bytes:
        return len(body).to_bytes(3, "little") + bytes([number & 255]) + body

    ok = b"\0\0\0\2\0\0\0"
    more = b"\0\0\0\x0a\0\0\0"
    greeting = b"\n8.0.1\0" + struct.pack("<I", 7) + b"12345678\0" + b"\xff\xf7\x21\2\0\xff\xc1\x15" + bytes(10)
    hello = packet(0, greeting + b"123456789012\0mysql_native_password\0")
    error = packet(1, b"\xff\x51\x04#HY000" + ESCAPES)
    column = packet(2, b"\3def\0\0\0\1a\0\x0c\x21\0\xff\0\0\0\xfd\0\0\0\0\0")
    rows = packet(1, b"\1") + column + packet(3, b"\xfe\0\0\2\0")
    yield flood("ok instead of rows", packet(1, ok))
    yield flood("ok to everything", packet(1, ok), hello + packet(2, ok))
    yield flood("endless results", packet(1, more))
    yield flood("long packets", b"\0", b"\xff\xff\xff\0")
    yield flood("continued packets", b"\xff\xff\xff\1" + b"\1" * 0xFFFFFF)
    yield flood("many columns", column, packet(1, b"\xfe" + b"\xff" * 8))
    yield flood("endless rows", b"".join(packet(4 + number, b"\2ab") for number in range(256)), rows)
    yield Answer("local file", once(packet(1, b"\xfb/etc/passwd")))
    yield Answer("error text", once(error), hold=False)
    yield Answer("truncated", once(packet(1, b"\1")[:3]), hold=False)
    head = packet(1, b"\x12") + column * 18 + packet(3, b"\xfe\0\0\2\0")
    end = packet(5, b"\xfe\0\0\2\0")

    def row(*values: bytes) -> bytes:
        sizes = (
            bytes([len(value)]) if len(value) < 251 else b"\xfd%b" % len(value).to_bytes(3, "little")
            for value in values
        )
        body = b"".join(chain.from_iterable(zip(sizes, values, strict=True)))
        return b"".join(packet(4, body[at : at + 0xFFFFFF]) for at in range(0, len(body), 0xFFFFFF))

    def listed(one_name: bool) -> bytes:
        return b"".join(row(*each) for each in _holdings(one_name))

    def replies(rows: Callable[[], bytes]) -> Callable[[bytes], bytes]:
        def reply(data: bytes) -> bytes:
            """A hello to a client that has said nothing, then OK to its login, then rows."""
            return hello if not data else packet(2, ok) if data[3:4] == b"\1" else head + rows() + end

        return reply

    tall = _EMOJI + b"x" * 11  # Python takes eight times as much
    yield many_items(replies(partial(listed, False)))
    yield Answer("many items of one name", once(), reply=replies(partial(listed, True)))
    forged: dict[str, Callable[[], bytes]] = {
        "many short values": lambda: row(*[b"ab"] * 18) * (_LARGE // 58),
        "many texts": lambda: row(*[tall] * 18) * (_LARGE // 292),
        "many nulls": lambda: packet(4, b"\xfb" * 18) * (_LARGE // 22),
        "many rows of few values": lambda: packet(4, b"\xfb") * (_LARGE // 5),
        "many long texts": lambda: row(*[b""] * 17, _EMOJI + b"x" * 100_000) * 80,
        "long text": lambda: row(*[b""] * 17, _EMOJI + b"x" * _LARGE),
        "long text of a short reply": lambda: row(*[b""] * 17, _EMOJI + b"x" * 1_000_000),
        "many values of a short reply": lambda: row(*[tall] * 18) * 900,
    }
    for name, rows_of_reply in forged.items():
        yield Answer(name, once(), reply=replies(rows_of_reply), forged=True)


def _http() -> Iterator[Answer]:
    def chunk(data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data)

    def whole(status: int, body: bytes) -> bytes:
        return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)

    ok, json = b"HTTP/1.1 200 OK\r\n", b'[{"grant": [1, 2.0, null]}]'
    chunked = ok + b"Transfer-Encoding: chunked\r\n\r\n"
    events = ok + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    wakeup = b'data: [{"wakeup": "%b", "name": "n"}]\n\n' % (b"ab" * 16)
    problem = b'{"type": "x/engine-unavailable", "detail": "\\u001b]0;title\\u0007 \\u202e \\ud800 %b"}' % (b"x" * 5000)
    yield flood("endless headers", b"A: b\r\n", ok)
    yield flood("long header", b"x", ok + b"A: ")
    yield flood("interim responses", b"HTTP/1.1 100 Continue\r\n\r\n")
    yield Answer("a gigabyte", once(ok + b"Content-Length: 1000000000\r\n\r\n"))
    yield flood("long body", b" ", ok + b"Content-Length: 8000000\r\n\r\n")
    yield flood("endless chunks", chunk(b" " * 1000), chunked)
    yield flood("small chunks", chunk(b" "), chunked)
    yield flood("long chunk", b" ", chunked + b"ffffffffffffffff\r\n")
    yield flood("endless responses", whole(200, json))
    yield flood("deep JSON", whole(200, b"[" * 5000))
    for value in (b"{}", b'{"":{}}', b"1.5", b'"ab"'):
        body = b'[{"value": [' + b",".join(repeat(value, 1_000_000 // (len(value) + 1))) + b"]}]"
        yield Answer(f"many values {value.decode()}", once(whole(200, body)))
    many = b'[{"value": [' + b'{"":{}},' * 1_000_000 + b"0]}]"
    yield Answer("8 MB of values", once(whole(200, many)))
    holding = (
        b'{"namespace":"","name":"%05d","state":"held","mode":"exclusive","kind":"lock","limit":1,"fingerprint":"%b",'
    )
    holding += (
        b'"holder":["w","h",1,""],"age":1,"left":1,"token":1,"slot":null,"position":null,"owner":"","since_grant":true}'
    )
    page = b",".join(holding % (number, b"ab" * 8) for number in range(7_500))
    listed = whole(200, b'[{"value":[' + page + b'],"more":["x",1]}]')
    yield many_items(lambda data: listed * data.count(b"POST /"))
    yield Answer("long numbers", once(whole(200, b"[" + b",".join(repeat(b"9" * 4000, 200)) + b"]")))
    yield Answer("gzip", once(_gzipped(b"[" + b"0," * 5_000_000 + b"0]")))
    yield Answer("bad chunk sizes", once(chunked + b"-1\r\n\r\n"))
    yield Answer("many trailers", once(chunked + chunk(json) + b"0\r\n" + b"A: b\r\n" * 10_000))
    yield flood("endless events", chunk(b'data: [{"news": 1}]\n\n'), events)
    yield flood("endless beats", chunk(b": x\n\n"), events)
    yield flood("endless wake-ups", chunk(wakeup), events)
    yield Answer("wake-ups of many claims", _wakeups(events), floods=True)
    yield flood("lost and hello", chunk(b'data: [{"lost": "%b"}, {"hello": {}}]\n\n' % (b"ab" * 16)), events)
    yield Answer("many notifications", once(events, chunk(b"data: [" + b"{}," * 300_000 + b"{}]\n\n")))
    yield Answer("moved", once(events, chunk(b'data: [{"moved": true}]\n\n')))
    yield flood("long event", chunk(b"data: xxxxxxxx\n"), events)
    yield Answer("wrong types", once(whole(200, b'[{"grant": ["x", -1, []], "busy": 7, "renewed": {}, "value": {}}]')))
    yield Answer("too many answers", once(whole(200, b"[" + b"{}," * 9 + b"{}]")))
    yield Answer("two lengths", once(ok + b"Content-Length: 2\r\nContent-Length: 27\r\n\r\n" + json))
    yield Answer("redirect", once(b"HTTP/1.1 301 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"))
    yield Answer("error text", once(whole(503, problem)))
    yield Answer("truncated", once(ok + b"Content-Length: 27\r\n\r\n" + json[:9]), hold=False)


def _gzipped(body: bytes) -> bytes:
    packed = gzip.compress(body)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"
    return head % len(packed) + packed


def _wakeups(begin: bytes) -> Callable[[], Iterator[bytes]]:
    """Of another claim each time."""

    def chunks() -> Iterator[bytes]:
        yield begin
        while True:
            event = b'data: [{"wakeup": "%b", "name": "n"}]\n\n' % os.urandom(16).hex().encode()
            yield b"%x\r\n%b\r\n" % (len(event), event)

    return chunks


_OF_ENGINE: Final[dict[str, Callable[[], Iterator[Answer]]]] = {
    "redis": _redis,
    "redlock": partial(_redis, servers=5),
    "zookeeper": _zookeeper,
    "etcd": _etcd,
    "postgresql": _postgresql,
    "mysql": _mysql,
    "http-memory": _http,
}
ENGINES: Final = sorted(_OF_ENGINE)


@cache
def answers_of(engine: str) -> tuple[Answer, ...]:
    """Made when they are first needed: some are megabytes, and every worker of a run imports this module."""
    return (*COMMON, *_OF_ENGINE[engine]())
