"""Who has entered which lock by `with` or decorator: for leaving it again, for reentrancy, against self-deadlock.

Locks are immutable and shared between threads, so what a `with` entered is noted here, by thread or task. Which entry
a `with` leaves is told by its frame, the same at both ends: bodies may interleave (generators), and be closed by
another thread or task than entered them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from leasehold.runtime.base import Interrupt, Runtime

if TYPE_CHECKING:
    from leasehold.model import Mode
    from leasehold.recipes.lease import BaseLease

Key: TypeAlias = tuple[Hashable, str]


@dataclass(slots=True, eq=False)
class Entry:
    lock: object  # the lock whose `with` will leave it; None: taken by acquire() of a reentrant lock
    lease: BaseLease
    mode: Mode
    frame: int = 0  # the id of the frame that runs the `with`; alive as long as the entry is of use
    interrupt: Interrupt | None = None
    spent: bool = False  # its hold was given up by hand: leaving it gives up nothing more


class Entries:
    """Entries by owner and name, oldest first. Every change is under the guard: leases are released by any thread."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._guard = runtime.guard()
        self._entries: dict[Key, list[Entry]] = {}

    def after_fork(self) -> None:
        self._guard = self._runtime.guard()

    def find(self, name: str) -> Entry | None:
        """The newest entry of this thread or task whose lease is still held."""
        if not self._entries:
            return None
        entries = self._entries.get((self._runtime.owner(), name), ())
        return next((entry for entry in reversed(entries) if not entry.spent and entry.lease.held), None)

    def push(self, name: str, entry: Entry) -> None:
        key = (self._runtime.owner(), name)
        with self._guard:
            entries = self._entries.get(key)
            if entries is None:
                self._entries[key] = [entry]
            else:
                entries.append(entry)

    def pop(self, name: str, lock: object, frame: int) -> Entry:
        """The entry that this frame's `with` made. Where a helper such as ExitStack entered and left: the newest of
        this lock here, else the only one anywhere."""
        here = (self._runtime.owner(), name)
        with self._guard:
            entries = self._entries.get(here)
            if entries is not None and len(entries) == 1 and entries[0].lock is lock and entries[0].frame == frame:
                del self._entries[here]  # nearly always
                return entries[0]
            entry = self._of_frame(lock, frame) or self._take([here], lambda entry: entry.lock is lock)
            if entry is None:
                mine = [e for entries in self._entries.values() for e in entries if e.lock is lock]
                if len(mine) == 1:
                    entry = self._take(list(self._entries), lambda entry: entry is mine[0])
        if entry is None:
            raise RuntimeError(
                f"{name}: this `with` is left in another thread or task than it was entered in, and the lock is "
                "entered in several; use acquire() and release() for leases that move"
            )
        return entry

    def remove(self, entry: Entry) -> bool:
        """Take out this very entry. False: it is not here, or no longer."""
        with self._guard:
            return self._take(list(self._entries), lambda other: other is entry) is not None

    def abandon(self, lock: object, frame: int) -> Entry | None:
        """Take out what a `with` entered, if anything, when leaving it was interrupted."""
        with self._guard:
            return self._of_frame(lock, frame)

    def spend(self, lease: BaseLease) -> None:
        """One hold of this lease is given up by hand: the newest, which no `with` shall give up once more."""
        if not self._entries:
            return
        with self._guard:
            entry = self._newest(list(self._entries), lambda entry: entry.lease is lease and not entry.spent)
            if entry is None:
                return
            entry.spent = True
            if entry.lock is None:
                self._take(list(self._entries), lambda other: other is entry)

    def _of_frame(self, lock: object, frame: int) -> Entry | None:
        return self._take(list(self._entries), lambda entry: entry.lock is lock and entry.frame == frame)

    def _newest(self, keys: list[Key], fits: Callable[[Entry], bool]) -> Entry | None:
        return next((e for key in keys for e in reversed(self._entries.get(key, ())) if fits(e)), None)

    def _take(self, keys: list[Key], fits: Callable[[Entry], bool]) -> Entry | None:
        for key in keys:
            entries = self._entries.get(key, [])
            for index in reversed(range(len(entries))):
                if fits(entries[index]):
                    entry = entries.pop(index)
                    if not entries:
                        del self._entries[key]
                    return entry
        return None
