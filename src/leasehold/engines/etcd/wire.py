"""The messages of etcd's API that this engine uses, as typed values, and their bytes (protocol buffers).

Strict in what is read: bytes that do not add up are `Malformed`, which callers hear as Unavailable, never as an answer.
Fields that etcd may add in the future are skipped, as the format wants it.
"""

from __future__ import annotations

from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

M = TypeVar("M")

EQUAL, GREATER, LESS, NOT_EQUAL = 0, 1, 2, 3
VERSION, CREATE, MOD, VALUE, LEASE = 0, 1, 2, 3, 4  # what a Compare looks at
ASCENDING, DESCENDING = 1, 2
BY_CREATION: Final = 2
NO_PUTS: Final = 0  # a filter of a watch
DELETED: Final = 1  # the type of an event


class Malformed(ValueError):
    """An answer that cannot be one of etcd's."""


class Header(NamedTuple):
    cluster_id: int = 0
    revision: int = 0


class KeyValue(NamedTuple):
    key: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    value: bytes = b""
    lease: int = 0


class Range(NamedTuple):
    key: bytes
    range_end: bytes = b""
    limit: int = 0
    sort_order: int = 0
    sort_target: int = 0
    keys_only: int = 0
    max_create_revision: int = 0


class Ranged(NamedTuple):
    header: Header | None = None
    kvs: tuple[KeyValue, ...] = ()
    total: int = 0  # keys in the range, whatever limit or filter left out


class Put(NamedTuple):
    key: bytes
    value: bytes = b""
    lease: int = 0
    ignore_value: int = 0


class PutDone(NamedTuple):
    header: Header | None = None


class Delete(NamedTuple):
    key: bytes
    range_end: bytes = b""


class Deleted(NamedTuple):
    header: Header | None = None
    deleted: int = 0


class Compare(NamedTuple):
    result: int
    target: int
    key: bytes
    create_revision: int = 0
    mod_revision: int = 0
    value: bytes = b""
    range_end: bytes = b""


class Op(NamedTuple):
    range: Range | None = None
    put: Put | None = None
    delete: Delete | None = None


class OpDone(NamedTuple):
    range: Ranged | None = None
    put: PutDone | None = None
    delete: Deleted | None = None


class Txn(NamedTuple):
    compare: tuple[Compare, ...]
    success: tuple[Op, ...]
    failure: tuple[Op, ...] = ()


class TxnDone(NamedTuple):
    header: Header | None = None
    succeeded: int = 0
    responses: tuple[OpDone, ...] = ()


class Grant(NamedTuple):
    ttl: int
    id: int


class Granted(NamedTuple):
    header: Header | None = None
    id: int = 0
    ttl: int = 0


class LeaseId(NamedTuple):
    id: int


class LeaseLife(NamedTuple):
    header: Header | None = None
    id: int = 0
    ttl: int = 0


class Member(NamedTuple):
    id: int = 0


class Members(NamedTuple):
    header: Header | None = None
    members: tuple[Member, ...] = ()


class Follow(NamedTuple):
    key: bytes
    range_end: bytes
    start_revision: int
    filters: tuple[int, ...]
    prev_kv: int
    watch_id: int


class Unfollow(NamedTuple):
    watch_id: int


class Watch(NamedTuple):
    create: Follow | None = None
    cancel: Unfollow | None = None


class Event(NamedTuple):
    type: int = 0
    kv: KeyValue | None = None
    prev_kv: KeyValue | None = None


class Watched(NamedTuple):
    header: Header | None = None
    watch_id: int = 0
    created: int = 0
    canceled: int = 0
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[Event, ...] = ()


class Authenticate(NamedTuple):
    name: str
    password: str

    def __repr__(self) -> str:
        return "<Authenticate>"


class Authenticated(NamedTuple):
    header: Header | None = None
    token: str = ""


class Nothing(NamedTuple):
    header: Header | None = None


INT, BYTES, TEXT = "int", "bytes", "text"
Kind: TypeAlias = "str | type[Any]"

# Of each message: number and kind of each field, in the order of its class. A kind in a list is repeated.
_SHAPES: Final[dict[type[Any], tuple[tuple[int, Kind | list[Kind]], ...]]] = {
    Header: ((1, INT), (3, INT)),
    KeyValue: ((1, BYTES), (2, INT), (3, INT), (5, BYTES), (6, INT)),
    Range: ((1, BYTES), (2, BYTES), (3, INT), (5, INT), (6, INT), (8, INT), (13, INT)),
    Ranged: ((1, Header), (2, [KeyValue]), (4, INT)),
    Put: ((1, BYTES), (2, BYTES), (3, INT), (5, INT)),
    PutDone: ((1, Header),),
    Delete: ((1, BYTES), (2, BYTES)),
    Deleted: ((1, Header), (2, INT)),
    Compare: ((1, INT), (2, INT), (3, BYTES), (5, INT), (6, INT), (7, BYTES), (64, BYTES)),
    Op: ((1, Range), (2, Put), (3, Delete)),
    OpDone: ((1, Ranged), (2, PutDone), (3, Deleted)),
    Txn: ((1, [Compare]), (2, [Op]), (3, [Op])),
    TxnDone: ((1, Header), (2, INT), (3, [OpDone])),
    Grant: ((1, INT), (2, INT)),
    Granted: ((1, Header), (2, INT), (3, INT)),
    LeaseId: ((1, INT),),
    LeaseLife: ((1, Header), (2, INT), (3, INT)),
    Member: ((1, INT),),
    Members: ((1, Header), (2, [Member])),
    Follow: ((1, BYTES), (2, BYTES), (3, INT), (5, [INT]), (6, INT), (7, INT)),
    Unfollow: ((1, INT),),
    Watch: ((1, Follow), (2, Unfollow)),
    Event: ((1, INT), (2, KeyValue), (3, KeyValue)),
    Watched: ((1, Header), (2, INT), (3, INT), (4, INT), (5, INT), (6, TEXT), (11, [Event])),
    Authenticate: ((1, TEXT), (2, TEXT)),
    Authenticated: ((1, Header), (2, TEXT)),
    Nothing: ((1, Header),),
}

_FIELDS: Final = {
    kind: {number: (place, each) for place, (number, each) in enumerate(shape)} for kind, shape in _SHAPES.items()
}
_EMPTY: Final = {
    kind: [[] if isinstance(each, list) else cast(Any, kind)._field_defaults.get(name) for name, (_, each) in fields]
    for kind, shape in _SHAPES.items()
    for fields in [list(zip(cast(Any, kind)._fields, shape, strict=True))]
}


class Method(NamedTuple, Generic[M]):
    path: str
    answer: type[M]


TXN: Final = Method("/etcdserverpb.KV/Txn", TxnDone)
RANGE: Final = Method("/etcdserverpb.KV/Range", Ranged)
DELETE: Final = Method("/etcdserverpb.KV/DeleteRange", Deleted)
GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", Granted)
REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", Nothing)
LIFE: Final = Method("/etcdserverpb.Lease/LeaseTimeToLive", LeaseLife)
KEEP_ALIVE: Final = Method("/etcdserverpb.Lease/LeaseKeepAlive", LeaseLife)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", Watched)
MEMBERS: Final = Method("/etcdserverpb.Cluster/MemberList", Members)
LOGIN: Final = Method("/etcdserverpb.Auth/Authenticate", Authenticated)

# ------------------------------------------------------------------ bytes


def encode(message: tuple[Any, ...]) -> bytes:
    out: list[bytes] = []
    for value, (number, kind) in zip(message, _SHAPES[type(message)], strict=True):
        if not value:  # what is not said is 0, or empty, or absent
            continue
        for each in value if isinstance(kind, list) else (value,):
            if isinstance(each, int):
                out += _varint(number << 3), _varint(each)
                continue
            part = each if isinstance(each, bytes) else each.encode() if isinstance(each, str) else encode(each)
            out += _varint(number << 3 | 2), _varint(len(part)), part
    return b"".join(out)


_SMALL: Final = [bytes([value]) for value in range(128)]


def _varint(value: int) -> bytes:
    if 0 <= value < 128:
        return _SMALL[value]
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode(kind: type[M], data: bytes) -> M:
    """Raises Malformed, and nothing else, whatever the bytes."""
    shape = _FIELDS[kind]
    fields: list[Any] = [[] if isinstance(usual, list) else usual for usual in _EMPTY[kind]]
    at = 0
    while at < len(data):
        tag = data[at]
        if tag < 128:
            at += 1
        else:
            tag, at = _number(data, at)
        value, at = _value(data, at, tag & 7)
        if (found := shape.get(tag >> 3)) is None:
            if tag < 8:
                raise Malformed("a field without a number")
            continue
        place, each = found
        if isinstance(each, list):
            fields[place].append(_as(each[0], value))
        else:
            fields[place] = _as(each, value)
    return kind(*(tuple(value) if isinstance(value, list) else value for value in fields))


def _value(data: bytes, at: int, form: int) -> tuple[int | bytes, int]:
    if form == 0:
        return _number(data, at)
    if form == 2:
        size, at = (data[at], at + 1) if at < len(data) and data[at] < 128 else _number(data, at)
    elif form in (1, 5):
        size = 8 if form == 1 else 4
    else:
        raise Malformed("a field of a form that does not exist")
    if size < 0 or at + size > len(data):
        raise Malformed("a field cut short")
    return data[at : at + size], at + size


def _as(kind: Kind, value: int | bytes) -> Any:
    if isinstance(value, int):
        if kind != INT:
            raise Malformed("a number where none belongs")
        return value
    if kind == BYTES:
        return value
    if isinstance(kind, type):
        return decode(kind, value)
    if kind != TEXT:
        raise Malformed("bytes where a number belongs")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Malformed("a text that is none") from error


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise Malformed("a number cut short")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), at
    raise Malformed("a number that does not end")
