"""Any one of several names: in all their queues at once, before one deadline.

Each name has an acquire of its own: the coroutine in `acquire.py` with all its promises, for a claim of its own. They
all run on the caller's thread or task, one at a time. Only their pauses are shared: the waiter of each claim gets a
`_MemberSignal`, and waiting on that suspends the acquire instead of the caller. The caller waits on one signal for all,
and resumes the acquires that were notified or whose pause is over. So blocking mode needs no thread for each name, and
every engine waits for each claim as it does for any other: by notification, by polling, by probing.

The first grant ends the other acquires: closing a suspended coroutine raises GeneratorExit in its pause, and `acquire`
leaves the queue, as after Ctrl-C (E6). If another name was granted or reserved meanwhile, leaving releases that too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from leasehold.client.acquire import AcquireRequest, acquire, without_min_hold
from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease
from leasehold.client.lock import BaseLock, Shape
from leasehold.config import Duration, LockOptions, Unset, check_wait
from leasehold.core import timing
from leasehold.engines.base import Engine, WrappedEngine
from leasehold.errors import ConfigError, Deadlocked, NotAcquired, SelfDeadlock, Unavailable
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime, Signal

if TYPE_CHECKING:
    from leasehold.client.base import BaseClient
    from leasehold.client.core import ClientCore
    from leasehold.engines.registry import Waiter

L = TypeVar("L", bound=BaseLease)

_ORDER: Final = count(1)  # of the `with` statements of all pools
_LAST_ATTEMPTS: Final = 0.25  # seconds after `wait` in which the names get their last attempts
_PAUSE: Final = object()  # what the coroutine of a member yields to `_Member.resume` when it waits


@types.coroutine
def _suspend() -> Generator[object, None, None]:
    yield _PAUSE


class _MemberSignal:
    """The signal of one member's waiter. `set` wakes the caller; `wait` suspends the member."""

    def __init__(self, runtime: Runtime, caller: Signal) -> None:
        self._runtime, self._caller = runtime, caller
        self.is_set, self.wake_at = False, 0.0

    def set(self) -> None:
        self.is_set = True  # first: the caller checks it before it waits
        self._caller.set()

    async def wait(self, seconds: float) -> bool:
        if not self.is_set:
            self.wake_at = self._runtime.now() + seconds
            await _suspend()
        if self.is_set:
            self.is_set = False
            return True
        return False


class _MemberRequest(AcquireRequest[L]):
    """The request of one name. Its waiter gets the member's signal."""

    __slots__ = ("_signal",)

    def __init__(
        self,
        lock: BaseLock[L],
        began: float,
        wait: float | None,
        get_engine: Callable[[], Engine],
        signal: _MemberSignal,
    ) -> None:
        super().__init__(lock, lock._new_claim(), began, wait, False, get_engine)
        self._signal = signal

    def add_waiter(self, claim: Claim) -> Waiter:
        waiter = super().add_waiter(claim)
        waiter.signal = self._signal
        return waiter


class _MemberEngine(WrappedEngine):
    """The engine for one member: its claims queue at once, and their waiters get its signal."""

    queues_at_once = True

    def __init__(self, engine: Engine, core: ClientCore, signal: _MemberSignal) -> None:
        super().__init__(engine)
        self._core, self._signal = core, signal

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        reply = await self._engine.attempt(claim, deadline)
        # A notification that came before this has set the waiter's flags, which `wait` checks before the signal (E4).
        if (waiter := self._core.registry.waiting.get(claim.id_hash)) is not None:
            waiter.signal = self._signal
        return reply


class _BoundedEngine(WrappedEngine):
    """The engine for the attempts before queueing: while it is silent, none outlasts the caller's `wait`."""

    def __init__(self, engine: Engine, runtime: Runtime, wait_deadline: float) -> None:
        super().__init__(engine)
        self._runtime, self._wait_deadline = runtime, wait_deadline

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        latest = timing.bounded_attempt(self._runtime.now(), deadline, self._wait_deadline)
        return await self._engine.attempt(claim, latest)


def _bounded_engine(core: ClientCore, wait_deadline: float) -> Engine:
    engine = _BoundedEngine(core.engine_unless_closed(), core.runtime, wait_deadline)
    return cast("Engine", engine)  # `acquire` calls no other verbs


class _Member(Generic[L]):
    """One of the names: its acquire as a coroutine that is suspended while it waits, and how it ended."""

    def __init__(self, lock: BaseLock[L], began: float, wait: float | None, caller: Signal) -> None:
        self._core = lock._core
        self.signal = _MemberSignal(self._core.runtime, caller)
        self.request: _MemberRequest[L] = _MemberRequest(lock, began, wait, self._get_engine, self.signal)
        self._acquire: Coroutine[Any, Any, L] = acquire(self.request)
        self.lease: L | None = None
        self.refusal: NotAcquired | None = None
        self._left = False

    def _get_engine(self) -> Engine:
        engine = _MemberEngine(self._core.engine_unless_closed(), self._core, self.signal)
        return cast("Engine", engine)  # `acquire` calls no other verbs

    @types.coroutine
    def resume(self) -> Generator[Any, Any, None]:
        """Run the acquire until it waits or ends. What it awaits otherwise is awaited here."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                awaited = self._acquire.send(value) if error is None else self._acquire.throw(error)
            except StopIteration as done:
                self.lease = done.value
                return
            except Deadlocked:  # stuck in all queues: for every member
                raise
            except NotAcquired as refusal:
                self.refusal = refusal
                return
            if awaited is _PAUSE:
                return
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as thrown:  # a cancellation: the acquire must see it where it waits
                error = thrown

    def leave(self) -> None:
        """End the acquire, if it has not ended: it leaves the queue. If Ctrl-C interrupts this, call it again."""
        if self._left:
            return
        self._acquire.close()
        id_hash, registry = self.request.claim.id_hash, self._core.registry
        if (waiter := registry.waiting.get(id_hash)) is not None and id_hash not in registry.held:
            self._core.forget(without_min_hold(waiter.claim))  # the acquire was interrupted before it could
        self._left = True


async def _first_grant(
    members: Sequence[_Member[L]], caller: Signal, runtime: Runtime, latest: float
) -> _Member[L] | None:
    """Resume the members when they are due, until one of them has a lease. None: each of them gave up, or it is later
    than `latest`: each attempt of a slow engine takes long, and they follow each other."""
    while running := [member for member in members if member.refusal is None]:
        now = runtime.now()
        due = [member for member in running if member.signal.is_set or member.signal.wake_at <= now]
        if not due:
            await caller.wait(min(member.signal.wake_at for member in running) - now)
        for member in due:
            if runtime.now() > latest:
                return None
            await member.resume()
            if member.lease is not None:
                return member
    return None


def _leave_all(members: Iterable[_Member[L]]) -> None:
    """All members leave their queues, however often Ctrl-C interrupts this; then the error is raised."""
    error: BaseException | None = None
    for member in members:
        while True:
            try:
                member.leave()
            except Exception as failure:  # it would fail again: this claim expires
                error = error or failure
            except BaseException as interrupt:
                error = interrupt
                continue
            break
    if error is not None:
        raise error


class BaseAnyOf(BaseLock[L], Generic[L]):
    """What `AnyOf` and `AsyncAnyOf` share: a lock whose lease is that of the first name that was granted."""

    __slots__ = ("locks",)

    def __init__(
        self, client: BaseClient, lease_type: type[L], names: Iterable[str], shape: Shape, options: LockOptions
    ) -> None:
        if isinstance(names, str):
            raise ConfigError(f"any_of takes a list of names, such as [{names!r}], not one string")
        each_once = dict.fromkeys(names)
        self.locks = tuple(BaseLock(client, lease_type, name, shape, options) for name in each_once)
        if not self.locks:
            raise ConfigError("any_of needs at least one name")
        if options.reentrant:
            raise ConfigError("any_of cannot be reentrant: pass the lease down")
        if options.on_unavailable == "run":
            raise ConfigError('any_of cannot run without a grant, which chooses the name: use "raise" or "wait"')
        self.name = "any of " + _list_names([lock.name for lock in self.locks])
        self._client, self._lease_type, self.shape, self.options = client, lease_type, shape, options
        self._core = client._core

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(lock.name for lock in self.locks)} ttl={self.options.ttl}>"

    def __reduce__(self) -> tuple[object, ...]:
        names = [lock.name for lock in self.locks]
        return type(self), (self._client, self._lease_type, names, self.shape, self.options)

    async def _acquire_lease(
        self,
        wait: Duration | Unset | None,
        get_engine: Callable[[], Engine] | None = None,  # noqa: ARG002  # for elections
        entered: list[HeldLock] | None = None,  # noqa: ARG002  # for reentrant locks
    ) -> L:
        wait = self.options.wait if isinstance(wait, Unset) else check_wait(wait)
        core = self._core
        if not core.runtime.bind():
            core.rebind_loop()
        locks, began = self._not_held_here(wait), core.runtime.now()
        pool_acquire = _PoolAcquire(self, locks, began, wait)
        try:
            lease, request = await pool_acquire.run()
        except BaseException as error:
            if core.reports():
                refusals = {refusal.name: refusal for refusal in getattr(error, "refusals", ())}
                for lock, failed in pool_acquire.requests.items():
                    core.emit("attempted", failed.claim)
                    reason = refusals.get(lock.name, error)
                    core.report_not_acquired(failed.claim, began, failed.waited, failed.position, reason)
            raise
        finally:
            core.in_flight.difference_update(pool_acquire.in_flight)
        if core.reports():
            core.emit("attempted", lease._claim)
            request.lock._report_granted(lease, request)
        return lease

    def _record_enter(self, lease: L, frame: int, entered: list[HeldLock]) -> L:
        entered.append(HeldLock(self, lease, self.shape.mode, order=next(_ORDER)))
        return super()._record_enter(lease, frame, entered)

    def _not_held_here(self, wait: float | None) -> list[BaseLock[L]]:
        """The names that this thread or task can wait for, in an order that spreads the load: they follow each other as
        given, from a random one on."""
        core, start = self._core, int(self._core.runtime.random() * len(self.locks))
        locks = [*self.locks[start:], *self.locks[:start]]
        held = {lock: held_lock for lock in locks if (held_lock := core.held_locks.find(lock.name)) is not None}
        blocked = [lock for lock, held_lock in held.items() if held_lock.lease._claim.kind == self.shape.kind]
        if len(blocked) < len(locks):
            return [lock for lock in locks if lock not in blocked]
        if wait != 0:
            raise SelfDeadlock(self.name, token=held[locks[0]].lease._token, why="release one of them first")
        return locks

    async def _locked(self) -> bool:
        """Whether all of the names are held."""
        for lock in self.locks:
            if not await lock._locked():
                return False
        return True


@dataclass(slots=True, eq=False)
class _PoolAcquire(Generic[L]):
    """One call to acquire any of the names."""

    pool: BaseAnyOf[L]
    locks: Sequence[BaseLock[L]]
    began: float
    wait: float | None
    requests: dict[BaseLock[L], AcquireRequest[L]] = field(default_factory=dict)  # the last one for each name
    in_flight: set[str] = field(default_factory=set)  # id hashes of all its claims
    refusals: dict[str, NotAcquired] = field(default_factory=dict)  # the last one for each name
    failure: Unavailable | None = None  # of the attempts before queueing

    async def run(self) -> tuple[L, AcquireRequest[L]]:
        """Attempt each name once, without queueing. If none is free, queue for all of them."""
        found = await self._attempt_each()
        if found is None and self.wait == 0:
            raise NotAcquired(self.pool.name, refusals=tuple(self.refusals.values()))
        return found or await self._queue_for_all()

    @property
    def deadline(self) -> float:
        return timing.NEVER if self.wait is None else self.began + self.wait

    async def _attempt_each(self) -> tuple[L, AcquireRequest[L]] | None:
        core, may_wait = self.pool._core, self.wait != 0
        retries = may_wait and self.pool.options.on_unavailable == "wait"
        get_engine: Callable[[], Engine] = core.engine_unless_closed
        if retries and self.wait is not None:
            get_engine = partial(_bounded_engine, core, self.deadline)
        for lock in self.locks:
            once: AcquireRequest[L] = AcquireRequest(lock, lock._new_claim(), self.began, 0, False, get_engine)
            self._track(lock, once)
            try:
                return await acquire(once), once
            except NotAcquired as refusal:
                self.refusals[lock.name] = refusal
            except Unavailable as error:
                if not retries:
                    raise
                self.failure = error
                break  # the attempts of `_queue_for_all` are repeated until the engine answers
            if may_wait and core.runtime.now() >= self.deadline:
                break
        return None

    async def _queue_for_all(self) -> tuple[L, AcquireRequest[L]]:
        runtime = self.pool._core.runtime
        caller, members = runtime.signal(), list[_Member[L]]()
        winner: _Member[L] | None = None
        try:
            for lock in self.locks:
                members.append(member := _Member(lock, self.began, self.wait, caller))
                self._track(lock, member.request)
            try:
                winner = await _first_grant(members, caller, runtime, self.deadline + _LAST_ATTEMPTS)
            finally:
                _leave_all(members)
        except BaseException:
            for member in members:
                if member.lease is not None:  # interrupted after the grant
                    member.lease._release_nowait()
            raise
        if winner is None:
            raise self._not_acquired(members)
        return cast("L", winner.lease), winner.request

    def _not_acquired(self, members: Sequence[_Member[L]]) -> NotAcquired | Unavailable:
        self.refusals.update({member.request.lock.name: member.refusal for member in members if member.refusal})
        if not self.refusals and self.failure is not None:
            return self.failure
        given_up = tuple(self.refusals[lock.name] for lock in self.locks if lock.name in self.refusals)
        waited = self.pool._core.runtime.now() - self.began
        return NotAcquired(self.pool.name, waited=waited, refusals=given_up)

    def _track(self, lock: BaseLock[L], request: AcquireRequest[L]) -> None:
        self.requests[lock] = request
        self.in_flight.add(request.claim.id_hash)
        self.pool._core.in_flight.add(request.claim.id_hash)


def _list_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown} and {len(names) - 10} more"
