"""Requests whose replies are checked while they are decoded. kazoo's own decode as many children, and results of a
transaction, as a server sends, and return None for a text or data that the server left out; these raise ValueError."""

from __future__ import annotations

import struct
from typing import Any, ClassVar, Final

from kazoo.exceptions import EXCEPTIONS
from kazoo.protocol import serialization
from kazoo.protocol.serialization import MultiHeader, int_struct, stat_struct
from kazoo.protocol.states import ZnodeStat

MAX_CHILDREN: Final = 50_000  # of one node: parsed, each takes up to 400 bytes
_MAX_FEW: Final = 500
_FAILED: Final = -1  # the type of a result of a transaction
_NOT_BEGUN: Final = (0, -2)  # errors of the other operations: rolled back, or not begun
_MAX_SHORT: Final = 16_384  # bytes; what a claim says of itself has less than half of that


class TooManyChildren(ValueError):
    """A node has more children than a client reads."""


class GetChildren(serialization.GetChildren):  # type: ignore[misc]
    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> list[str]:
        return _read_children(reply, offset, MAX_CHILDREN)[0]


class GetFewChildren(GetChildren):
    """For a pipeline of many. The reply is None if there are more than 500 children: get those on their own."""

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> Any:
        return None if _read_int(reply, offset)[0] > _MAX_FEW else _read_children(reply, offset, _MAX_FEW)[0]


class GetChildren2(serialization.GetChildren2):  # type: ignore[misc]
    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> tuple[list[str], ZnodeStat]:
        children, offset = _read_children(reply, offset, MAX_CHILDREN)
        return children, _read_stat(reply, offset)


class GetData(serialization.GetData):  # type: ignore[misc]
    """A node without data, which other clients can make, has b""."""

    max_size: ClassVar[int | None] = None

    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> tuple[bytes, ZnodeStat]:
        size, offset = _read_int(reply, offset)
        end = offset + max(size, 0)
        data = reply[offset:end] if cls.max_size is None or size <= cls.max_size else b""
        return data, _read_stat(reply, end)


class GetShortData(GetData):
    """For a pipeline of many. Data of more than 16 KiB, which no claim has, is left out."""

    max_size = _MAX_SHORT


class Create2(serialization.Create2):  # type: ignore[misc]
    @classmethod
    def deserialize(cls, reply: bytes, offset: int) -> tuple[str, ZnodeStat]:
        path, offset = _read_text(reply, offset)
        return path, _read_stat(reply, offset)


class Transaction(serialization.Transaction):  # type: ignore[misc]
    """All of its operations are applied, or none. The reply is a list, because kazoo iterates over it: empty, or with
    the error of the operation that failed."""

    def deserialize(self, reply: bytes, offset: int) -> list[Exception]:
        errors = []
        for operation in self.operations:
            kind, offset = _read_result_header(reply, offset)
            if kind == _FAILED:
                number, offset = _read_int(reply, offset)
                errors.append(number)
            elif kind != operation.type:
                raise ValueError(f"a result of type {kind}")
            elif kind == serialization.Create.type:
                offset = _read_text(reply, offset)[1]
            elif kind == serialization.SetData.type:
                _read_stat(reply, offset)
                offset += stat_struct.size
        if _read_result_header(reply, offset)[0] is not None:
            raise ValueError("more results than operations")
        if not errors:
            return []
        for number in errors if len(errors) == len(self.operations) else ():
            if number in EXCEPTIONS and number not in _NOT_BEGUN:
                return [EXCEPTIONS[number]()]
        raise ValueError("a refusal without a reason")


def _read_result_header(reply: bytes, offset: int) -> tuple[int | None, int]:
    """The type of the next result of a transaction. None: there are no more."""
    try:
        header, offset = MultiHeader.deserialize(reply, offset)
    except struct.error as error:
        raise ValueError("truncated") from error
    return (None if header.done else header.type), offset


def _read_children(reply: bytes, offset: int, max_count: int) -> tuple[list[str], int]:
    count, offset = _read_int(reply, offset)
    if not 0 <= count <= max_count:
        raise TooManyChildren(f"the server announced {count} children")
    children, unpack, end = [], int_struct.unpack_from, len(reply)
    try:
        for _ in range(count):  # without calls of functions here: there may be ten thousand, and each claim reads them
            (size,), offset = unpack(reply, offset), offset + int_struct.size
            if not 0 <= size <= end - offset:
                raise ValueError(f"a text of {size} bytes")
            children.append(reply[offset : offset + size].decode())
            offset += size
    except struct.error as error:
        raise ValueError("truncated") from error
    return children, offset


def _read_text(reply: bytes, offset: int) -> tuple[str, int]:
    size, offset = _read_int(reply, offset)
    if not 0 <= size <= len(reply) - offset:
        raise ValueError(f"a text of {size} bytes")
    return reply[offset : offset + size].decode(), offset + size


def _read_int(reply: bytes, offset: int) -> tuple[int, int]:
    try:
        return int_struct.unpack_from(reply, offset)[0], offset + int_struct.size
    except struct.error as error:
        raise ValueError("truncated") from error


def _read_stat(reply: bytes, offset: int) -> ZnodeStat:
    try:
        return ZnodeStat._make(stat_struct.unpack_from(reply, offset))
    except struct.error as error:
        raise ValueError("truncated") from error
