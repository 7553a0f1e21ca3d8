"""Several locks as one: sorted, one deadline, all or nothing, lost together.

Callers that acquire several names in the same order cannot wait for each other in a cycle: the caller that is furthest
in that order needs no name that the others hold. So the names are sorted here, whatever order the caller passed. If one
lock fails, those acquired before are released with `forget`: the rollback does not wait.

The locks may belong to clients of different engines. To move from one engine to another, hold the same name on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from leasehold.client.any_of import BaseAnyOf
from leasehold.client.held_locks import CURRENT_LEASES, HeldLock
from leasehold.client.lease import BY_LOCAL_CLOCK, BaseLease, is_group_of_losses, wait_lost
from leasehold.client.lock import BaseLock, LeaseAttributes
from leasehold.config import UNSET, Duration, Unset, check_wait
from leasehold.errors import ConfigError, LeaseLost, NotAcquired
from leasehold.model import Reason
from leasehold.runtime.base import Interrupt

L = TypeVar("L", bound=BaseLease)
S = TypeVar("S")  # `Leases` or `AsyncLeases`


class BaseLeases(Mapping[str, L], Generic[L]):
    """The leases of a multilock, by name. They are valid only together."""

    __slots__ = ("_leases",)

    def __init__(self, leases: Mapping[BaseLock[L], L]) -> None:
        self._leases = dict(leases)  # in the order the caller passed

    def __getitem__(self, name: str) -> L:
        """The lease of a name; if the name is held on several engines, that of the lock passed first."""
        for lock, lease in self._leases.items():
            if lock.name == name:
                return lease
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter({lock.name: None for lock in self._leases})

    def __len__(self) -> int:
        return len({lock.name for lock in self._leases})

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self._leases.values()))}>"

    def of(self, lock: BaseLock[L]) -> L:
        """The lease of a lock, for a name that is held on several engines."""
        return self._leases[lock]

    @property
    def held(self) -> bool:
        """Whether the work may continue: all leases are held."""
        return all(lease.held for lease in self._leases.values())

    @property
    def guaranteed(self) -> bool:
        """Whether the engines granted all of them: False only after an outage with `on_unavailable="run"`."""
        return all(lease.guaranteed for lease in self._leases.values())

    @property
    def remaining(self) -> float:
        """Seconds all leases can be trusted if no further renewal succeeds. Never an overestimate."""
        return min(lease.remaining for lease in self._leases.values())

    @property
    def lost_reason(self) -> Reason | None:
        """Why the first LOST lease was lost; None if none is LOST."""
        return next((reason for lease in self._leases.values() if (reason := lease.lost_reason)), None)

    def check(self) -> None:
        """Raise `LeaseLost` unless all leases are held. No I/O: call it before every step that matters."""
        for lease in self._leases.values():
            lease.check()

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(leases)` once when the first of them is lost, on the client's callback thread; at once if one
        is already lost."""
        pending = [callback]  # list.pop is atomic: two clients may notify at the same time

        def notify_once(_lease: L) -> None:
            while pending:
                pending.pop()(self)

        for lease in self._leases.values():
            lease.on_lost(notify_once)

    def on_at_risk(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(leases)` each time one of them becomes AT_RISK, as `Lease.on_at_risk` does."""
        for lease in self._leases.values():
            lease.on_at_risk(lambda _lease: callback(self))

    async def _release(self) -> bool:
        for lease in self._leases.values():
            lease._core.held_locks.mark_released(lease)
        return await release_all([HeldLock(None, lease, lease._claim.mode) for lease in self._leases.values()][::-1])

    async def _wait_lost(self, seconds: Duration | None) -> bool:
        return await wait_lost([*self._leases.values()], seconds)


class MemberLock(NamedTuple):
    """One acquired lock of the set."""

    lock: BaseLock[Any]
    held_lock: HeldLock


class Rollback:
    """Gives the acquired members up again if the body of its `with` fails, and decides which error the caller gets."""

    def __init__(self, members: list[MemberLock], interrupt: Interrupt | None) -> None:
        self._members, self._interrupt = members, interrupt

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            return
        interrupted = self._interrupt is not None and self._interrupt.disarm(kind)
        lost = _first_lost([member.held_lock.lease for member in self._members])
        roll_back(self._members)
        if interrupted and lost is not None:
            raise lost from error


def roll_back(members: list[MemberLock]) -> None:
    """Release all members without waiting. However often Ctrl-C interrupts this, all of them are released, and then the
    error is raised. May be called again."""
    error: BaseException | None = None
    while members:
        lock, held_lock = members[-1]
        held_lock.current_leases.leave(lock._core.runtime)
        try:
            lock._core.held_locks.remove(held_lock)
            held_lock.lease._rollback(held_lock)
        except Exception as failure:  # it would fail again: this lease expires
            error = error or failure
        except BaseException as interrupt:
            error = interrupt
            continue
        members.pop()  # only now: if interrupted, it is done again
    if error is not None:
        raise error


class BaseMultiLock(LeaseAttributes, Generic[L, S]):
    """What `MultiLock` and `AsyncMultiLock` share. Immutable; threads and tasks may share it."""

    __slots__ = ("_sorted_locks", "locks", "wait")

    _leases_type: ClassVar[Callable[..., Any]]
    _lock_type: ClassVar[type]

    def __init__(self, locks: Iterable[BaseLock[L]], *, wait: Duration | Unset | None = UNSET) -> None:
        self.locks = tuple(locks)
        if not self.locks:
            raise ConfigError("a multilock needs at least one lock")
        for lock in self.locks:
            if not isinstance(lock, self._lock_type):
                raise ConfigError(f"{type(self).__name__} takes {self._lock_type.__name__} objects, not {lock!r}")
            if isinstance(lock, BaseAnyOf):  # its name is not known before it is granted, so it cannot be sorted
                raise ConfigError(f"{type(self).__name__} cannot take {lock.name}: acquire the pool first, by itself")
        if len({(id(lock._core), lock.name) for lock in self.locks}) < len(self.locks):
            raise ConfigError("a multilock can take each name of a client only once: it would wait for itself")
        _refuse_duplicates(self.locks)
        waits = [lock.options.wait for lock in self.locks if lock.options.wait is not None]
        self.wait = check_wait(wait) if not isinstance(wait, Unset) else min(waits, default=None)
        self._sorted_locks = sorted(self.locks, key=_sort_key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(lock.name for lock in self.locks)} wait={self.wait}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.locks, self.wait)

    # ----------------------------------------------------------- acquiring

    async def _acquire(self, wait: Duration | Unset | None = UNSET) -> S:
        """All of them, without a `with`."""
        members: list[MemberLock] = []
        try:
            return await self._acquire_all(wait, None, members)
        except BaseException:
            roll_back(members)
            raise

    async def _try_acquire(self) -> S | None:
        try:
            return await self._acquire(0)
        except NotAcquired:
            return None

    async def _acquire_all(self, wait: Duration | Unset | None, frame: int | None, members: list[MemberLock]) -> S:
        """Acquire one after the other, or none. `frame`: that of the `with`, if there is one."""
        wait = self.wait if isinstance(wait, Unset) else check_wait(wait)
        runtime = self._sorted_locks[0]._core.runtime
        deadline = None if wait is None else runtime.now() + wait
        # One for all of them, armed even while waiting: if one lease is lost meanwhile, the rest is pointless.
        interrupt = runtime.interrupt()
        with Rollback(members, interrupt):
            for lock in self._sorted_locks:
                remaining = None if deadline is None else max(0.0, deadline - runtime.now())
                lease = await self._acquire_member(lock, remaining, members)
                held_lock = members[-1].held_lock
                held_lock.lock, held_lock.frame = None if frame is None else self, frame or 0
                if frame is not None or lock.options.reentrant:
                    lock._core.held_locks.push(lock.name, held_lock)
                if interrupt is not None and lease._depth == 1:
                    held_lock.interrupt = lease._interrupt = interrupt
            _raise_lost([member.held_lock.lease for member in members])
        if frame is None and interrupt is not None:
            interrupt.disarm(None)
        leases = {member.lock: member.held_lock.lease for member in members}
        if frame is not None:
            current = members[0].held_lock.current_leases
            current.extend(leases[lock] for lock in self.locks)
            CURRENT_LEASES.set((*filter(None, CURRENT_LEASES.get()), current))
        result: S = self._leases_type({lock: leases[lock] for lock in self.locks})
        return result

    async def _acquire_member(self, lock: BaseLock[L], wait: float | None, members: list[MemberLock]) -> L:
        entered: list[HeldLock] = []
        try:
            lease = await lock._acquire_lease(wait, entered=entered)
            held_lock = entered[0] if entered else HeldLock(None, lease, lock.shape.mode)
            members.append(MemberLock(lock, held_lock))
        except BaseException:
            lock._rollback_enter(entered)
            raise
        return lease

    def _rollback_enter(self, members: list[MemberLock]) -> None:
        roll_back(members)

    # ---------------------------------------------------------------- with

    async def _exit(
        self, frame: int, kind: type[BaseException] | None, error: BaseException | None, exited: list[HeldLock]
    ) -> None:
        """Release all. Whether one was lost is decided by the clock before anything is sent, or by the engine's answer
        to the release. `exited` as for a lock."""
        for lock in reversed(self._sorted_locks):
            lock._core.held_locks.pop(lock.name, self, frame, exited).current_leases.leave(lock._core.runtime)
        interrupt = next((held_lock.interrupt for held_lock in exited if held_lock.interrupt is not None), None)
        interrupted = interrupt is not None and interrupt.disarm(kind)
        leases = [held_lock.lease for held_lock in reversed(exited)]
        lost = _first_lost(leases)
        await release_all([held_lock for held_lock in exited if not held_lock.released])
        # A lease that reached its local deadline after the body, while the others were released, is not lost.
        lost = lost or _first_lost([lease for lease in leases if lease.lost_reason not in BY_LOCAL_CLOCK])
        if lost is None:
            return
        if error is None or interrupted or is_group_of_losses(error):
            raise lost from error
        if not isinstance(error, LeaseLost):
            error.add_note(str(lost))

    def _rollback_exit(self, frame: int, exited: list[HeldLock]) -> None:
        """After Ctrl-C while leaving a `with`: release what it still holds."""
        if len(exited) < len(self._sorted_locks):
            for lock in self._sorted_locks:
                if (held_lock := lock._core.held_locks.pop_if_present(self, frame)) is not None:
                    exited.append(held_lock)
        for held_lock in exited:
            held_lock.current_leases.leave(held_lock.lease._core.runtime)
            held_lock.lease._core.held_locks.remove(held_lock)
            if not held_lock.released:
                held_lock.lease._release_nowait(held_lock)


async def release_all(held_locks: Sequence[HeldLock]) -> bool:
    """Release them in this order. True: all were live, and the engine confirmed each release. If interrupted, it
    releases the rest without waiting. If an engine did not answer for one lease, the others do not wait for it."""
    confirmed, unresponsive = True, set[object]()
    try:
        for held_lock in held_locks:
            lease = held_lock.lease
            if lease._core in unresponsive:
                lease._release_nowait(held_lock)
                confirmed = False
            else:
                confirmed &= await lease._release(held_lock)
                if lease._claim.id_hash in lease._core.registry.pending_releases:
                    unresponsive.add(lease._core)
    except BaseException:
        for held_lock in held_locks:
            if not held_lock.released:
                held_lock.lease._release_nowait(held_lock)
        raise
    return confirmed


def _first_lost(leases: Sequence[BaseLease]) -> LeaseLost | None:
    for lease in leases:
        if reason := lease.lost_reason:
            return LeaseLost(lease.name, reason=reason, token=lease._token)
    return None


def _raise_lost(leases: Sequence[BaseLease]) -> None:
    """If one was lost while waiting for the next, the body must not start."""
    if lost := _first_lost(leases):
        raise lost


def _sort_key(lock: BaseLock[L]) -> tuple[str, str, str, str]:
    """The same order in every process: by name first, because processes may write the engine's URL differently."""
    config = lock._core.config
    return lock.name, lock._core.options.namespace, config.scheme, config.target.rpartition("@")[2]


def _refuse_duplicates(locks: Sequence[BaseLock[Any]]) -> None:
    """Two clients of one engine are two holders: the second would wait for what the first holds."""
    seen: dict[tuple[str, str, str, str], BaseLock[Any]] = {}
    for lock in locks:
        other = seen.setdefault(_sort_key(lock), lock)
        private = lock._core.config.scheme == "memory" and not lock._core.config.target
        if other is lock or private or lock.shape.kind == "semaphore":
            continue
        if "exclusive" in (lock.shape.mode, other.shape.mode):
            raise ConfigError(f"{lock.name} is given twice, by two clients of one engine: it would wait for itself")


def unique_names(names: Iterable[str]) -> list[str]:
    """Each name once: a transfer from an account to itself needs one lock."""
    if isinstance(names, str):
        raise ConfigError(f"multilock takes a list of names, such as [{names!r}], not one string")
    return list(dict.fromkeys(names))


def _rebuild(kind: type[BaseMultiLock[L, S]], locks: tuple[BaseLock[L], ...], wait: float | None) -> object:
    return kind(locks, wait=wait)
