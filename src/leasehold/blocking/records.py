"""The blocking face of what is decided by records: `once`, schedules, statuses. Its twin is `once_aio`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, Final, TypeVar

from leasehold.events import Hook
from leasehold.records.optimistic import RetryPolicy
from leasehold.records.schedule import BaseSchedule
from leasehold.records.state_machine import BaseStatus
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads

T = TypeVar("T")

_THREADS: Final = Threads()


class Schedule(BaseSchedule):
    """A job that runs once per tick in the whole fleet. Make one in every process, with the same name and times."""

    def run(self, fn: Callable[..., object]) -> None:
        """Run `fn` at every tick, here or elsewhere, until `stop()`. It gets `tick`, the time it is due as an aware
        `datetime`, and `lease`, if it has parameters of these names. What it raises is logged and recorded."""
        run_sync(self._run(fn))

    def run_due(self, fn: Callable[..., object]) -> list[datetime]:
        """Run what is due now, and return; for a loop of your own. Gives the ticks that ran here."""
        return run_sync(self._run_due(fn))[0]


class Status(BaseStatus):
    """A status that moves along drawn arrows, one atomic step at a time."""

    def get(self) -> str:
        """The state it is in."""
        return run_sync(self._get())

    def move(self, to: str, *, expected: str | Collection[str] | None = None) -> str:
        """Move it to `to`, and give the state it was in. `Conflict`: it is not in an expected state (default: any that
        has an arrow to `to`), and was not moved. `Unavailable`: whether it was moved cannot be told. Of any number of
        callers with the same step, at most one succeeds."""
        return run_sync(self._move(to, expected))


def optimistic(
    fn: Callable[..., T],
    /,
    *args: Any,
    attempts: int = 5,
    on: type[BaseException] | tuple[type[BaseException], ...] = (),
    pause: float = 0.01,
    most_pause: float = 1.0,
    name: str = "",
    on_event: Hook | None = None,
) -> T:
    """Call `fn(*args)`, which reads, decides and writes unless something changed; after a conflict again, with growing
    random pauses, at most `attempts` times. Then `Conflict`.

    A conflict is a `Conflict` that `fn` raises, SQLAlchemy's `StaleDataError`, a serialization failure or deadlock of
    PostgreSQL or MySQL, redis-py's `WatchError`, or an error of a type in `on`. `fn` must begin anew each time: a new
    session, a new transaction. `on_event` gets an `Event` of kind "conflict" for each, under `name`: count them there.
    """
    policy = RetryPolicy(attempts, on, pause, most_pause, name, on_event)
    result: T = run_sync(policy.run(_THREADS, fn, args))
    return result
