"""Who has entered which lock by `with` or decorator: for leaving it again, for reentrancy, against self-deadlock.

Locks are immutable and shared between threads, so what a `with` entered is noted here, by thread or task.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from leasehold.runtime.base import Interrupt, Runtime

if TYPE_CHECKING:
    from leasehold.model import Mode
    from leasehold.recipes.lease import BaseLease

Key: TypeAlias = tuple[Hashable, str]


class Entry(NamedTuple):
    lock: object  # the lock whose `with` will leave it; None: taken by acquire() of a reentrant lock
    lease: BaseLease
    mode: Mode
    interrupt: Interrupt | None
    outer: Entry | None = None  # the one entered before it, by the same owner and name

    def chain(self) -> Iterator[Entry]:
        """This entry and all it is nested in, newest first."""
        entry: Entry | None = self
        while entry is not None:
            yield entry
            entry = entry.outer


class Entries:
    """The newest entry by owner and name. Each owner touches only its own, so single steps need no guard."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._newest: dict[Key, Entry] = {}

    def find(self, name: str) -> Entry | None:
        """The newest entry of this thread or task whose lease is still held."""
        if not self._newest:
            return None
        newest = self._newest.get((self._runtime.owner(), name))
        return None if newest is None else next((entry for entry in newest.chain() if entry.lease.held), None)

    def push(self, name: str, lock: object, lease: BaseLease, mode: Mode, interrupt: Interrupt | None) -> None:
        key = (self._runtime.owner(), name)
        self._newest[key] = Entry(lock, lease, mode, interrupt, self._newest.get(key))

    def pop(self, name: str, lock: object) -> Entry:
        """The newest entry of this lock here; else, for a body that moved to another thread or task, the only one."""
        if entry := self._take((self._runtime.owner(), name), lock):
            return entry
        elsewhere = [key for key, newest in list(self._newest.items()) if any(e.lock is lock for e in newest.chain())]
        if len(elsewhere) == 1 and (entry := self._take(elsewhere[0], lock)):
            return entry
        raise RuntimeError(
            f"{name}: this `with` is left in another thread or task than it was entered in, and the lock is entered "
            "in several; use acquire() and release() for leases that move"
        )

    def discard(self, lease: BaseLease) -> None:
        """Forget the newest acquire() of a reentrant lease that is given up by hand, by whichever thread or task."""
        for key, newest in list(self._newest.items()):
            if key[1] == lease.name and any(entry.lease is lease for entry in newest.chain()):
                self._take(key, None, lease)
                return

    def _take(self, key: Key, lock: object, lease: BaseLease | None = None) -> Entry | None:
        newest = self._newest.get(key)
        if newest is None:
            return None
        if newest.outer is None:  # nearly always
            found = newest if newest.lock is lock and (lease is None or newest.lease is lease) else None
            if found is not None:
                del self._newest[key]
            return found
        kept = list(newest.chain())
        found = next((e for e in kept if e.lock is lock and (lease is None or e.lease is lease)), None)
        if found is not None:
            kept.remove(found)
            outer: Entry | None = None
            for entry in reversed(kept):
                outer = entry._replace(outer=outer)
            assert outer is not None
            self._newest[key] = outer
        return found
