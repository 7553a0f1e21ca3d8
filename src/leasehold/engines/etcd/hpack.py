"""Header compression of HTTP/2 (RFC 7541), as far as a gRPC client needs it.

What is sent is written out plainly, which every peer must accept. What comes back may use everything: both tables, and
the Huffman code, which is canonical, so that the lengths of its codes are all there is to keep.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple


class Header(NamedTuple):
    name: bytes
    value: bytes


class Undecodable(ValueError):
    """The peer does not speak HTTP/2: nothing that comes after this can be understood."""


_LARGEST: Final = 4096  # of the dynamic table: what a peer may use unless told otherwise, which it never is
_OVERHEAD: Final = 32

_ENTRIES: Final = (
    ":authority", ":method=GET", ":method=POST", ":path=/", ":path=/index.html", ":scheme=http", ":scheme=https",
    ":status=200", ":status=204", ":status=206", ":status=304", ":status=400", ":status=404", ":status=500",
    "accept-charset", "accept-encoding=gzip, deflate", "accept-language", "accept-ranges", "accept",
    "access-control-allow-origin", "age", "allow", "authorization", "cache-control", "content-disposition",
    "content-encoding", "content-language", "content-length", "content-location", "content-range", "content-type",
    "cookie", "date", "etag", "expect", "expires", "from", "host", "if-match", "if-modified-since", "if-none-match",
    "if-range", "if-unmodified-since", "last-modified", "link", "location", "max-forwards", "proxy-authenticate",
    "proxy-authorization", "range", "referer", "refresh", "retry-after", "server", "set-cookie",
    "strict-transport-security", "transfer-encoding", "user-agent", "vary", "via", "www-authenticate",
)  # fmt: skip
_STATIC: Final = tuple(
    Header(name.encode(), value.encode()) for name, _, value in (entry.partition("=") for entry in _ENTRIES)
)
assert len(_STATIC) == 61

# The length of each symbol's code, in base 32, from 0 to 255 and the end mark.
_LENGTHS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6cad67777777777777777777777878djde6f56565666577666567"
    "655677777fbedskmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmnqqkjmnmpqqqrrqopjlqrrqrollqqsrrrkokl"
    "mllnmmppooqnqrqqrrrrrsrrrrrqu"
)


def _huffman() -> dict[tuple[int, int], int]:
    lengths = [int(digit, 32) for digit in _LENGTHS]
    codes, code, before = {}, 0, 0
    for symbol in sorted(range(257), key=lambda each: (lengths[each], each)):
        code <<= lengths[symbol] - before
        before = lengths[symbol]
        codes[before, code] = symbol
        code += 1
    return codes


_CODES: Final = _huffman()
_END: Final = 256


def plain(name: bytes, value: bytes) -> bytes:
    """One header as it is sent: a literal that no table ever learns, so that a password stays out of them."""
    return b"\x10" + _text(name) + _text(value)


def _text(text: bytes) -> bytes:
    return _number(len(text), 7) + text


def _number(value: int, bits: int) -> bytes:
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = bytearray([most]), value - most
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Decoder:
    """Reads the header blocks of one connection, in order: each may refer to what came before."""

    def __init__(self) -> None:
        self._dynamic: deque[Header] = deque()
        self._size, self._most = 0, _LARGEST

    def decode(self, block: bytes) -> list[Header]:
        headers, at = [], 0
        while at < len(block):
            first = block[at]
            if first & 128:
                index, at = _read_number(block, at, 7)
                headers.append(self._entry(index))
            elif first & 224 == 32:
                self._most, at = _read_number(block, at, 5)
                if self._most > _LARGEST:
                    raise Undecodable("a header table larger than was allowed")
                self._shrink()
            else:
                learnt = bool(first & 64)
                index, at = _read_number(block, at, 6 if learnt else 4)
                if index:
                    name = self._entry(index).name
                else:
                    name, at = _read_text(block, at)
                value, at = _read_text(block, at)
                headers.append(Header(name, value))
                if learnt:
                    self._learn(headers[-1])
        return headers

    def _entry(self, index: int) -> Header:
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        try:
            return self._dynamic[index - len(_STATIC) - 1]
        except IndexError:
            raise Undecodable(f"no header has the number {index}") from None

    def _learn(self, header: Header) -> None:
        self._dynamic.appendleft(header)
        self._size += len(header.name) + len(header.value) + _OVERHEAD
        self._shrink()

    def _shrink(self) -> None:
        while self._size > self._most:
            gone = self._dynamic.pop()
            self._size -= len(gone.name) + len(gone.value) + _OVERHEAD


def _read_number(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value, at = block[at] & most, at + 1
    if value < most:
        return value, at
    for shift in range(0, 35, 7):
        if at >= len(block):
            break
        byte, at = block[at], at + 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, at
    raise Undecodable("a number that does not end")


def _read_text(block: bytes, at: int) -> tuple[bytes, int]:
    if at >= len(block):
        raise Undecodable("a header without a text")
    coded = block[at] & 128
    size, at = _read_number(block, at, 7)
    text = block[at : at + size]
    if len(text) < size:
        raise Undecodable("a header cut short")
    return (_unhuffman(text) if coded else text), at + size


def _unhuffman(text: bytes) -> bytes:
    out, code, length = bytearray(), 0, 0
    for byte in text:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            symbol = _CODES.get((length, code))
            if symbol is not None:
                if symbol == _END:
                    raise Undecodable("the end mark inside a text")
                out.append(symbol)
                code = length = 0
            elif length > 30:
                raise Undecodable("no letter has this code")
    if length > 7 or code != (1 << length) - 1:  # what fills the last byte is the beginning of the end mark
        raise Undecodable("a text that ends inside a letter")
    return bytes(out)
