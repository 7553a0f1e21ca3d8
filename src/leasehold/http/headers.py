"""A token on its way through HTTP: two headers there, a problem document back (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import NO_TOKEN, TOKEN_LIMIT, Pass, Shown, token_for_read

TOKEN_HEADER: Final = "Lease-Token"  # noqa: S105  # the name of a header; tokens are public
SLOT_HEADER: Final = "Lease-Slot"  # of a semaphore's permit
SHARED_HEADER: Final = "Lease-Shared"  # 1: of a reader
_MAX_SLOT_DIGITS: Final = 5  # digits: whoever asks decides how large a file of marks gets
STALE_TYPE: Final = "urn:leasehold:stale-token"
PROBLEM_JSON: Final = "application/problem+json"


def headers(lease: Shown) -> dict[str, str]:
    """The headers that show a lease to a service: `requests.put(url, data, headers=headers(lease))`."""
    token_info = token_for_read(lease)
    result = {TOKEN_HEADER: str(token_info.token)}
    if token_info.slot is not None:
        result[SLOT_HEADER] = str(token_info.slot)
    if token_info.shared:
        result[SHARED_HEADER] = "1"
    return result


def parse_token_headers(token: str | None, slot: str | None, shared: str | None) -> Pass | None:
    """What a request shows; None: no token. Raises `ConfigError` for one that is none."""
    if token is None:
        return None
    if not (token.isascii() and token.isdigit() and len(token) <= 16 and NO_TOKEN < int(token) < TOKEN_LIMIT):
        raise ConfigError(f"{TOKEN_HEADER} is the token of a lease: a whole number from 1 to 2^53 - 1")
    if slot is not None and not (slot.isascii() and slot.isdigit() and len(slot) <= _MAX_SLOT_DIGITS):
        raise ConfigError(
            f"{SLOT_HEADER} is the slot of a semaphore's permit: a whole number of at most {_MAX_SLOT_DIGITS} digits"
        )
    if shared not in (None, "0", "1"):
        raise ConfigError(f"{SHARED_HEADER} is 1 for the lease of a reader, or left out")
    return Pass(int(token), None if slot is None else int(slot), shared == "1")


def problem(status: int, title: str, **fields: Any) -> dict[str, Any]:
    return {"type": "about:blank", "title": title, "status": status, **fields}


def stale_problem(error: StaleToken) -> dict[str, Any]:
    """A refusal as a document. 409: the request conflicts with what the resource has seen."""
    facts = {"resource": error.resource, "token": error.token, "highest": error.highest, "slot": error.slot}
    return {**problem(409, "Stale lease token", detail=str(error), **facts), "type": STALE_TYPE}


def parse_stale_problem(document: Any) -> StaleToken | None:
    """The refusal that such a document tells of; None: it tells of something else."""
    if not isinstance(document, Mapping) or document.get("type") != STALE_TYPE:
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
