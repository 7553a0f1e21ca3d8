"""A lease written down: it leaves the process that acquired it, and any process that has the text may go on with it.

The text holds the secret id. What makes this safe is the engine: it compares the mark of the id (E5, E6), so that a
deed renews and releases the one grant it was written for and nothing else, however late.
"""

from __future__ import annotations

import json
from typing import Any

from leasehold.client.core import ClientCore
from leasehold.client.lease import BaseLease
from leasehold.core import timing
from leasehold.core.names import check_name, check_namespace, hash_id
from leasehold.errors import ConfigError, LeaseLost, Unavailable
from leasehold.model import Claim, Gone, Holder

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


def dump(lease: BaseLease) -> dict[str, Any]:
    """All that another process needs to renew and release this lease, the secret among it. It is still held here."""
    lease.check()
    claim = lease._claim_for_renewal()
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


def detach(lease: BaseLease) -> None:
    """Neither renew nor release it here any more: it lives on at the engine, and its object is over (`released`).

    Needs an engine with the trait `outlives`: build the lock with `require={"outlives"}`.
    """
    lease._core.watchdog.unwatch(lease._claim.id_hash)
    lease._invalidate("released")


def load(text: str) -> Claim:
    """The claim a deed was written for. Errors name the field, never what stands in it: it may be the secret."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("this is not the JSON that `acquire` gave: pass it on as it is, quotes and all") from None
    if not isinstance(document, dict):
        raise ConfigError("a lease is written as one JSON object")
    for field, field_type in _FIELDS.items():
        if not isinstance(document.get(field), field_type) or isinstance(document[field], bool):
            raise ConfigError(f"this lease has no usable {field!r}: pass on all that `acquire` gave")
    return Claim(
        check_namespace(document["namespace"]),
        check_name(document["name"]),
        document["id"],
        hash_id(document["id"]),
        Holder(document["holder"]),
        float(document["ttl"]),
        document["mode"],
        document["kind"],
        document["limit"],
        float(document["delay"]),
        float(document["min_hold"]),
        token=document["token"],
    )


async def renew(core: ClientCore, claim: Claim, ttl: float | None = None) -> float:
    """Seconds it lives from now at the least. Raises `LeaseLost` if it is over, `Unavailable` if nobody can say."""
    renewal = claim if ttl is None else claim._replace(ttl=ttl)
    began = core.runtime.now()
    (reply,) = await core.engine().renew([renewal], core.deadline())
    if isinstance(reply, Unavailable):
        raise reply
    if isinstance(reply, Gone):
        raise LeaseLost(claim.name, reason=reply.reason, token=claim.token)
    return max(0.0, timing.valid_until(began, reply.ttl) - core.runtime.now())


async def release(core: ClientCore, claim: Claim) -> bool:
    """Give it up. False: it was over before. Raises `Unavailable`: then it lapses by itself, or can be released
    again.
    """
    return await core.engine().release(claim, core.deadline())
