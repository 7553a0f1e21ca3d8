"""Encodes requests, and decodes the replies of a node. Every node gets the same request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from leasehold.core.queue_entry import HELD
from leasehold.engines.redis.protocol import (
    MAX_CACHED_NAMES,
    NameKeys,
    decode_holder,
    encode_arguments,
    encode_holder,
    encode_keys,
    encode_msgpack,
    encode_prefix,
    to_micros,
    unexpected_reply,
)
from leasehold.engines.redis.scripts import MICROS, PubSubCommands, Script, load
from leasehold.errors import Mismatch
from leasehold.model import Claim, Holder

_HERE: Final = Path(__file__).parent
_MAX_CACHED: Final = 4096  # encoded argument lists


class RedlockScripts(NamedTuple):
    attempt: Script
    confirm: Script
    renew: Script
    rejoin: Script
    release: Script
    break_: Script
    decline: Script
    inspect: Script


class RedlockRequests:
    """The encoded requests of one engine instance."""

    def __init__(self, client: str) -> None:
        own_scripts = [
            load(script_name, PubSubCommands(), _HERE)
            for script_name in ("attempt", "confirm", "renew", "rejoin", "release", "break")
        ]
        self.scripts = RedlockScripts._make(
            [*own_scripts, *(load(shared, PubSubCommands()) for shared in ("decline", "inspect"))]
        )
        self.set_client(client)

    def set_client(self, client: str) -> None:
        """Use this client id from now on: it is new after a fork."""
        self._client = client
        self._cached_keys: dict[tuple[str, str], NameKeys] = {}
        self._cached_arguments: dict[tuple[Any, ...], bytes] = {}
        self._attempt_prefix, self._release_prefix = (
            encode_prefix(self.scripts.attempt, 7),
            encode_prefix(self.scripts.release, 1),
        )

    def name_keys(self, namespace: str, name: str) -> NameKeys:
        keys = self._cached_keys.get((namespace, name))
        if keys is None:
            if len(self._cached_keys) >= MAX_CACHED_NAMES:
                self._cached_keys.clear()
            keys = self._cached_keys[(namespace, name)] = encode_keys(namespace, name)
        return keys

    def _encoded_arguments(self, claim: Claim) -> bytes:
        """The encoded arguments after id hash, number and ticket: the same for all claims of a lock."""
        cache_key = (claim.holder, claim.ttl, claim.delay, claim.min_hold, claim.queue)
        arguments = self._cached_arguments.get(cache_key)
        if arguments is None:
            delay, min_hold = to_micros(claim.delay), (to_micros(claim.min_hold),) if claim.min_hold > 0 else ()
            fields = (HELD, 0, delay, -1, 0, 0, self._client, encode_holder(claim.holder))
            packed_grant = b"".join([encode_msgpack(field) for field in fields])
            if len(self._cached_arguments) >= _MAX_CACHED:
                self._cached_arguments.clear()
            arguments = self._cached_arguments[cache_key] = encode_arguments(
                to_micros(claim.ttl), delay, int(claim.queue), packed_grant, *min_hold
            )
        return arguments

    def attempt(self, keys: NameKeys, claim: Claim, number: int, ticket: int) -> bytes:
        number_text, ticket_text = b"%d" % number, b"%d" % ticket
        values = (bytes.fromhex(claim.id_hash), len(number_text), number_text, len(ticket_text), ticket_text)
        arguments = b"$16\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % values
        prefix = self._attempt_prefix if claim.min_hold <= 0 else encode_prefix(self.scripts.attempt, 8)
        return b"".join((prefix, keys.encoded, arguments, self._encoded_arguments(claim)))

    def confirm(self, keys: NameKeys, claim: Claim, token: int, number: int) -> bytes:
        return (
            encode_prefix(self.scripts.confirm, 3)
            + keys.encoded
            + encode_arguments(bytes.fromhex(claim.id_hash), token, number)
        )

    def renew(self, keys: NameKeys, claims: Sequence[Claim], number: int) -> bytes:
        values = [
            value for claim in claims for value in (bytes.fromhex(claim.id_hash), claim.token, to_micros(claim.ttl))
        ]
        return encode_prefix(self.scripts.renew, 1 + len(values)) + keys.encoded + encode_arguments(number, *values)

    def rejoin(self, keys: NameKeys, claim: Claim, number: int, valid_until: int = 0) -> bytes:
        arguments = encode_arguments(bytes.fromhex(claim.id_hash), number, claim.token, valid_until)
        count = 9 if claim.min_hold > 0 else 8
        return encode_prefix(self.scripts.rejoin, count) + keys.encoded + arguments + self._encoded_arguments(claim)

    def release(self, keys: NameKeys, claim: Claim) -> bytes:
        if claim.id and claim.min_hold >= 0:
            return b"%b%b$16\r\n%b\r\n" % (self._release_prefix, keys.encoded, bytes.fromhex(claim.id_hash))
        return self._full_release(keys, claim, int(claim.min_hold >= 0), int(bool(claim.id)), 0, 0)

    def undo_attempt(self, keys: NameKeys, claim: Claim, number: int, ticket: int = 0) -> bytes:
        """Release what the request with this number got, but not what a later request or another client got; with a
        ticket, requeue."""
        return self._full_release(keys, claim, 0, 1, number, ticket)

    def _full_release(self, keys: NameKeys, claim: Claim, *values: int) -> bytes:
        return (
            encode_prefix(self.scripts.release, 6)
            + keys.encoded
            + encode_arguments(bytes.fromhex(claim.id_hash), *values, self._client)
        )

    def decline(self, keys: NameKeys, claim: Claim) -> bytes:
        arguments = encode_arguments(bytes.fromhex(claim.id_hash), self._client)
        return encode_prefix(self.scripts.decline, 2) + keys.encoded + arguments

    def break_(self, keys: NameKeys, token: int, id_hash: bytes = b"") -> bytes:
        return encode_prefix(self.scripts.break_, 2) + keys.encoded + encode_arguments(token, id_hash)

    def inspect(self, keys: NameKeys) -> bytes:
        return encode_prefix(self.scripts.inspect, 0) + keys.encoded


# -------------------------------------------------------------- replies


class NodeGrant(NamedTuple):
    """A node's vote for the claim."""

    token: int
    life: float


class NodeBusy(NamedTuple):
    """The node votes for another claim."""

    left: float | None
    position: int | None
    token: int
    holder: Holder | None
    subscribed: bool  # the client's channel has a subscriber on the node
    last_ticket: int  # the highest ticket in the node's queue


class NodeRenewal(NamedTuple):
    life: float | None  # None: the node does not have the claim
    position: int | None
    expired: bool


def decode_attempt(claim: Claim, reply: Any) -> NodeGrant | NodeBusy:
    if reply.__class__ is list and len(reply) == 2:  # the usual reply; `match` takes five times as long
        token, life = reply
        if token.__class__ is life.__class__ is int and token > 0:
            return NodeGrant(token, life / MICROS)
    match reply:
        case [0, int(left), int(raw_position), int(token), bytes(holder), int(subscribed), int(last_ticket)]:
            position = None if raw_position < 0 else raw_position
            if left < 0:
                return NodeBusy(None, position, 0, None, subscribed > 0, last_ticket)
            return NodeBusy(left / MICROS, position, token, decode_holder(holder), subscribed > 0, last_ticket)
        case [-1, int(semaphore_limit)]:
            raise Mismatch(claim.name, wanted="lock", found=f"semaphore of {semaphore_limit}")
    raise unexpected_reply()


def decode_renewals(count: int, reply: Any) -> tuple[list[NodeRenewal], int]:
    """One answer per claim, in the same order; and the node's clock."""
    if not isinstance(reply, list) or len(reply) != 2 * count + 1 or not all(type(number) is int for number in reply):
        raise unexpected_reply()
    pairs = zip(reply[:-1:2], reply[1::2], strict=True)
    renewals = [NodeRenewal(l / MICROS if l >= 0 else None, p if p >= 0 else None, l == -2) for l, p in pairs]  # noqa: E741
    return renewals, reply[-1]


def decode_release(reply: Any) -> int:
    if reply not in (0, 1, 2):
        raise unexpected_reply()
    return int(reply)


def decode_break(reply: Any) -> bytes:
    if not isinstance(reply, bytes):
        raise unexpected_reply()
    return reply
