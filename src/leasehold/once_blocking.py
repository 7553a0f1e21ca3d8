"""The blocking face of what is decided by records: `once`, schedules, statuses. Its twin is `once_aio`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, ClassVar, Final, TypeVar

from leasehold import stores
from leasehold.core.names import check_name
from leasehold.core.once import MAX_RESULT
from leasehold.core.ticks import Missed
from leasehold.events import Hook
from leasehold.model import Outcome
from leasehold.recipes import once as recipe
from leasehold.recipes.calling import Task
from leasehold.recipes.keeping import KeepingClient
from leasehold.recipes.once import DAY, OnceOptions, OnFailure
from leasehold.recipes.optimistic import Terms
from leasehold.recipes.schedule import KIND as SCHEDULE
from leasehold.recipes.schedule import BaseSchedule, checked_ticks
from leasehold.recipes.status import BaseStatus
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.store import Store

T = TypeVar("T")

_THREADS: Final = Threads()


class Schedule(BaseSchedule):
    """A job that runs once per tick in the whole fleet. Make one in every process, with the same name and times."""

    def run(self, fn: Callable[..., object]) -> None:
        """Run `fn` at every tick, here or elsewhere, until `stop()`. It gets `tick`, the time it is due as an aware
        `datetime`, and `lease`, if it has parameters of these names. What it raises is logged and recorded."""
        step(self._run(fn))

    def run_due(self, fn: Callable[..., object]) -> list[datetime]:
        """Run what is due now, and return; for a loop of your own. Gives the ticks that ran here."""
        return step(self._look(fn))[0]


class Status(BaseStatus):
    """A status that moves along drawn arrows, one atomic step at a time."""

    def get(self) -> str:
        """The state it is in."""
        return step(self._get())

    def move(self, to: str, *, expected: str | Collection[str] | None = None) -> str:
        """Move it to `to`, and give the state it was in. `Conflict`: it is not in an expected state (default: any that
        has an arrow to `to`), and was not moved. `Unavailable`: whether it was moved cannot be told. Of any number of
        callers with the same step, at most one succeeds."""
        return step(self._move(to, expected))


class OnceClient(KeepingClient):
    """What `Client` has of it."""

    _stores: ClassVar = stores

    def once(
        self,
        key: str,
        fn: Callable[..., T],
        /,
        *args: Any,
        keep: float | None = DAY,
        wait: float | None = None,
        ttl: float | None = None,
        on_failure: OnFailure = "retry",
        request: str = "",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> T:
        """Run `fn(*args)` once for `key`, however many call; everybody gets its result, through JSON.

        keep        seconds the result is kept, None for ever; after that the key may run again
        wait        seconds to wait for another caller who runs it: None for ever, 0 raises `NotAcquired` at once
        ttl         so long after a runner died the next takes over (default: the client's)
        on_failure  "retry": the next caller runs it again; "keep": all get `RunFailed` until `keep` is over
        request     a text that stands for what is asked: another one under the same key raises `Mismatch`
        max_result  bytes of JSON; 0: no result is kept, all get None
        store       where the record is kept: a URL, a store, or by default beside the client's locks

        A runner whose lease was lost and taken over gets `StaleToken`: its result is not kept. Not promised: that what
        it did outside the store is undone. Let it commit with the record (`stores.within`), or fence it by the token.
        """
        options = OnceOptions(keep, on_failure, request, max_result)
        return step(self._once(key, wait, ttl, store, options).run(fn, args, {}))  # type: ignore[no-any-return]

    def once_per(
        self,
        key: str,
        *,
        keep: float | None = DAY,
        wait: float | None = None,
        ttl: float | None = None,
        on_failure: OnFailure = "retry",
        max_result: int = MAX_RESULT,
        store: Store | str | None = None,
    ) -> Callable[[Callable[..., T]], Callable[..., T]]:
        """Decorate a function to run once for the key that its arguments make: `@client.once_per("order:{order_id}")`.
        Options as for `once`."""
        options = OnceOptions(keep, on_failure, "", max_result)

        def decorate(fn: Callable[..., T]) -> Callable[..., T]:
            task = Task(fn, key, "wait", blocking=True)

            @wraps(fn)
            def run(*args: Any, **kwargs: Any) -> T:
                call = self._once(task.name(args, kwargs), wait, ttl, store, options)
                result: T = step(call.run(fn, args, kwargs))
                return result

            return run

        return decorate

    def outcome(self, key: str, *, store: Store | str | None = None) -> Outcome | None:
        """Where a key of `once` stands: running, done, failed, or lapsed. None: it never ran, or is no longer kept."""
        return step(recipe.outcome(self._key_lock(recipe.KIND, key), self._records(store), key))

    def schedule(
        self,
        name: str,
        every: float,
        *,
        offset: float = 0.0,
        missed: Missed = "skip",
        late: float | None = None,
        most: int = 100,
        on_failure: OnFailure = "keep",
        ttl: float | None = None,
        store: Store | str | None = None,
    ) -> Schedule:
        """A job for every `every` seconds, `offset` after the full multiples since 1970 (UTC), once in the whole fleet.

        missed      what becomes of ticks at whose time nobody ran: "skip", "last" (only the latest), or "all", in order
        late        so many seconds after its time a tick is still run, where missed ones are skipped (default: every/2)
        most        so many missed ticks are caught up with at most
        on_failure  "keep": a tick that failed is over; "retry": the next to look runs it again
        """
        lock = self._key_lock(SCHEDULE, name, wait=0, ttl=ttl)
        ticks = checked_ticks(every, offset, missed, late, most)
        return Schedule(lock, self._records(store), name, ticks, on_failure)

    def status(
        self, name: str, moves: Mapping[str, Collection[str]], start: str, *, store: Store | str | None = None
    ) -> Status:
        """A status with the arrows `moves`, such as `{"new": {"paid", "cancelled"}, "paid": {"shipped"}}`; a name that
        was never moved is in the state `start`."""
        return Status(self._records(store), check_name(name), moves, start)


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
    terms = Terms(attempts, on, pause, most_pause, name, on_event)
    result: T = step(terms.run(_THREADS, fn, args))
    return result
