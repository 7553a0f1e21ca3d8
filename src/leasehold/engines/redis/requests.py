"""Requests as bytes, and what their replies mean.

A lock asks the same thing again and again; only the claim's mark is new each time. So what stands before and behind the
mark is packed once and kept. Times travel as whole microseconds, marks as their 16 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from leasehold.core.admission import Line, described
from leasehold.core.names import FORMAT, bucket, decode, encode
from leasehold.core.party import COOLING, HELD, WAITING, Party
from leasehold.engines.redis.scripts import MICROS, Publishing, Script, load
from leasehold.engines.redis.server import pack
from leasehold.errors import Mismatch, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding

_KEPT: Final = 4096  # ways of asking that are kept packed
KEPT_NAMES: Final = 16_384  # and names, about 450 bytes each: a client may well hold ten thousand
_LONGEST: Final = 100 * 365 * 86_400 * MICROS  # a century: sums of such times are still whole numbers of a double
_MARK: Final = b"$16\r\n"

_new = tuple.__new__  # what `Grant(...)` comes down to, without matching the arguments


class Name(NamedTuple):
    """The keys of a name, packed; `tag` is their hash tag, braces and all."""

    tag: str
    keys: bytes


def keys(namespace: str, name: str) -> tuple[str, str, str, str]:
    """Counter, name, queue, waiters: what `machine.lua` calls them."""
    counter = f"{FORMAT}:{{{encode(namespace)}:{bucket(name)}}}"
    key = f"{counter}:{encode(name)}"
    return counter, key, f"{key}:q", f"{key}:w"


def packed_name(namespace: str, name: str, guarded: bool = False) -> Name:
    """All is plain ASCII, a byte for each character."""
    known: tuple[str, ...] = keys(namespace, name)
    if guarded:
        known += (f"{known[0]}:",)
    text = "".join([f"${len(key)}\r\n{key}\r\n" for key in (str(len(known)), *known)])
    return Name(known[0][len(FORMAT) + 1 :], text.encode())


def pattern(namespace: str, prefix: str) -> str:
    """What SCAN is asked for: the encoding leaves no character that would mean something else there."""
    return f"{FORMAT}:{{{encode(namespace)}:*}}:{encode(prefix)}*"


def named(key: str) -> tuple[str, str] | None:
    """Namespace and name of a name's own key; None: of another key beside it, or not ours."""
    parts = key.split(":")
    if len(parts) != 4 or parts[0] != FORMAT or not parts[1].startswith("{"):
        return None
    try:
        return decode(parts[1][1:]), decode(parts[3])
    except ValueError:
        return None


def terms(claim: Claim, client: str) -> tuple[bytes, bytes]:
    """What the attempts of a lock say behind their mark, packed: one that tries, and one that joins the line."""
    most = claim.limit if claim.kind == "semaphore" else 0
    shared, delay = int(claim.mode == "shared"), micros(claim.delay)
    facts = (HELD, shared, delay, 0 if most else -1, 0, 0, client, packed_holder(claim.holder))
    grant = b"".join([packed(fact) for fact in facts])
    tries, queues = (b"\r\n" + words(micros(claim.ttl), delay, queue, most, grant) for queue in (0, 1))
    return tries, queues


class Requests:
    """Of one engine."""

    def __init__(self, publishing: Publishing, client: str) -> None:
        names = ("attempt", "renew", "release", "break", "inspect")
        self.scripts = Scripts(*(load(name, publishing) for name in names))
        self._publishing = publishing
        self.moved(client)

    def moved(self, client: str) -> None:
        """The client has another address now: after a fork."""
        self._client = client
        self._names: dict[tuple[str, ...], Name] = {}
        self._terms: dict[tuple[Any, ...], tuple[bytes, bytes]] = {}
        self._last: tuple[tuple[Any, ...], tuple[bytes, bytes]] = ((), (b"", b""))
        scripts = self.scripts
        self._attempt = self._head(scripts.attempt, 6)
        self._release = self._head(scripts.release, 1)
        self._renew = self._head(scripts.renew, 3)

    def _head(self, script: Script, arguments: int) -> bytes:
        return head(script, arguments, 4 + self._publishing.by_bucket)

    def name(self, namespace: str, name: str) -> Name:
        """In a cluster the keys have one more, which never exists: while a slot moves, a server refuses a script that
        does not find all its keys. Else it would run as long as it finds them, and end where it misses the first."""
        whose = (namespace, name)
        found = self._names.get(whose)
        if found is None:
            found = packed_name(namespace, name, self._publishing.by_bucket)
            if len(self._names) >= KEPT_NAMES:
                self._names.clear()
            self._names[whose] = found
        return found

    def _look_up(self, key: tuple[Any, ...], claim: Claim) -> tuple[bytes, bytes]:
        found = self._terms.get(key)
        if found is None:
            found = terms(claim, self._client)
            if len(self._terms) >= _KEPT:
                self._terms.clear()
            self._terms[key] = found
        self._last = (key, found)
        return found

    def attempt(self, name: Name, claim: Claim) -> bytes:
        last, key = self._last, claim[4:10]  # comparing with the one used last is a third of a look-up
        behind = last[1] if last[0] == key else self._look_up(key, claim)
        return b"".join((self._attempt, name.keys, _MARK, bytes.fromhex(claim.mark), behind[claim.queue]))

    def release(self, name: Name, claim: Claim) -> bytes:
        mark = bytes.fromhex(claim.mark)
        if claim.id and not claim.min_hold:
            return b"".join((self._release, name.keys, _MARK, mark, b"\r\n"))
        held = int(bool(claim.id))  # 0: it ends no grant
        return self._head(self.scripts.release, 3) + name.keys + words(mark, micros(claim.min_hold), held)

    def renew(self, name: Name, claims: Sequence[Claim]) -> bytes:
        parts = [self._renew if len(claims) == 1 else self._head(self.scripts.renew, 3 * len(claims)), name.keys]
        for each in claims:
            token, ttl = b"%d" % each.token, b"%d" % micros(each.ttl)
            facts = (bytes.fromhex(each.mark), len(token), token, len(ttl), ttl)
            parts.append(b"$16\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % facts)
        return b"".join(parts)

    def break_(self, name: Name, token: int) -> bytes:
        return self._head(self.scripts.break_, 1) + name.keys + words(token)

    def inspect(self, name: Name) -> bytes:
        return self._head(self.scripts.inspect, 0) + name.keys


class Scripts(NamedTuple):
    attempt: Script
    renew: Script
    release: Script
    break_: Script
    inspect: Script


def spelled_out(script: Script, packed: bytes) -> bytes:
    """The same request for a server that does not know the script, or forgot it: it learns it by this."""
    return packed.replace(_called(script), b"$4\r\nEVAL\r\n$%d\r\n%b\r\n" % (len(script.text), script.text), 1)


def _called(script: Script) -> bytes:
    return b"$7\r\nEVALSHA\r\n$40\r\n%b\r\n" % script.sha


def head(script: Script, arguments: int, keys: int = 4) -> bytes:
    """What stands before the keys and their number."""
    return b"*%d\r\n%b" % (3 + keys + arguments, _called(script))


def words(*facts: bytes | str | int) -> bytes:
    return pack(*facts).partition(b"\r\n")[2]


def micros(seconds: float) -> int:
    return min(round(seconds * MICROS), _LONGEST)


def packed(value: int | str) -> bytes:
    """As the scripts pack it (MessagePack), as far as it is needed."""
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xda" + len(raw).to_bytes(2)) + raw
    if value < 128:
        return value.to_bytes(1, signed=True)
    return b"\xcf" + value.to_bytes(8)


def packed_holder(holder: Holder) -> str:
    """For people, so short: the usual label is made of host and pid."""
    facts = (holder.host, str(holder.pid), holder.purpose)
    return "\0".join(facts if holder.label == f"{holder.host}:{holder.pid}" else (holder.label, *facts))


def read_holder(raw: bytes) -> Holder:
    try:
        *label, host, pid, purpose = raw.decode().split("\0")
        return Holder(label[0] if label else f"{host}:{pid}", host, int(pid), purpose)
    except ValueError as bad:
        raise nonsense() from bad


# -------------------------------------------------------------- replies


def nonsense() -> Unavailable:
    return Unavailable("the server answered what no script of Leasehold answers: is it Redis?", engine="redis")


def granted(claim: Claim, reply: Any) -> Grant | Busy:
    if reply.__class__ is list and len(reply) == 3:  # the usual answer; a match would cost five times as much
        token, life, slot = reply
        if token.__class__ is life.__class__ is slot.__class__ is int and token > 0:
            return _new(Grant, (token, life / MICROS, None if slot < 0 else slot))
    match reply:
        case [0, int(left), int(place), int(token), bytes(holder), int()]:
            where = None if place < 0 else place
            if left < 0:
                return Busy(None, where)
            return Busy(left / MICROS, where, token, read_holder(holder))
        case [-1, int(most)]:
            found = described("semaphore", most) if most else described("lock", 1)
            raise Mismatch(claim.name, wanted=described(claim.kind, claim.limit), found=found)
    raise nonsense()


def unheard(reply: Any) -> bool:
    """Busy, and the server knows nobody whom it could wake."""
    return len(reply) == 6 and reply[5] == 0


def yes(reply: Any) -> bool:
    if reply not in (0, 1):
        raise nonsense()
    return bool(reply)


def renewed(claims: Sequence[Claim], reply: Any) -> list[Alive | Gone]:
    """For each claim, in turn."""
    if reply.__class__ is list and len(claims) == 1 and len(reply) == 2:  # the usual answer
        life, place = reply
        if life.__class__ is place.__class__ is int and life >= 0:
            return [Alive(life / MICROS, None if place < 0 else place)]
    if not isinstance(reply, list) or len(reply) != 2 * len(claims) or not all(type(one) is int for one in reply):
        raise nonsense()
    answers: list[Alive | Gone] = []
    for life, place in zip(reply[::2], reply[1::2], strict=True):
        if life < 0:
            answers.append(Gone("lapsed" if life == -2 else "unknown"))
        else:
            answers.append(Alive(life / MICROS, None if place < 0 else place))
    return answers


def scanned(reply: Any) -> tuple[bytes, list[tuple[str, str]]]:
    """Where to go on, and the names found."""
    match reply:
        case [bytes(cursor), list(found)]:
            return cursor, [whose for key in found if (whose := named(key.decode(errors="replace"))) is not None]
    raise nonsense()


def holdings(namespace: str, name: str, reply: Any) -> list[Holding]:
    """Judged by the reference itself, at the server's own time."""
    try:
        now, *rest = reply
        if not rest:
            return []
        most, *parties = rest
        line = Line(now / MICROS, "semaphore" if most else "lock", most or 1)
        line._next_end = 0.0
        for each in parties:
            _enter(line, each)
    except (TypeError, ValueError, AttributeError) as bad:
        raise nonsense() from bad
    line.waiters.sort(key=lambda entry: entry[0])
    line.tidy(now / MICROS)
    return list(line.holdings(namespace, name, now / MICROS))


def _enter(line: Line, packed: Any) -> None:
    mark, token, till, since, state, shared, delay, slot, ticket, beat, client, holder, *_ = packed
    party = Party(
        mark=mark.hex(),
        client=client.decode(),
        holder=read_holder(holder),
        mode="shared" if shared else "exclusive",
        delay=delay / MICROS,
        ticket=ticket,
        since=since / MICROS,
        beat=beat / MICROS,
        state=state,
        until=till / MICROS,
        token=token,
        slot=None if slot < 0 else slot,
    )
    if token:
        line.occupiers[token] = party
    if state != COOLING:
        line.parties[party.mark] = party
    if state == WAITING:
        line.waiters.append((ticket, party))
