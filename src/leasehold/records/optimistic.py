"""Optimistic concurrency: read, decide, write if nothing changed meanwhile; otherwise retry, a few times.

For short work with rare conflicts: no lock is held, nothing expires, and no caller waits for a dead holder. The
resource itself must detect the conflict: a version column, a compare-and-set, a serializable transaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from leasehold.client.decorator import accepted_parameters, refuse_coroutine
from leasehold.config import Duration, check_seconds
from leasehold.core import timing
from leasehold.core.conflicts import is_conflict
from leasehold.errors import ConfigError, Conflict
from leasehold.events import Event, Hook, call_hook
from leasehold.runtime.base import Runtime, maybe_await

T = TypeVar("T")


class RetryPolicy:
    """The options of `optimistic`, checked."""

    def __init__(
        self,
        attempts: int,
        on: type[BaseException] | tuple[type[BaseException], ...],
        pause: Duration,
        most_pause: Duration,
        name: str,
        on_event: Hook | None,
    ) -> None:
        if isinstance(attempts, bool) or not isinstance(attempts, int) or attempts < 1:
            raise ConfigError(f"attempts must be a whole number of at least 1, not {attempts!r}")
        self.attempts, self.on, self.name, self.on_event = attempts, on, name, on_event
        self.pause, self.most_pause = check_seconds("pause", pause), check_seconds("most_pause", most_pause)

    async def run(self, runtime: Runtime, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of the first call of `fn` without a conflict. Raises `Conflict` after the last attempt."""
        accepted_parameters(fn, runtime.blocking)

        async def attempt() -> Any:
            value = fn(*args)
            return refuse_coroutine(value, fn) if runtime.blocking else await maybe_await(value)

        return await self.repeat(runtime, attempt)

    async def repeat(self, runtime: Runtime, attempt: Callable[[], Awaitable[T]]) -> T:
        """The same for a coroutine function of this runtime."""
        tries = 0
        while True:
            try:
                return await attempt()
            except Exception as error:
                if not (is_conflict(error) or isinstance(error, self.on)):
                    raise
                tries += 1
                exhausted = tries == self.attempts
                seconds = 0.0 if exhausted else timing.backoff(tries - 1, self.pause, self.most_pause, runtime.random())
                self._emit_conflict(runtime, error, seconds)
                if exhausted:
                    text = f"{self.name or 'the value'} was changed by another writer in each of {tries} attempts"
                    raise Conflict(self.name, text=text, attempts=tries) from error
            await runtime.sleep(seconds)

    def _emit_conflict(self, runtime: Runtime, error: Exception, seconds: float) -> None:
        if self.on_event is not None:
            reason = f"{type(error).__name__}: {error}"
            call_hook(
                self.on_event, Event("conflict", "", "", self.name, runtime.wall(), seconds=seconds, reason=reason)
            )
