"""Who has entered which lock by `with` or decorator: for leaving it again, for reentrancy, against self-deadlock.

Locks are immutable and shared between threads, so what a `with` entered is noted here, by thread or task.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from leasehold.runtime.base import Interrupt, Runtime

if TYPE_CHECKING:
    from leasehold.model import Mode
    from leasehold.recipes.lease import BaseLease


class Entry(NamedTuple):
    lock: object  # the lock whose `with` will leave it; None: taken by acquire() of a reentrant lock
    lease: BaseLease
    mode: Mode
    interrupt: Interrupt | None


class Entries:
    """Entries by owner and name, newest last. Each owner touches only its own, so single steps need no guard."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._entries: dict[tuple[Hashable, str], list[Entry]] = {}

    def find(self, name: str) -> Entry | None:
        """The newest entry of this thread or task whose lease is still held."""
        if not self._entries:
            return None
        entries = self._entries.get((self._runtime.owner(), name), ())
        return next((entry for entry in reversed(entries) if entry.lease.held), None)

    def push(self, name: str, entry: Entry) -> None:
        self._entries.setdefault((self._runtime.owner(), name), []).append(entry)

    def pop(self, name: str, lock: object) -> Entry:
        """The newest entry of this lock here; else, for a body that moved to another thread or task, the only one."""
        here = (self._runtime.owner(), name)
        if entry := self._take(here, lock):
            return entry
        elsewhere = [key for key, entries in list(self._entries.items()) if any(e.lock is lock for e in entries)]
        if len(elsewhere) == 1 and (entry := self._take(elsewhere[0], lock)):
            return entry
        raise RuntimeError(
            f"{name}: this `with` is left in another thread or task than it was entered in, and the lock is entered "
            "in several; use acquire() and release() for leases that move"
        )

    def discard(self, lease: BaseLease) -> None:
        """Forget the newest acquire() of a reentrant lease that is given up by hand, by whichever thread or task."""
        if not self._entries:
            return
        for key, entries in list(self._entries.items()):
            if key[1] == lease.name and any(entry.lease is lease for entry in entries):
                self._take(key, None, lease)
                return

    def _take(self, key: tuple[Hashable, str], lock: object, lease: BaseLease | None = None) -> Entry | None:
        entries = self._entries.get(key)
        if not entries:
            return None
        for index in reversed(range(len(entries))):
            if entries[index].lock is lock and (lease is None or entries[index].lease is lease):
                entry = entries.pop(index)
                if not entries:
                    del self._entries[key]
                return entry
        return None
