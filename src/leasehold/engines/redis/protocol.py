"""Encodes requests as bytes, and decodes replies.

The requests of a lock differ only in the claim's id hash. So the bytes before and after the id hash are encoded once
and cached. Times are sent as whole microseconds, id hashes as their 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

from leasehold.core.lock_state import LockState, mismatch
from leasehold.core.names import FORMAT, bucket, decode, encode
from leasehold.core.queue_entry import COOLING, HELD, STATES, WAITING, QueueEntry
from leasehold.engines.redis.scripts import MICROS, PubSubCommands, Script, load
from leasehold.engines.redis.server import encode_command
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Kind, fast_tuple

_MAX_CACHED_ARGUMENTS: Final = 4096  # encoded argument lists
_MAX_CACHED_HOLDER: Final = 4096  # bytes: a hostile server, or a client with another program, may send megabytes
MAX_CACHED_NAMES: Final = 16_384  # about 450 bytes each: a client may hold ten thousand names
_MAX_MICROS: Final = 100 * 365 * 86_400 * MICROS  # a century: a double still holds sums of such times exactly
_ID_HASH_HEADER: Final = b"$16\r\n"


class NameKeys(NamedTuple):
    """The encoded keys of a name. `tag` is their hash tag, with its braces."""

    tag: str
    encoded: bytes


def lock_keys(namespace: str, name: str) -> tuple[str, str, str, str]:
    """Counter, name, queue, waiters, as `lock_state.lua` calls them."""
    counter = f"{FORMAT}:{{{encode(namespace)}:{bucket(name)}}}"
    key = f"{counter}:{encode(name)}"
    return counter, key, f"{key}:q", f"{key}:w"


def encode_keys(namespace: str, name: str, with_missing_key: bool = False) -> NameKeys:
    """Keys are ASCII, so their length in bytes is their length in characters."""
    all_keys: tuple[str, ...] = lock_keys(namespace, name)
    if with_missing_key:
        all_keys += (f"{all_keys[0]}:",)
    text = "".join([f"${len(key)}\r\n{key}\r\n" for key in (str(len(all_keys)), *all_keys)])
    return NameKeys(all_keys[0][len(FORMAT) + 1 :], text.encode())


def scan_pattern(namespace: str, prefix: str) -> str:
    """The MATCH pattern for SCAN. Encoded names contain no character that is special in patterns."""
    return f"{FORMAT}:{{{encode(namespace)}:*}}:{encode(prefix)}*"


def parse_key(key: str) -> tuple[str, str] | None:
    """The namespace and name of a NAME key; None for any other key."""
    parts = key.split(":")
    if len(parts) != 4 or parts[0] != FORMAT or not parts[1].startswith("{"):
        return None
    try:
        return decode(parts[1][1:]), decode(parts[3])
    except ValueError:
        return None


def encode_attempt_arguments(claim: Claim, client: str) -> tuple[bytes, bytes]:
    """The encoded arguments after the id hash: for an attempt without `queue`, and for one with it."""
    semaphore_limit = claim.limit if claim.kind == "semaphore" else 0
    shared, delay = int(claim.mode == "shared"), to_micros(claim.delay)
    fields = (HELD, shared, delay, 0 if semaphore_limit else -1, 0, 0, client, encode_holder(claim.holder))
    packed_grant = b"".join([encode_msgpack(field) for field in fields])
    min_hold = (to_micros(claim.min_hold),) if claim.min_hold > 0 else ()
    without_queue, with_queue = (
        b"\r\n" + encode_arguments(to_micros(claim.ttl), delay, queue, semaphore_limit, packed_grant, *min_hold)
        for queue in (0, 1)
    )
    return without_queue, with_queue


class RedisRequests:
    """The encoded requests of one engine instance."""

    def __init__(self, pubsub_commands: PubSubCommands, client: str) -> None:
        names = ("attempt", "renew", "release", "decline", "break", "set_limit", "inspect")
        self.scripts = RedisScripts(*(load(name, pubsub_commands) for name in names))
        self._pubsub_commands = pubsub_commands
        self.set_client(client)

    def set_client(self, client: str) -> None:
        """Use this client id from now on: it is new after a fork."""
        self._client = client
        self._cached_keys: dict[tuple[str, ...], NameKeys] = {}
        self._cached_arguments: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}
        self._last_arguments: tuple[tuple[Any, ...], tuple[bytes, bytes]] = ((), (b"", b""))
        scripts = self.scripts
        self._attempt_prefix = self._encode_prefix(scripts.attempt, 6)
        self._release_prefix = self._encode_prefix(scripts.release, 1)
        self._renew_prefix = self._encode_prefix(scripts.renew, 3)

    def _encode_prefix(self, script: Script, arguments: int) -> bytes:
        return encode_prefix(script, arguments, 4 + self._pubsub_commands.by_bucket)

    def name_keys(self, namespace: str, name: str) -> NameKeys:
        """In a cluster there is one more key, which never exists. While a hash slot moves, a server refuses a script if
        any of its keys is missing. Without that key a script would run while its keys exist, and be aborted halfway at
        the first one that does not."""
        cache_key = (namespace, name)
        keys = self._cached_keys.get(cache_key)
        if keys is None:
            keys = encode_keys(namespace, name, self._pubsub_commands.by_bucket)
            if len(self._cached_keys) >= MAX_CACHED_NAMES:
                self._cached_keys.clear()
            self._cached_keys[cache_key] = keys
        return keys

    def _lookup_arguments(self, key: tuple[Any, ...], claim: Claim) -> tuple[bytes, bytes]:
        arguments = self._cached_arguments.get(key)
        if arguments is None:
            arguments = encode_attempt_arguments(claim, self._client)
            if len(self._cached_arguments) >= _MAX_CACHED_ARGUMENTS:
                self._cached_arguments.clear()
            self._cached_arguments[key] = arguments
        self._last_arguments = (key, arguments)
        return arguments

    def attempt(self, keys: NameKeys, claim: Claim) -> bytes:
        last_arguments, key = self._last_arguments, claim[4:11]  # comparing takes a third of the time of a look-up
        arguments = last_arguments[1] if last_arguments[0] == key else self._lookup_arguments(key, claim)
        prefix = self._encode_prefix(self.scripts.attempt, 7) if claim.min_hold > 0 else self._attempt_prefix
        return b"".join((prefix, keys.encoded, _ID_HASH_HEADER, bytes.fromhex(claim.id_hash), arguments[claim.queue]))

    def release(self, keys: NameKeys, claim: Claim) -> bytes:
        id_hash = bytes.fromhex(claim.id_hash)
        if claim.id and claim.min_hold >= 0:
            return b"".join((self._release_prefix, keys.encoded, _ID_HASH_HEADER, id_hash, b"\r\n"))
        held = int(bool(claim.id))  # 0: does not end a grant
        return (
            self._encode_prefix(self.scripts.release, 3)
            + keys.encoded
            + encode_arguments(id_hash, int(claim.min_hold >= 0), held)
        )

    def renew(self, keys: NameKeys, claims: Sequence[Claim]) -> bytes:
        parts = [
            self._renew_prefix if len(claims) == 1 else self._encode_prefix(self.scripts.renew, 3 * len(claims)),
            keys.encoded,
        ]
        for claim in claims:
            token, ttl = b"%d" % claim.token, b"%d" % to_micros(claim.ttl)
            fields = (bytes.fromhex(claim.id_hash), len(token), token, len(ttl), ttl)
            parts.append(b"$16\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % fields)
        return b"".join(parts)

    def decline(self, keys: NameKeys, claim: Claim) -> bytes:
        arguments = encode_arguments(bytes.fromhex(claim.id_hash), self._client)
        return self._encode_prefix(self.scripts.decline, 2) + keys.encoded + arguments

    def break_(self, keys: NameKeys, token: int) -> bytes:
        return self._encode_prefix(self.scripts.break_, 1) + keys.encoded + encode_arguments(token)

    def set_limit(self, keys: NameKeys, limit: int | None) -> bytes:
        return self._encode_prefix(self.scripts.set_limit, 1) + keys.encoded + encode_arguments(limit or 0)

    def inspect(self, keys: NameKeys) -> bytes:
        return self._encode_prefix(self.scripts.inspect, 0) + keys.encoded


class RedisScripts(NamedTuple):
    attempt: Script
    renew: Script
    release: Script
    decline: Script
    break_: Script
    set_limit: Script
    inspect: Script


def as_eval(script: Script, packed: bytes) -> bytes:
    """The same request with the script's text, for a server that does not know the script: EVAL also stores it."""
    return packed.replace(_encode_evalsha(script), b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(script.text), script.text), 1)


def _encode_evalsha(script: Script) -> bytes:
    return b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % script.sha


def encode_prefix(script: Script, arguments: int, key_count: int = 4) -> bytes:
    """The request up to the number of keys."""
    return b"*%d\r\n%b" % (3 + key_count + arguments, _encode_evalsha(script))


def encode_arguments(*values: bytes | str | int) -> bytes:
    return encode_command(*values).partition(b"\r\n")[2]


def to_micros(seconds: float) -> int:
    return min(round(seconds * MICROS), _MAX_MICROS)


def encode_msgpack(value: int | str) -> bytes:
    """MessagePack as the scripts write it, for the types needed here."""
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xda" + len(raw).to_bytes(2)) + raw
    if value < 128:
        return value.to_bytes(1, signed=True)
    return b"\xcf" + value.to_bytes(8)


def encode_holder(holder: Holder) -> str:
    """Display only. The default label is left out: it is made of host and pid."""
    fields = (holder.host, str(holder.pid), holder.purpose)
    return "\0".join(fields if holder.label == f"{holder.host}:{holder.pid}" else (holder.label, *fields))


def decode_holder(raw: bytes) -> Holder:
    return _decode_holder(raw) if len(raw) <= _MAX_CACHED_HOLDER else _decode_holder.__wrapped__(raw)


@lru_cache(256)  # in a queue the same clients hold the name again and again
def _decode_holder(raw: bytes) -> Holder:
    try:
        *label, host, pid, purpose = raw.decode().split("\0")
        return Holder(label[0] if label else f"{host}:{pid}", host, int(pid), purpose)
    except ValueError as bad:
        raise unexpected_reply() from bad


# -------------------------------------------------------------- replies


def unexpected_reply() -> Unavailable:
    return Unavailable("unexpected reply to a Leasehold script; is this a Redis server?", engine="redis")


def decode_attempt(claim: Claim, reply: Any) -> Grant | Busy:
    if reply.__class__ is list and len(reply) == 3:  # the usual reply; `match` takes five times as long
        token, life, slot = reply
        if token.__class__ is life.__class__ is slot.__class__ is int and token > 0:
            return fast_tuple(Grant, (token, life / MICROS, None if slot < 0 else slot))
    match reply:
        case [0, int(left), int(raw_position), int(token), bytes(holder), int()]:
            position = None if raw_position < 0 else raw_position
            if left < 0:
                return Busy(None, position)
            return Busy(left / MICROS, position, token, decode_holder(holder))
        case [-1, int(semaphore_limit)]:
            found: Kind = "semaphore" if semaphore_limit else "lock"
            raise mismatch(claim.name, claim.kind, claim.limit, found, semaphore_limit)
    raise unexpected_reply()


def not_subscribed(reply: Any) -> bool:
    """Whether this is a busy reply that says that the client's channel has no subscriber."""
    return len(reply) == 6 and reply[5] == 0


def must_recheck(reply: Any) -> bool:
    """Whether this is a busy reply to a claim that has to be attempted again soon, even without a notification."""
    return len(reply) == 6 and reply[5] == 2


def decode_bool(reply: Any) -> bool:
    if reply not in (0, 1):
        raise unexpected_reply()
    return bool(reply)


def decode_renewals(claims: Sequence[Claim], reply: Any) -> list[Alive | Gone]:
    """One answer per claim, in the same order."""
    if reply.__class__ is list and len(claims) == 1 and len(reply) == 2:  # the usual reply
        life, position = reply
        if life.__class__ is position.__class__ is int and life >= 0:
            return [fast_tuple(Alive, (life / MICROS, None if position < 0 else position))]
    if not isinstance(reply, list) or len(reply) != 2 * len(claims) or not all(type(number) is int for number in reply):
        raise unexpected_reply()
    answers: list[Alive | Gone] = []
    for life, position in zip(reply[::2], reply[1::2], strict=True):
        if life < 0:
            answers.append(Gone("expired" if life == -2 else "unknown"))
        else:
            answers.append(Alive(life / MICROS, None if position < 0 else position))
    return answers


def decode_scan(reply: Any) -> tuple[bytes, list[tuple[str, str]]]:
    """The next cursor, and the names found."""
    match reply:
        case [bytes(cursor), list(keys)] if all(type(key) is bytes for key in keys):
            return cursor, [name_id for key in keys if (name_id := parse_key(key.decode(errors="replace"))) is not None]
    raise unexpected_reply()


def decode_holdings(namespace: str, name: str, reply: Any) -> list[Holding]:
    """Entries that have expired by the server's clock are left out, as `core/lock_state.py` decides."""
    match reply:
        case [int()]:
            return []
        case [int(now), int(semaphore_limit), *packed_entries]:
            lock_state = LockState(now / MICROS, "semaphore" if semaphore_limit else "lock", semaphore_limit or 1)
        case _:
            raise unexpected_reply()
    lock_state._next_expiry = 0.0
    for packed_entry in packed_entries:
        entry = _decode_entry(packed_entry)
        if entry.token:
            lock_state.holders[entry.token] = entry
        if entry.state != COOLING:
            lock_state.entries[entry.id_hash] = entry
        if entry.state == WAITING:
            lock_state.waiters.append((entry.ticket, entry))
    lock_state.waiters.sort(key=lambda entry: entry[0])
    lock_state.expire(now / MICROS)
    return list(lock_state.holdings(namespace, name, now / MICROS))


def _decode_entry(packed_entry: Any) -> QueueEntry:
    match packed_entry:
        case [
            bytes(id_hash),
            int(token),
            int(expires_at),
            int(since),
            int(state),
            int(shared),
            int(delay),
            int(slot),
            int(ticket),
            int(heartbeat_expires_at),
            bytes(client),
            bytes(holder),
            *_,
        ] if 0 <= state < len(STATES):
            return QueueEntry(
                id_hash=id_hash.hex(),
                client=client.decode(errors="replace"),
                holder=decode_holder(holder),
                mode="shared" if shared else "exclusive",
                delay=delay / MICROS,
                ticket=ticket,
                since=since / MICROS,
                heartbeat_expires_at=heartbeat_expires_at / MICROS,
                state=state,
                expires_at=expires_at / MICROS,
                token=token,
                slot=None if slot < 0 else slot,
            )
    raise unexpected_reply()
