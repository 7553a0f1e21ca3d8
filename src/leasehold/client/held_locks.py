"""Which thread or task entered which lock by `with` or decorator: to leave it again, for reentrancy, against
self-deadlock.

Locks are immutable and shared between threads, so what a `with` entered is recorded here, by thread or task. A `with`
finds its entry by its frame, which is the same on entry and exit: bodies may interleave (generators), and another
thread or task may close them than entered them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import ref

from leasehold.runtime.base import Interrupt, Runtime

if TYPE_CHECKING:
    from leasehold.client.lease import BaseLease
    from leasehold.model import Mode

Key: TypeAlias = tuple[Hashable, str]


class CurrentLeases(list["BaseLease"]):
    """The leases of one `with`, for `current_lease`. Empty once that was left, whichever thread or task left it."""

    __slots__ = ("_left_by",)

    def leave(self, runtime: Runtime) -> None:
        self.clear()
        owner = runtime.blocked_task() or runtime.owner()
        try:
            self._left_by: tuple[Runtime, Callable[[], object]] = runtime, ref(owner)  # a copied context may live long
        except TypeError:  # an event loop that cannot be referenced weakly
            self._left_by = runtime, lambda: owner

    def was_left_here(self) -> bool:
        """Of an empty list: whether the running thread or task itself has left the `with`, so that the one around it
        is current again. A task that was created in the `with` has not."""
        runtime, left_by = self._left_by
        return left_by() is (runtime.blocked_task() or runtime.owner())


# The leases of each `with` around the running code, outermost first. Contexts are copied, and code that runs in one
# cannot change the others. Leaving a `with` does not set the variable: the garbage collector may close a generator, and
# so leave its `with`, while CPython sets any variable of this context, and a second `set` inside the first crashes the
# interpreter. The next `with` drops the empty ones.
CURRENT_LEASES: Final[ContextVar[tuple[CurrentLeases, ...]]] = ContextVar("leasehold_current_leases", default=())


class HeldLock:
    """One hold of a lease: by a `with`, by a decorator, or by `acquire()` of a reentrant lock."""

    __slots__ = (
        "current_leases",
        "frame",
        "interrupt",
        "lease",
        "lock",
        "mode",
        "order",
        "reentered",
        "released",
        "task",
    )

    def __init__(
        self,
        lock: object,
        lease: BaseLease,
        mode: Mode,
        frame: int = 0,
        interrupt: Interrupt | None = None,
        order: int = 0,
    ) -> None:
        self.lock = lock  # the lock whose `with` will leave it; None: from acquire() of a reentrant lock
        self.lease, self.mode = lease, mode
        self.frame = frame  # the id of the frame that runs the `with`; the frame lives as long as the entry is needed
        self.interrupt = interrupt
        self.task: object = None  # of a reentrant lock: the task whose loop the thread blocked when it entered
        self.released = False  # leaving the `with` releases nothing more
        self.current_leases = CurrentLeases()  # its `with` in CURRENT_LEASES
        self.order = order  # of a pool (`any_of`): one `with` may be inside another, each with another name
        # A hold of a lease that was held before: it counts in the lease's depth, recorded or not.
        self.reentered = False


class HeldLocks:
    """Entries by owner and name, oldest first. Every change is under the mutex: any thread may release a lease."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex = runtime.mutex()
        self._held: dict[Key, list[HeldLock]] = {}

    def after_fork(self) -> None:
        self._mutex = self._runtime.mutex()

    def find(self, name: str) -> HeldLock | None:
        """The newest entry of this thread or task whose lease is still held."""
        if not self._held:
            return None
        held_locks = self._held.get((self._runtime.owner(), name), ())
        return next(
            (held_lock for held_lock in reversed(held_locks) if not held_lock.released and held_lock.lease.held), None
        )

    def push(self, name: str, held_lock: HeldLock) -> None:
        key = (self._runtime.owner(), name)
        with self._mutex:
            held_locks = self._held.get(key)
            if held_locks is None:
                self._held[key] = [held_lock]
            else:
                held_locks.append(held_lock)

    def pop(self, name: str, lock: object, frame: int, popped: list[HeldLock]) -> HeldLock:
        """Remove and return the entry that this frame's `with` made. If a helper such as ExitStack entered and left:
        the newest entry of this lock in this thread or task, else the only one anywhere. It is appended to `popped`
        before it is removed, so that Ctrl-C in between does not lose it."""
        own_key = (self._runtime.owner(), name)
        with self._mutex:
            held_locks = self._held.get(own_key)
            if held_locks is not None and len(held_locks) == 1:
                only = held_locks[0]
                if only.lock is lock and only.frame == frame:  # the common case
                    popped.append(only)
                    del self._held[own_key]
                    return only
            # All names of this thread or task: the lock may be one of a pool (`any_of`).
            own_keys = [key for key in self._held if key[0] is own_key[0]]
            held_lock = self._find_newest(
                list(self._held), lambda other: other.lock is lock and other.frame == frame
            ) or self._find_newest(own_keys, lambda other: other.lock is lock)
            if held_lock is None:
                matching = [e for held_locks in self._held.values() for e in held_locks if e.lock is lock]
                held_lock = matching[0] if len(matching) == 1 else None
            if held_lock is not None:
                popped.append(held_lock)
                self._pop_newest(list(self._held), lambda other: other is held_lock)
        if held_lock is None:
            raise RuntimeError(
                f"{name}: this `with` was entered in another thread or task, and several of them are in a `with` of "
                "this lock; use acquire() and release() for leases that change threads"
            )
        return held_lock

    def remove(self, held_lock: HeldLock) -> bool:
        """Remove this very entry. False: it is not here, or no longer."""
        with self._mutex:
            return self._pop_newest(list(self._held), lambda other: other is held_lock) is not None

    def pop_if_present(self, lock: object, frame: int) -> HeldLock | None:
        """Remove and return the entry of a `with` whose exit was interrupted, if it is still there."""
        with self._mutex:
            return self._pop_frame(lock, frame)

    def mark_released(self, lease: BaseLease) -> None:
        """One hold of this lease was released explicitly: mark the newest entry, so that no `with` releases it
        again."""
        if not self._held:
            return
        with self._mutex:
            held_lock = self._find_newest(
                list(self._held), lambda held_lock: held_lock.lease is lease and not held_lock.released
            )
            if held_lock is None:
                return
            held_lock.released = True
            if held_lock.lock is None:
                self._pop_newest(list(self._held), lambda other: other is held_lock)

    def _pop_frame(self, lock: object, frame: int) -> HeldLock | None:
        return self._pop_newest(list(self._held), lambda held_lock: held_lock.lock is lock and held_lock.frame == frame)

    def _find_newest(self, keys: list[Key], matches: Callable[[HeldLock], bool]) -> HeldLock | None:
        found = (e for key in keys for e in reversed(self._held.get(key, ())) if matches(e))
        return max(found, key=lambda held_lock: held_lock.order, default=None)  # the first of equals

    def _pop_newest(self, keys: list[Key], matches: Callable[[HeldLock], bool]) -> HeldLock | None:
        newest = self._find_newest(keys, matches)
        for key in keys if newest is not None else ():
            held_locks = self._held.get(key, [])
            for index in reversed(range(len(held_locks))):
                if held_locks[index] is newest:
                    held_locks.pop(index)
                    if not held_locks:
                        del self._held[key]
                    return newest
        return None
