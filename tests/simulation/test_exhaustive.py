"""Every await cancelled, every message lost, one at a time: no double grant, and nothing left behind.

The scenario touches every verb: take, stand in line, be woken, renew, verify, release, give up. It runs once unharmed
to count what can go wrong, then once for each of those, in a world where nothing else does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from leasehold import AsyncClient, LeaseholdError
from leasehold.runtime.simulated import Process, Task, World
from leasehold.testing.network import NetworkLink, Server

TTL = 4.0


class Losing(Server):
    """Loses one message, by number: a request, an answer or a wake-up."""

    def __init__(self, world: World, lose: int | None) -> None:
        super().__init__(world)
        self.carried, self._lose = 0, lose

    def carry(self, link: NetworkLink, fn: Callable[[], object], *, up: bool) -> None:
        self.carried += 1
        if self.carried != self._lose:
            super().carry(link, fn, up=up)


class Scenario:
    def __init__(self, lose: int | None = None, cancel: tuple[int, int] | None = None) -> None:
        self.world = World(7)
        self.server = Losing(self.world, lose)
        self.inside: list[str] = []
        self.served: list[int] = []
        self.clients: list[AsyncClient] = []
        self.tasks = [self._start(number) for number in range(3)]
        if cancel is not None:
            self.tasks[cancel[0]].cancel_at = cancel[1]

    def _start(self, number: int) -> Task:
        process = Process(self.world, f"p{number}")
        client = AsyncClient(engine=self.server.opener(), runtime=process, call_timeout=1.0)
        self.clients.append(client)
        return process.spawn(self._work(number, client, process), f"worker {number}")

    async def _work(self, number: int, client: AsyncClient, process: Process) -> None:
        await process.sleep(number * 0.05)
        for lock in (
            client.lock("x", ttl=TTL, min_hold=0.1),
            client.lock("x", ttl=TTL, delay=0.2, wait=20),
            client.rwlock("y").read(ttl=TTL) if number else client.rwlock("y").write(ttl=TTL),
            client.semaphore("z", 2, ttl=TTL),
            client.lock("x", ttl=TTL, wait=0.3),
        ):
            try:
                async with lock as lease:
                    if lock.name == "x":
                        self.inside.append(process.name)
                    try:
                        await process.sleep(0.3)
                        if lock.name == "x" and lease.held:
                            assert self.inside == [process.name], "two inside"
                        await lease.verify()
                        await process.sleep(TTL / 2)
                        await lease.renew(TTL * 2)
                        if lock.name == "x" and lease.held:
                            assert self.inside == [process.name], "two inside"
                    finally:
                        if lock.name == "x":
                            self.inside.remove(process.name)
            except LeaseholdError:
                continue  # an honest word about what went wrong
            self.served.append(lease.token)

    def run(self) -> None:
        world = self.world
        for task in self.tasks:
            try:
                world.finish(task, 120)
            except asyncio.CancelledError:
                continue
        # What was given up is released at once, or owed and repeated: long before any ttl has passed.
        world.run(2.5)
        store = self.server.store
        left = [holding for ns, name in list(store.lines) for holding in store.inspect(ns, name, True)]
        assert not left, left
        for client, task in zip(self.clients, self.tasks, strict=True):
            assert not client._desk.book.waiting
            assert not client._desk.book.owed
            assert not client._desk.book.held
            process = task.process
            world.finish(process.spawn(client.close(), "close"), 10)
        assert len(self.served) == len(set(self.served))


def test_unharmed_everyone_is_served() -> None:
    scenario = Scenario()
    scenario.run()
    assert len(scenario.served) >= 12


def _awaits() -> list[tuple[int, int]]:
    scenario = Scenario()
    scenario.run()
    return [(who, number) for who, task in enumerate(scenario.tasks) for number in range(1, task.awaits + 1)]


def test_every_await_cancelled() -> None:
    awaits = _awaits()
    print(f"{len(awaits)} awaits cancelled, one at a time")
    assert len(awaits) > 100
    for who, number in awaits:
        _report(partial(Scenario, cancel=(who, number)), f"await {number} of worker {who} cancelled")


def test_every_message_lost() -> None:
    counted = Scenario()
    counted.run()
    print(f"{counted.server.carried} messages lost, one at a time")
    assert counted.server.carried > 150
    for number in range(1, counted.server.carried + 1):
        _report(partial(Scenario, lose=number), f"message {number} lost")


def pairs(who: int, step: int) -> None:
    counted = Scenario()
    counted.run()
    for number in range(1, counted.tasks[who].awaits + 1):
        for lost in range(1 + number % step, counted.server.carried + 1, step):
            _report(partial(Scenario, cancel=(who, number), lose=lost), f"await {number}, message {lost}")


@pytest.mark.parametrize("who", range(3))
def test_an_await_cancelled_and_a_message_lost(who: int) -> None:
    pairs(who, step=12)


@pytest.mark.faults
@pytest.mark.parametrize("who", range(3))
def test_every_await_cancelled_with_every_message_lost(who: int) -> None:
    pairs(who, step=1)


def _report(make: Callable[[], Any], what: str) -> None:
    try:
        make().run()
    except BaseException as error:
        error.add_note(f"with {what}")
        raise
