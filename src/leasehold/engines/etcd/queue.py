"""Who stands in line for a name, and what one transaction at etcd asks and changes about it.

Everything about a name is keys below one prefix, one key per claim:

    <root>q/<namespace>:<name>/<kind>/<mode>/<chair>       kind: l, or s<limit>; mode: x, r (reads), s (a permit)

A chair is the client's, and serves one claim after another; whose it is now says the mark in the note. With a key of
its own for every claim, as one would have it, etcd gets slower with each: until it compacts, it reads through all keys
of a range that ever were (0.4 us for each: 5 ms after 12,000 claims of a name).

etcd numbers every key when it is created, and never gives a number twice. That number is the place in line, and with
the base added the token. The rule, in `may_hold`: a claim holds the name if nothing that it cannot stand beside was
created before it. Nothing can ever come to stand before it later, so once it is so it stays so while its key lives.

Safety, in five lines. The transaction that creates a key looks at what was there before it, in the same step (E1). It
creates only what is absent, so a repetition finds the first (E2), and only beside keys of its own kind. Numbers rise,
and a base is only ever replaced by a higher one, compared in the step that grants (E3). A key goes with its lease,
which outlives what the holder was told (E8). Whoever changes a key names the creation it means: no successor is hit.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.core.names import FORMAT, decode, encode, engine_key
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.messages import (
    Compare,
    KeyValue,
    MalformedReply,
    PutRequest,
    RangeRequest,
    RangeResponse,
    RequestOp,
    TxnRequest,
    TxnResponse,
)
from leasehold.model import Claim, Holder, Kind, Mode

EntryState: TypeAlias = Literal["waiting", "held", "released", "cooling"]

MAX_QUEUE_READ: Final = 100  # how much of a line is looked at for people's sake
MAX_HEAD_READ: Final = 8  # of the front of a line, whose notes are read at a look
_MODES: Final[dict[str, Mode]] = {"x": "exclusive", "r": "shared", "s": "exclusive"}
_STATES: Final = ("waiting", "held", "released", "cooling")


class EntryValue(NamedTuple):
    """What stands in a key. `written_at` is the holder's own clock, for people alone."""

    id_hash: str
    state: EntryState  # `held` may be hoped for: whether it is so, only the place in line says
    base: int
    delay: float  # how long the name has to rest if it holds it, and goes without a release
    holder: Holder
    written_at: float
    remaining_delay: float = 0.0  # the same while it waits: what it waits out itself

    def to_bytes(self) -> bytes:
        fields: dict[str, object] = {
            "id_hash": self.id_hash,
            "state": self.state,
            "base": self.base,
            "delay": self.delay,
            "holder": self.holder,
            "written_at": self.written_at,
        }
        if self.remaining_delay:
            fields["remaining_delay"] = self.remaining_delay
        return json.dumps(fields, separators=(",", ":")).encode()


def parse_value(value: bytes) -> EntryValue:
    """Whatever else somebody put there, its key still stands in line: as a holder nobody knows."""
    try:
        found: dict[str, Any] = json.loads(value)
        label, host, pid, purpose = found["holder"]
        holder = Holder(str(label), str(host), int(pid), str(purpose))
        state: EntryState = found["state"] if found["state"] in _STATES else "held"
        id_hash, delay, written_at = str(found["id_hash"]), float(found["delay"]), float(found["written_at"])
        return EntryValue(
            id_hash, state, int(found["base"]), delay, holder, written_at, float(found.get("remaining_delay", 0.0))
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return EntryValue("", "held", 0, 0.0, Holder("?"), 0.0)


class Entry(NamedTuple):
    """A key of the line, read."""

    key: bytes
    namespace: str
    name: str
    kind: Kind
    limit: int
    mode: Mode
    create_revision: int
    lease_id: int
    value: EntryValue

    @property
    def token(self) -> int:
        return self.value.base + self.create_revision


def parse_entry(root: str, kv: KeyValue) -> Entry | None:
    """None: not one of ours."""
    try:
        path, kind, mode, _ = kv.key.decode()[len(root) + 2 :].split("/")
        namespace, name = path.split(":")
        limit = 1 if kind == "l" else int(kind.removeprefix("s"))
        if limit < 1:
            return None
        where = decode(namespace), decode(name)
        claim_kind: Kind = "lock" if kind == "l" else "semaphore"
        return Entry(
            kv.key, *where, claim_kind, limit, _MODES[mode], kv.create_revision, kv.lease, parse_value(kv.value)
        )
    except (ValueError, KeyError):
        return None


def range_end(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin so."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def key_root(prefix: str) -> str:
    """What every key begins with."""
    return f"{prefix}/{FORMAT}/" if prefix else f"{FORMAT}/"


def names_prefix(root: str, namespace: str, prefix: str, exact: bool) -> bytes:
    """What the keys of these names begin with."""
    return f"{root}q/{encode(namespace)}:{encode(prefix)}{'/' if exact else ''}".encode()


class QueueKey(NamedTuple):
    """Where a claim stands, or would."""

    root: str
    prefix: bytes
    key: bytes
    conflict_prefix: bytes  # the range of keys that it cannot stand beside, so far as they come before it
    limit: int  # of that many
    other_kinds: tuple[tuple[bytes, bytes], ...]  # where keys of other kinds would be

    @property
    def base_key(self) -> bytes:
        return base_key(self.root)

    @property
    def is_exclusive(self) -> bool:
        """It stands beside nothing, not even its like."""
        return self.conflict_prefix == self.prefix


def base_key(root: str) -> bytes:
    return f"{root}base".encode()


def claim_prefix(root: str, claim: Claim) -> bytes:
    return f"{root}q/{engine_key(claim.namespace, claim.name)}/".encode()


def make_queue_key(root: str, claim: Claim, key_suffix: str) -> QueueKey:
    prefix = claim_prefix(root, claim)
    if claim.kind == "lock":
        shared = claim.mode == "shared"
        own = prefix + (b"l/r/" if shared else b"l/x/") + key_suffix.encode()
        return QueueKey(root, prefix, own, prefix + b"l/x/" if shared else prefix, 1, ((prefix + b"s", prefix + b"t"),))
    kind = prefix + b"s%d/" % claim.limit
    other_kinds = ((prefix, kind), (range_end(kind), range_end(prefix)))
    return QueueKey(root, prefix, kind + b"s/" + key_suffix.encode(), kind + b"s/", claim.limit, other_kinds)


# -------------------------------------------------------------- what is asked


class QueueView(NamedTuple):
    """What a transaction read of a line."""

    revision: int
    own: KeyValue | None
    base: bytes
    head: Entry | None
    oldest: tuple[KeyValue, ...]  # the front of the line, oldest first
    conflicts: tuple[KeyValue, ...]  # what is in the way, newest first; at most one more than the limit
    ahead: tuple[KeyValue, ...]  # everything ahead, newest first; at most SHOWN


def may_hold(queue_key: QueueKey, conflict_count: int) -> bool:
    return conflict_count < queue_key.limit


def _view_ops(queue_key: QueueKey, create_revision: int) -> tuple[RequestOp, ...]:
    """`create_revision`: of its own key; what came later is not before it. 0: it has none yet."""
    max_revision, newest = (
        create_revision - 1 if create_revision else 0,
        {"sort_order": messages.DESCENDING, "sort_target": messages.BY_CREATE_REVISION},
    )
    return (
        RequestOp(RangeRequest(queue_key.key)),
        RequestOp(RangeRequest(queue_key.base_key)),
        _oldest_op(queue_key),
        RequestOp(
            RangeRequest(
                queue_key.conflict_prefix,
                range_end(queue_key.conflict_prefix),
                queue_key.limit + 1,
                **newest,
                keys_only=1,
                max_create_revision=max_revision,
            )
        ),
        RequestOp(
            RangeRequest(
                queue_key.prefix,
                range_end(queue_key.prefix),
                MAX_QUEUE_READ,
                **newest,
                keys_only=1,
                max_create_revision=max_revision,
            )
        ),
    )


def _oldest_op(queue_key: QueueKey) -> RequestOp:
    whole = RangeRequest(
        queue_key.prefix,
        range_end(queue_key.prefix),
        MAX_HEAD_READ,
        sort_order=messages.ASCENDING,
        sort_target=messages.BY_CREATE_REVISION,
    )
    return RequestOp(whole)


def view_txn(queue_key: QueueKey, create_revision: int) -> TxnRequest:
    return TxnRequest((), _view_ops(queue_key, create_revision))


def enqueue_txn(queue_key: QueueKey, value: bytes, lease_id: int, base: bytes) -> TxnRequest:
    """Stand in line, whatever is there. What is in the way is read before the key is put: it never finds itself. All
    who may hold are read, not the first alone: any of them may vanish, with its delay, before the next look."""
    newest = {"sort_order": messages.DESCENDING, "sort_target": messages.BY_CREATE_REVISION}
    conflicts = RangeRequest(
        queue_key.conflict_prefix, range_end(queue_key.conflict_prefix), queue_key.limit + 1, **newest, keys_only=1
    )
    return TxnRequest(
        (_if_absent(queue_key.key), _if_value(queue_key.base_key, base), *_if_no_keys(queue_key.other_kinds)),
        (RequestOp(conflicts), _oldest_op(queue_key), RequestOp(put=PutRequest(queue_key.key, value, lease_id))),
    )


def try_acquire_txn(queue_key: QueueKey, value: bytes, lease_id: int, base: bytes, viewed_revision: int) -> TxnRequest:
    """Take it if it is free, and leave nothing if it is not. A permit among others is taken if nobody has come since
    the line was looked at, at revision `looked`; 0: if there is nobody."""
    free = (
        _if_all_older(queue_key.conflict_prefix, viewed_revision + 1)
        if viewed_revision
        else _if_no_keys(((queue_key.conflict_prefix, range_end(queue_key.conflict_prefix)),))[0]
    )
    extra_compares = () if queue_key.is_exclusive else (_if_absent(queue_key.key), *_if_no_keys(queue_key.other_kinds))
    return TxnRequest(
        (free, _if_value(queue_key.base_key, base), *extra_compares),
        (RequestOp(put=PutRequest(queue_key.key, value, lease_id)),),
        _view_ops(queue_key, 0),
    )


def grant_txn(
    queue_key: QueueKey, create_revision: int, value: bytes, lease_id: int, base: bytes, checked: bool
) -> TxnRequest:
    """Make a place in line a grant: a new note, on a lease of the holder's ttl. `checked`: it is entitled, by an
    earlier look; else that is compared in this very step, which only one that stands alone can do."""
    extra_compares = (
        ()
        if checked
        else (
            Compare(
                messages.GREATER,
                messages.CREATE,
                queue_key.prefix,
                create_revision - 1,
                range_end=range_end(queue_key.prefix),
            ),
        )
    )
    return TxnRequest(
        (_if_created_at(queue_key.key, create_revision), _if_value(queue_key.base_key, base), *extra_compares),
        (RequestOp(put=PutRequest(queue_key.key, value, lease_id)),),
        _view_ops(queue_key, create_revision),
    )


def requeue_txn(queue_key: QueueKey, create_revision: int, value: bytes, lease_id: int) -> TxnRequest:
    """Hang it on another lease, with another note. The line is looked at in either case."""
    view_ops = _view_ops(queue_key, create_revision)
    return TxnRequest(
        (_if_created_at(queue_key.key, create_revision),),
        (*view_ops, RequestOp(put=PutRequest(queue_key.key, value, lease_id))),
        view_ops,
    )


def attach_lease_txn(entry: Entry, lease_id: int) -> TxnRequest:
    """Hang a grant on another lease as it is."""
    return TxnRequest(
        (_if_created_at(entry.key, entry.create_revision),),
        (RequestOp(put=PutRequest(entry.key, entry.value.to_bytes(), lease_id)),),
    )


def dequeue_txn(queue_key: QueueKey, create_revision: int) -> TxnRequest:
    """Give the place up. It names the creation it means: the chair may be another claim's when this arrives."""
    return TxnRequest(
        (_if_created_at(queue_key.key, create_revision),),
        (RequestOp(delete=messages.DeleteRangeRequest(queue_key.key)),),
    )


def if_unchanged_txn(kv: KeyValue, operation: RequestOp) -> TxnRequest:
    """Do this to a key if it is still what was read."""
    return TxnRequest((Compare(messages.EQUAL, messages.MOD, kv.key, mod_revision=kv.mod_revision),), (operation,))


def _if_absent(key: bytes) -> Compare:
    return Compare(messages.EQUAL, messages.CREATE, key)


def _if_created_at(key: bytes, create_revision: int) -> Compare:
    return Compare(messages.EQUAL, messages.CREATE, key, create_revision)


def _if_value(key: bytes, value: bytes) -> Compare:
    return Compare(messages.EQUAL, messages.VALUE, key, value=value)


def _if_no_keys(ranges: tuple[tuple[bytes, bytes], ...]) -> tuple[Compare, ...]:
    """All keys of a range were created at 0: there are none."""
    return tuple(Compare(messages.EQUAL, messages.CREATE, begin, range_end=end) for begin, end in ranges)


def _if_all_older(prefix: bytes, revision: int) -> Compare:
    return Compare(messages.LESS, messages.CREATE, prefix, revision, range_end=range_end(prefix))


# ----------------------------------------------------------- what is answered


def txn_revision(done: TxnResponse) -> int:
    if done.header is None or done.header.revision <= 0:
        raise MalformedReply("a transaction at no revision")
    return done.header.revision


class Enqueued(NamedTuple):
    """What a key just put found there."""

    conflicts: tuple[KeyValue, ...]  # what is in its way
    total: int  # how many that are in all
    oldest: tuple[KeyValue, ...]  # the front of the line, oldest first


def parse_enqueued(queue_key: QueueKey, done: TxnResponse) -> Enqueued | None:
    """None: it was not put."""
    if not done.succeeded:
        return None
    if len(done.responses) != 3 or done.responses[2].put is None:
        raise MalformedReply("not what a place in line is answered with")
    conflicts, found = _parse_kvs(done, 0, queue_key.conflict_prefix), done.responses[0].range
    if found is None or found.total < len(conflicts) or bool(found.total) != bool(conflicts):
        raise MalformedReply("a count that does not fit")
    return Enqueued(conflicts, found.total, _parse_kvs(done, 1, queue_key.prefix))


def was_put(done: TxnResponse) -> bool:
    if done.succeeded and (len(done.responses) != 1 or done.responses[0].put is None):
        raise MalformedReply("not what a write is answered with")
    return bool(done.succeeded)


def parse_view(queue_key: QueueKey, done: TxnResponse) -> QueueView:
    if len(done.responses) < 5:
        raise MalformedReply(f"{len(done.responses)} answers instead of five")
    own, base = _parse_kvs(done, 0, queue_key.key), _parse_kvs(done, 1, queue_key.base_key)
    oldest = _parse_kvs(done, 2, queue_key.prefix)
    return QueueView(
        txn_revision(done),
        own[0] if own else None,
        base[0].value if base else b"",
        parse_entry(queue_key.root, oldest[0]) if oldest else None,
        oldest,
        _parse_kvs(done, 3, queue_key.conflict_prefix),
        _parse_kvs(done, 4, queue_key.prefix),
    )


def _parse_kvs(done: TxnResponse, index: int, prefix: bytes) -> tuple[KeyValue, ...]:
    found: RangeResponse | None = done.responses[index].range
    if found is None or not all(kv.key.startswith(prefix) and kv.create_revision > 0 for kv in found.kvs):
        raise MalformedReply("not the keys that were asked for")
    return found.kvs


def conflicts_ahead(queue_key: QueueKey, create_revision: int, oldest: tuple[KeyValue, ...]) -> list[Entry]:
    """Those among them that came before, and cannot be stood beside."""
    found = [
        kv for kv in oldest if kv.create_revision < create_revision and kv.key.startswith(queue_key.conflict_prefix)
    ]
    return [entry for kv in found if (entry := parse_entry(queue_key.root, kv)) is not None]


def position(queue_key: QueueKey, ahead: tuple[KeyValue, ...]) -> int | None:
    """How many wait ahead, the holders not counted; None: the line is too long to say."""
    if len(ahead) >= MAX_QUEUE_READ:
        return None
    shared_count = 0
    for kv in reversed(ahead):
        if b"/l/r/" not in kv.key[len(queue_key.prefix) - 1 :]:
            break
        shared_count += 1
    holders = max(shared_count, 1) if queue_key.limit == 1 else queue_key.limit
    return max(0, len(ahead) - holders)


def is_holder(entry: Entry, earlier: list[Entry]) -> bool:
    """The rule of `may_hold`, for whoever looks on."""
    if entry.kind == "semaphore":
        return len(earlier) < entry.limit
    return all(entry.mode == "shared" and other.mode == "shared" for other in earlier)
