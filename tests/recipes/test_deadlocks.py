"""Deadlocks among real threads and tasks: named while they last, by claims anybody can see, and gone when broken."""

from __future__ import annotations

import asyncio
import os
import threading
from dataclasses import replace
from hashlib import sha256

import pytest

from leasehold import AsyncClient, Client, Deadlock, LeaseholdError, Unsupported
from leasehold.core.names import claim_id, mark, owner
from leasehold.engines.memory import TRAITS
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads


class Hands:
    """Threads that each hold the first of their names and wait for the others, in the order given."""

    def __init__(self, client: Client, *orders: str) -> None:
        self._ready = threading.Barrier(len(orders) + 1)
        self.threads = [threading.Thread(target=self._work, args=(client, order)) for order in orders]
        for thread in self.threads:
            thread.start()
        self._ready.wait(20)

    def _work(self, client: Client, order: str) -> None:
        try:
            with client.lock(order[0], wait=30):
                self._ready.wait(20)
                for name in order[1:]:
                    client.lock(name, wait=30).acquire().release()
        except LeaseholdError:
            return

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def owners(deadlock: Deadlock) -> set[str]:
    return {wait.waiter.owner for wait in deadlock.waits}


def test_threads_in_a_circle_are_named_and_freed_by_breaking_the_youngest(wait_until) -> None:
    with Client("memory://") as client:
        hands = Hands(client, "ab", "bc", "ca", "x", "yx", "d")
        wait_until(client.deadlocks)
        (deadlock,) = client.deadlocks()
        assert len(owners(deadlock)) == 3
        assert {wait.name for wait in deadlock.waits} == {"a", "b", "c"}
        assert all(wait.waiter.holder.pid == os.getpid() for wait in deadlock.waits)
        assert deadlock.victim.token == max(wait.holder.token for wait in deadlock.waits)
        assert client.break_lock(deadlock.victim.name, token=deadlock.victim.token)
        hands.join()
        assert client.deadlocks() == []


def test_two_threads_of_one_client_that_merely_wait_are_not_named(wait_until) -> None:
    with Client("memory://") as client:
        inner = client.lock("b").acquire()
        hands = Hands(client, "ab", "ca")  # a chain: the second waits for the first, which waits for this thread
        wait_until(lambda: sum(one.state == "waiting" for one in client.inspect()) == 2)
        assert client.deadlocks() == []
        inner.release()
        hands.join()


def test_tasks_in_a_circle_are_named() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:

            async def both(first: str, second: str) -> None:
                async with client.lock(first):
                    ready.append(first)
                    while len(ready) < 2:
                        await asyncio.sleep(0)
                    async with client.lock(second):
                        pass

            ready: list[str] = []
            tasks = [asyncio.create_task(both(*pair)) for pair in ("ab", "ba")]
            while not (found := await client.deadlocks()):
                await asyncio.sleep(0.001)
            assert [len(owners(one)) for one in found] == [2]
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await client.deadlocks() == []

    asyncio.run(main())


def test_a_multilock_never_makes_one(bench) -> None:
    client = bench.client()
    with client.multilock(["b", "a"]):
        assert client.deadlocks() == []


def test_without_a_line_nobody_can_tell(bench) -> None:
    client = bench.client()
    client._desk._engine.traits = replace(TRAITS, fair=False)
    with pytest.raises(Unsupported, match="no line of waiters"):
        client.deadlocks()


def test_a_look_that_finds_nothing_is_one_look(bench) -> None:
    client = bench.client()
    before = bench.link.calls
    assert client.deadlocks() == []
    assert bench.link.calls == before + 1


# ------------------------------------------------------------- the owner


def test_the_claims_of_one_thread_have_one_owner_and_its_neighbour_another(bench) -> None:
    client, found = bench.client(), {}

    def look() -> None:
        with client.lock("c"):
            found.update({one.name: one.owner for one in client.inspect()})

    with client.lock("a") as one, client.lock("b") as two:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert found["a"] == found["b"] == Threads().owner_mark() != found["c"]
        assert found["a"] not in one.fingerprint
        assert one.fingerprint != two.fingerprint


def test_the_owner_of_a_task_and_of_no_task() -> None:
    loop = Loop()

    async def mine() -> tuple[str, str]:
        return loop.owner_mark(), loop.owner_mark()

    one, again = asyncio.run(mine())
    two, _ = asyncio.run(mine())
    assert one == again != two

    async def outside() -> str:
        seen: list[str] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(loop.owner_mark()))
        await asyncio.sleep(0)
        return seen[0]

    assert asyncio.run(outside()) == Threads().owner_mark()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_another_owner() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, Threads().owner_mark().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100).decode() != Threads().owner_mark()
    os.close(reader)
    os.close(writer)


def test_a_mark_ends_with_the_owner_and_a_fingerprint_is_of_the_whole_id() -> None:
    secret, made = claim_id("0123abcd", "secret")
    assert made == mark(secret)
    assert (owner(made), len(made)) == ("0123abcd", 32)
    assert made[:16] == sha256(b"0123abcd.secret").hexdigest()[:16]
    assert mark("not hex!.secret") == sha256(b"not hex!.secret").hexdigest()[:32], "no owner: hashed like the rest"
