"""The rig of the SQLite engine: a real file, real sockets, and a clock that can be advanced.

There is no server to cut a client off from. So `cut` and `pause` prevent transactions from beginning, as a process does
that is stopped inside a transaction (tests/engines/sqlite/test_processes.py tests that fault with real processes).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from typing import ClassVar

from harness.servers.folders import scratch
from leasehold.config import EngineConfig
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.connection import DatabaseLocked, SqliteConnection
from leasehold.engines.sqlite.engine import SqliteEngine
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from leasehold.runtime.base import Runtime
from leasehold.runtime.threads import boot_clock
from leasehold.testing.conformance.rig import ClientPath, Rig


class SqliteRig(Rig):
    scheme = "sqlite"
    ttl: ClassVar[float] = 10.0  # cases advance the clock instead of waiting
    can_cut = can_pause = can_kill = can_advance_clock = can_count = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self._folder = scratch()  # in memory, where FULL durability costs nothing
        self.path = os.path.join(self._folder, "locks.db")
        self._offset = 0.0
        self.paused = False
        this_host = BootClock.of_this_machine()
        self.host = BootClock(this_host.machine, this_host.boot, this_host.time_namespace, self.clock)

    def client_path(self) -> ClientPath:
        return SqliteMachine(self)

    def machines(self) -> list[SqliteMachine]:
        return [machine for _, machine in self._client_paths if isinstance(machine, SqliteMachine)]

    def clock(self) -> float:
        return boot_clock() + self._offset

    def advance_clock(self, seconds: float) -> None:
        self._offset += seconds
        for machine in self.machines():
            machine.wake_sleepers()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def restart(self) -> None:
        """Close every connection, so that the file is opened again."""
        for machine in self.machines():
            for connection in machine.connections:
                connection.close()

    def residue(self, namespace: str) -> int:
        if not os.path.exists(self.path):
            return 0
        db = sqlite3.connect(self.path)
        try:
            counts = (
                db.execute(f"select count(*) from {table} where namespace = ?", (namespace,)).fetchone()[0]  # noqa: S608
                for table in ("lh_grant", "lh_waiter", "lh_queue")
            )
            return sum(counts)
        finally:
            db.close()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RigConnection(SqliteConnection):
    """A connection whose transactions can be prevented from beginning."""

    def __init__(self, machine: SqliteMachine, runtime: Runtime) -> None:
        super().__init__(machine.rig.path, True, machine.rig.host, runtime)
        self._machine = machine

    def _ensure_open(self) -> sqlite3.Connection:
        if self._machine.is_silent:
            raise DatabaseLocked
        return super()._ensure_open()


class SqliteMachine(ClientPath):
    """One client: the connections of its engine instances, and its wake-up socket."""

    def __init__(self, rig: SqliteRig) -> None:
        super().__init__(f"sqlite://{rig.path}", self._open)
        self.rig = rig
        self.is_cut = False
        self.connections: list[RigConnection] = []
        self._wakeup_sockets: dict[ClaimRegistry, WakeupSocket] = {}

    @property
    def is_silent(self) -> bool:
        return self.is_cut or self.rig.paused

    def _open(self, config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> SqliteEngine:
        config.accept()
        if registry not in self._wakeup_sockets:
            self._wakeup_sockets[registry] = WakeupSocket(self.rig.path, runtime, registry)
            deliver = registry.on_notification
            registry.on_notification = lambda *notification: None if self.is_silent else deliver(*notification)  # type: ignore[method-assign]
        self.connections.append(RigConnection(self, runtime))
        return SqliteEngine(runtime, registry, self.connections[-1], self._wakeup_sockets[registry])

    def cut(self) -> None:
        self.is_cut = True

    def restore(self) -> None:
        self.is_cut = False

    def kill_session(self) -> None:
        for wakeup_socket in self._wakeup_sockets.values():
            wakeup_socket.unlink_socket()

    def wake_sleepers(self) -> None:
        """The clock was advanced: wake the watchdog and all waiters, so that they read it again."""
        for registry in self._wakeup_sockets:
            registry.wake_watchdog(0.0)
            for waiter in list(registry.waiting.values()):
                waiter.signal.set()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for wakeup_socket in self._wakeup_sockets.values():
            wakeup_socket.close()
