"""Records within one process: `memory://` for one client, `memory://name` for all that say the same name."""

from __future__ import annotations

import os
from typing import Final

from leasehold.config import EngineConfig
from leasehold.records.store import Record
from leasehold.runtime.base import Mutex, Runtime

OPTIONS: Final[frozenset[str]] = frozenset()

_SHARED: dict[str, MemoryStore] = {}


class MemoryStore:
    """A dictionary behind a guard: the reference for the others."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex, self._pid = runtime.mutex(), os.getpid()
        self._records: dict[str, tuple[Record, float]] = {}
        self._sweep_at = 1000  # records; whether some are over is looked at when there are so many

    def read(self, key: str, seconds: float) -> Record | None:
        with self._own_mutex():
            record, expires_at = self._records.get(key, (None, 0.0))
            return record if expires_at > self._runtime.now() else None

    def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        with self._own_mutex():
            now = self._runtime.now()
            found, expires_at = self._records.get(key, (None, 0.0))
            if (found.version if found is not None and expires_at > now else "") != expected_version:
                return False
            if len(self._records) >= self._sweep_at:
                self._records = {name: entry for name, entry in self._records.items() if entry[1] > now}
                self._sweep_at = 2 * len(self._records) + 1000
            self._records[key] = record, float("inf") if keep is None else now + keep
            return True

    def _own_mutex(self) -> Mutex:
        if self._pid != os.getpid():  # forked, perhaps while another thread was inside
            self._mutex, self._pid = self._runtime.mutex(), os.getpid()
        return self._mutex

    def close(self) -> None:
        """There is nothing to let go: a store of one client goes with it, one with a name stays."""


def open(config: EngineConfig, runtime: Runtime) -> MemoryStore:
    config.accept()
    return _SHARED.setdefault(config.target, MemoryStore(runtime)) if config.target else MemoryStore(runtime)
