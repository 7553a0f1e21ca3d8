"""The rig of the memory engine: a shared server behind transports that can be cut, paused and killed, and a clock that
can be advanced.

The server, the engine and everything above are production code; only the transport between them belongs to the rig.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, ClassVar

from leasehold.config import EngineConfig
from leasehold.core.queue_entry import Notification
from leasehold.engines.memory import MemoryEngine, MemoryServer, NotifyCallback
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.threads import Threads, boot_clock
from leasehold.testing.conformance.rig import ClientPath, Rig


class MemoryRig(Rig):
    scheme = "memory"
    ttl: ClassVar[float] = 10.0  # long, so that no stall uses it up: cases advance the clock instead of waiting
    can_cut = can_pause = can_kill = can_advance_clock = can_count = True

    def __init__(self) -> None:
        super().__init__()
        self._offset = 0.0
        self.paused = False
        self.queued_requests: list[QueuedRequest] = []
        self.server = MemoryServer(Threads(self.clock))

    def client_path(self) -> ClientPath:
        return MemoryMachine(self)

    def clock(self) -> float:
        return boot_clock() + self._offset

    def advance_clock(self, seconds: float) -> None:
        self._offset += seconds
        for _, machine in self._client_paths:
            assert isinstance(machine, MemoryMachine)
            machine.wake_sleepers()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        while self.queued_requests:
            self.queued_requests.pop(0).execute(self.server)

    def residue(self, namespace: str) -> int:
        return sum(key[0] == namespace for key in self.server.lock_states)


class MemoryMachine(ClientPath):
    """All transports of one client: the caller's and the watchdog's."""

    def __init__(self, rig: MemoryRig) -> None:
        super().__init__("memory://rig", self._open)
        self.rig = rig
        self.is_cut = self.killed = False
        self._registries: list[ClaimRegistry] = []
        self._listeners: dict[str, NotifyCallback] = {}

    def _open(self, config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> MemoryEngine:
        if registry not in self._registries:
            self._registries.append(registry)
        return MemoryEngine(runtime, registry, BreakableTransport(self, runtime))

    def cut(self) -> None:
        self.is_cut = True

    def restore(self) -> None:
        self.is_cut = False

    def kill_session(self) -> None:
        self.killed = True
        for client in self._listeners:
            self.rig.server.notify_callbacks.pop(client, None)

    def wake_sleepers(self) -> None:
        """After the clock was advanced: wake all sleepers, so that they read it again."""
        for registry in self._registries:
            registry.wake_watchdog(0.0)
            for waiter in list(registry.waiting.values()):
                waiter.signal.set()

    def listen(self, client: str, notify: NotifyCallback) -> None:
        def notify_unless_cut(notification: Notification, namespace: str, name: str) -> None:
            if not self.is_cut and not self.rig.paused:
                notify(notification, namespace, name)

        self._listeners[client] = self.rig.server.notify_callbacks[client] = notify_unless_cut

    def stop_listening(self, client: str) -> None:
        self._listeners.pop(client, None)
        self.rig.server.notify_callbacks.pop(client, None)

    def reconnect(self) -> None:
        """At the next call after a kill: register for notifications again, and let all waiters retry, since they may
        have missed a wake-up."""
        if self.killed:
            self.killed = False
            self.rig.server.notify_callbacks.update(self._listeners)
            for registry in self._registries:
                for id_hash in list(registry.waiting):
                    registry.on_notification("recheck", id_hash, 0.0, None)


@dataclass(eq=False)
class QueuedRequest:
    """A request sent to a paused engine: carried out on resume, even if its caller has given up."""

    verb: str
    args: tuple[Any, ...]
    signal: Signal | None
    answer: Any = None

    def execute(self, server: MemoryServer) -> None:
        try:
            self.answer = getattr(server, self.verb)(*self.args)
        except LeaseholdError as error:
            self.answer = error
        if self.signal is not None:
            self.signal.set()


class BreakableTransport:
    """How one engine instance reaches the server, or fails to."""

    def __init__(self, machine: MemoryMachine, runtime: Runtime) -> None:
        self._machine, self._rig, self._runtime = machine, machine.rig, runtime

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any | Awaitable[Any]:
        if self._machine.is_cut or self._rig.paused:
            return self._wait_unanswered(verb, args, deadline)
        self._machine.reconnect()
        return getattr(self._rig.server, verb)(*args)

    async def _wait_unanswered(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        request = QueuedRequest(verb, args, self._runtime.signal())
        if not self._machine.is_cut:
            self._rig.queued_requests.append(request)
        began = self._runtime.now()
        assert request.signal is not None
        if not await request.signal.wait(deadline - began):
            raise Unavailable("the memory rig does not answer", engine="memory", seconds=self._runtime.now() - began)
        if isinstance(request.answer, LeaseholdError):
            raise request.answer
        return request.answer

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        if self._machine.is_cut:
            return False
        if self._rig.paused:
            self._rig.queued_requests.append(QueuedRequest(verb, args, None))
            return False
        getattr(self._rig.server, verb)(*args)
        return True

    def listen(self, client: str, notify: NotifyCallback) -> None:
        self._machine.listen(client, notify)

    def close(self, client: str) -> None:
        self._machine.stop_listening(client)
