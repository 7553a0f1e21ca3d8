"""Who stands in line for a name, and what one transaction at etcd asks and changes about it.

Everything about a name is keys below one prefix, one key per claim:

    <root>q/<namespace>:<name>/<kind>/<mode>/<chair>       kind: l, or s<limit>; mode: x, r (reads), s (a permit)

A chair is the client's, and serves one claim after another; whose it is now says the mark in the note. With a key of
its own for every claim, as one would have it, etcd gets slower with each: until it compacts, it reads through all keys
of a range that ever were (0.4 us for each: 5 ms after 12,000 claims of a name).

etcd numbers every key when it is created, and never gives a number twice. That number is the place in line, and with
the base added the token. The rule, in `entitled`: a claim holds the name if nothing that it cannot stand beside was
created before it. Nothing can ever come to stand before it later, so once it is so it stays so while its key lives.

Safety, in five lines. The transaction that creates a key looks at what was there before it, in the same step (E1). It
creates only what is absent, so a repetition finds the first (E2), and only beside keys of its own kind. Numbers rise,
and a base is only ever replaced by a higher one, compared in the step that grants (E3). A key goes with its lease,
which outlives what the holder was told (E8). Whoever changes a key names the creation it means: no successor is hit.
"""

from __future__ import annotations

import json
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from leasehold.core.names import FORMAT, decode, encode, key
from leasehold.engines.etcd import wire
from leasehold.engines.etcd.wire import Compare, KeyValue, Malformed, Op, Put, Range, Ranged, Txn, TxnDone
from leasehold.model import Claim, Holder, Kind, Mode

State: TypeAlias = Literal["waiting", "held", "released", "cooling"]

SHOWN: Final = 100  # how much of a line is looked at for people's sake
HOLDERS: Final = 8  # of the front of a line, whose notes are read at a look
_MODES: Final[dict[str, Mode]] = {"x": "exclusive", "r": "shared", "s": "exclusive"}
_STATES: Final = ("waiting", "held", "released", "cooling")


class Note(NamedTuple):
    """What stands in a key. `at` is the holder's own clock, for people alone."""

    mark: str
    state: State  # `held` may be hoped for: whether it is so, only the place in line says
    base: int
    delay: float  # how long the name has to rest if it holds it, and goes without a release
    holder: Holder
    at: float
    rest: float = 0.0  # the same while it waits: what it waits out itself

    def to_bytes(self) -> bytes:
        fields: dict[str, object] = {
            "mark": self.mark,
            "state": self.state,
            "base": self.base,
            "delay": self.delay,
            "holder": self.holder,
            "at": self.at,
        }
        if self.rest:
            fields["rest"] = self.rest
        return json.dumps(fields, separators=(",", ":")).encode()


def note_of(value: bytes) -> Note:
    """Whatever else somebody put there, its key still stands in line: as a holder nobody knows."""
    try:
        found: dict[str, Any] = json.loads(value)
        label, host, pid, purpose = found["holder"]
        holder = Holder(str(label), str(host), int(pid), str(purpose))
        state: State = found["state"] if found["state"] in _STATES else "held"
        mark, delay, at = str(found["mark"]), float(found["delay"]), float(found["at"])
        return Note(mark, state, int(found["base"]), delay, holder, at, float(found.get("rest", 0.0)))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return Note("", "held", 0, 0.0, Holder("?"), 0.0)


class Seen(NamedTuple):
    """A key of the line, read."""

    key: bytes
    namespace: str
    name: str
    kind: Kind
    limit: int
    mode: Mode
    created: int
    lease: int
    note: Note

    @property
    def token(self) -> int:
        return self.note.base + self.created


def seen(root: str, kv: KeyValue) -> Seen | None:
    """None: not one of ours."""
    try:
        path, kind, mode, _ = kv.key.decode()[len(root) + 2 :].split("/")
        namespace, name = path.split(":")
        limit = 1 if kind == "l" else int(kind.removeprefix("s"))
        if limit < 1:
            return None
        where = decode(namespace), decode(name)
        shape: Kind = "lock" if kind == "l" else "semaphore"
        return Seen(kv.key, *where, shape, limit, _MODES[mode], kv.create_revision, kv.lease, note_of(kv.value))
    except (ValueError, KeyError):
        return None


def after(prefix: bytes) -> bytes:
    """The end of the range of all keys that begin so."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def root(prefix: str) -> str:
    """What every key begins with."""
    return f"{prefix}/{FORMAT}/" if prefix else f"{FORMAT}/"


def names(root: str, namespace: str, prefix: str, exact: bool) -> bytes:
    """What the keys of these names begin with."""
    return f"{root}q/{encode(namespace)}:{encode(prefix)}{'/' if exact else ''}".encode()


class Spot(NamedTuple):
    """Where a claim stands, or would."""

    root: str
    prefix: bytes
    key: bytes
    before: bytes  # the range of keys that it cannot stand beside, so far as they come before it
    limit: int  # of that many
    others: tuple[tuple[bytes, bytes], ...]  # where keys of other kinds would be

    @property
    def base(self) -> bytes:
        return base_key(self.root)

    @property
    def alone(self) -> bool:
        """It stands beside nothing, not even its like."""
        return self.before == self.prefix


def base_key(root: str) -> bytes:
    return f"{root}base".encode()


def prefix_of(root: str, claim: Claim) -> bytes:
    return f"{root}q/{key(claim.namespace, claim.name)}/".encode()


def spot(root: str, claim: Claim, chair: str) -> Spot:
    prefix = prefix_of(root, claim)
    if claim.kind == "lock":
        shared = claim.mode == "shared"
        own = prefix + (b"l/r/" if shared else b"l/x/") + chair.encode()
        return Spot(root, prefix, own, prefix + b"l/x/" if shared else prefix, 1, ((prefix + b"s", prefix + b"t"),))
    kind = prefix + b"s%d/" % claim.limit
    others = ((prefix, kind), (after(kind), after(prefix)))
    return Spot(root, prefix, kind + b"s/" + chair.encode(), kind + b"s/", claim.limit, others)


# -------------------------------------------------------------- what is asked


class Look(NamedTuple):
    """What a transaction read of a line."""

    revision: int
    own: KeyValue | None
    base: bytes
    front: Seen | None
    holders: tuple[KeyValue, ...]  # the front of the line, oldest first
    before: tuple[KeyValue, ...]  # what is in the way, newest first; at most one more than the limit
    line: tuple[KeyValue, ...]  # everything ahead, newest first; at most SHOWN


def entitled(spot: Spot, before: int) -> bool:
    return before < spot.limit


def _looks(spot: Spot, created: int) -> tuple[Op, ...]:
    """`created`: of its own key; what came later is not before it. 0: it has none yet."""
    most, newest = created - 1 if created else 0, {"sort_order": wire.DESCENDING, "sort_target": wire.BY_CREATION}
    return (
        Op(Range(spot.key)),
        Op(Range(spot.base)),
        _oldest(spot),
        Op(Range(spot.before, after(spot.before), spot.limit + 1, **newest, keys_only=1, max_create_revision=most)),
        Op(Range(spot.prefix, after(spot.prefix), SHOWN, **newest, keys_only=1, max_create_revision=most)),
    )


def _oldest(spot: Spot) -> Op:
    whole = Range(spot.prefix, after(spot.prefix), HOLDERS, sort_order=wire.ASCENDING, sort_target=wire.BY_CREATION)
    return Op(whole)


def look(spot: Spot, created: int) -> Txn:
    return Txn((), _looks(spot, created))


def enter(spot: Spot, value: bytes, lease: int, base: bytes) -> Txn:
    """Stand in line, whatever is there. What is in the way is read before the key is put: it never finds itself. All
    who may hold are read, not the first alone: any of them may vanish, with its delay, before the next look."""
    newest = {"sort_order": wire.DESCENDING, "sort_target": wire.BY_CREATION}
    before = Range(spot.before, after(spot.before), spot.limit + 1, **newest, keys_only=1)
    return Txn(
        (_absent(spot.key), _same(spot.base, base), *_none(spot.others)),
        (Op(before), _oldest(spot), Op(put=Put(spot.key, value, lease))),
    )


def grab(spot: Spot, value: bytes, lease: int, base: bytes, looked: int) -> Txn:
    """Take it if it is free, and leave nothing if it is not. A permit among others is taken if nobody has come since
    the line was looked at, at revision `looked`; 0: if there is nobody."""
    free = _older(spot.before, looked + 1) if looked else _none(((spot.before, after(spot.before)),))[0]
    alone = () if spot.alone else (_absent(spot.key), *_none(spot.others))
    return Txn((free, _same(spot.base, base), *alone), (Op(put=Put(spot.key, value, lease)),), _looks(spot, 0))


def claim_turn(spot: Spot, created: int, value: bytes, lease: int, base: bytes, checked: bool) -> Txn:
    """Make a place in line a grant: a new note, on a lease of the holder's ttl. `checked`: it is entitled, by an
    earlier look; else that is compared in this very step, which only one that stands alone can do."""
    alone = (
        () if checked else (Compare(wire.GREATER, wire.CREATE, spot.prefix, created - 1, range_end=after(spot.prefix)),)
    )
    return Txn(
        (_created(spot.key, created), _same(spot.base, base), *alone),
        (Op(put=Put(spot.key, value, lease)),),
        _looks(spot, created),
    )


def move(spot: Spot, created: int, value: bytes, lease: int) -> Txn:
    """Hang it on another lease, with another note. The line is looked at in either case."""
    looks = _looks(spot, created)
    return Txn((_created(spot.key, created),), (*looks, Op(put=Put(spot.key, value, lease))), looks)


def hang(seen: Seen, lease: int) -> Txn:
    """Hang a grant on another lease as it is."""
    return Txn((_created(seen.key, seen.created),), (Op(put=Put(seen.key, seen.note.to_bytes(), lease)),))


def leave(spot: Spot, created: int) -> Txn:
    """Give the place up. It names the creation it means: the chair may be another claim's when this arrives."""
    return Txn((_created(spot.key, created),), (Op(delete=wire.Delete(spot.key)),))


def change(kv: KeyValue, to: Op) -> Txn:
    """Do this to a key if it is still what was read."""
    return Txn((Compare(wire.EQUAL, wire.MOD, kv.key, mod_revision=kv.mod_revision),), (to,))


def _absent(key: bytes) -> Compare:
    return Compare(wire.EQUAL, wire.CREATE, key)


def _created(key: bytes, created: int) -> Compare:
    return Compare(wire.EQUAL, wire.CREATE, key, created)


def _same(key: bytes, value: bytes) -> Compare:
    return Compare(wire.EQUAL, wire.VALUE, key, value=value)


def _none(ranges: tuple[tuple[bytes, bytes], ...]) -> tuple[Compare, ...]:
    """All keys of a range were created at 0: there are none."""
    return tuple(Compare(wire.EQUAL, wire.CREATE, begin, range_end=end) for begin, end in ranges)


def _older(prefix: bytes, revision: int) -> Compare:
    return Compare(wire.LESS, wire.CREATE, prefix, revision, range_end=after(prefix))


# ----------------------------------------------------------- what is answered


def revision(done: TxnDone) -> int:
    if done.header is None or done.header.revision <= 0:
        raise Malformed("a transaction at no revision")
    return done.header.revision


class Entered(NamedTuple):
    """What a key just put found there."""

    before: tuple[KeyValue, ...]  # what is in its way
    total: int  # how many that are in all
    holders: tuple[KeyValue, ...]  # the front of the line, oldest first


def entered(spot: Spot, done: TxnDone) -> Entered | None:
    """None: it was not put."""
    if not done.succeeded:
        return None
    if len(done.responses) != 3 or done.responses[2].put is None:
        raise Malformed("not what a place in line is answered with")
    before, found = _kvs(done, 0, spot.before), done.responses[0].range
    if found is None or found.total < len(before) or bool(found.total) != bool(before):
        raise Malformed("a count that does not fit")
    return Entered(before, found.total, _kvs(done, 1, spot.prefix))


def was_put(done: TxnDone) -> bool:
    if done.succeeded and (len(done.responses) != 1 or done.responses[0].put is None):
        raise Malformed("not what a write is answered with")
    return bool(done.succeeded)


def looked(spot: Spot, done: TxnDone) -> Look:
    if len(done.responses) < 5:
        raise Malformed(f"{len(done.responses)} answers instead of five")
    own, base = _kvs(done, 0, spot.key), _kvs(done, 1, spot.base)
    oldest = _kvs(done, 2, spot.prefix)
    return Look(
        revision(done),
        own[0] if own else None,
        base[0].value if base else b"",
        seen(spot.root, oldest[0]) if oldest else None,
        oldest,
        _kvs(done, 3, spot.before),
        _kvs(done, 4, spot.prefix),
    )


def _kvs(done: TxnDone, place: int, prefix: bytes) -> tuple[KeyValue, ...]:
    found: Ranged | None = done.responses[place].range
    if found is None or not all(kv.key.startswith(prefix) and kv.create_revision > 0 for kv in found.kvs):
        raise Malformed("not the keys that were asked for")
    return found.kvs


def ahead(spot: Spot, created: int, holders: tuple[KeyValue, ...]) -> list[Seen]:
    """Those among them that came before, and cannot be stood beside."""
    found = [kv for kv in holders if kv.create_revision < created and kv.key.startswith(spot.before)]
    return [it for kv in found if (it := seen(spot.root, kv)) is not None]


def place(spot: Spot, line: tuple[KeyValue, ...]) -> int | None:
    """How many wait ahead, the holders not counted; None: the line is too long to say."""
    if len(line) >= SHOWN:
        return None
    reading = 0
    for kv in reversed(line):
        if b"/l/r/" not in kv.key[len(spot.prefix) - 1 :]:
            break
        reading += 1
    holders = max(reading, 1) if spot.limit == 1 else spot.limit
    return max(0, len(line) - holders)


def holds(it: Seen, earlier: list[Seen]) -> bool:
    """The rule of `entitled`, for whoever looks on."""
    if it.kind == "semaphore":
        return len(earlier) < it.limit
    return all(it.mode == "shared" and other.mode == "shared" for other in earlier)
