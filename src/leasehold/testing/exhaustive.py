"""Cancels every await and loses every message, one at a time: for client code that promises to leave nothing behind.

A scenario runs once without faults to count its awaits and messages, then once for each of them, with that fault and no
other. At its end there may be no waiter, no grant and no pending release, neither at the engine nor in a client's
registry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

from leasehold.aio import AsyncClient
from leasehold.runtime.simulated import Process, Simulator, Task
from leasehold.testing.network import NetworkTransport, SimulatedServer

Make: TypeAlias = "Callable[..., Scenario]"

# A claim that was given up is released at once, or its pending release is retried; both long before a ttl has passed.
_SETTLE_SECONDS: float = 2.5


class LossyServer(SimulatedServer):
    """Loses one message, by number: a request, an answer or a wake-up."""

    def __init__(self, world: Simulator, lose: int | None) -> None:
        super().__init__(world)
        self.message_count, self._lost_number = 0, lose
        self._released: set[str] = set()
        # Of claims whose attempt arrived after their release, which had taken another connection.
        self.late_fingerprints: set[str] = set()

    def transmit(self, transport: NetworkTransport, fn: Callable[[], object], *, to_server: bool) -> None:
        self.message_count += 1
        if self.message_count != self._lost_number:
            super().transmit(transport, fn, to_server=to_server)

    def receive(
        self, transport: NetworkTransport, generation: int, number: int, verb: str, args: tuple[Any, ...]
    ) -> None:
        if verb == "release":
            self._released.add(args[0].id_hash)
        elif verb == "attempt" and args[0].id_hash in self._released:
            self.late_fingerprints.add(args[0].fingerprint)
        super().receive(transport, generation, number, verb, args)


class Scenario:
    """A few clients with one worker each. `lose` is the number of a message, `cancel` a worker and the number of its
    await."""

    workers: ClassVar[int] = 3
    time_limit: ClassVar[float] = 120.0  # simulated

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.world = Simulator(7)
        self.server = LossyServer(self.world, lose)
        self.clients: list[AsyncClient] = []
        self.tasks = [self._start(number) for number in range(self.workers)]
        if cancel is not None:
            self.tasks[cancel[0]].cancel_at = cancel[1]

    def _start(self, number: int) -> Task:
        process = Process(self.world, f"p{number}")
        client = AsyncClient(engine=self.server.opener(), runtime=process, call_timeout=1.0)
        self.clients.append(client)
        return process.spawn(self.work(number, client, process), f"worker {number}")

    async def work(self, number: int, client: AsyncClient, process: Process) -> None:
        """What a worker does. Any exception but its own cancellation fails the scenario."""
        raise NotImplementedError

    def run(self) -> None:
        for task in self.tasks:
            try:
                self.world.run_until_complete(task, self.time_limit)
            except asyncio.CancelledError:
                continue
        self.world.run(_SETTLE_SECONDS)
        server = self.server.memory
        left = [holding for ns, name in list(server.lock_states) for holding in server.inspect(ns, name, True)]
        # Only its ttl ends an attempt that arrives after its release (E6).
        left = [holding for holding in left if holding.fingerprint not in self.server.late_fingerprints]
        assert not left, left
        for client, task in zip(self.clients, self.tasks, strict=True):
            registry = client._core.registry
            assert not registry.waiting
            assert not registry.pending_releases
            assert not registry.held
            assert not client._core.held_locks._held
            self.world.run_until_complete(task.process.spawn(client.close(), "close"), 10)


def every_await_cancelled(make: Make) -> int:
    """Run the scenario once for each of its awaits, cancelling that one. Returns how many there are."""
    baseline = make()
    baseline.run()
    awaits = [
        (worker, number) for worker, task in enumerate(baseline.tasks) for number in range(1, task.await_count + 1)
    ]
    for worker, number in awaits:
        _report(partial(make, cancel=(worker, number)), f"await {number} of worker {worker} cancelled")
    return len(awaits)


def every_message_lost(make: Make) -> int:
    """Run the scenario once for each of its messages, losing that one. Returns how many there are."""
    baseline = make()
    baseline.run()
    for number in range(1, baseline.server.message_count + 1):
        _report(partial(make, lose=number), f"message {number} lost")
    return baseline.server.message_count


def awaits_with_messages(make: Make, worker: int, stride: int) -> None:
    """Cancel each await of one worker, combined with the loss of every `stride`-th message, one message a run."""
    baseline = make()
    baseline.run()
    for number in range(1, baseline.tasks[worker].await_count + 1):
        for message in range(1 + number % stride, baseline.server.message_count + 1, stride):
            _report(partial(make, cancel=(worker, number), lose=message), f"await {number}, message {message}")


def _report(make: Callable[[], Scenario], what: str) -> None:
    try:
        make().run()
    except BaseException as error:
        error.add_note(f"with {what}")
        raise
