"""A lease as JSON: it leaves the process that acquired it, and any process that has the text may renew and release it.

The text contains the secret id. The engine makes this safe: it compares the hash of the id (E5, E6), so a document
renews and releases only the grant it was written for, however late.

A text of `hand_over` can be taken over once, however many processes have it. It names a *ticket*: a grant of its own,
on a name that no other claim uses. Taking over releases the ticket, and the engine answers True to one release of a
grant and no more (E6). If that answer is lost, no process goes on with the lease, and it expires.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from leasehold.client.acquire import without_min_hold
from leasehold.client.core import ClientCore
from leasehold.client.lease import RELEASED, BaseLease
from leasehold.config import check_limit, check_seconds, check_ttl
from leasehold.core import timing
from leasehold.core.names import FORMAT, MAX_NAME_BYTES, check_name, check_namespace, hash_id, make_claim_id
from leasehold.engines.base import Engine
from leasehold.errors import ConfigError, LeaseLost, Refused, Unavailable, Unsupported, for_caller
from leasehold.model import Alive, Claim, Gone, Grant, Holder, Kind, Mode

L = TypeVar("L", bound=BaseLease)

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "engine": str,
    "namespace": str,
    "name": str,
    "id": str,
    "token": int,
    "ttl": (int, float),
    "mode": str,
    "kind": str,
    "limit": int,
    "delay": (int, float),
    "min_hold": (int, float),
    "holder": str,
    "strict": bool,
}
# What the types do not say. The rest is checked as the options of a lock are.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "format": FORMAT.__eq__,
    "engine": lambda text: re.fullmatch(r"[a-z0-9+.-]{1,40}", text) is not None,
    "id": lambda text: re.fullmatch(r"[!-~]{1,200}", text) is not None,
    "token": lambda number: 0 <= number < 2**63,
    "mode": get_args(Mode).__contains__,
    "kind": get_args(Kind).__contains__,
    "holder": lambda text: len(text) <= 200 and text.isprintable(),
}


class Ticket(NamedTuple):
    """The right to take a lease over, which one process can use."""

    name: str
    id: str

    def __repr__(self) -> str:
        return f"<Ticket {self.name}>"  # the tuple's own repr would show the id


class Document(NamedTuple):
    """A document, checked."""

    claim: Claim
    engine: str  # its scheme
    slot: int | None
    max_hold: float | None  # seconds left of it when the document was written
    strict: bool
    ticket: Ticket | None  # None: written by `leasehold acquire`

    def claims(self) -> list[Claim]:
        """The lease, and its ticket if it has one: what a renewal or a release is about."""
        return [self.claim] if self.ticket is None else [self.claim, self.ticket_claim()]

    def ticket_claim(self) -> Claim:
        assert self.ticket is not None  # noqa: S101  # for the type checker
        claim = self.claim
        return Claim(
            claim.namespace, self.ticket.name, self.ticket.id, hash_id(self.ticket.id), claim.holder, claim.ttl
        )


def dump(lease: BaseLease, ticket: Ticket | None = None) -> dict[str, Any]:
    """All that another process needs to go on with this lease, including the secret id. It stays held here."""
    lease.check()
    claim, core = lease._claim_for_renewal(), lease._core
    max_hold = lease._max_hold_at - core.runtime.now()
    return {
        "format": FORMAT,
        "engine": core.engine_name,
        "namespace": claim.namespace,
        "name": claim.name,
        "id": claim.id,
        "token": claim.token,
        "slot": lease.slot,
        "ttl": claim.ttl,
        "mode": claim.mode,
        "kind": claim.kind,
        "limit": claim.limit,
        "delay": claim.delay,
        "min_hold": claim.min_hold,
        "max_hold": None if max_hold == timing.NEVER else round(max_hold, 3),
        "strict": lease._strict,
        "holder": claim.holder.label,
        "fingerprint": claim.fingerprint,
        "ticket": None if ticket is None else ticket._asdict(),
    }


def detach(lease: BaseLease) -> None:
    """Stop renewing it here, without a release: the grant lives on at the engine, and the object ends (`released`).

    Needs an engine with the trait `outlives`: build the lock with `require={"outlives"}`.
    """
    lease._core.watchdog.unwatch(lease._claim.id_hash)
    lease._invalidate("released")


def load(text: str) -> Document:
    """What a document says. Errors name the field, never its value: it may be the secret."""
    found = _parse_object(text)
    _check_fields(found)
    slot, max_hold = found.get("slot"), found.get("max_hold")
    if slot is not None and (isinstance(slot, bool) or not isinstance(slot, int)):
        raise _invalid("slot")
    claim = Claim(
        check_namespace(found["namespace"]),
        check_name(found["name"]),
        found["id"],
        hash_id(found["id"]),
        Holder(found["holder"]),
        float(found["ttl"]),
        found["mode"],
        found["kind"],
        found["limit"],
        float(found["delay"]),
        float(found["min_hold"]),
        token=found["token"],
    )
    max_hold = None if max_hold is None else check_seconds("max_hold", max_hold)
    return Document(claim, found["engine"], slot, max_hold, found["strict"], _ticket(found.get("ticket")))


def _parse_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(
            "this is not the JSON that `acquire` printed or hand_over() returned: pass it on unchanged"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError("a lease document must be one JSON object: pass on everything that was printed or returned")
    if isinstance(other := found.get("format"), str) and other != FORMAT and other.startswith("lh"):
        raise ConfigError(
            f"this lease document was written by a Leasehold with another format ({other[:10]!r}, this one reads "
            f"{FORMAT!r}): pass it to that version, or let the lease expire"
        )
    return found


def _check_fields(found: Mapping[str, Any]) -> None:
    """The fields that every document has."""
    for field, field_type in _FIELDS.items():
        is_bool = isinstance(found.get(field), bool)
        if not isinstance(found.get(field), field_type) or is_bool is not (field_type is bool):
            raise _invalid(field)
    for field, is_valid in _CHECKS.items():
        if not is_valid(found[field]):
            raise _invalid(field)
    check_ttl(found["ttl"], timing.NEVER)
    check_limit(found["limit"])
    check_seconds("delay", found["delay"])
    check_seconds("min_hold", found["min_hold"])


def _ticket(found: object) -> Ticket | None:
    if found is None:
        return None
    if not isinstance(found, dict) or not all(isinstance(found.get(field), str) for field in Ticket._fields):
        raise _invalid("ticket")
    if not _CHECKS["id"](found["id"]):
        raise _invalid("ticket")
    return Ticket(check_name(found["name"]), found["id"])


def _invalid(field: str) -> ConfigError:
    return ConfigError(f"this lease document has no valid {field!r}: pass on everything that was printed or returned")


async def hand_over(lease: BaseLease) -> str:
    """Write a document that one process can take over, and end the lease here without a release."""
    core, claim = lease._core, lease._claim
    lease.check()
    if not lease.guaranteed:
        raise lease._unguaranteed("there is nothing to hand over")
    if claim.process_bound:
        raise ConfigError(
            f"{lease.name} cannot be handed over, because its grant may end with this process: build the lock with "
            'require={"outlives"}; an engine that cannot do this refuses such a lock'
        )
    if lease._depth > 1:
        raise ConfigError(f"{lease.name} is entered {lease._depth} times: hand it over in the outermost block")
    runtime, engine = core.runtime, core.engine()
    secret, id_hash = make_claim_id(runtime.owner_id(), runtime.random_bytes(16).hex())
    ticket = Ticket(_ticket_name(claim.name, id_hash[:16]), secret)
    holder = claim.holder._replace(purpose=f"hand-over of {claim.name}"[:200])
    ticket_claim = Claim(claim.namespace, ticket.name, secret, id_hash, holder, claim.ttl)
    ended = False
    try:
        asked_at = runtime.now()
        reply = await engine.attempt(ticket_claim, timing.call_deadline(asked_at, core.options.call_timeout, claim.ttl))
        if not isinstance(reply, Grant):
            raise Unavailable(f"the ticket for {lease.name} was not granted", engine=core.engine_name)
        document = {**dump(lease, ticket), "left": round(lease.remaining, 3)}
        text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
        with core.mutex:
            lease.check()
            # In one step: without a call, Ctrl-C does not come between.
            lease._final_state, lease._release_started, ended = RELEASED, True, True
        lease._report_released("handed over")
        core.held_locks.mark_released(lease)
        return text
    except BaseException:
        engine.forget(ticket_claim)
        if ended:  # interrupted: no process gets the text, so none would ever release the lease
            engine.forget(claim)
        raise


def _ticket_name(name: str, unique: str) -> str:
    """Begins with the lease's name: a client that may lock all names with a prefix may also hand them over."""
    suffix = f" (hand-over {unique})"
    return name.encode()[: MAX_NAME_BYTES - len(suffix)].decode(errors="ignore") + suffix


async def take_over(core: ClientCore, lease_type: type[L], text: str) -> L:
    """Go on with the lease of a document: in this client, whose watchdog renews it from now on."""
    document = load(text)
    claim, traits = document.claim, core.traits
    _refuse_foreign(core, document)
    if not traits.outlives:
        raise Unsupported(
            f"{core.engine_name} cannot take over a lease: its grants die with their client",
            engine=core.engine_name,
            missing=("outlives",),
        )
    if core.registry.knows(claim.id_hash) or claim.id_hash in core.in_flight:
        raise ConfigError(f"this client has already taken over the lease of {claim.name}")
    check_ttl(claim.ttl, core.options.max_ttl)
    engine, id_hash, runtime = core.engine(), claim.id_hash, core.runtime
    try:
        core.in_flight.add(id_hash)
        asked_at, connection_epoch = runtime.now(), core.registry.connection_epoch  # before it is sent (E8)
        alive = await _renewed(core, engine, claim, claim.token)
        await _use_ticket(core, engine, document)
        life = min(alive.ttl, timing.granted_ttl(claim.ttl, traits.min_ttl, traits.ttl_step))
        valid_until = timing.trusted_until(asked_at, life, core.options.drift, document.strict)
        if runtime.now() >= valid_until:
            engine.forget(without_min_hold(claim))  # answered too late to be trusted
            raise LeaseLost(claim.name, reason="unreachable", token=claim.token)
        grant = Grant(claim.token, life, document.slot)
        lease = lease_type(core, claim, grant, asked_at, valid_until, document.max_hold, document.strict)
        try:
            core.register(lease, connection_epoch)
        except BaseException:  # the client was closed meanwhile: with the ticket used up, no other process can go on
            if document.ticket is not None:
                engine.forget(without_min_hold(claim))
            raise
    finally:
        core.in_flight.discard(id_hash)
    left, lease._reports_release = lease._left(lease._validity, runtime.now()), True
    core.emit("granted", claim, claim.token, asked_at, lease.slot, False, life, left, reason="taken over")
    return lease


def _refuse_foreign(core: ClientCore, document: Document) -> None:
    """Raise ConfigError if this client uses another engine or namespace. That engine would answer that it does not know
    the claim, as if the lease had ended; it is not asked."""
    claim = document.claim
    if document.engine != core.engine_name:
        raise ConfigError(
            f"the lease of {claim.name} is on {document.engine}, and this client uses {core.engine_name}: use the URL "
            "with which the lease was acquired"
        )
    if claim.namespace != core.options.namespace:
        raise ConfigError(
            f"{claim.name} is held in the namespace {claim.namespace!r}, and this client uses "
            f"{core.options.namespace!r}: use a client with the same namespace"
        )


async def _use_ticket(core: ClientCore, engine: Engine, document: Document) -> None:
    """Raises `LeaseLost` unless this call, of all that were ever made, ended the ticket."""
    if document.ticket is not None and not await engine.release(document.ticket_claim(), core.deadline()):
        raise LeaseLost(document.claim.name, reason="taken_over", token=document.claim.token)


async def _renewed(core: ClientCore, engine: Engine, claim: Claim, token: int, *others: Claim) -> Alive:
    reply, *_ = await engine.renew([claim, *others], core.deadline())
    if isinstance(reply, Unavailable):
        raise for_caller(reply)
    if isinstance(reply, Gone):
        raise LeaseLost(claim.name, reason=reply.reason, token=token)
    return reply


async def renew(core: ClientCore, document: Document, ttl: float | None = None) -> float:
    """Renew, and return how many seconds it lives from now at least. Raises `LeaseLost` if it has ended, `Unavailable`
    if the engine does not answer, `ConfigError` if it is from another engine or namespace."""
    _refuse_foreign(core, document)
    claim, *others = [claim if ttl is None else claim._replace(ttl=ttl) for claim in document.claims()]
    began = core.runtime.now()
    reply = await _renewed(core, core.engine(), claim, claim.token, *others)
    return max(0.0, timing.valid_until(began, reply.ttl, core.options.drift) - core.runtime.now())


async def release(core: ClientCore, document: Document) -> bool:
    """Release it. False: it had already ended. Raises `Unavailable`: it then expires, or can be released again. Raises
    `ConfigError` if it is from another engine or namespace."""
    _refuse_foreign(core, document)
    claim, *others = document.claims()
    try:
        released = bool(await core.engine().release(claim, core.deadline()))
        for other in others:
            await core.engine().release(other, core.deadline())
    except Refused as refused:
        raise for_caller(refused) from None
    return released
