"""Several locks as one: sorted, one deadline, all or nothing, one word of loss for all.

Everybody who takes several names in one order cannot meet another in a cycle: whoever has the last name so far lacks
nothing that those behind it hold. So the order is made here, from the names themselves, whatever order the caller gave
them in. What was taken before a failure is forgotten, not released: rolling back waits for nobody.

The locks may belong to clients of different engines. To move from one engine to another, hold the same name on both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from leasehold.config import UNSET, Unset, check_wait
from leasehold.errors import ConfigError, LeaseLost, NotAcquired
from leasehold.model import Reason
from leasehold.recipes.entries import Entry
from leasehold.recipes.lease import BaseLease
from leasehold.recipes.lock import BaseLock
from leasehold.recipes.losing import wait_lost

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
        todo = [callback]  # a list's pop is one step: two clients may tell at the same time

        def told(_lease: L) -> None:
            while todo:
                todo.pop()(self)

        for lease in self._leases.values():
            lease.on_lost(told)

    async def _release(self) -> bool:
        for lease in self._leases.values():
            lease._desk.entries.spend(lease)
        return await give_back([*self._leases.values()][::-1])

    async def _wait_lost(self, seconds: float | None) -> bool:
        return await wait_lost([*self._leases.values()], seconds)


class Hold(NamedTuple):
    """One lock of the set, taken."""

    lock: BaseLock[Any]
    entry: Entry


class BaseMultiLock(Generic[L, S]):
    """The multilock of both faces: immutable, shared freely between threads and tasks."""

    __slots__ = ("_order", "locks", "wait")

    _leases_type: ClassVar[Callable[..., Any]]
    _lock_type: ClassVar[type]

    def __init__(self, locks: Iterable[BaseLock[L]], *, wait: float | Unset | None = UNSET) -> None:
        self.locks = tuple(locks)
        if not self.locks:
            raise ConfigError("a multilock needs at least one lock")
        for lock in self.locks:
            if not isinstance(lock, self._lock_type):
                raise ConfigError(f"{type(self).__name__} takes objects of {self._lock_type.__name__}, not {lock!r}")
        if len({(id(lock._desk), lock.name) for lock in self.locks}) < len(self.locks):
            raise ConfigError("a multilock has each name of a client once: it would wait for itself")
        _refuse_same(self.locks)
        waits = [lock.options.wait for lock in self.locks if lock.options.wait is not None]
        self.wait = wait if not isinstance(wait, Unset) else min(waits, default=None)
        check_wait(self.wait)
        self._order = sorted(self.locks, key=_rank)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(lock.name for lock in self.locks)} wait={self.wait}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.locks, self.wait)

    # ----------------------------------------------------------- acquiring

    async def _acquire(self, wait: float | Unset | None = UNSET) -> S:
        """All of them, for nobody's `with`."""
        return await self._take(wait, None, [])

    async def _try_acquire(self) -> S | None:
        try:
            return await self._acquire(0)
        except NotAcquired:
            return None

    async def _take(self, wait: float | Unset | None, frame: int | None, holds: list[Hold]) -> S:
        """Take one after the other, or nothing. `frame`: for the `with` that this frame runs."""
        wait = self.wait if isinstance(wait, Unset) else wait
        check_wait(wait)
        runtime = self._order[0]._desk.runtime
        deadline = None if wait is None else runtime.now() + wait
        # One for all of them, also while it still stands in line: what is lost meanwhile makes the rest pointless.
        interrupt = runtime.interrupt()
        try:
            for lock in self._order:
                left = None if deadline is None else max(0.0, deadline - runtime.now())
                lease = await lock._take(left)
                holds.append(Hold(lock, Entry(None if frame is None else self, lease, lock.shape.mode, frame or 0)))
                if frame is not None or lock.options.reentrant:
                    lock._desk.entries.push(lock.name, holds[-1].entry)
                if interrupt is not None and lease._depth == 1:
                    holds[-1].entry.interrupt = lease._interrupt = interrupt
            _raise_lost([hold.entry.lease for hold in holds])
        except BaseException as error:
            ours = interrupt is not None and interrupt.disarm(type(error))
            lost = _first_lost([hold.entry.lease for hold in holds])
            try:
                self._undo(holds)
            finally:  # torn by Ctrl-C: once more
                self._undo(holds)
            if ours and lost is not None:
                raise lost from error
            raise
        if frame is None and interrupt is not None:
            interrupt.disarm(None)
        taken = {hold.lock: hold.entry.lease for hold in holds}
        given: S = self._leases_type({lock: taken[lock] for lock in self.locks})
        return given

    def _undo(self, holds: list[Hold]) -> None:
        """Give up what was taken for nothing, without waiting."""
        while holds:
            lock, entry = holds[-1]
            lock._desk.entries.remove(entry)
            entry.lease._forgo(entry)
            holds.pop()  # only now: interrupted, it is done again

    # ---------------------------------------------------------------- with

    async def _leave(
        self, frame: int, kind: type[BaseException] | None, error: BaseException | None, left: list[Entry]
    ) -> None:
        """Release all; the verdict is taken by the clock before anything is sent. `left` is as for a lock."""
        for lock in reversed(self._order):
            left.append(lock._desk.entries.pop(lock.name, self, frame))
        interrupt = next((entry.interrupt for entry in left if entry.interrupt is not None), None)
        interrupted = interrupt is not None and interrupt.disarm(kind)
        lost = _first_lost([entry.lease for entry in reversed(left)])
        await give_back([entry.lease for entry in left if not entry.spent])
        if lost is None:
            return
        if error is None or interrupted:
            raise lost from error
        if not isinstance(error, LeaseLost):
            error.add_note(str(lost))

    def _abandon(self, frame: int, left: list[Entry]) -> None:
        """After Ctrl-C in the middle of leaving a `with`, before everything was taken out: all is given up."""
        if len(left) == len(self._order):
            return
        for lock in self._order:
            if (entry := lock._desk.entries.abandon(self, frame)) is not None:
                left.append(entry)
        for entry in left:
            if not entry.spent:
                entry.lease._abandon()


async def give_back(leases: Sequence[BaseLease]) -> bool:
    """Release them in this order. True: live leases, all confirmed. Torn apart, it gives up the rest without waiting;
    an engine that did not answer for one is not asked for each of the others."""
    confirmed, silent, left = True, set[object](), list(leases)
    try:
        while left:
            lease = left.pop(0)
            if lease._desk in silent:
                lease._abandon()
                confirmed = False
            else:
                confirmed &= await lease._release()
                if lease._claim.mark in lease._desk.book.owed:
                    silent.add(lease._desk)
    except BaseException:
        for lease in left:
            lease._abandon()
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


def _rank(lock: BaseLock[L]) -> tuple[str, str, str, str]:
    """The same order in every process: by name first, for the same engine may be spelt differently elsewhere."""
    config = lock._desk.config
    return lock.name, lock._desk.options.namespace, config.scheme, config.target.rpartition("@")[2]


def _refuse_same(locks: Sequence[BaseLock[Any]]) -> None:
    """Two clients of one engine are two holders: what the first has, the second would wait for."""
    seen: dict[tuple[str, str, str, str], BaseLock[Any]] = {}
    for lock in locks:
        other = seen.setdefault(_rank(lock), lock)
        private = lock._desk.config.scheme == "memory" and not lock._desk.config.target
        if other is lock or private or lock.shape.kind == "semaphore":
            continue
        if "exclusive" in (lock.shape.mode, other.shape.mode):
            raise ConfigError(f"{lock.name} is there twice, by two clients of one engine: it would wait for itself")


def distinct(names: Iterable[str]) -> list[str]:
    """Each name once: a transfer from an account to itself takes one lock."""
    if isinstance(names, str):
        raise ConfigError(f"multilock takes a list of names, such as [{names!r}], not one text")
    return list(dict.fromkeys(names))


def _rebuild(kind: type[BaseMultiLock[L, S]], locks: tuple[BaseLock[L], ...], wait: float | None) -> object:
    return kind(locks, wait=wait)
