"""A lease as JSON: it leaves the process that acquired it, and any process that has the text may renew and release it.

The text contains the secret id. The engine makes this safe: it compares the hash of the id (E5, E6), so a document
renews and releases only the grant it was written for, however late.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, get_args

from leasehold.client.core import ClientCore
from leasehold.client.lease import BaseLease
from leasehold.config import check_limit, check_seconds, check_ttl
from leasehold.core import timing
from leasehold.core.names import check_name, check_namespace, hash_id
from leasehold.errors import ConfigError, LeaseLost, Unavailable
from leasehold.model import Claim, Gone, Holder, Kind, Mode

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
# What the types do not say. The rest is checked as the options of a lock are.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "id": lambda text: re.fullmatch(r"[!-~]{1,200}", text) is not None,
    "token": lambda number: 0 <= number < 2**63,
    "mode": get_args(Mode).__contains__,
    "kind": get_args(Kind).__contains__,
    "holder": lambda text: len(text) <= 200 and text.isprintable(),
}


def dump(lease: BaseLease) -> dict[str, Any]:
    """All that another process needs to renew and release this lease, including the secret id. It stays held here."""
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
    """Stop renewing it here, without a release: the grant lives on at the engine, and the object ends (`released`).

    Needs an engine with the trait `outlives`: build the lock with `require={"outlives"}`.
    """
    lease._core.watchdog.unwatch(lease._claim.id_hash)
    lease._invalidate("released")


def load(text: str) -> Claim:
    """The claim a document was written for. Errors name the field, never its value: it may be the secret."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(
            "this is not the JSON that `acquire` printed: pass it on unchanged, with its quotes"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError("a lease document must be one JSON object: pass on everything that `acquire` printed")
    for field, field_type in _FIELDS.items():
        if not isinstance(document.get(field), field_type) or isinstance(document[field], bool):
            raise ConfigError(f"this lease document has no valid {field!r}: pass on everything that `acquire` printed")
    for field, is_valid in _CHECKS.items():
        if not is_valid(document[field]):
            raise ConfigError(f"this lease document has no valid {field!r}: pass on everything that `acquire` printed")
    check_ttl(document["ttl"])
    check_limit(document["limit"])
    check_seconds("delay", document["delay"])
    check_seconds("min_hold", document["min_hold"])
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
    """Renew, and return how many seconds it lives from now at least. Raises `LeaseLost` if it has ended, `Unavailable`
    if the engine does not answer."""
    renewal = claim if ttl is None else claim._replace(ttl=ttl)
    began = core.runtime.now()
    (reply,) = await core.engine().renew([renewal], core.deadline())
    if isinstance(reply, Unavailable):
        raise reply
    if isinstance(reply, Gone):
        raise LeaseLost(claim.name, reason=reply.reason, token=claim.token)
    return max(0.0, timing.valid_until(began, reply.ttl) - core.runtime.now())


async def release(core: ClientCore, claim: Claim) -> bool:
    """Release it. False: it had already ended. Raises `Unavailable`: it then expires, or can be released again."""
    return bool(await core.engine().release(claim, core.deadline()))
