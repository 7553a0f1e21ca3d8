"""The two faces of a value, one line per method."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from leasehold.events import Hook
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.value import BaseValue, Versioned
from leasehold.runtime.base import run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads


class Value(BaseValue):
    """For threads; shared between them freely."""

    _runtime_type = Threads

    def read(self) -> Versioned:
        """The newest value and its version; None and 0 if there is none. Raises `Unavailable`."""
        return run_sync(self._read())

    def write(self, value: bytes | str, version: int) -> Versioned:
        """Write it in the place of the version that was read (0: of none), and give the new one. Else `Conflict`, and
        nothing was changed; `Unavailable`: nobody can say."""
        return run_sync(self._write(value, version))

    def update(
        self,
        fn: Callable[..., bytes | str | None],
        /,
        *args: Any,
        attempts: int = 5,
        pause: float = 0.01,
        most_pause: float = 1.0,
        on_event: Hook | None = None,
    ) -> Versioned:
        """Write what `fn(value, *args)` makes of the value, and give the new one; None from `fn` leaves it as it is.

        After a conflict it is read again and asked again, with growing random pauses, at most `attempts` times; then
        `Conflict`. So `fn` only decides, and does nothing else. `on_event` gets an `Event` of kind "conflict" for each.
        `Unavailable` is not tried again: the value may have been written.
        """
        return run_sync(self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event)))


class AsyncValue(BaseValue):
    """For asyncio: a thread does the asking. Cancelled, it may still be done."""

    _runtime_type = Loop

    async def read(self) -> Versioned:
        """The newest value and its version; None and 0 if there is none. Raises `Unavailable`."""
        return await self._read()

    async def write(self, value: bytes | str, version: int) -> Versioned:
        """Write it in the place of the version that was read, as `Value.write` does."""
        return await self._write(value, version)

    async def update(
        self,
        fn: Callable[..., bytes | str | Awaitable[bytes | str | None] | None],
        /,
        *args: Any,
        attempts: int = 5,
        pause: float = 0.01,
        most_pause: float = 1.0,
        on_event: Hook | None = None,
    ) -> Versioned:
        """Write what `fn`, plain or async, makes of the value, as `Value.update` does."""
        return await self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event))
