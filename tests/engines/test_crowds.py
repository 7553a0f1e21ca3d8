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

from leasehold import Client, Lease, LeaseLost, Mismatch, NotAcquired
from leasehold.core.timing import BEAT_EVERY
from leasehold.testing.rig import Rig, rig_type
from leasehold.testing.suite import made

FAIR = ["sqlite", "postgresql", "mysql", "redis", "etcd", "zookeeper"]  # and with permits
ALL = [*FAIR, "redlock"]
TOLD = [name for name in ALL if name not in ("zookeeper", "mysql")]  # where a holder need not ask

every = pytest.mark.parametrize("rig", ALL, indirect=True)

# Python warns of every fork beside threads: that it works is what is shown.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture(params=FAIR)
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


@every
def test_fifty_threads(rig, client, namespace, until) -> None:
    inside, tokens = [], []

    def work() -> None:
        for _ in range(3):
            with client.lock("hot", ttl=60, wait=100) as lease:
                inside.append(lease)
                assert inside == [lease]
                tokens.append(lease.token)
                lease.check()
                inside.remove(lease)

    in_threads(50, work)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 150
    until(lambda: rig.residue(namespace) == 0)


def test_forty_threads_and_three_permits(rig, client, namespace, until) -> None:
    inside, most = [], []

    def work() -> None:
        for _ in range(5):
            with client.semaphore("s", 3, ttl=60) as lease:
                inside.append(lease)
                most.append(len(inside))
                inside.remove(lease)

    in_threads(40, work)
    assert len(most) == 200
    assert max(most) <= 3
    until(lambda: rig.residue(namespace) == 0)


@every
def test_two_hundred_tasks(rig, namespace, until) -> None:
    inside, tokens = [], []

    async def main() -> None:
        async with rig.async_client(namespace=namespace, call_timeout=30) as client:

            async def work() -> None:
                async with client.lock("hot", ttl=60, wait=120) as lease:
                    inside.append(lease)
                    assert inside == [lease]
                    tokens.append(lease.token)
                    await asyncio.sleep(0)
                    inside.remove(lease)

            await asyncio.gather(*(work() for _ in range(200)))
            assert await client.inspect() == []

    asyncio.run(main())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 200
    until(lambda: rig.residue(namespace) == 0)


@every
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


@every
def test_cancelled_in_a_crowd_the_line_goes_on_and_nothing_stays(rig, namespace, until) -> None:
    chance = random.Random(4)

    async def main() -> None:
        async with rig.async_client(namespace=namespace, call_timeout=30) as client:

            async def work() -> None:
                # An attempt may land after its own release, by another connection: then its ttl ends it (E6).
                async with client.lock("hot", ttl=5, wait=60):
                    await asyncio.sleep(0.002)

            tasks = [asyncio.create_task(work()) for _ in range(150)]
            while not all(task.done() for task in tasks):
                chance.choice(tasks).cancel()
                await asyncio.sleep(chance.random() * 0.002)
            await asyncio.gather(*tasks, return_exceptions=True)
            async with client.lock("hot", wait=20):  # the line is not held up by what was given up
                pass

    asyncio.run(main())
    until(lambda: rig.residue(namespace) == 0)


def ours() -> set[threading.Thread]:
    """The threads of clients."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("leasehold-") or "zk_" in thread.name}


@every
def test_a_client_goes_with_its_last_loop(rig, client, namespace, until) -> None:
    """Also where that loop was closed with a task of it still in line, which knows the engine of that time."""
    with client.lock("a", ttl=60):
        client.inspect()
    others = ours()
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
    # As its collection would, but from the outside in: the end of what stood in line asks nothing of a closed loop.
    waiting.get_coro().close()
    del waiting
    gc.collect()
    until(lambda: ours() <= others)


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


@every
def test_both_faces_see_one_lock(rig, client, namespace, until) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as other:
            with pytest.raises(NotAcquired, match="a test"):
                await other.lock("orders/42").acquire(wait=0)
            assert await other.lock("elsewhere").locked() is False

    with client.lock("orders/42", purpose="a test") as lease:
        (holding,) = client.inspect()
        assert (holding.name, holding.token, holding.state) == ("orders/42", lease.token, "held")
        assert (holding.holder.label, holding.holder.purpose) == (lease.holder, "a test")
        assert client.lock("orders/42").try_acquire() is None
        asyncio.run(main())
    until(lambda: rig.residue(namespace) == 0)


@every
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


@pytest.mark.parametrize("rig", TOLD, indirect=True)
def test_a_break_is_told_while_the_loop_is_blocked(rig, client, namespace, until) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as blocked:
            lease = await blocked.lock("job", ttl=300).acquire()
            assert client.break_lock("job", token=lease.token)
            until(lambda: not lease.held, 10)
            with pytest.raises(LeaseLost):
                lease.check()

    asyncio.run(main())


def test_another_kind_of_a_live_name_is_refused(rig, client, namespace) -> None:
    with rig.client(namespace=namespace) as other:
        with client.lock("a"), pytest.raises(Mismatch):
            other.semaphore("a", 2).acquire(wait=0)
        with other.semaphore("a", 2), pytest.raises(Mismatch):
            client.semaphore("a", 3).acquire(wait=1)
        with client.lock("a", wait=0):
            pass


# ------------------------------------------------------------------- processes


@every
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


@every
def test_waiters_on_both_sides_of_a_fork_are_woken(client, in_fork, until) -> None:
    mine, other = client.lock("mine", ttl=60).acquire(), client.lock("other", ttl=60).acquire()

    def wait_for(name: str) -> None:
        client.lock(name, wait=30).acquire().release()

    def woken_by(lease: Lease, waiting: threading.Thread) -> bool:
        until(lambda: len(client.inspect(lease.name)) == 2)
        began = time.monotonic()
        lease.release()
        waiting.join(30)
        return time.monotonic() - began < BEAT_EVERY - 1  # not by looking now and then

    parents = threading.Thread(target=wait_for, args=("other",))
    parents.start()
    until(lambda: len(client.inspect("other")) == 2)
    childs = threading.Thread(target=in_fork, args=(lambda: wait_for("mine"),))
    childs.start()
    assert woken_by(mine, childs)
    assert woken_by(other, parents)
    assert client.inspect() == []


@every
def test_a_child_that_exits_says_no_goodbye(client, in_fork) -> None:
    with client.lock("a", ttl=60) as lease:
        in_fork(lambda: None)
        in_fork(gc.collect)
        lease.renew()


@every
def test_a_child_forked_beside_a_loop_says_nothing_on_its_connections(rig, namespace, in_fork) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as client:
            lease = await client.lock("a", ttl=60).acquire()
            in_fork(gc.collect)
            await lease.renew()
            assert await lease.release()

    asyncio.run(main())


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
