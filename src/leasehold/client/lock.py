"""Locks, read and write locks, permits of a semaphore: one implementation; their shape is the difference."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NoReturn, TypeVar

from leasehold.client.acquire import AcquireRequest, acquire
from leasehold.client.decorator import FilledParameters, call_filled, refuse_coroutine
from leasehold.client.held_locks import CURRENT_LEASES, HeldLock
from leasehold.client.lease import LOST, RELEASED, BaseLease, is_group_of_losses
from leasehold.config import UNSET, Duration, LockOptions, Unset, check_required, check_wait
from leasehold.core.names import check_name, make_claim_id
from leasehold.core.timing import NEVER
from leasehold.engines.base import Engine
from leasehold.errors import LeaseLost, NotAcquired, SelfDeadlock, Unavailable, Unsupported
from leasehold.model import Claim, Kind, Mode, fast_tuple
from leasehold.runtime.base import maybe_await

if TYPE_CHECKING:
    from leasehold.client.base import BaseClient
    from leasehold.client.core import ClientCore

L = TypeVar("L", bound=BaseLease)
T = TypeVar("T")

REENTRANT_ADVICE = "pass the lease down, or build the lock with reentrant=True"


class Shape(NamedTuple):
    """What is claimed of a name. Locks and both sides of an rwlock are one kind, semaphores another."""

    mode: Mode = "exclusive"
    kind: Kind = "lock"
    limit: int = 1


_OF_THE_LEASE = frozenset(
    {
        "check",
        "ensure",
        "guaranteed",
        "hand_over",
        "held",
        "on_at_risk",
        "on_lost",
        "release",
        "remaining",
        "renew",
        "token",
        "verify",
        "wait_lost",
    }
)


class _LeaseAttribute:
    """An attribute that leases have and locks do not. The error says how to get the lease.

    One descriptor per name, not `__getattr__`, which slows down every read of the lock's own attributes.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, lock: object, owner: type) -> NoReturn:
        async_, await_ = ("async ", "await ") if owner.__name__.startswith("Async") else ("", "")
        text = (
            f"{owner.__name__!r} object has no attribute {self._name!r}: the lease has it. Write "
            f"`{async_}with lock as lease:`, or keep what acquire() returns: `lease = {await_}lock.acquire()`, and "
            f"then `lease.{self._name}`"
        )
        raise AttributeError(text, name=self._name, obj=lock)


class LeaseAttributes:
    """For all kinds of locks. Added by name below, so that a type checker still reports them as unknown."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return [name for name in object.__dir__(self) if name not in _OF_THE_LEASE]


for _name in _OF_THE_LEASE:
    setattr(LeaseAttributes, _name, _LeaseAttribute(_name))


class BaseLock(LeaseAttributes, Generic[L]):
    """What `Lock` and `AsyncLock` share. Immutable; threads and tasks may share it."""

    # For locks that the caller did not build: those of an election, and of records.
    _deadlock_advice: ClassVar[str] = "a function that holds it cannot wait for it"

    __slots__ = ("_claim_fields", "_client", "_core", "_lease_type", "_namespace", "name", "options", "shape")

    def __init__(self, client: BaseClient, lease_type: type[L], name: str, shape: Shape, options: LockOptions) -> None:
        self.name = check_name(name)
        self._client, self._lease_type, self.shape, self.options = client, lease_type, shape, options
        self._core: ClientCore = client._core
        self._namespace = self._core.options.namespace
        # The fields that follow `holder` in every claim of this lock, built once: each acquire makes a claim.
        process_bound = not options.min_hold and "outlives" not in (options.require or ())
        of_grant = (options.ttl, *shape, options.delay, options.min_hold)
        self._claim_fields = (*of_grant, False, 0, NEVER, options.group, process_bound)
        self._refuse_unsupported()
        self._core.watchdog.shortest_ttl = min(self._core.watchdog.shortest_ttl, options.ttl)

    def _refuse_unsupported(self) -> None:
        """Refuse now what the engine cannot do, not in a call that is already running."""
        traits, engine = self._core.traits, self._core.engine_name
        missing = []
        if self.shape.mode == "shared" and not traits.shared:
            missing.append("shared claims (read locks)")
        if traits.max_limit is not None and self.shape.limit > traits.max_limit:
            missing.append(f"more than {traits.max_limit} holder(s) of a name")
        if not traits.outlives and (self.options.min_hold or self.options.delay):
            missing.append("min_hold and delay (its grants die with their process)")
        if self.options.on_deadlock == "raise" and not traits.fair:
            missing.append('on_deadlock="raise" (it keeps no queue of waiters)')
        if missing:
            text = f"{engine} does not support {' or '.join(missing)}: use another engine"
            raise Unsupported(text, engine=engine, missing=tuple(missing))
        if self.options.require:
            check_required(self.options.require, traits, engine)

    def __repr__(self) -> str:
        from leasehold.core.lock_state import describe_kind  # only here: most engines do without that module

        what = "shared lock" if self.shape.mode == "shared" else describe_kind(self.shape.kind, self.shape.limit)
        return f"<{type(self).__name__} {self.name} ({what}) ttl={self.options.ttl}>"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self._client, self._lease_type, self.name, self.shape, self.options)

    # ----------------------------------------------------------- acquiring

    def _acquire(self, wait: Duration | Unset | None = UNSET) -> Coroutine[Any, Any, L]:
        """A new lease; if this thread or task already holds a reentrant lock, the same lease again."""
        return self._acquire_reentrant(wait) if self.options.reentrant else self._acquire_lease(wait)

    async def _acquire_reentrant(self, wait: Duration | Unset | None) -> L:
        entered: list[HeldLock] = []
        try:
            lease = await self._acquire_lease(wait, entered=entered)
            held_lock = entered[0] if entered else HeldLock(None, lease, self.shape.mode)
            held_lock.task = self._core.runtime.blocked_task()
            self._core.held_locks.push(self.name, held_lock)
        except BaseException:
            self._rollback_enter(entered)
            raise
        return lease

    async def _try_acquire(self) -> L | None:
        try:
            return await self._acquire(0)
        except NotAcquired:
            return None

    async def _acquire_lease(
        self,
        wait: Duration | Unset | None,
        get_engine: Callable[[], Engine] | None = None,
        entered: list[HeldLock] | None = None,
    ) -> L:
        """A new lease, or the one this thread or task already has (then its depth is above 1). `get_engine` may raise
        to end the wait. `entered` gets the entry of a lease that is entered again, for the caller to record; if Ctrl-C
        comes first, `_rollback_enter` takes the hold back.

        Here and below a coroutine is created only where something is awaited: each one doubles the cost of a call.
        """
        wait = self.options.wait if isinstance(wait, Unset) else check_wait(wait)
        core = self._core
        if not core.runtime.bind():  # before anything is recorded for the running task
            core.rebind_loop()
        held_lock, waiting_deadlocks = core.held_locks.find(self.name), False
        if held_lock is not None and held_lock.lease._release_on_commit:  # the caller's commit may have released it
            with suppress(LeaseLost):
                await held_lock.lease._renew(None)
            held_lock = core.held_locks.find(self.name)
        if held_lock is not None and held_lock.lease._claim.kind == self.shape.kind:  # else the engine says Mismatch
            if not self._may_reenter(held_lock):
                waiting_deadlocks = self._waiting_deadlocks(held_lock, wait)
            elif self._reenter(held_lock, entered):
                return held_lock.lease  # type: ignore[return-value]  # leases of one client are of one type
        claim, began = self._new_claim(), core.runtime.now()
        request: AcquireRequest[L] = AcquireRequest(
            self, claim, began, wait, waiting_deadlocks, get_engine or core.engine_unless_closed
        )
        reports = core.reports() or self.options.on_unavailable == "run"  # which `_on_not_acquired` handles as well
        id_hash = claim.id_hash
        try:
            core.in_flight.add(id_hash)
            if reports:
                core.emit("attempted", claim)
            lease = await acquire(request)
        except BaseException as error:
            if reports and (unguaranteed := self._on_not_acquired(request, error)) is not None:
                return unguaranteed
            raise
        else:
            if reports:
                self._report_granted(lease, request)
            return lease
        finally:
            core.in_flight.discard(id_hash)

    def _on_not_acquired(self, request: AcquireRequest[L], error: BaseException) -> L | None:
        """Report that an acquire failed. A lease without a grant, if the engine did not answer and the lock's
        `on_unavailable` lets the caller go on."""
        if isinstance(error, Unavailable) and request.may_run(error):
            lease = request.register_unguaranteed()
            self._core.emit("unguaranteed", lease._claim, since=request.began, reason=str(error))
            return lease
        self._core.report_not_acquired(request.claim, request.began, request.waited, request.position, error)
        return None

    def _report_granted(self, lease: L, request: AcquireRequest[L]) -> None:
        emit, claim, validity = self._core.emit, lease._claim, lease._validity
        began, waited, position = request.began, request.waited, request.position
        lease._reports_release = True
        if waited:
            emit("waited", claim, lease.token, began, lease.slot, True, position=position)
        now = self._core.runtime.now()
        left = lease._left(validity, now)
        emit("granted", claim, lease._token, began, lease.slot, waited, validity.ttl, left, position=position)

    def _may_reenter(self, held_lock: HeldLock) -> bool:
        """Whether a reentrant lock gets the lease that its thread or task already has. In blocking mode all tasks of a
        loop are one thread: another task than the one that entered would work at the same time."""
        return (
            self.options.reentrant
            and held_lock.mode in ("exclusive", self.shape.mode)
            and held_lock.task is self._core.runtime.blocked_task()
        )

    def _reenter(self, held_lock: HeldLock, entered: list[HeldLock] | None) -> bool:
        """Hold its lease once more. False: the lease has ended."""
        reentered = HeldLock(None, held_lock.lease, self.shape.mode)
        if entered is not None:
            entered.append(reentered)
        if held_lock.lease._reenter(reentered):
            return True
        if entered is not None:
            entered.clear()
        return False

    def _waiting_deadlocks(self, held_lock: HeldLock, wait: float | None) -> bool:
        """True: this thread or task may attempt the claim in addition to its lease, but must not wait for it. Raises
        `SelfDeadlock` if it could never be granted."""
        if self.shape.kind == "semaphore" or wait == 0:
            return False
        if self.shape.mode == held_lock.mode == "shared":
            return True
        if self._core.runtime.blocked_task() is not None:
            why = "the tasks of an event loop share one thread, so a blocking client cannot tell them apart; "
            why += "use AsyncClient"
        elif held_lock.mode == "shared":
            why = "a read lock cannot become a write lock; release it first"
        else:
            why = self._deadlock_advice
        raise SelfDeadlock(self.name, token=held_lock.lease._token, why=why)

    def _new_claim(self) -> Claim:
        core, options = self._core, self.options
        runtime, holder = core.runtime, core.holder(options.holder, options.purpose)
        secret, id_hash = make_claim_id(runtime.owner_id(), runtime.random_bytes(16).hex())
        return fast_tuple(Claim, (self._namespace, self.name, secret, id_hash, holder, *self._claim_fields))

    # ------------------------------------------------------ with, and call

    def _record_enter(self, lease: L, frame: int, entered: list[HeldLock]) -> L:
        """Record the lease for the `with` that this frame runs. `entered`: what to undo if that is interrupted."""
        core = self._core
        interrupt = core.runtime.interrupt() if lease._depth == 1 else None  # an outer hold has its own
        if entered:  # entered again
            held_lock = entered[0]
            held_lock.lock, held_lock.frame, held_lock.interrupt = self, frame, interrupt
        else:
            held_lock = HeldLock(self, lease, self.shape.mode, frame, interrupt)
            entered.append(held_lock)
        if self.options.reentrant:
            held_lock.task = core.runtime.blocked_task()
        core.held_locks.push(lease._claim.name, held_lock)
        held_lock.current_leases.append(lease)
        CURRENT_LEASES.set((*filter(None, CURRENT_LEASES.get()), held_lock.current_leases))
        if interrupt is not None:
            lease._interrupt = interrupt
            if lease.state is LOST:  # it was lost before the interrupt was in place
                interrupt.fire()
        return lease

    async def _exit(
        self, frame: int, kind: type[BaseException] | None, error: BaseException | None, exited: list[HeldLock]
    ) -> None:
        """Release, and raise `LeaseLost` if the lease was lost, by the clock, before anything was sent. `exited`: the
        entry that is left, for `_rollback_exit`."""
        held_lock = self._core.held_locks.pop(self.name, self, frame, exited)
        held_lock.current_leases.leave(self._core.runtime)
        interrupted = held_lock.interrupt is not None and held_lock.interrupt.disarm(kind)
        lease = held_lock.lease
        if not held_lock.released:
            await lease._release(held_lock)
        if lease._final_state is RELEASED or (reason := lease.lost_reason) is None:
            return
        lost = LeaseLost(lease.name, reason=reason, token=lease._token)
        if error is None or interrupted or is_group_of_losses(error):
            raise lost from error
        if not isinstance(error, LeaseLost):
            error.add_note(str(lost))

    def _rollback_enter(self, entered: list[HeldLock]) -> None:
        """After Ctrl-C while entering a `with`: release what this one acquired, recorded or not yet."""
        for held_lock in entered:
            held_lock.current_leases.leave(self._core.runtime)
            if (self._core.held_locks.remove(held_lock) or held_lock.reentered) and not held_lock.released:
                held_lock.lease._release_nowait(held_lock)

    def _rollback_exit(self, frame: int, exited: list[HeldLock]) -> None:
        """After Ctrl-C while leaving a `with`: release what it still holds."""
        if not exited and (held_lock := self._core.held_locks.pop_if_present(self, frame)):
            exited.append(held_lock)
        for held_lock in exited:
            held_lock.current_leases.leave(self._core.runtime)
            self._core.held_locks.remove(held_lock)
            if not held_lock.released:
                held_lock.lease._release_nowait(held_lock)

    async def _call(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], filled: FilledParameters
    ) -> Any:
        async def work(lease: L) -> Any:
            result = call_filled(fn, args, kwargs, filled, {"lease": lease}) if filled else fn(*args, **kwargs)
            return refuse_coroutine(result, fn) if self._core.runtime.blocking else await maybe_await(result)

        return await self._run_locked(work)

    async def _run_locked(self, work: Callable[[L], Awaitable[T]]) -> T:
        """Run `work(lease)` under the lock, as the body of a `with` would run."""
        frame = id(sys._getframe())
        entered: list[HeldLock] = []
        exited: list[HeldLock] = []
        try:
            lease = self._record_enter(await self._acquire_lease(UNSET, entered=entered), frame, entered)
            try:
                result = await work(lease)
            except BaseException as error:
                await self._exit(frame, type(error), error, exited)
                raise
            await self._exit(frame, None, None, exited)
        except BaseException:
            if exited:
                self._rollback_exit(frame, exited)
            else:
                self._rollback_enter(entered)
            raise
        return result

    async def _locked(self) -> bool:
        """Whether another claim of this shape would be refused, even with an empty queue."""
        core = self._core
        found = await core.engine().inspect(core.options.namespace, self.name, True, core.deadline())
        holders = [holding for holding in found if holding.state in ("held", "reserved", "cooling")]
        if self.shape.mode == "shared":
            return any(holding.mode == "exclusive" for holding in holders)
        return len(holders) >= (holders[0].limit if holders else self.shape.limit)
