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


class ProtocolError(ValueError):
    """The peer does not speak HTTP/2: nothing that comes after this can be understood."""


_MAX_TABLE_SIZE: Final = 4096  # of the dynamic table: what a peer may use unless told otherwise, which it never is
_ENTRY_OVERHEAD: Final = 32

_STATIC_ENTRIES: Final = (
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
_STATIC_TABLE: Final = tuple(
    Header(name.encode(), value.encode()) for name, _, value in (entry.partition("=") for entry in _STATIC_ENTRIES)
)
assert len(_STATIC_TABLE) == 61

# The length of each symbol's code, in base 32, from 0 to 255 and the end mark.
_CODE_LENGTHS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6cad67777777777777777777777878djde6f56565666577666567"
    "655677777fbedskmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmnqqkjmnmpqqqrrqopjlqrrqrollqqsrrrkokl"
    "mllnmmppooqnqrqqrrrrrsrrrrrqu"
)


def _build_huffman_codes() -> dict[tuple[int, int], int]:
    lengths = [int(digit, 32) for digit in _CODE_LENGTHS]
    codes, code, previous_length = {}, 0, 0
    for symbol in sorted(range(257), key=lambda each: (lengths[each], each)):
        code <<= lengths[symbol] - previous_length
        previous_length = lengths[symbol]
        codes[previous_length, code] = symbol
        code += 1
    return codes


_HUFFMAN_CODES: Final = _build_huffman_codes()
_END_OF_STRING: Final = 256


def encode_literal(name: bytes, value: bytes) -> bytes:
    """One header as it is sent: a literal that no table ever learns, so that a password stays out of them."""
    return b"\x10" + _encode_string(name) + _encode_string(value)


def _encode_string(text: bytes) -> bytes:
    return _encode_integer(len(text), 7) + text


def _encode_integer(value: int, bits: int) -> bytes:
    max_prefix = (1 << bits) - 1
    if value < max_prefix:
        return bytes([value])
    out, value = bytearray([max_prefix]), value - max_prefix
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class HeaderDecoder:
    """Reads the header blocks of one connection, in order: each may refer to what came before."""

    def __init__(self) -> None:
        self._dynamic_table: deque[Header] = deque()
        self._size, self._max_size = 0, _MAX_TABLE_SIZE

    def decode(self, block: bytes) -> list[Header]:
        headers, offset = [], 0
        while offset < len(block):
            first_byte = block[offset]
            if first_byte & 128:
                index, offset = _read_integer(block, offset, 7)
                headers.append(self._lookup(index))
            elif first_byte & 224 == 32:
                self._max_size, offset = _read_integer(block, offset, 5)
                if self._max_size > _MAX_TABLE_SIZE:
                    raise ProtocolError("a header table larger than was allowed")
                self._evict()
            else:
                indexed = bool(first_byte & 64)
                index, offset = _read_integer(block, offset, 6 if indexed else 4)
                if index:
                    name = self._lookup(index).name
                else:
                    name, offset = _read_string(block, offset)
                value, offset = _read_string(block, offset)
                headers.append(Header(name, value))
                if indexed:
                    self._add_to_table(headers[-1])
        return headers

    def _lookup(self, index: int) -> Header:
        if 1 <= index <= len(_STATIC_TABLE):
            return _STATIC_TABLE[index - 1]
        try:
            return self._dynamic_table[index - len(_STATIC_TABLE) - 1]
        except IndexError:
            raise ProtocolError(f"no header has the number {index}") from None

    def _add_to_table(self, header: Header) -> None:
        self._dynamic_table.appendleft(header)
        self._size += len(header.name) + len(header.value) + _ENTRY_OVERHEAD
        self._evict()

    def _evict(self) -> None:
        while self._size > self._max_size:
            evicted = self._dynamic_table.pop()
            self._size -= len(evicted.name) + len(evicted.value) + _ENTRY_OVERHEAD


def _read_integer(block: bytes, offset: int, bits: int) -> tuple[int, int]:
    max_prefix = (1 << bits) - 1
    value, offset = block[offset] & max_prefix, offset + 1
    if value < max_prefix:
        return value, offset
    for shift in range(0, 35, 7):
        if offset >= len(block):
            break
        byte, offset = block[offset], offset + 1
        value += (byte & 127) << shift
        if byte < 128:
            return value, offset
    raise ProtocolError("a number that does not end")


def _read_string(block: bytes, offset: int) -> tuple[bytes, int]:
    if offset >= len(block):
        raise ProtocolError("a header without a text")
    is_huffman = block[offset] & 128
    size, offset = _read_integer(block, offset, 7)
    text = block[offset : offset + size]
    if len(text) < size:
        raise ProtocolError("a header cut short")
    return (_decode_huffman(text) if is_huffman else text), offset + size


def _decode_huffman(text: bytes) -> bytes:
    out, code, length = bytearray(), 0, 0
    for byte in text:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            symbol = _HUFFMAN_CODES.get((length, code))
            if symbol is not None:
                if symbol == _END_OF_STRING:
                    raise ProtocolError("the end mark inside a text")
                out.append(symbol)
                code = length = 0
            elif length > 30:
                raise ProtocolError("no letter has this code")
    if length > 7 or code != (1 << length) - 1:  # what fills the last byte is the beginning of the end mark
        raise ProtocolError("a text that ends inside a letter")
    return bytes(out)
