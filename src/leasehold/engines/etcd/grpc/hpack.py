"""Header compression of HTTP/2 (RFC 7541), as far as a gRPC client needs it.

Sections used: integers and strings (5.1, 5.2), header fields and table size updates (6), the tables (2.3, 4, appendix
A) and the Huffman code (appendix B).

Requests use never-indexed literals only, which every peer must accept. Replies may use everything: both tables and the
Huffman code. That code is canonical, so the lengths of its codes define it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple


class Header(NamedTuple):
    name: bytes
    value: bytes


class ProtocolError(ValueError):
    """The peer violated HTTP/2. Nothing it sends afterwards can be parsed."""


_MAX_TABLE_SIZE: Final = 4096  # bytes of the dynamic table: HTTP/2's default, which our settings never change
_ENTRY_OVERHEAD: Final = 32  # section 4.1

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
assert len(_STATIC_TABLE) == 61  # noqa: S101  # of this very file

# Appendix B: the code length of each symbol as a base-32 digit, for 0 to 255 and the end-of-string symbol.
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
    """One header as a never-indexed literal (section 6.2.3), so that a password gets into no table."""
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
    """Decodes the header blocks of one connection in order: each may refer to entries of earlier blocks."""

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
                    raise ProtocolError("dynamic header table larger than 4096 bytes")
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
            raise ProtocolError(f"header index {index} is not in the table") from None

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
    raise ProtocolError("header integer is truncated or too long")


def _read_string(block: bytes, offset: int) -> tuple[bytes, int]:
    if offset >= len(block):
        raise ProtocolError("header block ends before a string")
    is_huffman = block[offset] & 128
    size, offset = _read_integer(block, offset, 7)
    text = block[offset : offset + size]
    if len(text) < size:
        raise ProtocolError("header string is truncated")
    return (_decode_huffman(text) if is_huffman else text), offset + size


def _decode_huffman(text: bytes) -> bytes:
    out, code, length = bytearray(), 0, 0
    for byte in text:
        for bit in range(7, -1, -1):
            code, length = code << 1 | byte >> bit & 1, length + 1
            symbol = _HUFFMAN_CODES.get((length, code))
            if symbol is not None:
                if symbol == _END_OF_STRING:
                    raise ProtocolError("end-of-string symbol inside a Huffman string")
                out.append(symbol)
                code = length = 0
            elif length > 30:
                raise ProtocolError("invalid Huffman code")
    if length > 7 or code != (1 << length) - 1:  # padding is the first bits of the end-of-string code, all ones
        raise ProtocolError("invalid padding of a Huffman string")
    return bytes(out)
