"""A network between client and server that loses, repeats and delays messages, for the simulated runtime.

`SimulatedServer` is the memory engine's server in a process of its own; `NetworkTransport` carries requests, answers
and wake-ups to and from it as messages. Everything above the transport is production code. A transport is one
connection: a restart of the server ends it together with all messages under way. The client then reconnects and
registers again, and all its waiters retry, since it cannot know which wake-ups it missed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold.config import EngineConfig
from leasehold.core.queue_entry import Notification
from leasehold.engines.base import Opener
from leasehold.engines.memory import MemoryEngine, MemoryServer, NotifyCallback
from leasehold.engines.registry import ClaimRegistry
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.simulated import Process, Promise, Simulator

RECONNECT_INTERVAL: Final = 0.25  # between attempts to register again


@dataclass(frozen=True, slots=True)
class NetworkProfile:
    """How bad the network is. Rates are probabilities per message; `late` messages arrive up to `late_by` s late."""

    latency: float = 0.002
    loss: float = 0.0
    duplication: float = 0.0
    late: float = 0.0
    late_by: float = 5.0
    notification_loss: float = 0.0  # additional probability that a wake-up is lost
    notification_duplication: float = 0.0  # and that it is sent twice
    notification_late: float = 0.0  # and that it arrives up to `late_by` s late, after later ones
    ordered: bool = True  # messages arrive in the order in which they were sent


RELIABLE: Final = NetworkProfile()


class Observer:
    """Sees each message of all clients and the server when it is sent and when it arrives."""

    def sent(self, transport: NetworkTransport, verb: str, args: tuple[Any, ...]) -> None:
        """A client sent a request."""

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        """The server carried out a request."""

    def delivered(self, transport: NetworkTransport, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        """An answer reached a call that was still waiting for it."""

    def notified(self, transport: NetworkTransport, notification: Notification) -> None:
        """A wake-up reached its client."""


class SimulatedServer:
    """A memory server in a process of its own. A restart keeps the data and nothing else."""

    def __init__(self, world: Simulator, profile: NetworkProfile = RELIABLE, *, rate: float | None = None) -> None:
        """`rate`: how fast the server's clock runs; None chooses one at random."""
        self.world, self.profile = world, profile
        self.process = Process(world, "server", rate=rate)
        self.memory = MemoryServer(self.process)
        self.is_up = True
        self.generation = 0  # of connections: increases at each restart
        self.observer = Observer()
        self.cut_off: dict[Process, None] = {}
        self.transports: list[NetworkTransport] = []

    def opener(self) -> Opener:
        """The `engine` argument for a client."""

        def open_(_config: EngineConfig, runtime: Runtime, registry: ClaimRegistry) -> MemoryEngine:
            assert isinstance(runtime, Process)
            return MemoryEngine(runtime, registry, NetworkTransport(runtime, self, registry))

        return open_

    # ------------------------------------------------------------------ faults

    def stop(self) -> None:
        """Go down: connections, registered clients and all messages under way are lost."""
        self.is_up = False
        self.generation += 1
        self.memory.notify_callbacks.clear()
        for transport in self.transports:
            self._send_reset(transport)

    def start(self) -> None:
        self.is_up = True

    def cut(self, process: Process) -> None:
        """Cut a client off from the server, silently in both directions: to the server it still looks reachable."""
        self.cut_off[process] = None

    def restore(self, process: Process) -> None:
        self.cut_off.pop(process, None)
        for transport in self.transports:
            if transport.process is process:
                if process.dead:
                    self._connection_closed(transport)
                elif transport.generation != self.generation:
                    self._send_reset(transport)

    # -------------------------------------------------------------- connections

    def connect(self, transport: NetworkTransport) -> None:
        self.transports.append(transport)
        transport.process.on_crash.append(partial(self._connection_closed, transport))

    def transmit(self, transport: NetworkTransport, fn: Callable[[], object], *, to_server: bool) -> None:
        """Send a message; `fn` runs when it arrives. The network may lose, repeat or delay it."""
        if transport.process in self.cut_off or (to_server and transport.process.dead):
            return
        profile, random = self.profile, self.world.random
        if profile.loss and random.random() < profile.loss:
            return
        self._schedule_arrival(transport, fn, to_server)
        if profile.duplication and random.random() < profile.duplication:
            self._schedule_arrival(transport, fn, to_server)

    def _schedule_arrival(self, transport: NetworkTransport, fn: Callable[[], object], to_server: bool) -> None:
        profile, random, now = self.profile, self.world.random, self.world.time
        arrival = now + random.expovariate(1 / profile.latency)
        if profile.late and random.random() < profile.late:
            arrival += random.uniform(0, profile.late_by)
        if profile.ordered:
            arrival = max(arrival, transport.arrivals[to_server])
            transport.arrivals[to_server] = arrival
        self.world.schedule(
            arrival - now, partial(self._arrive, transport, fn), self.process if to_server else transport.process
        )

    def _arrive(self, transport: NetworkTransport, fn: Callable[[], object]) -> None:
        if transport.process not in self.cut_off:
            fn()

    def _send_reset(self, transport: NetworkTransport) -> None:
        """Notify a client that its connection is closed. Never lost: a client notices a closed socket eventually."""
        if transport.process not in self.cut_off and not transport.process.dead:
            self.world.schedule(
                self.world.random.expovariate(1 / self.profile.latency),
                partial(self._arrive, transport, partial(transport.reset, self.generation)),
                transport.process,
            )

    def _connection_closed(self, transport: NetworkTransport) -> None:
        """The client's process died: its socket closes, and the server can no longer notify it."""
        if transport.client is not None and transport.process not in self.cut_off:
            delay = self.world.random.expovariate(1 / self.profile.latency)
            self.world.schedule(delay, partial(self._unregister, transport.client), self.process)

    def _unregister(self, client: str) -> bool:
        return self.memory.notify_callbacks.pop(client, None) is not None

    # ----------------------------------------------------------------- requests

    def receive(
        self, transport: NetworkTransport, generation: int, number: int, verb: str, args: tuple[Any, ...]
    ) -> None:
        if not self.is_up or generation != self.generation:
            self._send_reset(transport)
            return
        if transport.client is not None and not transport.closed and not transport.process.dead:
            self.memory.notify_callbacks[transport.client] = partial(self._notify, transport, generation)
        if verb == "listen":
            answer: Any = True
        elif verb == "close":
            answer = self._unregister(*args)
        else:
            answer = self._execute(verb, args)
        if verb == "release":
            if not answer and (generation, number) in transport.executed_releases:
                answer = None  # the network duplicated the request: the first copy may have ended the grant
            transport.executed_releases.add((generation, number))
        self.transmit(transport, partial(transport.on_answer, generation, number, answer), to_server=False)

    def _execute(self, verb: str, args: tuple[Any, ...]) -> Any:
        try:
            answer = getattr(self.memory, verb)(*args)
        except LeaseholdError as error:
            answer = error
        self.observer.answered(verb, args, answer)
        return answer

    def _notify(
        self, transport: NetworkTransport, generation: int, notification: Notification, namespace: str, name: str
    ) -> None:
        if transport.process.dead:
            self._connection_closed(transport)
        profile, random = self.profile, self.world.random
        if profile.notification_loss and random.random() < profile.notification_loss:
            return
        message = partial(transport.on_notification, generation, notification, namespace, name)
        copies = 2 if profile.notification_duplication and random.random() < profile.notification_duplication else 1
        for _ in range(copies):
            send = partial(self.transmit, transport, message, to_server=False)
            if profile.notification_late and random.random() < profile.notification_late:
                self.world.schedule(random.uniform(0, profile.late_by), send)
            else:
                send()


class PendingCall(NamedTuple):
    """A request that still waits for its answer."""

    promise: Promise[Any]
    verb: str
    args: tuple[Any, ...]


class NetworkTransport:
    """One connection of a client. Every request carries the client's address and thereby registers the client."""

    def __init__(self, process: Process, server: SimulatedServer, registry: ClaimRegistry) -> None:
        self.process, self._server, self.registry = process, server, registry
        self.generation = server.generation
        self.client: str | None = None
        self.closed = False
        self.arrivals = {True: 0.0, False: 0.0}  # when the last message in each direction arrives
        self._notify_callback: NotifyCallback | None = None
        self._number = 0
        self._registered = server.generation
        self.pending: dict[int, PendingCall] = {}
        self.executed_releases: set[tuple[int, int]] = set()
        server.connect(self)

    # ------------------------------------------------------------ as a transport

    def call(self, verb: str, args: tuple[Any, ...], deadline: float) -> Coroutine[Any, Any, Any]:
        return self._send_and_wait(verb, args, deadline)

    async def _send_and_wait(self, verb: str, args: tuple[Any, ...], deadline: float) -> Any:
        seconds = deadline - self.process.now()
        unavailable = Unavailable(f"the simulated server did not answer within {seconds:.3f} s", engine="simulated")
        if seconds <= 0:
            raise unavailable
        promise: Promise[Any] = Promise(self.process)
        timer = self.process.call_later(seconds, lambda: promise.fail(unavailable))
        number = self._send(verb, args)
        self.pending[number] = PendingCall(promise, verb, args)
        try:
            answer = await promise
        finally:
            timer.cancel()
            del self.pending[number]
        if isinstance(answer, LeaseholdError):
            raise answer
        return answer

    def post(self, verb: str, args: tuple[Any, ...]) -> bool:
        self._send(verb, args)
        return False

    def listen(self, client: str, notify: NotifyCallback) -> None:
        self.client, self._notify_callback = client, notify

    def close(self, client: str) -> None:
        if self.client == client:
            self.closed = True
            self._send("close", (client,))

    def _send(self, verb: str, args: tuple[Any, ...]) -> int:
        self._number += 1
        request = partial(self._server.receive, self, self.generation, self._number, verb, args)
        self._server.transmit(self, request, to_server=True)
        self._server.observer.sent(self, verb, args)
        return self._number

    # ------------------------------------------------------------- what comes back

    def on_answer(self, generation: int, number: int, answer: Any) -> None:
        if generation != self.generation:
            return
        if self._registered != generation:
            self._registered = generation
            self._wake_waiters()
        if (call := self.pending.get(number)) and not call.promise.done:
            call.promise.resolve(answer)
            self._server.observer.delivered(self, call.verb, call.args, answer)

    def on_notification(self, generation: int, notification: Notification, namespace: str, name: str) -> None:
        if self._notify_callback is not None and not self.closed and generation == self.generation:
            self._notify_callback(notification, namespace, name)
            self._server.observer.notified(self, notification)

    def reset(self, generation: int) -> None:
        """The connection is gone, with every request under way; the next one belongs to the server's new generation."""
        for call in list(self.pending.values()):
            call.promise.fail(Unavailable("the connection to the simulated server was lost", engine="simulated"))
        if generation != self.generation:
            self.generation = generation
            self._register()

    def _register(self) -> None:
        if self.client is not None and not self.closed and self._registered != self.generation:
            self._send("listen", (self.client,))
            self.process.call_later(RECONNECT_INTERVAL, self._register)

    def _wake_waiters(self) -> None:
        for id_hash in list(self.registry.waiting):
            self.registry.on_notification("recheck", id_hash, 0.0, None)
