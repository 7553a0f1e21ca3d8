"""Answers that a client can read, and that no Leasehold server gives: other types, other numbers of values, null."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from harness.servers.hostile import Answer

_VALUES: Final[tuple[object, ...]] = (None, 1, -1, 1e308, True, "x", [], {}, [[]], [{}], {"state": []}, [None] * 3)
_ITEMS: Final[tuple[object, ...]] = (1, "x", None, [])
_LISTS: Final[tuple[object, ...]] = tuple([value] * count for value in _ITEMS for count in (1, 2, 3, 4, 6, 17))
_TEXTS: Final = (b"", b"x", b"1e400", *(json.dumps(value).encode() for value in (*_VALUES, *_LISTS)))


def _answer(name: object, reply: Callable[[bytes], bytes]) -> Answer:
    return Answer(f"{name}"[:60], tuple[bytes, ...]().__iter__, reply=reply)


def _redis() -> Iterator[Answer]:
    replies = [b":1\r\n", b":-1\r\n", b":0\r\n", b"+OK\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n"]
    replies += [b"$%d\r\n%b\r\n" % (len(text), text) for text in _TEXTS]
    replies += [b"$%d\r\n%b\r\n" % (32 + len(text), b"a" * 32 + text) for text in _TEXTS]  # records
    items = (b":1\r\n", b"$1\r\nx\r\n", b"$-1\r\n", b"*0\r\n")
    replies += [b"*%d\r\n" % count + item * count for count in range(1, 8) for item in items]
    replies += [b"*3\r\n:1\r\n:-1\r\n:5\r\n", b"*3\r\n" + b":9223372036854775807\r\n" * 3]
    for each in replies:
        yield _answer(each, lambda data, each=each: each * data.count(b"\r\n$7\r\nEVALSHA\r\n"))  # type: ignore[misc]


def _postgresql() -> Iterator[Answer]:
    def message(kind: bytes, body: bytes) -> bytes:
        return kind + struct.pack(">I", len(body) + 4) + body

    def result(*values: bytes | None) -> bytes:
        fields = (b"\xff" * 4 if value is None else struct.pack(">I", len(value)) + value for value in values)
        count = struct.pack(">H", len(values))
        columns = message(b"T", count + (b"\0" + struct.pack(">IHIHIH", 0, 0, 25, 0, 0, 0)) * len(values))
        return columns + message(b"D", count + b"".join(fields))

    def reply(rows: bytes, data: bytes) -> bytes:
        begin = (b"1\0\0\0\4" if data[:1] == b"P" else b"") + b"2\0\0\0\4"
        return begin + rows + message(b"C", b"SELECT 1\0") + message(b"Z", b"I") if data else b""

    for values in _rows():
        yield _answer(values, partial(reply, result(*values)))


def _rows() -> Iterator[tuple[bytes | None, ...]]:
    yield from ((text,) for text in (None, *_TEXTS))
    yield from ((value,) * count for count in (0, 2, 6, 17, 30) for value in (None, b"1", b"x", b"[]"))


def _mysql() -> Iterator[Answer]:
    def packet(body: bytes) -> bytes:
        return len(body).to_bytes(3, "little") + b"\1" + body

    def reply(values: tuple[bytes | None, ...], data: bytes) -> bytes:
        fields = (b"\xfb" if value is None else bytes([len(value)]) + value for value in values)
        column = packet(b"\3def\0\0\0\1a\0\x0c\x21\0\xff\0\0\0\xfd\0\0\0\0\0")
        end = packet(b"\xfe\0\0\2\0")
        head = packet(bytes([len(values)])) + column * len(values) + end
        return head + packet(b"".join(fields)) + end if data else b""

    for values in _rows():
        if values:
            yield _answer(values, partial(reply, values))


def _http() -> Iterator[Answer]:
    for kind in ("grant", "busy", "renewed", "value"):
        for value in (*_VALUES, *_LISTS):
            body = json.dumps([{kind: value}]).encode()
            yield _answer((kind, value), partial(_respond, body))
    for value in _VALUES:
        yield _answer(value, partial(_respond, json.dumps(value).encode()))


def _respond(body: bytes, data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) if data else b""


def _zookeeper() -> Iterator[Answer]:
    """To every request the same body, under its own number."""
    stat = struct.pack(">qqqqiiiqiiq", 1, 1, 1000, 1000, 0, 0, 0, 0, 5, 0, 1)
    texts = [struct.pack(">i", len(text)) + text for text in (b"", b"x", b"/", b"/lh1/:x/l-x-9999999999", *_TEXTS[:9])]
    bodies = [b"", stat, stat * 2, b"\xff" * 100, b"\0" * 100]
    bodies += [text + tail for text in texts for tail in (b"", stat)]
    bodies += [struct.pack(">i", count) + text * count + stat for text in texts for count in (1, 3)]

    def reply(body: bytes, data: bytes) -> bytes:
        out = []
        while len(data) >= 8:
            size, xid = struct.unpack_from(">ii", data)
            data = data[4 + size :]
            out.append(struct.pack(">iiqi", 16 + len(body), xid, 5, 0) + body)
        return b"".join(out)

    for body in bodies:
        yield _answer(body, partial(reply, body))


_OF_ENGINE: Final[dict[str, Callable[[], Iterator[Answer]]]] = {
    "redis": _redis,
    "redlock": _redis,
    "postgresql": _postgresql,
    "mysql": _mysql,
    "http-memory": _http,
    "zookeeper": _zookeeper,
}
ENGINES: Final = sorted(_OF_ENGINE)


def answers_of(engine: str) -> tuple[Answer, ...]:
    return tuple(_OF_ENGINE[engine]())
