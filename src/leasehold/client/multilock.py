"""Several locks as one: sorted, one deadline, all or nothing, one word of loss for all.

Everybody who takes several names in one order cannot meet another in a cycle: whoever has the last name so far lacks
nothing that those behind it hold. So the order is made here, from the names themselves, whatever order the caller gave
them in. What was taken before a failure is forgotten, not released: rolling back waits for nobody.

The locks may belong to clients of different engines. To move from one engine to another, hold the same name on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from leasehold.client.held_locks import HeldLock
from leasehold.client.lease import BaseLease, wait_lost
from leasehold.client.lock import BaseLock
from leasehold.config import UNSET, Unset, check_wait
from leasehold.errors import ConfigError, LeaseLost, NotAcquired
from leasehold.model import Reason

L = TypeVar("L", bound=BaseLease)
S = TypeVar("S")  # what the face makes of them


class BaseLeases(Mapping[str, L], Generic[L]):
    """The leases of a multilock, by name: good together, or not at all."""

    __slots__ = ("_leases",)

    def __init__(self, leases: Mapping[BaseLock[L], L]) -> None:
        self._leases = dict(leases)  # in the order asked for

    def __getitem__(self, name: str) -> L:
        """The lease of a name; of a name held on several engines, that of the lock given first."""
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
        """The lease of a lock: where one name is held on several engines, the name alone does not tell."""
        return self._leases[lock]

    @property
    def held(self) -> bool:
        """True while the work may go on: every one of them is held."""
        return all(lease.held for lease in self._leases.values())

    @property
    def remaining(self) -> float:
        """Seconds all of them can be trusted if no renewal succeeds any more."""
        return min(lease.remaining for lease in self._leases.values())

    @property
    def lost_reason(self) -> Reason | None:
        """Why the first that is LOST is so; None while none is."""
        return next((reason for lease in self._leases.values() if (reason := lease.lost_reason)), None)

    def check(self) -> None:
        """Raise `LeaseLost` once one of them cannot be trusted. No I/O: call it before every step that matters."""
        for lease in self._leases.values():
            lease.check()

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(leases)` once, when the first of them is lost, on a thread of its own; at once if one is."""
        pending = [callback]  # a list's pop is one step: two clients may tell at the same time

        def notify_once(_lease: L) -> None:
            while pending:
                pending.pop()(self)

        for lease in self._leases.values():
            lease.on_lost(notify_once)

    async def _release(self) -> bool:
        for lease in self._leases.values():
            lease._core.held_locks.mark_released(lease)
        return await release_all([*self._leases.values()][::-1])

    async def _wait_lost(self, seconds: float | None) -> bool:
        return await wait_lost([*self._leases.values()], seconds)


class MemberLock(NamedTuple):
    """One lock of the set, taken."""

    lock: BaseLock[Any]
    held_lock: HeldLock


class BaseMultiLock(Generic[L, S]):
    """The multilock of both faces: immutable, shared freely between threads and tasks."""

    __slots__ = ("_sorted_locks", "locks", "wait")

    _leases_type: ClassVar[Callable[..., Any]]
    _lock_type: ClassVar[type]

    def __init__(self, locks: Iterable[BaseLock[L]], *, wait: float | Unset | None = UNSET) -> None:
        self.locks = tuple(locks)
        if not self.locks:
            raise ConfigError("a multilock needs at least one lock")
        for lock in self.locks:
            if not isinstance(lock, self._lock_type):
                raise ConfigError(f"{type(self).__name__} takes objects of {self._lock_type.__name__}, not {lock!r}")
        if len({(id(lock._core), lock.name) for lock in self.locks}) < len(self.locks):
            raise ConfigError("a multilock has each name of a client once: it would wait for itself")
        _refuse_duplicates(self.locks)
        waits = [lock.options.wait for lock in self.locks if lock.options.wait is not None]
        self.wait = wait if not isinstance(wait, Unset) else min(waits, default=None)
        check_wait(self.wait)
        self._sorted_locks = sorted(self.locks, key=_sort_key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(lock.name for lock in self.locks)} wait={self.wait}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.locks, self.wait)

    # ----------------------------------------------------------- acquiring

    async def _acquire(self, wait: float | Unset | None = UNSET) -> S:
        """All of them, for nobody's `with`."""
        return await self._acquire_all(wait, None, [])

    async def _try_acquire(self) -> S | None:
        try:
            return await self._acquire(0)
        except NotAcquired:
            return None

    async def _acquire_all(self, wait: float | Unset | None, frame: int | None, members: list[MemberLock]) -> S:
        """Take one after the other, or nothing. `frame`: for the `with` that this frame runs."""
        wait = self.wait if isinstance(wait, Unset) else wait
        check_wait(wait)
        runtime = self._sorted_locks[0]._core.runtime
        deadline = None if wait is None else runtime.now() + wait
        # One for all of them, also while it still stands in line: what is lost meanwhile makes the rest pointless.
        interrupt = runtime.interrupt()
        try:
            for lock in self._sorted_locks:
                remaining = None if deadline is None else max(0.0, deadline - runtime.now())
                lease = await lock._acquire_lease(remaining)
                members.append(
                    MemberLock(lock, HeldLock(None if frame is None else self, lease, lock.shape.mode, frame or 0))
                )
                if frame is not None or lock.options.reentrant:
                    lock._core.held_locks.push(lock.name, members[-1].held_lock)
                if interrupt is not None and lease._depth == 1:
                    members[-1].held_lock.interrupt = lease._interrupt = interrupt
            _raise_lost([member.held_lock.lease for member in members])
        except BaseException as error:
            interrupted = interrupt is not None and interrupt.disarm(type(error))
            lost = _first_lost([member.held_lock.lease for member in members])
            try:
                self._rollback_enter(members)
            finally:  # torn by Ctrl-C: once more
                self._rollback_enter(members)
            if interrupted and lost is not None:
                raise lost from error
            raise
        if frame is None and interrupt is not None:
            interrupt.disarm(None)
        leases = {member.lock: member.held_lock.lease for member in members}
        result: S = self._leases_type({lock: leases[lock] for lock in self.locks})
        return result

    def _rollback_enter(self, members: list[MemberLock]) -> None:
        """Give up what was taken for nothing, without waiting."""
        while members:
            lock, held_lock = members[-1]
            lock._core.held_locks.remove(held_lock)
            held_lock.lease._rollback(held_lock)
            members.pop()  # only now: interrupted, it is done again

    # ---------------------------------------------------------------- with

    async def _exit(
        self, frame: int, kind: type[BaseException] | None, error: BaseException | None, exited: list[HeldLock]
    ) -> None:
        """Release all; the verdict is taken by the clock before anything is sent. `left` is as for a lock."""
        for lock in reversed(self._sorted_locks):
            exited.append(lock._core.held_locks.pop(lock.name, self, frame))
        interrupt = next((held_lock.interrupt for held_lock in exited if held_lock.interrupt is not None), None)
        interrupted = interrupt is not None and interrupt.disarm(kind)
        lost = _first_lost([held_lock.lease for held_lock in reversed(exited)])
        await release_all([held_lock.lease for held_lock in exited if not held_lock.released])
        if lost is None:
            return
        if error is None or interrupted:
            raise lost from error
        if not isinstance(error, LeaseLost):
            error.add_note(str(lost))

    def _rollback_exit(self, frame: int, exited: list[HeldLock]) -> None:
        """After Ctrl-C in the middle of leaving a `with`, before everything was taken out: all is given up."""
        if len(exited) == len(self._sorted_locks):
            return
        for lock in self._sorted_locks:
            if (held_lock := lock._core.held_locks.pop_if_present(self, frame)) is not None:
                exited.append(held_lock)
        for held_lock in exited:
            if not held_lock.released:
                held_lock.lease._release_nowait()


async def release_all(leases: Sequence[BaseLease]) -> bool:
    """Release them in this order. True: live leases, all confirmed. Torn apart, it gives up the rest without waiting;
    an engine that did not answer for one is not asked for each of the others."""
    confirmed, unresponsive, unreleased = True, set[object](), list(leases)
    try:
        while unreleased:
            lease = unreleased.pop(0)
            if lease._core in unresponsive:
                lease._release_nowait()
                confirmed = False
            else:
                confirmed &= await lease._release()
                if lease._claim.id_hash in lease._core.registry.pending_releases:
                    unresponsive.add(lease._core)
    except BaseException:
        for lease in unreleased:
            lease._release_nowait()
        raise
    return confirmed


def _first_lost(leases: Sequence[BaseLease]) -> LeaseLost | None:
    for lease in leases:
        if reason := lease.lost_reason:
            return LeaseLost(lease.name, reason=reason, token=lease.token)
    return None


def _raise_lost(leases: Sequence[BaseLease]) -> None:
    """Lost while it stood in line for the next: the body must not begin."""
    if lost := _first_lost(leases):
        raise lost


def _sort_key(lock: BaseLock[L]) -> tuple[str, str, str, str]:
    """The same order in every process: by name first, for the same engine may be spelt differently elsewhere."""
    config = lock._core.config
    return lock.name, lock._core.options.namespace, config.scheme, config.target.rpartition("@")[2]


def _refuse_duplicates(locks: Sequence[BaseLock[Any]]) -> None:
    """Two clients of one engine are two holders: what the first has, the second would wait for."""
    seen: dict[tuple[str, str, str, str], BaseLock[Any]] = {}
    for lock in locks:
        other = seen.setdefault(_sort_key(lock), lock)
        private = lock._core.config.scheme == "memory" and not lock._core.config.target
        if other is lock or private or lock.shape.kind == "semaphore":
            continue
        if "exclusive" in (lock.shape.mode, other.shape.mode):
            raise ConfigError(f"{lock.name} is there twice, by two clients of one engine: it would wait for itself")


def unique_names(names: Iterable[str]) -> list[str]:
    """Each name once: a transfer from an account to itself takes one lock."""
    if isinstance(names, str):
        raise ConfigError(f"multilock takes a list of names, such as [{names!r}], not one text")
    return list(dict.fromkeys(names))


def _rebuild(kind: type[BaseMultiLock[L, S]], locks: tuple[BaseLock[L], ...], wait: float | None) -> object:
    return kind(locks, wait=wait)
