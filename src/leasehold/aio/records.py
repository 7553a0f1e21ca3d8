"""Schedules, statuses, values and `optimistic_async`: one line per method. The blocking twin is `blocking.records`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import Any, Final, TypeVar, overload

from leasehold.config import Duration
from leasehold.events import Hook
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.schedule import BaseSchedule
from leasehold.records.state_machine import BaseStatus
from leasehold.records.value import BaseValue, Versioned
from leasehold.runtime.loop import Loop

T = TypeVar("T")

_LOOP: Final = Loop()


class AsyncSchedule(BaseSchedule):
    """A job that runs once per tick in the whole fleet. Create one in every process, with the same name and times.

    Not promised: that a job which is killed half-way has no effects. The tick is then run again, if it is still due.
    """

    async def run(self, fn: Callable[..., object]) -> None:
        """Until `stop()` or a cancellation, compete for every tick; one process of the fleet runs `fn`, plain or async,
        for it.

        `fn` gets `tick` (the time it is due, an aware `datetime`) and `lease` if it has parameters with these names.
        Exceptions of `fn` are logged and recorded. If the engine or store does not answer, `run` retries.
        """
        await self._run(fn)

    async def run_due(self, fn: Callable[..., object]) -> list[datetime]:
        """Run the ticks that are due now, and return those that ran in this process: for a loop or timer of your own.
        Exceptions of `fn` are logged and recorded. Raises `Unavailable` if the engine or store does not answer."""
        return (await self._run_due(fn))[0]


class AsyncStatus(BaseStatus):
    """A status that moves along defined transitions, one atomic step at a time."""

    async def get(self) -> str:
        """The current state. Raises `Unavailable` if the store does not answer."""
        return await self._get()

    async def move(self, to: str, *, expected: str | Collection[str] | None = None) -> str:
        """Move to the state `to`, and return the previous state. Of any number of callers that try the same step, at
        most one succeeds.

        expected  the state or states to move from (default: all that have a transition to `to`)

        `Conflict`: the status is not in an expected state, and was not moved. `ConfigError`: no transition leads from
        there to `to`. `Unavailable`: the store did not answer; the status may have been moved.
        """
        return await self._move(to, expected)


class AsyncValue(BaseValue):
    """A value that changes by compare-and-set, in the client's store or another one."""

    _blocking = False

    async def read(self) -> Versioned:
        """The newest value and its version; None and "" if there is none. Raises `Unavailable`."""
        return await self._read()

    async def write(self, value: bytes | str, version: str) -> Versioned:
        """Write the value if `version` is still the newest ("": no value exists), and return it with its new version.

        `Conflict`: the version is not the newest, and nothing was changed. `Unavailable`: the store did not answer; the
        value may have been written.
        """
        return await self._write(value, version)

    async def update(
        self,
        fn: Callable[..., bytes | str | Awaitable[bytes | str | None] | None],
        /,
        *args: Any,
        attempts: int = 5,
        pause: Duration = 0.01,
        most_pause: Duration = 1.0,
        on_event: Hook | None = None,
    ) -> Versioned:
        """Write the result of `fn(value, *args)`, plain or async, and return it with its new version. If it is None,
        nothing is written. Conflicts are retried as in `Value.update`."""
        return await self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event))


@overload
async def optimistic_async(
    fn: Callable[..., Awaitable[T]],
    /,
    *args: Any,
    attempts: int = ...,
    on: type[BaseException] | tuple[type[BaseException], ...] = ...,
    pause: Duration = ...,
    most_pause: Duration = ...,
    name: str = ...,
    on_event: Hook | None = ...,
) -> T: ...


@overload
async def optimistic_async(
    fn: Callable[..., T],
    /,
    *args: Any,
    attempts: int = ...,
    on: type[BaseException] | tuple[type[BaseException], ...] = ...,
    pause: Duration = ...,
    most_pause: Duration = ...,
    name: str = ...,
    on_event: Hook | None = ...,
) -> T: ...


async def optimistic_async(
    fn: Callable[..., Any],
    /,
    *args: Any,
    attempts: int = 5,
    on: type[BaseException] | tuple[type[BaseException], ...] = (),
    pause: Duration = 0.01,
    most_pause: Duration = 1.0,
    name: str = "",
    on_event: Hook | None = None,
) -> Any:
    """Call `fn(*args)`, plain or async, which reads, decides and writes if nothing changed meanwhile, and return its
    result. After a conflict call it again, at most `attempts` times in all; then raise `Conflict`. What counts as a
    conflict, and the options, are those of `optimistic`."""
    return await RetryPolicy(attempts, on, pause, most_pause, name, on_event).run(_LOOP, fn, args)
