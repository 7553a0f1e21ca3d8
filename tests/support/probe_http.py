"""What tests read inside the middlewares of `leasehold.http`."""

from __future__ import annotations

from typing import Any

from leasehold.http.fence_middleware import MemoryTokens
from leasehold.http.idempotency import IdempotencyKey


def client_of(middleware: IdempotencyKey) -> Any:
    """The client whose records an `IdempotencyKey` uses."""
    return middleware._client


def tokens_in_flight(tokens: MemoryTokens) -> dict[Any, Any]:
    """The tokens of the requests that are being answered."""
    return tokens._in_flight
