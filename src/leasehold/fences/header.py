"""A token on its way through HTTP: two headers there, a problem document back (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import MOST, NEVER, Pass, Shown, to_read

TOKEN: Final = "Lease-Token"  # noqa: S105  # the name of a header; tokens are public
SLOT: Final = "Lease-Slot"  # of a semaphore's permit
SHARED: Final = "Lease-Shared"  # 1: of a reader
_SLOT: Final = 5  # digits: whoever asks decides how large a file of marks gets
STALE: Final = "urn:leasehold:stale-token"
PROBLEM: Final = "application/problem+json"


def headers(lease: Shown) -> dict[str, str]:
    """The headers that show a lease to a service: `requests.put(url, data, headers=headers(lease))`."""
    shown = to_read(lease)
    found = {TOKEN: str(shown.token)}
    if shown.slot is not None:
        found[SLOT] = str(shown.slot)
    if shown.shared:
        found[SHARED] = "1"
    return found


def parsed(token: str | None, slot: str | None, shared: str | None) -> Pass | None:
    """What a request shows; None: no token. Raises `ConfigError` for one that is none."""
    if token is None:
        return None
    if not (token.isascii() and token.isdigit() and len(token) <= 16 and NEVER < int(token) < MOST):
        raise ConfigError(f"{TOKEN} is the token of a lease: a whole number from 1 to 2^53 - 1")
    if slot is not None and not (slot.isascii() and slot.isdigit() and len(slot) <= _SLOT):
        raise ConfigError(f"{SLOT} is the slot of a semaphore's permit: a whole number of at most {_SLOT} digits")
    if shared not in (None, "0", "1"):
        raise ConfigError(f"{SHARED} is 1 for the lease of a reader, or left out")
    return Pass(int(token), None if slot is None else int(slot), shared == "1")


def problem(status: int, title: str, **more: Any) -> dict[str, Any]:
    return {"type": "about:blank", "title": title, "status": status, **more}


def stale(error: StaleToken) -> dict[str, Any]:
    """A refusal as a document. 409: the request conflicts with what the resource has seen."""
    facts = {"resource": error.resource, "token": error.token, "highest": error.highest, "slot": error.slot}
    return {**problem(409, "Stale lease token", detail=str(error), **facts), "type": STALE}


def told(document: Any) -> StaleToken | None:
    """The refusal that such a document tells of; None: it tells of something else."""
    if not isinstance(document, Mapping) or document.get("type") != STALE:
        return None
    try:
        slot = document.get("slot")
        return StaleToken(
            str(document["resource"]),
            token=int(document["token"]),
            highest=int(document["highest"]),
            slot=None if slot is None else int(slot),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
