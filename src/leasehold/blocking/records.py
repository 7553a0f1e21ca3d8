"""Schedules, statuses, values and `optimistic`, blocking: one line per method. The asyncio twin is `aio.records`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, Final, TypeVar

from leasehold.config import Duration
from leasehold.events import Hook
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.schedule import BaseSchedule
from leasehold.records.state_machine import BaseStatus
from leasehold.records.value import BaseValue, Versioned
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads

T = TypeVar("T")

_THREADS: Final = Threads()


class Schedule(BaseSchedule):
    """A job that runs once per tick in the whole fleet. Create one in every process, with the same name and times.

    Not promised: that a job which is killed half-way has no effects. The tick is then run again, if it is still due.
    """

    def run(self, fn: Callable[..., object]) -> None:
        """Until `stop()`, compete for every tick; one process of the fleet runs `fn` for it.

        `fn` gets `tick` (the time it is due, an aware `datetime`) and `lease` if it has parameters with these names.
        Exceptions of `fn` are logged and recorded. If the engine or store does not answer, `run` retries.
        """
        run_sync(self._run(fn))

    def run_due(self, fn: Callable[..., object]) -> list[datetime]:
        """Run the ticks that are due now, and return those that ran in this process: for a loop or timer of your own.
        Exceptions of `fn` are logged and recorded. Raises `Unavailable` if the engine or store does not answer."""
        return run_sync(self._run_due(fn))[0]


class Status(BaseStatus):
    """A status that moves along defined transitions, one atomic step at a time."""

    def get(self) -> str:
        """The current state. Raises `Unavailable` if the store does not answer."""
        return run_sync(self._get())

    def move(self, to: str, *, expected: str | Collection[str] | None = None) -> str:
        """Move to the state `to`, and return the previous state. Of any number of callers that try the same step, at
        most one succeeds.

        expected  the state or states to move from (default: all that have a transition to `to`)

        `Conflict`: the status is not in an expected state, and was not moved. `ConfigError`: no transition leads from
        there to `to`. `Unavailable`: the store did not answer; the status may have been moved.
        """
        return run_sync(self._move(to, expected))


class Value(BaseValue):
    """A value that changes by compare-and-set, in the client's store or another one. Threads may share it."""

    _blocking = True

    def read(self) -> Versioned:
        """The newest value and its version; None and "" if there is none. Raises `Unavailable`."""
        return run_sync(self._read())

    def write(self, value: bytes | str, version: str) -> Versioned:
        """Write the value if `version` is still the newest ("": no value exists), and return it with its new version.

        `Conflict`: the version is not the newest, and nothing was changed. `Unavailable`: the store did not answer; the
        value may have been written.
        """
        return run_sync(self._write(value, version))

    def update(
        self,
        fn: Callable[..., bytes | str | None],
        /,
        *args: Any,
        attempts: int = 5,
        pause: Duration = 0.01,
        most_pause: Duration = 1.0,
        on_event: Hook | None = None,
    ) -> Versioned:
        """Write the result of `fn(value, *args)`, and return it with its new version. If `fn` returns None, nothing is
        written.

        After a conflict the value is read again and `fn` called again, with growing random pauses (the first up to
        `pause` seconds, none above `most_pause`), at most `attempts` times; then `Conflict` is raised. So `fn` may run
        several times, and should only compute. `on_event` gets an `Event` of kind "conflict" for each conflict.
        `Unavailable`: the store did not answer; the value may have been written.
        """
        return run_sync(self._update(fn, args, RetryPolicy(attempts, (), pause, most_pause, self.name, on_event)))


def optimistic(
    fn: Callable[..., T],
    /,
    *args: Any,
    attempts: int = 5,
    on: type[BaseException] | tuple[type[BaseException], ...] = (),
    pause: Duration = 0.01,
    most_pause: Duration = 1.0,
    name: str = "",
    on_event: Hook | None = None,
) -> T:
    """Call `fn(*args)`, which reads, decides and writes if nothing changed meanwhile, and return its result. After a
    conflict call it again, at most `attempts` times in all; then raise `Conflict`.

    on          exception types that also count as a conflict
    pause       the first pause between attempts lasts up to this many seconds; later ones grow, at random
    most_pause  the longest pause
    name        names the value in events and in the error
    on_event    gets an `Event` of kind "conflict" for each conflict

    A conflict is a `Conflict` that `fn` raises, SQLAlchemy's `StaleDataError`, a serialization failure or deadlock of
    PostgreSQL or MySQL, redis-py's `WatchError`, or an exception of a type in `on`. All other exceptions are raised at
    once. `fn` must start over each time: with a new session, in a new transaction.
    """
    policy = RetryPolicy(attempts, on, pause, most_pause, name, on_event)
    result: T = run_sync(policy.run(_THREADS, fn, args))
    return result
