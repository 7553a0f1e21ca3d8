"""Records within one process: `memory://` for one client, `memory://name` for all that say the same name."""

from __future__ import annotations

import os
from typing import Final

from leasehold.config import EngineConfig
from leasehold.runtime.base import Guard, Runtime
from leasehold.store import Record

OPTIONS: Final[frozenset[str]] = frozenset()

_SHARED: dict[str, MemoryStore] = {}


class MemoryStore:
    """A dictionary behind a guard: the reference for the others."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._guard, self._pid = runtime.guard(), os.getpid()
        self._kept: dict[str, tuple[Record, float]] = {}
        self._look_at = 1000  # records; whether some are over is looked at when there are so many

    def read(self, key: str, seconds: float) -> Record | None:
        with self._own():
            record, until = self._kept.get(key, (None, 0.0))
            return record if until > self._runtime.now() else None

    def write(self, key: str, record: Record, was: str, keep: float | None, seconds: float) -> bool:
        with self._own():
            now = self._runtime.now()
            found, until = self._kept.get(key, (None, 0.0))
            if (found.edition if found is not None and until > now else "") != was:
                return False
            if len(self._kept) >= self._look_at:
                self._kept = {name: kept for name, kept in self._kept.items() if kept[1] > now}
                self._look_at = 2 * len(self._kept) + 1000
            self._kept[key] = record, float("inf") if keep is None else now + keep
            return True

    def _own(self) -> Guard:
        if self._pid != os.getpid():  # forked, perhaps while another thread was inside
            self._guard, self._pid = self._runtime.guard(), os.getpid()
        return self._guard

    def close(self) -> None:
        """There is nothing to let go: a store of one client goes with it, one with a name stays."""


def open(config: EngineConfig, runtime: Runtime) -> MemoryStore:
    config.accept()
    return _SHARED.setdefault(config.target, MemoryStore(runtime)) if config.target else MemoryStore(runtime)
