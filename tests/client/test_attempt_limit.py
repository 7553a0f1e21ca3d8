"""How many attempts of a client are under way at a time: what forks, loops that end, and two threads leave behind."""

from __future__ import annotations

import asyncio
import os
import types

import pytest

from leasehold import AsyncClient, Client
from leasehold.client.attempt_limit import MAX_ATTEMPTS, AttemptLimit
from tests.support import probe


def fill(limit: AttemptLimit) -> None:
    for number in range(MAX_ATTEMPTS):
        assert limit.try_enter(f"sent {number}")


class SuspendingRuntime:
    """Suspends a caller that waits, so that a test decides when it goes on."""

    def now(self) -> float:
        return 100.0

    def signal(self) -> SuspendingRuntime:
        return self

    def set(self) -> None:
        pass

    @types.coroutine
    def wait(self, _seconds: float):
        yield


class InterruptedSet(set):
    """Lets another thread run before an id hash is added."""

    def __init__(self, id_hashes, interrupt) -> None:
        super().__init__(id_hashes)
        self._interrupt = interrupt

    def add(self, id_hash: str) -> None:
        self._interrupt(id_hash)
        super().add(id_hash)


def test_caller_that_gives_up_while_it_is_admitted_leaves_room_for_others() -> None:
    limit = AttemptLimit(SuspendingRuntime(), 5.0, "engine")
    fill(limit)
    callers = {id_hash: limit.enter(id_hash, 200.0) for id_hash in ("first", "second")}
    for caller in callers.values():
        caller.send(None)

    def give_up(id_hash: str) -> None:
        if id_hash == "first":
            callers["first"].close()
            limit.leave("first", answered=False)

    limit._under_way = InterruptedSet(limit._under_way, give_up)
    limit.leave("sent 0", answered=True)
    assert "first" not in limit._under_way
    assert "second" in limit._under_way
    callers["second"].close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_sends_attempts_while_threads_of_its_parent_wait_for_theirs() -> None:
    client = Client("memory://")
    fill(probe.core(client).attempts)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if client.lock("a", wait=0).acquire().held else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    probe.core(client).attempts.reset()
    client.close()


def test_client_in_next_loop_sends_attempts_though_those_of_the_first_never_ended() -> None:
    client = AsyncClient("memory://")
    asyncio.run(client.ping())
    fill(probe.core(client).attempts)

    async def use() -> None:
        async with client.lock("a", wait=0):
            pass
        await client.close()

    asyncio.run(use())
