"""An object of this very process, behind a fence: for threads, tasks, and tests of code that will meet other fences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from leasehold.fences.rules import NO_TOKEN, Pass, Shown, check_resource, check_token, token_for_read, token_for_write

T = TypeVar("T")


class Local(Generic[T]):
    """A value that only the newest holder may write. Safe between threads; forgotten with the process."""

    def __init__(self, resource: str, value: T) -> None:
        self.resource = check_resource(resource)
        self._value = value
        self._highest_tokens: dict[int | None, int] = {}  # by slot
        self._mutex = threading.Lock()

    def claim(self, lease: Shown) -> None:
        """Raise the mark, and nothing else. Raises `StaleToken`, as all of these do."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))

    def read(self, lease: Shown) -> T:
        """The value, to decide a write by: older holders write no more."""
        with self._mutex:
            self._check_and_raise(lease, token_for_read(lease))
            return self._value

    def write(self, lease: Shown, value: T) -> None:
        """Put another value in its place."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))
            self._value = value

    @contextmanager
    def held(self, lease: Shown) -> Iterator[T]:
        """For objects that change in place: no other lease is let in before the block ends. No `await` inside."""
        with self._mutex:
            self._check_and_raise(lease, token_for_write(lease))
            yield self._value

    def peek(self) -> T:
        """The value without a token, for people and metrics. Decide nothing by it."""
        return self._value

    def _check_and_raise(self, lease: Shown, token_info: Pass) -> None:
        highest_token = self._highest_tokens.get(token_info.slot, NO_TOKEN)
        self._highest_tokens[token_info.slot] = check_token(lease, token_info, highest_token, self.resource)

    def __repr__(self) -> str:
        return f"<Local {self.resource}>"
