"""The blocking and the asyncio API of a value, one line per method."""

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
    """The blocking API of a value. Threads may share it."""

    _runtime_type = Threads

    def read(self) -> Versioned:
        """The newest value and its version; None and 0 if there is none. Raises `Unavailable`."""
        return run_sync(self._read())

    def write(self, value: bytes | str, version: int) -> Versioned:
        """Write the value if `version` is still the newest (0: no value exists), and return it with its new version.

        `Conflict`: the version is not the newest, and nothing was changed. `Unavailable`: no server answered; the value
        may have been written.
        """
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
        """Write the result of `fn(value, *args)`, and return it with its new version. If `fn` returns None, nothing is
        written.

        After a conflict the value is read again and `fn` called again, with growing random pauses (the first up to
        `pause` seconds, none above `most_pause`), at most `attempts` times; then `Conflict` is raised. So `fn` may run
        several times, and should only compute. `on_event` gets an `Event` of kind "conflict" for each conflict.
        `Unavailable` is raised without a retry: the value may have been written.
        """
        return run_sync(self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event)))


class AsyncValue(BaseValue):
    """The asyncio API of a value. A worker thread makes the calls: a cancelled write may still be applied."""

    _runtime_type = Loop

    async def read(self) -> Versioned:
        """The newest value and its version; None and 0 if there is none. Raises `Unavailable`."""
        return await self._read()

    async def write(self, value: bytes | str, version: int) -> Versioned:
        """Write the value if `version` is still the newest (0: no value exists), and return it with its new version.

        `Conflict`: the version is not the newest, and nothing was changed. `Unavailable`: no server answered; the value
        may have been written.
        """
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
        """Write the result of `fn(value, *args)`, plain or async, and return it with its new version. If it is None,
        nothing is written. Conflicts are retried as in `Value.update`."""
        return await self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event))
