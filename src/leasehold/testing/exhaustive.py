"""Every await cancelled, every message lost, one at a time: for recipes that promise to leave nothing behind.

A scenario runs once unharmed to count what can go wrong, then once for each of those, in a world where nothing else
does. At its end nobody may be in line, held or owed, at the engine or in a client's book.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, TypeAlias

from leasehold.aio import AsyncClient
from leasehold.runtime.simulated import Process, Task, World
from leasehold.testing.network import NetworkLink, Server

Make: TypeAlias = "Callable[..., Scenario]"

_SETTLED: float = 2.5  # what was given up is released at once, or owed and repeated: long before any ttl has passed


class Losing(Server):
    """Loses one message, by number: a request, an answer or a wake-up."""

    def __init__(self, world: World, lose: int | None) -> None:
        super().__init__(world)
        self.carried, self._lose = 0, lose
        self._released: set[str] = set()
        self.late: set[str] = set()  # fingerprints of claims attempted after their release, which came by another way

    def carry(self, link: NetworkLink, fn: Callable[[], object], *, up: bool) -> None:
        self.carried += 1
        if self.carried != self._lose:
            super().carry(link, fn, up=up)

    def receive(self, link: NetworkLink, generation: int, number: int, verb: str, args: tuple[Any, ...]) -> None:
        if verb == "release":
            self._released.add(args[0].mark)
        elif verb == "attempt" and args[0].mark in self._released:
            self.late.add(args[0].fingerprint)
        super().receive(link, generation, number, verb, args)


class Scenario:
    """A few clients, each with one worker; `lose` a message, `cancel` an await of a worker, both by number."""

    workers: ClassVar[int] = 3
    patience: ClassVar[float] = 120.0  # simulated

    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.world = World(7)
        self.server = Losing(self.world, lose)
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
        """What a worker does; what it raises fails the scenario, but for its own cancellation."""
        raise NotImplementedError

    def run(self) -> None:
        for task in self.tasks:
            try:
                self.world.finish(task, self.patience)
            except asyncio.CancelledError:
                continue
        self.world.run(_SETTLED)
        store = self.server.store
        left = [holding for ns, name in list(store.lines) for holding in store.inspect(ns, name, True)]
        left = [holding for holding in left if holding.fingerprint not in self.server.late]  # its ttl ends that (E6)
        assert not left, left
        for client, task in zip(self.clients, self.tasks, strict=True):
            book = client._desk.book
            assert not book.waiting
            assert not book.owed
            assert not book.held
            assert not client._desk.entries._entries
            self.world.finish(task.process.spawn(client.close(), "close"), 10)


def every_await_cancelled(make: Make) -> int:
    """How many there were."""
    unharmed = make()
    unharmed.run()
    awaits = [(who, number) for who, task in enumerate(unharmed.tasks) for number in range(1, task.awaits + 1)]
    for who, number in awaits:
        _report(partial(make, cancel=(who, number)), f"await {number} of worker {who} cancelled")
    return len(awaits)


def every_message_lost(make: Make) -> int:
    """How many there were."""
    unharmed = make()
    unharmed.run()
    for number in range(1, unharmed.server.carried + 1):
        _report(partial(make, lose=number), f"message {number} lost")
    return unharmed.server.carried


def awaits_with_messages(make: Make, who: int, step: int) -> None:
    """Each await of one worker cancelled, each time with another message lost as well; `step` 1: with every one."""
    unharmed = make()
    unharmed.run()
    for number in range(1, unharmed.tasks[who].awaits + 1):
        for lost in range(1 + number % step, unharmed.server.carried + 1, step):
            _report(partial(make, cancel=(who, number), lose=lost), f"await {number}, message {lost}")


def _report(make: Callable[[], Scenario], what: str) -> None:
    try:
        make().run()
    except BaseException as error:
        error.add_note(f"with {what}")
        raise
