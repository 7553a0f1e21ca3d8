"""Tokens over HTTP: the headers of a request, and the problem document of a refusal (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote, unquote

from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import LeaseLike, TokenInfo, is_slot, is_token, token_for_read
from leasehold.http.responses import Document, problem

TOKEN_HEADER: Final = "Lease-Token"  # noqa: S105  # the name of a header; tokens are public
SLOT_HEADER: Final = "Lease-Slot"  # the slot of a semaphore permit
SHARED_HEADER: Final = "Lease-Shared"  # 1 for a shared lease
HIGHEST_HEADER: Final = "Lease-Highest-Token"  # of a refusal: the highest token
RESOURCE_HEADER: Final = "Lease-Resource"  # of a refusal: the resource, percent-encoded
_MAX_TOKEN_DIGITS: Final = 16  # digits of 2^53
_MAX_SLOT_DIGITS: Final = 5  # the sender's slot determines the size of a token file
STALE_TYPE: Final = "urn:leasehold:stale-token"


def headers(lease: LeaseLike) -> dict[str, str]:
    """The headers that present a lease to a service: `requests.put(url, data, headers=headers(lease))`."""
    token_info = token_for_read(lease)
    result = {TOKEN_HEADER: str(token_info.token)}
    if token_info.slot is not None:
        result[SLOT_HEADER] = str(token_info.slot)
    if token_info.shared:
        result[SHARED_HEADER] = "1"
    return result


def _is_number(text: str) -> bool:
    """Plain ASCII digits, no more than a token can have: `int` itself accepts much more."""
    return text.isascii() and text.isdigit() and len(text) <= _MAX_TOKEN_DIGITS


def parse_token_headers(token: str | None, slot: str | None, shared: str | None) -> TokenInfo | None:
    """The token of a request; None if it has none. Raises `ConfigError` if a header is not valid."""
    if token is None:
        return None
    if not (_is_number(token) and is_token(int(token))):
        raise ConfigError(f"{TOKEN_HEADER} must be the token of a lease, a whole number from 1 to 2^53 - 1")
    if slot is not None and not (_is_number(slot) and len(slot) <= _MAX_SLOT_DIGITS):
        raise ConfigError(
            f"{SLOT_HEADER} must be the slot of a semaphore permit, a whole number of at most {_MAX_SLOT_DIGITS} digits"
        )
    if shared not in (None, "0", "1"):
        raise ConfigError(f"{SHARED_HEADER} must be 1 for a shared lease, or left out")
    return TokenInfo(int(token), None if slot is None else int(slot), shared == "1")


def stale_problem(error: StaleToken) -> Document:
    """A refusal as a problem document. Its status is 409, because the request conflicts with a newer token."""
    facts = {"resource": error.resource, "token": error.token, "highest": error.highest, "slot": error.slot}
    return problem(409, str(error), title="Stale lease token", **facts) | {"type": STALE_TYPE}


def stale_headers(document: Document) -> list[tuple[str, str]]:
    """The facts of a refusal as headers too, because a response to HEAD has no body; none for other problems."""
    if document["type"] != STALE_TYPE:
        return []
    slot = [] if document["slot"] is None else [(SLOT_HEADER, str(document["slot"]))]
    tokens = [(TOKEN_HEADER, str(document["token"])), (HIGHEST_HEADER, str(document["highest"]))]
    return [(RESOURCE_HEADER, quote(document["resource"], errors="surrogatepass")), *tokens, *slot]


def parse_stale_headers(response_headers: Mapping[str, str]) -> StaleToken | None:
    """The `StaleToken` that the headers of a response describe; None if they describe none."""
    resource = response_headers.get(RESOURCE_HEADER)
    texts = [response_headers.get(name) for name in (TOKEN_HEADER, HIGHEST_HEADER, SLOT_HEADER)]
    if resource is None or not all(text is None or _is_number(text) for text in texts):
        return None
    numbers = [None if text is None else int(text) for text in texts]
    return _stale_token(unquote(resource, errors="surrogatepass"), *numbers)


def parse_stale_problem(document: Any) -> StaleToken | None:
    """The `StaleToken` that a problem document describes; None if it describes another problem."""
    if not isinstance(document, Mapping) or document.get("type") != STALE_TYPE:
        return None
    return _stale_token(*(document.get(name) for name in ("resource", "token", "highest", "slot")))


def _stale_token(resource: object, token: object, highest_token: object, slot: object) -> StaleToken | None:
    """The error; None if the other side sent anything else than text and whole numbers in range."""
    if not (isinstance(resource, str) and is_token(token) and is_token(highest_token) and token < highest_token):
        return None
    if slot is not None and not is_slot(slot):
        return None
    return StaleToken(resource, token=token, highest=highest_token, slot=slot)
