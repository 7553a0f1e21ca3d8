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

# The same for reading: where in the class a field is, its kind, and whether it is repeated; by number.
_FIELDS: Final = {
    kind: {
        number: (place, each[0] if isinstance(each, list) else each, isinstance(each, list))
        for place, (number, each) in enumerate(shape)
    }
    for kind, shape in _SHAPES.items()
}
_EMPTY: Final = {
    kind: [cast(Any, kind)._field_defaults.get(name) for name in cast(Any, kind)._fields] for kind in _SHAPES
}
_REPEATED: Final = {
    kind: [place for place, _, repeated in fields.values() if repeated] for kind, fields in _FIELDS.items()
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
    for value, (tag, repeated) in zip(message, _TAGS[type(message)], strict=True):
        if not value:  # what is not said is 0, or empty, or absent
            continue
        for each in value if repeated else (value,):
            if isinstance(each, int):
                out += tag[0], _varint(each)
                continue
            part = each if isinstance(each, bytes) else each.encode() if isinstance(each, str) else encode(each)
            out += tag[1], _varint(len(part)), part
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


# For writing: what leads a number, and what leads bytes; and whether it is repeated.
_TAGS: Final = {
    kind: [((_varint(number << 3), _varint(number << 3 | 2)), isinstance(each, list)) for number, each in shape]
    for kind, shape in _SHAPES.items()
}


def decode(kind: type[M], data: bytes) -> M:
    """Raises Malformed, and nothing else, whatever the bytes."""
    try:
        return cast(M, _decoded(kind, data, 0, len(data)))
    except IndexError:
        raise Malformed("a number cut short") from None


def _decoded(kind: type[Any], data: bytes, at: int, end: int) -> Any:
    """One message among the bytes. Its work is all in one place: half of what a hand-off costs here was once spent in
    calls of functions that read a field each."""
    shape, fields = _FIELDS[kind], _EMPTY[kind].copy()
    while at < end:
        tag, at = data[at], at + 1
        if tag > 127:
            tag, at = _number(data, at - 1)
        value: Any
        form, (place, each, repeated) = tag & 7, shape.get(tag >> 3, _UNKNOWN)
        if form == 0:
            value, at = data[at], at + 1
            if value > 127:
                value, at = _number(data, at - 1)
            fits, stop = each is INT, at
        else:
            size, at = _size(data, at, form)
            stop = at + size
            fits = form == 2 and each is not INT
        if stop > end or stop < at:
            raise Malformed("a field cut short")
        if place is None:
            if tag < 8:
                raise Malformed("a field without a number")
            at = stop
            continue
        if not fits:
            raise Malformed("a number where bytes belong, or bytes where a number does")
        if form:
            if isinstance(each, type):
                value = _decoded(each, data, at, stop)
            else:
                value = data[at:stop] if each is BYTES else _text(data[at:stop])
            at = stop
        if not repeated:
            fields[place] = value
        elif fields[place]:
            fields[place].append(value)
        else:
            fields[place] = [value]
    for place in _REPEATED[kind]:
        fields[place] = tuple(fields[place])
    return tuple.__new__(kind, fields)


_UNKNOWN: Final[tuple[None, str, bool]] = (None, "", False)


def _size(data: bytes, at: int, form: int) -> tuple[int, int]:
    """How long a field is that is no number, and where it begins."""
    if form == 2:
        size = data[at]
        return (size, at + 1) if size < 128 else _number(data, at)
    if form in (1, 5):
        return (8 if form == 1 else 4), at
    raise Malformed("a field of a form that does not exist")


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Malformed("a text that is none") from error


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            value &= (1 << 64) - 1
            return (value - (1 << 64) if value >> 63 else value), at
    raise Malformed("a number that does not end")
