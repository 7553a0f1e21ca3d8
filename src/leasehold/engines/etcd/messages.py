"""The messages of etcd's API that this engine uses, as typed values, and their bytes (protocol buffers).

Decoding is strict: inconsistent bytes raise `MalformedReply`, which callers get as `Unavailable`, never as an answer.
Unknown fields, which later versions of etcd may add, are skipped as the format requires."""

from __future__ import annotations

import re
from collections.abc import Container
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar, cast

M = TypeVar("M")

EQUAL, GREATER, LESS = 0, 1, 2
VERSION, CREATE, MOD, VALUE = 0, 1, 2, 3  # the target of a Compare
ASCENDING, DESCENDING = 1, 2
BY_CREATE_REVISION: Final = 2
NO_PUTS: Final = 0  # a filter of a watch
DELETED: Final = 1  # the type of an event
MAX_ITEMS: Final = 50_000  # messages, and bytes of texts, in one reply: 8 MiB hold fewer entries of queues
MAX_PAGE: Final = 500  # keys in the reply to one range request: 4 MiB, if all their texts are as long as they may be


class MalformedReply(ValueError):
    """The bytes are not a valid reply of etcd."""


class ResponseHeader(NamedTuple):
    cluster_id: int = 0
    revision: int = 0
    member_id: int = 0


class KeyValue(NamedTuple):
    key: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    value: bytes = b""
    lease: int = 0


class RangeRequest(NamedTuple):
    key: bytes
    range_end: bytes = b""
    limit: int = 0
    sort_order: int = 0
    sort_target: int = 0
    keys_only: int = 0
    max_create_revision: int = 0
    revision: int = 0  # as of which to read; 0: now


class RangeResponse(NamedTuple):
    header: ResponseHeader | None = None
    kvs: tuple[KeyValue, ...] = ()
    total: int = 0  # keys in the range, regardless of limit and filters
    more: int = 0  # the limit left some of them out


class PutRequest(NamedTuple):
    key: bytes
    value: bytes = b""
    lease: int = 0
    ignore_value: int = 0


class PutResponse(NamedTuple):
    header: ResponseHeader | None = None


class DeleteRangeRequest(NamedTuple):
    key: bytes
    range_end: bytes = b""


class DeleteRangeResponse(NamedTuple):
    header: ResponseHeader | None = None
    deleted: int = 0


class Compare(NamedTuple):
    result: int
    target: int
    key: bytes
    create_revision: int = 0
    mod_revision: int = 0
    value: bytes = b""
    range_end: bytes = b""


class RequestOp(NamedTuple):
    range: RangeRequest | None = None
    put: PutRequest | None = None
    delete: DeleteRangeRequest | None = None


class ResponseOp(NamedTuple):
    range: RangeResponse | None = None
    put: PutResponse | None = None
    delete: DeleteRangeResponse | None = None


class TxnRequest(NamedTuple):
    compare: tuple[Compare, ...]
    success: tuple[RequestOp, ...]
    failure: tuple[RequestOp, ...] = ()


class TxnResponse(NamedTuple):
    header: ResponseHeader | None = None
    succeeded: int = 0
    responses: tuple[ResponseOp, ...] = ()


class LeaseGrantRequest(NamedTuple):
    ttl: int
    id: int


class LeaseId(NamedTuple):
    id: int


class LeaseTtlResponse(NamedTuple):
    """What the answers to LeaseGrant, LeaseTimeToLive and LeaseKeepAlive have in common."""

    header: ResponseHeader | None = None
    id: int = 0
    ttl: int = 0


class Member(NamedTuple):
    id: int = 0
    is_learner: int = 0


class MemberListResponse(NamedTuple):
    header: ResponseHeader | None = None
    members: tuple[Member, ...] = ()


class StatusResponse(NamedTuple):
    header: ResponseHeader | None = None
    version: str = ""
    db_size: int = 0
    leader: int = 0
    raft_index: int = 0
    raft_applied_index: int = 0
    errors: tuple[str, ...] = ()
    is_learner: int = 0


class WatchCreateRequest(NamedTuple):
    key: bytes
    range_end: bytes
    start_revision: int
    filters: tuple[int, ...]
    prev_kv: int
    watch_id: int


class WatchCancelRequest(NamedTuple):
    watch_id: int


class WatchRequest(NamedTuple):
    create: WatchCreateRequest | None = None
    cancel: WatchCancelRequest | None = None


class WatchEvent(NamedTuple):
    type: int = 0
    kv: KeyValue | None = None
    prev_kv: KeyValue | None = None


class WatchResponse(NamedTuple):
    header: ResponseHeader | None = None
    watch_id: int = 0
    created: int = 0
    canceled: int = 0
    compact_revision: int = 0
    cancel_reason: str = ""
    events: tuple[WatchEvent, ...] = ()


class AuthenticateRequest(NamedTuple):
    name: str
    password: str

    def __repr__(self) -> str:
        return "<Authenticate>"


class AuthenticateResponse(NamedTuple):
    header: ResponseHeader | None = None
    token: str = ""


class EmptyMessage(NamedTuple):
    header: ResponseHeader | None = None


def range_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


INT, BYTES, TEXT = "int", "bytes", "text"
FieldType: TypeAlias = "str | type[Any]"

# For each message: number and type of each field, in the order of its class. A type in a list is a repeated field.
_SCHEMAS: Final[dict[type[Any], tuple[tuple[int, FieldType | list[FieldType]], ...]]] = {
    ResponseHeader: ((1, INT), (3, INT), (2, INT)),
    KeyValue: ((1, BYTES), (2, INT), (3, INT), (5, BYTES), (6, INT)),
    RangeRequest: ((1, BYTES), (2, BYTES), (3, INT), (5, INT), (6, INT), (8, INT), (13, INT), (4, INT)),
    RangeResponse: ((1, ResponseHeader), (2, [KeyValue]), (4, INT), (3, INT)),
    PutRequest: ((1, BYTES), (2, BYTES), (3, INT), (5, INT)),
    PutResponse: ((1, ResponseHeader),),
    DeleteRangeRequest: ((1, BYTES), (2, BYTES)),
    DeleteRangeResponse: ((1, ResponseHeader), (2, INT)),
    Compare: ((1, INT), (2, INT), (3, BYTES), (5, INT), (6, INT), (7, BYTES), (64, BYTES)),
    RequestOp: ((1, RangeRequest), (2, PutRequest), (3, DeleteRangeRequest)),
    ResponseOp: ((1, RangeResponse), (2, PutResponse), (3, DeleteRangeResponse)),
    TxnRequest: ((1, [Compare]), (2, [RequestOp]), (3, [RequestOp])),
    TxnResponse: ((1, ResponseHeader), (2, INT), (3, [ResponseOp])),
    LeaseGrantRequest: ((1, INT), (2, INT)),
    LeaseId: ((1, INT),),
    LeaseTtlResponse: ((1, ResponseHeader), (2, INT), (3, INT)),
    Member: ((1, INT), (5, INT)),
    MemberListResponse: ((1, ResponseHeader), (2, [Member])),
    StatusResponse: ((1, ResponseHeader), (2, TEXT), (3, INT), (4, INT), (5, INT), (7, INT), (8, [TEXT]), (10, INT)),
    WatchCreateRequest: ((1, BYTES), (2, BYTES), (3, INT), (5, [INT]), (6, INT), (7, INT)),
    WatchCancelRequest: ((1, INT),),
    WatchRequest: ((1, WatchCreateRequest), (2, WatchCancelRequest)),
    WatchEvent: ((1, INT), (2, KeyValue), (3, KeyValue)),
    WatchResponse: ((1, ResponseHeader), (2, INT), (3, INT), (4, INT), (5, INT), (6, TEXT), (11, [WatchEvent])),
    AuthenticateRequest: ((1, TEXT), (2, TEXT)),
    AuthenticateResponse: ((1, ResponseHeader), (2, TEXT)),
    EmptyMessage: ((1, ResponseHeader),),
}

# The same for decoding, by tag, which is number and wire type: index in the class, type, and whether it is repeated.
_FIELDS: Final = {
    message_type: {
        number << 3 | (0 if each in (INT, [INT]) else 2): (
            index,
            each[0] if isinstance(each, list) else each,
            isinstance(each, list),
        )
        for index, (number, each) in enumerate(schema)
    }
    for message_type, schema in _SCHEMAS.items()
}
_DEFAULTS: Final = {
    message_type: [cast(Any, message_type)._field_defaults.get(name) for name in cast(Any, message_type)._fields]
    for message_type in _SCHEMAS
}
_REPEATED: Final = {
    message_type: [index for index, _, repeated in fields.values() if repeated]
    for message_type, fields in _FIELDS.items()
}


class RpcMethod(NamedTuple, Generic[M]):
    path: str
    reply_type: type[M]
    max_reply: int = 1 << 16  # bytes of one reply
    max_items: int = MAX_ITEMS


TXN: Final = RpcMethod("/etcdserverpb.KV/Txn", TxnResponse, 4 << 20, 12_000)
RANGE: Final = RpcMethod("/etcdserverpb.KV/Range", RangeResponse, 4 << 20, 2 * MAX_PAGE)
DELETE: Final = RpcMethod("/etcdserverpb.KV/DeleteRange", DeleteRangeResponse)
LEASE_GRANT: Final = RpcMethod("/etcdserverpb.Lease/LeaseGrant", LeaseTtlResponse)
LEASE_REVOKE: Final = RpcMethod("/etcdserverpb.Lease/LeaseRevoke", EmptyMessage)
LEASE_TTL: Final = RpcMethod("/etcdserverpb.Lease/LeaseTimeToLive", LeaseTtlResponse)
LEASE_KEEP_ALIVE: Final = RpcMethod("/etcdserverpb.Lease/LeaseKeepAlive", LeaseTtlResponse)
WATCH: Final = RpcMethod("/etcdserverpb.Watch/Watch", WatchResponse, 2 << 20)
MEMBERS: Final = RpcMethod("/etcdserverpb.Cluster/MemberList", MemberListResponse)
STATUS: Final = RpcMethod("/etcdserverpb.Maintenance/Status", StatusResponse)
AUTHENTICATE: Final = RpcMethod("/etcdserverpb.Auth/Authenticate", AuthenticateResponse)

# ------------------------------------------------------------------ bytes


def encode(message: tuple[Any, ...]) -> bytes:
    out: list[bytes] = []
    for value, field in zip(message, _TAGS[type(message)], strict=True):
        if not value:  # protocol buffers leave out zero, empty and absent fields
            continue
        tag, field_type, repeated = field
        for item in value if repeated else (value,):
            if field_type is INT:
                out += tag, _ONE_BYTE_VARINTS[item] if 0 < item < 128 else _varint(item)
                continue
            if field_type is BYTES:
                part = item
            elif field_type is RangeRequest:
                part = _encode_range(item)
            else:
                part = item.encode() if field_type is TEXT else encode(item)
            size = len(part)
            out += tag, _ONE_BYTE_VARINTS[size] if size < 128 else _varint(size), part
    return b"".join(out)


_encode_range: Final = lru_cache(256)(encode)  # every transaction of a lock reads the same ranges
_ONE_BYTE_VARINTS: Final = [bytes([value]) for value in range(128)]


@lru_cache(256)  # a lease's id is in all requests for its keys
def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


# For encoding: tag, type, and whether the field is repeated.
_TAGS: Final = {
    message_type: [(_varint(tag), field_type, repeated) for tag, (_, field_type, repeated) in fields.items()]
    for message_type, fields in _FIELDS.items()
}


def decode(message_type: type[M], data: bytes, max_items: int = MAX_ITEMS) -> M:
    """Raises MalformedReply, and nothing else, for any invalid bytes."""
    try:
        return cast(M, _decode_message(message_type, data, 0, len(data), [max_items]))
    except IndexError:
        problem = "truncated integer"
    except MalformedReply as error:
        problem = str(error)
    raise MalformedReply(problem)  # without the frames of the other error, which refer to all that was decoded


def _decode_message(message_type: type[Any], data: bytes, offset: int, end: int, items_left: list[int]) -> Any:
    """Decode one message. `items_left`: how many messages, and bytes of texts, the rest of the reply may have. Python
    needs up to 300 bytes for a message, and 4 for a byte of text, so a reply is counted before it is decoded.

    All in one function: with a function call per field, decoding took half of the CPU time of passing a lock on."""
    known, fields = _FIELDS[message_type], _DEFAULTS[message_type].copy()
    while offset < end:
        tag, offset = data[offset], offset + 1
        if tag > 127:
            tag, offset = _read_varint(data, offset - 1)
        if tag not in known:
            offset = _skip_field(tag, known, data, offset, end)
            continue
        value: Any
        index, field_type, repeated = known[tag]
        value, offset = data[offset], offset + 1  # an integer, or the size of what follows
        if value > 127:
            value, offset = _read_varint(data, offset - 1)
        if field_type is not INT:
            begin, offset = offset, offset + value
            if not begin <= offset <= end:
                raise MalformedReply("truncated field")
            if field_type is BYTES:
                value = data[begin:offset]
            elif isinstance(field_type, type):
                items_left[0] -= 1
                if items_left[0] < 0:
                    raise MalformedReply("too many items")
                value = _decode_message(field_type, data, begin, offset, items_left)
            else:
                value = _decode_text(data[begin:offset], items_left)
        if not repeated:
            fields[index] = value
        elif fields[index]:
            fields[index].append(value)
        else:
            fields[index] = [value]
    if offset > end:
        raise MalformedReply("truncated field")
    for index in _REPEATED[message_type]:
        fields[index] = tuple(fields[index])
    return tuple.__new__(message_type, fields)


def _skip_field(tag: int, known: Container[int], data: bytes, offset: int, end: int) -> int:
    """The end of a field that this version of the engine does not know."""
    number, wire_type = tag >> 3, tag & 7
    if wire_type == 0:
        _, stop = _read_varint(data, offset)
    elif wire_type == 2:
        size, offset = _read_varint(data, offset)
        stop = offset + size
    elif wire_type in (1, 5):
        stop = offset + (8 if wire_type == 1 else 4)
    else:
        raise MalformedReply("unknown wire type")
    if not offset <= stop <= end:
        raise MalformedReply("truncated field")
    if number == 0:
        raise MalformedReply("field number 0")
    if number << 3 in known or number << 3 | 2 in known:
        raise MalformedReply("a field has the wrong wire type")
    return stop


def _decode_text(value: bytes, items_left: list[int]) -> str:
    items_left[0] -= 1 + len(value)
    if items_left[0] < 0:
        raise MalformedReply("texts too long")
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise MalformedReply("a string is not valid UTF-8") from error


_match_varint: Final = re.compile(rb"[\x80-\xff]{0,9}[\x00-\x7f]").match


def _read_varint(data: bytes, offset: int) -> tuple[int, int]:
    found = _match_varint(data, offset)
    if found is None:
        raise MalformedReply("truncated integer" if len(data) < offset + 10 else "integer too long")
    return _decode_varint(found[0]), found.end()


@lru_cache(256)  # the ids of cluster, member and lease are in nearly every reply
def _decode_varint(encoded: bytes) -> int:
    value = 0
    for byte in reversed(encoded):
        value = value << 7 | byte & 127
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
