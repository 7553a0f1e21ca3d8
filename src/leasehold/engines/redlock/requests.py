"""Requests to a node as bytes, and what its replies mean. The same request goes to every node."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from leasehold.core.party import HELD
from leasehold.engines.redis.requests import (
    KEPT_NAMES,
    Name,
    head,
    micros,
    nonsense,
    packed,
    packed_holder,
    packed_name,
    read_holder,
    words,
)
from leasehold.engines.redis.scripts import MICROS, Publishing, Script, load
from leasehold.errors import Mismatch
from leasehold.model import Claim, Holder

_HERE: Final = Path(__file__).parent
_KEPT: Final = 4096  # ways of asking that are kept packed


class Scripts(NamedTuple):
    attempt: Script
    confirm: Script
    renew: Script
    retake: Script
    release: Script
    break_: Script
    inspect: Script


class Requests:
    """Of one engine."""

    def __init__(self, client: str) -> None:
        own = [
            load(name, Publishing(), _HERE) for name in ("attempt", "confirm", "renew", "retake", "release", "break")
        ]
        self.scripts = Scripts._make([*own, load("inspect", Publishing())])
        self.moved(client)

    def moved(self, client: str) -> None:
        """The client has another address now: after a fork."""
        self._client = client
        self._names: dict[tuple[str, str], Name] = {}
        self._terms: dict[tuple[Any, ...], bytes] = {}
        self._attempt, self._release = head(self.scripts.attempt, 7), head(self.scripts.release, 1)

    def name(self, namespace: str, name: str) -> Name:
        found = self._names.get((namespace, name))
        if found is None:
            if len(self._names) >= KEPT_NAMES:
                self._names.clear()
            found = self._names[(namespace, name)] = packed_name(namespace, name)
        return found

    def _terms_of(self, claim: Claim) -> bytes:
        """What the claims of a lock say behind mark, number and ticket, packed."""
        key = (claim.holder, claim.ttl, claim.delay, claim.queue)
        found = self._terms.get(key)
        if found is None:
            delay = micros(claim.delay)
            facts = (HELD, 0, delay, -1, 0, 0, self._client, packed_holder(claim.holder))
            terms = b"".join([packed(fact) for fact in facts])
            if len(self._terms) >= _KEPT:
                self._terms.clear()
            found = self._terms[key] = words(micros(claim.ttl), delay, int(claim.queue), terms)
        return found

    def attempt(self, name: Name, claim: Claim, number: int, ticket: int) -> bytes:
        proposed, came = b"%d" % number, b"%d" % ticket
        facts = (bytes.fromhex(claim.mark), len(proposed), proposed, len(came), came)
        asked = b"$16\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % facts
        return b"".join((self._attempt, name.keys, asked, self._terms_of(claim)))

    def confirm(self, name: Name, claim: Claim, token: int, number: int) -> bytes:
        return head(self.scripts.confirm, 3) + name.keys + words(bytes.fromhex(claim.mark), token, number)

    def renew(self, name: Name, claims: Sequence[Claim], number: int) -> bytes:
        facts = [fact for each in claims for fact in (bytes.fromhex(each.mark), each.token, micros(each.ttl))]
        return head(self.scripts.renew, 1 + len(facts)) + name.keys + words(number, *facts)

    def retake(self, name: Name, claim: Claim, number: int, until: int = 0) -> bytes:
        facts = words(bytes.fromhex(claim.mark), number, claim.token, until)
        return head(self.scripts.retake, 8) + name.keys + facts + self._terms_of(claim)

    def release(self, name: Name, claim: Claim) -> bytes:
        if claim.id and not claim.min_hold:
            return b"%b%b$16\r\n%b\r\n" % (self._release, name.keys, bytes.fromhex(claim.mark))
        return self._giving(name, claim, micros(claim.min_hold), int(bool(claim.id)), 0, 0)

    def give_back(self, name: Name, claim: Claim, number: int, ticket: int = 0) -> bytes:
        """What the request of that number got, and no later one; with a ticket, back into line by it."""
        return self._giving(name, claim, 0, 1, number, ticket)

    def _giving(self, name: Name, claim: Claim, *facts: int) -> bytes:
        return head(self.scripts.release, 5) + name.keys + words(bytes.fromhex(claim.mark), *facts)

    def break_(self, name: Name, token: int, mark: bytes = b"") -> bytes:
        return head(self.scripts.break_, 2) + name.keys + words(token, mark)

    def inspect(self, name: Name) -> bytes:
        return head(self.scripts.inspect, 0) + name.keys


# -------------------------------------------------------------- replies


class Taken(NamedTuple):
    """A node's part of the name."""

    token: int
    life: float


class Refused(NamedTuple):
    """Somebody else has it there."""

    left: float | None
    place: int | None
    token: int
    holder: Holder | None
    heard: bool  # the node knows whom to wake
    last: int  # the highest ticket in its line


class Renewed(NamedTuple):
    life: float | None  # None: it is not there
    place: int | None
    lapsed: bool


def attempted(claim: Claim, reply: Any) -> Taken | Refused:
    if reply.__class__ is list and len(reply) == 2:  # the usual answer; a match would cost five times as much
        token, life = reply
        if token.__class__ is life.__class__ is int and token > 0:
            return Taken(token, life / MICROS)
    match reply:
        case [0, int(left), int(place), int(token), bytes(holder), int(heard), int(last)]:
            where = None if place < 0 else place
            if left < 0:
                return Refused(None, where, 0, None, heard > 0, last)
            return Refused(left / MICROS, where, token, read_holder(holder), heard > 0, last)
        case [-1, int(most)]:
            raise Mismatch(claim.name, wanted="lock", found=f"semaphore of {most}")
    raise nonsense()


def renewed(count: int, reply: Any) -> tuple[list[Renewed], int]:
    """For each claim, in turn; and the node's clock."""
    if not isinstance(reply, list) or len(reply) != 2 * count + 1 or not all(type(one) is int for one in reply):
        raise nonsense()
    pairs = zip(reply[:-1:2], reply[1::2], strict=True)
    found = [Renewed(l / MICROS if l >= 0 else None, p if p >= 0 else None, l == -2) for l, p in pairs]  # noqa: E741
    return found, reply[-1]


def ended(reply: Any) -> int:
    if reply not in (0, 1, 2):
        raise nonsense()
    return int(reply)


def broken(reply: Any) -> bytes:
    if not isinstance(reply, bytes):
        raise nonsense()
    return reply
