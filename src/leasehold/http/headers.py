"""Tokens over HTTP: the headers of a request, and the problem document of a refusal (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import NO_TOKEN, TOKEN_LIMIT, Pass, Shown, token_for_read

TOKEN_HEADER: Final = "Lease-Token"  # noqa: S105  # the name of a header; tokens are public
SLOT_HEADER: Final = "Lease-Slot"  # the slot of a semaphore permit
SHARED_HEADER: Final = "Lease-Shared"  # 1 for a shared lease
_MAX_SLOT_DIGITS: Final = 5  # the sender's slot determines the size of a token file
STALE_TYPE: Final = "urn:leasehold:stale-token"
PROBLEM_JSON: Final = "application/problem+json"


def headers(lease: Shown) -> dict[str, str]:
    """The headers that present a lease to a service: `requests.put(url, data, headers=headers(lease))`."""
    token_info = token_for_read(lease)
    result = {TOKEN_HEADER: str(token_info.token)}
    if token_info.slot is not None:
        result[SLOT_HEADER] = str(token_info.slot)
    if token_info.shared:
        result[SHARED_HEADER] = "1"
    return result


def parse_token_headers(token: str | None, slot: str | None, shared: str | None) -> Pass | None:
    """The token of a request; None if it has none. Raises `ConfigError` if a header is not valid."""
    if token is None:
        return None
    if not (token.isascii() and token.isdigit() and len(token) <= 16 and NO_TOKEN < int(token) < TOKEN_LIMIT):
        raise ConfigError(f"{TOKEN_HEADER} must be the token of a lease, a whole number from 1 to 2^53 - 1")
    if slot is not None and not (slot.isascii() and slot.isdigit() and len(slot) <= _MAX_SLOT_DIGITS):
        raise ConfigError(
            f"{SLOT_HEADER} must be the slot of a semaphore permit, a whole number of at most {_MAX_SLOT_DIGITS} digits"
        )
    if shared not in (None, "0", "1"):
        raise ConfigError(f"{SHARED_HEADER} must be 1 for a shared lease, or left out")
    return Pass(int(token), None if slot is None else int(slot), shared == "1")


def problem(status: int, title: str, **fields: Any) -> dict[str, Any]:
    return {"type": "about:blank", "title": title, "status": status, **fields}


def stale_problem(error: StaleToken) -> dict[str, Any]:
    """A refusal as a problem document. Its status is 409, because the request conflicts with a newer token."""
    facts = {"resource": error.resource, "token": error.token, "highest": error.highest, "slot": error.slot}
    return {**problem(409, "Stale lease token", detail=str(error), **facts), "type": STALE_TYPE}


def parse_stale_problem(document: Any) -> StaleToken | None:
    """The `StaleToken` that a problem document describes; None if it describes another problem."""
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
