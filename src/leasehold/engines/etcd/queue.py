"""The queue of a name, and the etcd transactions that read and change it: the safety argument of this engine.

Everything about a name is stored in keys below one prefix, one key per claim:

    <root>q/<namespace>:<name>/<kind>/<mode>/<tag><number>      kind: l, or s<limit>; mode: x, r (shared), s (a permit)

The tag is the first two digits of the claim's id hash. If other claims have the same tag, the number, in hexadecimal,
tells them apart; the id hash in the key's value says which claim uses the key now. So any client finds a claim that
another client has queued, by its id alone, and each key is used for one claim after another. A new key for every claim
would make etcd slower with each claim: until etcd compacts, a range read goes through all keys that ever existed in the
range (0.4 us for each: 5 ms after 12,000 claims of a name; 0.1 ms with 256 tags).

etcd gives every key a create revision when it is created, and never the same one twice. The create revision is the
position in the queue; added to the token base it is the token. The rule, in `may_hold`: a claim holds the name if fewer
conflicting keys than its limit (1 for a lock) were created before its own. No key can later be created with a lower
revision, so a claim that holds the name goes on holding it while its key exists.

The safety argument:

E1  The transaction that creates a key reads the conflicting keys that were there before it, in the same step. It
    creates the key only if all keys of the name are of its own kind.
E2  A key is created only if no other key has its tag, or none that its client has not read: so a repeated request finds
    the key of the first one, whichever client sent that.
E3  Revisions rise, and the token base is only ever replaced by a higher one. The transaction that grants compares it.
E8  A key is deleted with its lease, and the lease outlives the ttl that the holder was given.

Every transaction that changes a key compares its create or mod revision, so it never hits a successor. One that writes
a claim's state compares the mod revision that the client has seen: a grant that was broken meanwhile, and whose key is
kept for its delay, must not return.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import count
from math import isfinite
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
    range_end,
)
from leasehold.model import Claim, Holder, Kind, Mode

EntryState: TypeAlias = Literal["waiting", "held", "released", "cooling"]

MAX_QUEUE_READ: Final = 100  # keys read to compute a waiter's position
MAX_HEAD_READ: Final = 8  # oldest entries of a queue that every read returns with their values
_MAX_VALUE: Final = 16_384  # bytes: a value has less than half of that, even if every character is escaped
_MAX_INTEGER: Final = 1 << 63
_MAX_TOKEN_DIGITS: Final = 19
_TAG_DIGITS: Final = 2  # of an id hash: more make etcd slower, fewer make more claims share a tag
_MODES: Final[dict[str, Mode]] = {"x": "exclusive", "r": "shared", "s": "exclusive"}
_STATES: Final = ("waiting", "held", "released", "cooling")
_encode_json: Final = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would build an encoder each time


class EntryValue(NamedTuple):
    """The value of a key. `written_at` is by the client's own clock, and for display only."""

    id_hash: str
    state: EntryState  # `held` may be optimistic: only the position in the queue decides who holds
    token_base: int
    delay: float  # seconds the name must stay ungranted if this claim holds it and ends without a release
    holder: Holder
    written_at: float
    remaining_delay: float = 0.0  # seconds of an earlier holder's delay that this waiter is waiting out
    min_hold: float = 0.0  # seconds for which a release keeps the name, from the grant on

    def to_bytes(self) -> bytes:
        fields: dict[str, object] = {
            "id_hash": self.id_hash,
            "state": self.state,
            "token_base": self.token_base,
            "delay": self.delay,
            "holder": self.holder,
            "written_at": self.written_at,
        }
        if self.remaining_delay:
            fields["remaining_delay"] = self.remaining_delay
        if self.min_hold > 0:
            fields["min_hold"] = self.min_hold
        return _encode_json(fields).encode()


def parse_value(value: bytes) -> EntryValue:
    """A key whose value is invalid stays in the queue: it counts as an unknown holder."""
    try:
        if len(value) > _MAX_VALUE:
            raise ValueError("longer than any that this engine writes")
        found: dict[str, Any] = json.loads(value)
        label, host, pid, purpose = found["holder"]
        holder = Holder(str(label), str(host), int(pid), str(purpose))
        state: EntryState = found["state"] if found["state"] in _STATES else "held"
        id_hash, delay, written_at = str(found["id_hash"]), float(found["delay"]), float(found["written_at"])
        token_base, remaining_delay = int(found["token_base"]), float(found.get("remaining_delay", 0.0))
        min_hold = float(found.get("min_hold", 0.0))
        if not isfinite(delay + remaining_delay + min_hold) or not 0 <= token_base < _MAX_INTEGER:
            raise ValueError("no number that this engine writes")
        return EntryValue(id_hash, state, token_base, delay, holder, written_at, remaining_delay, min_hold)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return EntryValue("", "held", 0, 0.0, Holder("?"), 0.0)


class Entry(NamedTuple):
    """A key of the queue, parsed."""

    key: bytes
    namespace: str
    name: str
    kind: Kind
    limit: int
    mode: Mode
    create_revision: int
    lease_id: int
    value: EntryValue
    stored_value: bytes = b""  # as it was read: what a transaction compares

    @property
    def is_exclusive(self) -> bool:
        """Whether this is the entry of a lock that one claim holds alone."""
        return self.kind == "lock" and self.mode == "exclusive"

    @property
    def token(self) -> int:
        return self.value.token_base + self.create_revision


def parse_entry(root: str, kv: KeyValue) -> Entry | None:
    """None: the key is not one of ours."""
    try:
        path, kind, mode, _ = kv.key.decode()[len(root) + 2 :].split("/")
        namespace, name = path.split(":")
        limit = 1 if kind == "l" else int(kind.removeprefix("s"))
        if limit < 1:
            return None
        where = decode(namespace), decode(name)
        claim_kind: Kind = "lock" if kind == "l" else "semaphore"
        value = parse_value(kv.value)
        return Entry(kv.key, *where, claim_kind, limit, _MODES[mode], kv.create_revision, kv.lease, value, kv.value)
    except (ValueError, KeyError):
        return None


def key_root(prefix: str) -> str:
    """The prefix of every key."""
    return f"{prefix}/{FORMAT}/" if prefix else f"{FORMAT}/"


def names_prefix(root: str, namespace: str, prefix: str, exact: bool) -> bytes:
    """The prefix of the keys of these names."""
    return f"{root}q/{encode(namespace)}:{encode(prefix)}{'/' if exact else ''}".encode()


class QueueKey(NamedTuple):
    """The key of a claim, and the key ranges that its transactions compare and read."""

    root: str
    prefix: bytes
    id_hash: str
    tag: bytes  # the key without its number
    key: bytes
    conflict_prefix: bytes  # keys with this prefix conflict with the claim if they were created before its own
    limit: int  # the claim holds the name while fewer keys than this conflict
    other_kinds: tuple[tuple[bytes, bytes], ...]  # the ranges of keys of other kinds

    @property
    def token_base_key(self) -> bytes:
        return token_base_key(self.root)

    def with_number(self, number: int) -> QueueKey:
        return self._replace(key=self.tag + b"%x" % number)

    @property
    def is_exclusive(self) -> bool:
        """Whether every other key of the name conflicts with the claim."""
        return self.conflict_prefix == self.prefix


def token_base_key(root: str) -> bytes:
    return f"{root}base".encode()


def parse_token_base(stored: bytes) -> int:
    """0: it is not a number."""
    return int(stored) if stored.isdigit() and len(stored) <= _MAX_TOKEN_DIGITS else 0


def claim_prefix(root: str, claim: Claim) -> bytes:
    return f"{root}q/{engine_key(claim.namespace, claim.name)}/".encode()


def make_queue_key(root: str, claim: Claim) -> QueueKey:
    prefix = claim_prefix(root, claim)
    other_kinds: tuple[tuple[bytes, bytes], ...]
    if claim.kind == "lock":
        shared = claim.mode == "shared"
        folder, conflict_prefix = prefix + (b"l/r/" if shared else b"l/x/"), prefix + b"l/x/" if shared else prefix
        limit, other_kinds = 1, ((prefix + b"s", prefix + b"t"),)
    else:
        kind = prefix + b"s%d/" % claim.limit
        folder = conflict_prefix = kind + b"s/"
        limit, other_kinds = claim.limit, ((prefix, kind), (range_end(kind), range_end(prefix)))
    tag = folder + claim.id_hash[:_TAG_DIGITS].encode()
    return QueueKey(root, prefix, claim.id_hash, tag, tag, conflict_prefix, limit, other_kinds).with_number(0)


def free_number(queue_key: QueueKey, tagged: tuple[KeyValue, ...]) -> int:
    """The lowest number that none of these keys has."""
    taken = {kv.key for kv in tagged}
    return next(number for number in count() if queue_key.with_number(number).key not in taken)


# ------------------------------------------------------------------- requests


class QueueView(NamedTuple):
    """What a transaction read of a queue."""

    revision: int
    own: KeyValue | None
    tagged: tuple[KeyValue, ...]  # all keys with the claim's tag
    token_base: bytes
    head: Entry | None
    oldest: tuple[KeyValue, ...]  # the front of the queue, oldest first; at most MAX_HEAD_READ
    conflicts: tuple[KeyValue, ...]  # conflicting keys ahead, newest first; at most one more than the limit
    ahead: tuple[KeyValue, ...]  # all keys ahead, newest first; at most MAX_QUEUE_READ


def may_hold(queue_key: QueueKey, conflict_count: int) -> bool:
    return conflict_count < queue_key.limit


def _view_ops(queue_key: QueueKey, create_revision: int) -> tuple[RequestOp, ...]:
    """`create_revision`: of the claim's own key; only keys created before it are ahead. 0: the claim has no key yet.

    etcd reads and sorts all keys of a range, whatever the limit is. So the keys ahead of an exclusive claim, which all
    conflict with it, are read once."""

    def newest_ahead(prefix: bytes, limit: int) -> RequestOp:
        return RequestOp(
            RangeRequest(
                prefix,
                range_end(prefix),
                limit,
                sort_order=messages.DESCENDING,
                sort_target=messages.BY_CREATE_REVISION,
                keys_only=1,
                max_create_revision=create_revision - 1 if create_revision else 0,
            )
        )

    conflicts = () if queue_key.is_exclusive else (newest_ahead(queue_key.conflict_prefix, queue_key.limit + 1),)
    return (
        RequestOp(RangeRequest(queue_key.tag, range_end(queue_key.tag))),
        RequestOp(RangeRequest(queue_key.token_base_key)),
        _oldest_op(queue_key),
        newest_ahead(queue_key.prefix, MAX_QUEUE_READ),
        *conflicts,
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


def enqueue_txn(queue_key: QueueKey, value: bytes, lease_id: int, token_base: bytes, tag_revision: int) -> TxnRequest:
    """Join the queue, whether or not the name is free. `tag_revision`: the keys with the claim's tag were read at this
    revision, and none is the claim's; 0: only if there is none. The conflicting keys are read before the put, so a
    claim never finds its own key. All possible holders are read, not just the first: any may vanish before the next
    read, and its delay with it."""
    newest = {"sort_order": messages.DESCENDING, "sort_target": messages.BY_CREATE_REVISION}
    conflicts = RangeRequest(
        queue_key.conflict_prefix, range_end(queue_key.conflict_prefix), queue_key.limit + 1, **newest, keys_only=1
    )
    return TxnRequest(
        (
            *_if_not_queued(queue_key, tag_revision),
            _if_value(queue_key.token_base_key, token_base),
            *_if_no_keys(queue_key.other_kinds),
        ),
        (RequestOp(conflicts), _oldest_op(queue_key), RequestOp(put=PutRequest(queue_key.key, value, lease_id))),
    )


def try_acquire_txn(
    queue_key: QueueKey, value: bytes, lease_id: int, token_base: bytes, viewed_revision: int
) -> TxnRequest:
    """Take the name if it is free, and leave no key if it is not. `viewed_revision`: the queue was read at this
    revision, had a permit left and no key of this claim; the permit is taken if no key was created since. 0: only if
    there is no key."""
    free = (
        _if_all_older(queue_key.conflict_prefix, viewed_revision + 1)
        if viewed_revision
        else _if_no_keys(((queue_key.conflict_prefix, range_end(queue_key.conflict_prefix)),))[0]
    )
    extra_compares = (
        ()
        if queue_key.is_exclusive
        else (*_if_not_queued(queue_key, viewed_revision), *_if_no_keys(queue_key.other_kinds))
    )
    return TxnRequest(
        (free, _if_value(queue_key.token_base_key, token_base), *extra_compares),
        (RequestOp(put=PutRequest(queue_key.key, value, lease_id)),),
        _view_ops(queue_key, 0),
    )


def grant_txn(
    queue_key: QueueKey,
    create_revision: int,
    mod_revision: int,
    value: bytes,
    lease_id: int,
    token_base: bytes,
    checked: bool,
) -> TxnRequest:
    """Turn a queued claim into a grant: a new value, on a lease of the holder's ttl. `checked`: an earlier read showed
    that the claim may hold the name; otherwise this transaction compares it, which works for exclusive claims only."""
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
        (
            _if_unchanged(queue_key.key, mod_revision),
            _if_value(queue_key.token_base_key, token_base),
            *extra_compares,
        ),
        (RequestOp(put=PutRequest(queue_key.key, value, lease_id)),),
        _view_ops(queue_key, create_revision),
    )


def requeue_txn(
    queue_key: QueueKey, create_revision: int, mod_revision: int, value: bytes, lease_id: int
) -> TxnRequest:
    """Write a new value and attach the key to another lease. The queue is read whether or not that succeeds."""
    view_ops = _view_ops(queue_key, create_revision)
    return TxnRequest(
        (_if_unchanged(queue_key.key, mod_revision),),
        (*view_ops, RequestOp(put=PutRequest(queue_key.key, value, lease_id))),
        view_ops,
    )


def attach_lease_txn(entry: Entry, lease_id: int) -> TxnRequest:
    """Attach the key of a grant to another lease and keep its value. Compares the value: a grant that was released or
    broken meanwhile must not return."""
    return TxnRequest(
        (_if_created_at(entry.key, entry.create_revision), _if_value(entry.key, entry.stored_value)),
        (RequestOp(put=PutRequest(entry.key, entry.stored_value, lease_id)),),
    )


def dequeue_txn(queue_key: QueueKey, create_revision: int) -> TxnRequest:
    """End a claim. Compares the create revision: when this arrives, the key may belong to another claim."""
    return TxnRequest(
        (_if_created_at(queue_key.key, create_revision),),
        (RequestOp(delete=messages.DeleteRangeRequest(queue_key.key)),),
    )


def leave_txn(queue_key: QueueKey, mod_revision: int) -> TxnRequest:
    """Leave the queue, if the claim is still a waiter: another client may have been granted the name for it."""
    return TxnRequest(
        (_if_unchanged(queue_key.key, mod_revision),),
        (RequestOp(delete=messages.DeleteRangeRequest(queue_key.key)),),
    )


def if_unchanged_txn(kv: KeyValue, operation: RequestOp) -> TxnRequest:
    """Run an operation on a key if the key has not changed since it was read."""
    return TxnRequest((_if_unchanged(kv.key, kv.mod_revision),), (operation,))


def _if_absent(key: bytes) -> Compare:
    return Compare(messages.EQUAL, messages.CREATE, key)


def _if_not_queued(queue_key: QueueKey, tag_revision: int) -> tuple[Compare, ...]:
    """Whether the claim has no key, in any client's name: no key has its tag, or none was created since it was read."""
    if not tag_revision:
        return _if_no_keys(((queue_key.tag, range_end(queue_key.tag)),))
    return _if_absent(queue_key.key), _if_all_older(queue_key.tag, tag_revision + 1)


def _if_created_at(key: bytes, create_revision: int) -> Compare:
    return Compare(messages.EQUAL, messages.CREATE, key, create_revision)


def _if_unchanged(key: bytes, mod_revision: int) -> Compare:
    """A mod revision belongs to one key and one write, so this compares the create revision as well."""
    return Compare(messages.EQUAL, messages.MOD, key, mod_revision=mod_revision)


def _if_value(key: bytes, value: bytes) -> Compare:
    return Compare(messages.EQUAL, messages.VALUE, key, value=value)


def _if_no_keys(ranges: tuple[tuple[bytes, bytes], ...]) -> tuple[Compare, ...]:
    """True of a range only if it is empty: no key has create revision 0."""
    return tuple(Compare(messages.EQUAL, messages.CREATE, begin, range_end=end) for begin, end in ranges)


def _if_all_older(prefix: bytes, revision: int) -> Compare:
    return Compare(messages.LESS, messages.CREATE, prefix, revision, range_end=range_end(prefix))


# -------------------------------------------------------------------- replies


def txn_revision(done: TxnResponse) -> int:
    if done.header is None or done.header.revision <= 0:
        raise MalformedReply("a transaction reply has no revision")
    return done.header.revision


class Enqueued(NamedTuple):
    """What the transaction that put a key read before the put."""

    conflicts: tuple[KeyValue, ...]  # conflicting keys, newest first; at most one more than the limit
    oldest: tuple[KeyValue, ...]  # the front of the queue, oldest first
    total: int  # the number of all keys


def parse_enqueued(queue_key: QueueKey, done: TxnResponse) -> Enqueued | None:
    """None: the key was not put."""
    if not done.succeeded:
        return None
    if len(done.responses) != 3 or done.responses[2].put is None:
        raise MalformedReply("unexpected reply to an enqueue transaction")
    conflicts, oldest = _parse_kvs(done, 0, queue_key.conflict_prefix), _parse_kvs(done, 1, queue_key.prefix)
    found = done.responses[1].range
    if found is None or found.total < max(len(conflicts), len(oldest)) or bool(found.total) != bool(oldest):
        raise MalformedReply("the count does not match the keys")
    return Enqueued(conflicts, oldest, found.total)


def was_put(done: TxnResponse) -> bool:
    if done.succeeded and (len(done.responses) != 1 or done.responses[0].put is None):
        raise MalformedReply("unexpected reply to a write")
    return bool(done.succeeded)


def parse_view(queue_key: QueueKey, done: TxnResponse) -> QueueView:
    if len(done.responses) < (expected := 4 if queue_key.is_exclusive else 5):
        raise MalformedReply(f"{len(done.responses)} responses instead of {expected}")
    tagged, token_base = _parse_kvs(done, 0, queue_key.tag), _parse_kvs(done, 1, queue_key.token_base_key)
    oldest, ahead = _parse_kvs(done, 2, queue_key.prefix), _parse_kvs(done, 3, queue_key.prefix)
    conflicts = (
        ahead[: queue_key.limit + 1] if queue_key.is_exclusive else _parse_kvs(done, 4, queue_key.conflict_prefix)
    )
    return QueueView(
        txn_revision(done),
        find_own(queue_key.id_hash, tagged),
        tagged,
        token_base[0].value if token_base else b"",
        parse_entry(queue_key.root, oldest[0]) if oldest else None,
        oldest,
        conflicts,
        ahead,
    )


def find_own(id_hash: str, kvs: Sequence[KeyValue]) -> KeyValue | None:
    return next((kv for kv in kvs if parse_value(kv.value).id_hash == id_hash), None)


def _parse_kvs(done: TxnResponse, index: int, prefix: bytes) -> tuple[KeyValue, ...]:
    found: RangeResponse | None = done.responses[index].range
    if found is None or not all(kv.key.startswith(prefix) and kv.create_revision > 0 for kv in found.kvs):
        raise MalformedReply("the reply holds keys that were not requested")
    return found.kvs


def conflicts_ahead(queue_key: QueueKey, create_revision: int, oldest: tuple[KeyValue, ...]) -> list[Entry]:
    """The entries among `oldest` that were created before this revision and conflict with the claim."""
    found = [
        kv for kv in oldest if kv.create_revision < create_revision and kv.key.startswith(queue_key.conflict_prefix)
    ]
    return [entry for kv in found if (entry := parse_entry(queue_key.root, kv)) is not None]


def position(queue_key: QueueKey, total: int, oldest: Iterable[KeyValue]) -> int:
    """The number of waiters among `total` entries ahead of the claim. `oldest`: the first of them, or all. If readers
    hold the name, and more of them than `oldest` shows, the result is too high."""
    shared_count = 0
    for kv in oldest:
        if b"/l/r/" not in kv.key[len(queue_key.prefix) - 1 :]:
            break
        shared_count += 1
    holders = max(shared_count, 1) if queue_key.limit == 1 else queue_key.limit
    return max(0, total - holders)


def is_holder(entry: Entry, ahead: int, only_readers: bool) -> bool:
    """The rule of `may_hold`, for `inspect` and `break_`. `ahead`: how many entries were created earlier;
    `only_readers`: all of them are shared."""
    if entry.kind == "semaphore":
        return ahead < entry.limit
    return ahead == 0 or (entry.mode == "shared" and only_readers)
