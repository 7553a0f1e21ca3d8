"""A lease written down: it leaves the process that acquired it, and any process that has the text may go on with it.

The text holds the secret id. What makes this safe is the engine: it compares the mark of the id (E5, E6), so that a
deed renews and releases the one grant it was written for and nothing else, however late.
"""

from __future__ import annotations

import json
from typing import Any

from leasehold.core import timing
from leasehold.core.names import check_name, check_namespace, mark
from leasehold.errors import ConfigError, LeaseLost, Unavailable
from leasehold.model import Claim, Gone, Holder
from leasehold.recipes.desk import Desk
from leasehold.recipes.lease import BaseLease

_FIELDS: dict[str, type | tuple[type, ...]] = {
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
}


def write(lease: BaseLease) -> dict[str, Any]:
    """All that another process needs to renew and release this lease, the secret among it. It is still held here."""
    lease.check()
    claim = lease._renewal()
    return {
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
        "holder": claim.holder.label,
        "fingerprint": claim.fingerprint,
    }


def let_go(lease: BaseLease) -> None:
    """Neither renew nor release it here any more: it lives on at the engine, and its object is over (`released`).

    Needs an engine with the trait `outlives`: build the lock with `require={"outlives"}`.
    """
    lease._desk.dog.drop(lease._claim.mark)
    lease._disown("released")


def read(text: str) -> Claim:
    """The claim a deed was written for. Errors name the field, never what stands in it: it may be the secret."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("this is not the JSON that `acquire` gave: pass it on as it is, quotes and all") from None
    if not isinstance(found, dict):
        raise ConfigError("a lease is written as one JSON object")
    for field, kind in _FIELDS.items():
        if not isinstance(found.get(field), kind) or isinstance(found[field], bool):
            raise ConfigError(f"this lease has no usable {field!r}: pass on all that `acquire` gave")
    return Claim(
        check_namespace(found["namespace"]),
        check_name(found["name"]),
        found["id"],
        mark(found["id"]),
        Holder(found["holder"]),
        float(found["ttl"]),
        found["mode"],
        found["kind"],
        found["limit"],
        float(found["delay"]),
        float(found["min_hold"]),
        token=found["token"],
    )


async def renew(desk: Desk, claim: Claim, ttl: float | None = None) -> float:
    """Seconds it lives from now at the least. Raises `LeaseLost` if it is over, `Unavailable` if nobody can say."""
    asked = claim if ttl is None else claim._replace(ttl=ttl)
    began = desk.runtime.now()
    (reply,) = await desk.engine().renew([asked], desk.deadline())
    if isinstance(reply, Unavailable):
        raise reply
    if isinstance(reply, Gone):
        raise LeaseLost(claim.name, reason=reply.reason, token=claim.token)
    return max(0.0, timing.valid_until(began, reply.ttl) - desk.runtime.now())


async def release(desk: Desk, claim: Claim) -> bool:
    """Give it up. False: it was over before. Raises `Unavailable`: then it lapses by itself, or can be released
    again.
    """
    return await desk.engine().release(claim, desk.deadline())
