"""Records within one process: `memory://` for one client, `memory://name` for all clients with the same name."""

from __future__ import annotations

import os
from typing import Final

from leasehold.config import EngineConfig
from leasehold.records.store import Record
from leasehold.runtime.base import Mutex, Runtime

OPTIONS: Final[frozenset[str]] = frozenset()

_SHARED: dict[str, MemoryStore] = {}


class MemoryStore:
    """A dictionary behind a mutex: the reference for the other stores."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._mutex, self._pid = runtime.mutex(), os.getpid()
        self._records: dict[str, tuple[Record, float]] = {}
        self._sweep_at = 1000  # expired records are removed when there are this many

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
        if self._pid != os.getpid():  # forked, perhaps while another thread held the mutex
            self._mutex, self._pid = self._runtime.mutex(), os.getpid()
        return self._mutex

    def close(self) -> None:
        """Nothing to close: a store of one client goes with it, a store with a name stays."""


def open(config: EngineConfig, runtime: Runtime) -> MemoryStore:
    config.accept()
    return _SHARED.setdefault(config.target, MemoryStore(runtime)) if config.target else MemoryStore(runtime)
