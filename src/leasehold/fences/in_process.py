"""A fence for an object in this process: for threads and tasks, and for tests of code that uses other fences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from leasehold.fences.rules import (
    NO_TOKEN,
    LeaseLike,
    TokenInfo,
    check_resource,
    check_token,
    token_for_read,
    token_for_write,
)

T = TypeVar("T")


class Local(Generic[T]):
    """A value that only the newest holder may write. Thread-safe; lost when the process ends."""

    def __init__(self, resource: str, value: T) -> None:
        self.resource = check_resource(resource)
        self._value = value
        self._highest_tokens: dict[int | None, int] = {}  # by slot
        self._mutex = threading.Lock()

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token. All methods with a lease raise `StaleToken`."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))

    def read(self, lease: LeaseLike) -> T:
        """The value, to base a write on. Older holders are refused from now on."""
        with self._mutex:
            self._check_and_raise(lease, token_for_read(lease))
            return self._value

    def write(self, lease: LeaseLike, value: T) -> None:
        """Replace the value."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))
            self._value = value

    @contextmanager
    def held(self, lease: LeaseLike) -> Iterator[T]:
        """For objects that change in place: other leases wait until the block ends. Do not `await` inside it."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))
            yield self._value

    def peek(self) -> T:
        """The value without a token, for display and metrics. Do not base a write on it."""
        return self._value

    def _check_and_raise(self, lease: LeaseLike, token_info: TokenInfo) -> None:
        highest_token = self._highest_tokens.get(token_info.slot, NO_TOKEN)
        self._highest_tokens[token_info.slot] = check_token(lease, token_info, highest_token, self.resource, "local")

    def __repr__(self) -> str:
        return f"<Local {self.resource}>"
