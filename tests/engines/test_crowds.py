"""What every engine owes a program with many threads, many tasks, several loops, forks and processes: one test for all
engines, by their rigs. What only one engine has to show is in its own tests.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from leasehold import Client, Mismatch
from leasehold.testing.rig import Rig, rig_type
from leasehold.testing.suite import made

ENGINES = ["sqlite", "zookeeper"]


@pytest.fixture(params=ENGINES)
def rig(request) -> Iterator[Rig]:
    found = made(rig_type(request.param))
    yield found
    found.close()


@pytest.fixture
def namespace() -> str:
    return f"test-{os.urandom(6).hex()}"


@pytest.fixture
def client(rig, namespace) -> Iterator[Client]:
    with rig.client(namespace=namespace, call_timeout=30) as found:
        yield found


def in_threads(count: int, work) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failed == []


# ------------------------------------------------------------------ one client


def test_forty_threads(rig, client, namespace, until) -> None:
    inside, most, tokens = [0], [0], []

    def work() -> None:
        for _ in range(5):
            with client.semaphore("s", 3, ttl=60):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
            with client.lock("l", ttl=60) as lease:
                tokens.append(lease.token)
                assert tokens[-1] == lease.token

    in_threads(40, work)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 200
    assert most[0] <= 3
    until(lambda: rig.residue(namespace) == 0)


def test_two_hundred_tasks(rig, namespace) -> None:
    tokens: list[int] = []

    async def main() -> None:
        async with rig.async_client(namespace=namespace, call_timeout=30) as client:
            inside = 0

            async def work() -> None:
                nonlocal inside
                async with client.lock("a", ttl=60) as lease:
                    inside += 1
                    assert inside == 1
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside -= 1

            await asyncio.gather(*(work() for _ in range(200)))
            assert await client.inspect() == []

    asyncio.run(main())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 200


def test_cancelled_a_hundred_times_nothing_stays(rig, client, namespace, until) -> None:
    chance = random.Random(5)

    async def main() -> None:
        async with rig.async_client(namespace=namespace) as cancelled:
            for number in range(100):
                task = asyncio.create_task(cancelled.lock(chance.choice(["held", "free"])).acquire())
                for _ in range(number % 8):
                    await asyncio.sleep(0)
                if number >= 8:
                    await asyncio.sleep(chance.random() * 0.006)
                task.cancel()
                try:
                    lease = await task
                except asyncio.CancelledError:
                    continue
                await lease.release()
            end = time.monotonic() + 20
            while len(await cancelled.inspect()) > 1:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)

    with client.lock("held", ttl=60):
        asyncio.run(main())
    until(lambda: rig.residue(namespace) == 0)


def test_a_client_goes_with_its_last_loop(rig, client, namespace) -> None:
    """Also where that loop was closed with a task of it still in line."""
    moved = rig.async_client(namespace=namespace)

    async def use() -> int:
        async with moved.lock("a", ttl=60, wait=10) as lease:
            return lease.token

    async def stand_in_line() -> asyncio.Task[object]:
        waiting = asyncio.create_task(moved.lock("a", ttl=60).acquire())
        while len(client.inspect()) < 2:
            await asyncio.sleep(0.001)
        return waiting

    tokens = [asyncio.run(use()) for _ in range(2)]
    loop = asyncio.new_event_loop()
    with client.lock("a", ttl=60) as held:
        waiting = loop.run_until_complete(stand_in_line())
        loop.close()
    tokens += [held.token, *(asyncio.run(use()) for _ in range(2))]
    assert tokens == sorted(set(tokens))
    assert not waiting.done()
    waiting._log_destroy_pending = False
    asyncio.run(moved.close())


# ----------------------------------------------------------------- two clients


def test_both_faces_stand_in_one_line(rig, client, namespace) -> None:
    async def asyncio_side() -> None:
        async with rig.async_client(namespace=namespace) as other:
            order = []
            held = client.lock("a", ttl=60).acquire()

            async def one(number: int) -> None:
                async with other.lock("a"):
                    order.append(number)

            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(one(number)))
                while len(await other.inspect("a")) < number + 2:
                    await asyncio.sleep(0.001)
            held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(10))

    asyncio.run(asyncio_side())


def test_a_hand_off_is_pushed(rig, client, namespace, until) -> None:
    with rig.client(namespace=namespace) as other:
        lease = client.lock("a", ttl=60).acquire()
        taken = []
        thread = threading.Thread(target=lambda: taken.append((other.lock("a").acquire(), time.monotonic())))
        thread.start()
        until(lambda: len(client.inspect("a")) == 2)
        released = time.monotonic()
        lease.release()
        thread.join(30)
        assert taken[0][1] - released < 2  # looking unprompted would take up to five
        taken[0][0].release()


def test_another_kind_of_a_live_name_is_refused(rig, client, namespace) -> None:
    with rig.client(namespace=namespace) as other:
        with client.lock("a"), pytest.raises(Mismatch):
            other.semaphore("a", 2).acquire(wait=0)
        with other.semaphore("a", 2), pytest.raises(Mismatch):
            client.semaphore("a", 3).acquire(wait=1)
        with client.lock("a", wait=0):
            pass


# ------------------------------------------------------------------- processes


def test_a_forked_child_is_a_client_of_its_own(client, in_fork) -> None:
    lease = client.lock("a", ttl=60).acquire()

    def child() -> None:
        assert not lease.held
        assert lease.lost_reason == "forked"
        assert client.lock("a").try_acquire() is None
        with client.lock("b"):
            assert {seen.name for seen in client.inspect()} == {"a", "b"}
        client.close()

    for _ in range(3):
        in_fork(child)
    lease.renew()
    assert lease.release()


def test_a_child_that_exits_says_no_goodbye(client, in_fork) -> None:
    with client.lock("a", ttl=60) as lease:
        in_fork(lambda: None)
        in_fork(gc.collect)
        lease.renew()


def test_forks_in_the_midst_of_a_busy_client(client, in_fork) -> None:
    """Whatever another thread is doing at that moment, the child can lock, and the parent goes on."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with client.lock("busy", ttl=60), client.semaphore("many", 2, ttl=60):
                pass

    def fork() -> None:
        try:
            for _ in range(5):
                in_fork(lambda: client.lock(f"child-{os.getpid()}", wait=20).call(lambda: None))
        finally:
            over.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    fork()
    for thread in threads:
        thread.join(60)
    assert client.inspect("busy") == []


def test_eight_processes_count_in_one_plain_file(rig, child, tmp_path) -> None:
    machine = rig.machine()
    rig.join(machine, machine)
    file = tmp_path / "count"
    file.write_text("0")
    children = [child("count", machine.url, f"hot-{os.getpid()}", file, 50) for _ in range(8)]
    counted = sorted(tuple(pair) for one in children for pair in one.hear(120))
    assert file.read_text() == "400"
    assert [number for number, _ in counted] == list(range(400))
    assert all(one < two for (_, one), (_, two) in pairwise(counted))
