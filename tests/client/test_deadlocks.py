"""Deadlocks among real threads and tasks: found from what `inspect` shows, and gone once a victim is broken."""

from __future__ import annotations

import asyncio
import os
import threading
from hashlib import sha256

import pytest

from leasehold import AsyncClient, Client, Deadlock, LeaseholdError, Unsupported
from leasehold.core.names import hash_id, make_claim_id, owner_of
from leasehold.engines.memory import TRAITS
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import Threads
from tests.support import probe


class LockingThreads:
    """Threads that each hold the first of their names and then wait for the others in the given order."""

    def __init__(self, client: Client, *orders: str) -> None:
        self._ready = threading.Barrier(len(orders) + 1)
        self.threads = [threading.Thread(target=self._work, args=(client, order)) for order in orders]
        for thread in self.threads:
            thread.start()
        self._ready.wait(60)

    def _work(self, client: Client, order: str) -> None:
        try:
            with client.lock(order[0], wait=30):
                self._ready.wait(60)
                for name in order[1:]:
                    client.lock(name, wait=30).acquire().release()
        except LeaseholdError:
            return

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def owner_ids(deadlock: Deadlock) -> set[str]:
    return {wait.waiter.owner for wait in deadlock.waits}


def test_deadlocked_threads_are_reported_and_freed_by_breaking_victim(wait_until) -> None:
    with Client("memory://") as client:
        locking_threads = LockingThreads(client, "ab", "bc", "ca", "x", "yx", "d")
        wait_until(client.deadlocks)
        (deadlock,) = client.deadlocks()
        assert len(owner_ids(deadlock)) == 3
        assert {wait.name for wait in deadlock.waits} == {"a", "b", "c"}
        assert all(wait.waiter.holder.pid == os.getpid() for wait in deadlock.waits)
        assert deadlock.victim.token == max(wait.holder.token for wait in deadlock.waits)
        assert client.break_lock(deadlock.victim.name, token=deadlock.victim.token)
        locking_threads.join()
        assert client.deadlocks() == []


def test_waiting_chain_without_cycle_is_not_a_deadlock(wait_until) -> None:
    with Client("memory://") as client:
        inner = client.lock("b").acquire()
        locking_threads = LockingThreads(
            client, "ab", "ca"
        )  # a chain: the second waits for the first, which waits for this thread
        wait_until(lambda: sum(holding.state == "waiting" for holding in client.inspect()) == 2)
        assert client.deadlocks() == []
        inner.release()
        locking_threads.join()


def test_deadlocked_tasks_are_reported() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:

            async def acquire_both(first: str, second: str) -> None:
                async with client.lock(first):
                    ready.append(first)
                    while len(ready) < 2:
                        await asyncio.sleep(0)
                    async with client.lock(second):
                        pass

            ready: list[str] = []
            tasks = [asyncio.create_task(acquire_both(*pair)) for pair in ("ab", "ba")]
            while not (found := await client.deadlocks()):
                await asyncio.sleep(0.001)
            assert [len(owner_ids(deadlock)) for deadlock in found] == [2]
            tasks[0].cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert await client.deadlocks() == []

    asyncio.run(main())


def test_multilock_causes_no_deadlock(bench) -> None:
    client = bench.client()
    with client.multilock(["b", "a"]):
        assert client.deadlocks() == []


def test_deadlocks_is_unsupported_without_a_queue(bench) -> None:
    client = bench.client()
    probe.engine(client).traits = TRAITS._replace(fair=False)
    with pytest.raises(Unsupported, match="no queue of waiters"):
        client.deadlocks()


def test_deadlocks_without_cycle_needs_one_engine_call(bench) -> None:
    client = bench.client()
    before = bench.transport.calls
    assert client.deadlocks() == []
    assert bench.transport.calls == before + 1


# ------------------------------------------------------------- owner ids


def test_claims_of_one_thread_share_an_owner_id(bench) -> None:
    client, owner_by_name = bench.client(), {}

    def inspect_owners() -> None:
        with client.lock("c"):
            owner_by_name.update({holding.name: holding.owner for holding in client.inspect()})

    with client.lock("a") as first_lease, client.lock("b") as second_lease:
        thread = threading.Thread(target=inspect_owners)
        thread.start()
        thread.join()
        assert owner_by_name["a"] == owner_by_name["b"] == Threads().owner_id() != owner_by_name["c"]
        assert owner_by_name["a"] not in first_lease.fingerprint
        assert first_lease.fingerprint != second_lease.fingerprint


def test_owner_id_differs_per_task_and_falls_back_to_thread() -> None:
    loop = Loop()

    async def own_ids() -> tuple[str, str]:
        return loop.owner_id(), loop.owner_id()

    first_id, same_task_id = asyncio.run(own_ids())
    second_id, _ = asyncio.run(own_ids())
    assert first_id == same_task_id != second_id

    async def outside() -> str:
        seen: list[str] = []
        asyncio.get_running_loop().call_soon(lambda: seen.append(loop.owner_id()))
        await asyncio.sleep(0)
        return seen[0]

    assert asyncio.run(outside()) == Threads().owner_id()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_has_another_owner_id() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, Threads().owner_id().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 100).decode() != Threads().owner_id()
    os.close(reader)
    os.close(writer)


def test_id_hash_ends_with_the_owner_id() -> None:
    secret, id_hash = make_claim_id("0123abcd", "secret")
    assert id_hash == hash_id(secret)
    assert (owner_of(id_hash), len(id_hash)) == ("0123abcd", 32)
    assert id_hash[:16] == sha256(b"0123abcd.secret").hexdigest()[:16]
    assert hash_id("not hex!.secret") == sha256(b"not hex!.secret").hexdigest()[:32], "no owner id in it"
