"""Every engine with many threads, many tasks, several event loops, forks and processes. Tests of a single engine are in
that engine's folder.
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
from typing import Any

import pytest

from leasehold import Client, Lease, LeaseLost, Mismatch, NotAcquired
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.testing.conformance.rig import Rig, rig_type
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.timing import check_elapsed, check_seconds

FAIR = ["sqlite", "postgresql", "mysql", "redis", "etcd", "zookeeper", "http-redis-pair"]  # these also have semaphores
ALL = [*FAIR, "redlock"]
BREAK_NOTICE = [name for name in ALL if name not in ("zookeeper", "mysql")]  # these notify the holder of a break

SIBLINGS = {"mysql", "redlock", "http-redis-pair"}  # share much with another engine, so they run in the second tier


def each(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.extended if name in SIBLINGS else ()) for name in names]


on_every_engine = pytest.mark.parametrize("rig", each(ALL), indirect=True)

# Python warns if a process with threads forks; these tests show that it works here.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture(params=each(FAIR))
def rig(request) -> Iterator[Rig]:
    found = rig_or_skip(rig_type(request.param))
    yield found
    found.close()


@pytest.fixture
def namespace() -> str:
    return f"test-{os.urandom(6).hex()}"


@pytest.fixture
def client(rig, namespace) -> Iterator[Client]:
    with rig.client(namespace=namespace, call_timeout=30) as found:
        yield found


def run_in_threads(count: int, work) -> None:
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


@on_every_engine
def test_fifty_threads_share_one_lock(rig, client, namespace, wait_until) -> None:
    inside, tokens = [], []

    def work() -> None:
        for _ in range(2):
            with client.lock("hot", ttl=60, wait=100) as lease:
                inside.append(lease)
                assert inside == [lease]
                tokens.append(lease.token)
                lease.check()
                inside.remove(lease)

    run_in_threads(50, work)
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 100
    wait_until(lambda: rig.residue(namespace) == 0)


def test_forty_threads_share_three_permits(rig, client, namespace, wait_until) -> None:
    inside, counts = [], []

    def work() -> None:
        for _ in range(2):
            with client.semaphore("s", 3, ttl=60) as lease:
                inside.append(lease)
                counts.append(len(inside))
                inside.remove(lease)

    run_in_threads(40, work)
    assert len(counts) == 80
    assert max(counts) <= 3
    wait_until(lambda: rig.residue(namespace) == 0)


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.faults)])
@on_every_engine
def test_many_tasks_share_one_lock(rig, namespace, wait_until, count) -> None:
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

            await asyncio.gather(*(work() for _ in range(count)))
            assert await client.inspect() == []

    asyncio.run(main())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == count
    wait_until(lambda: rig.residue(namespace) == 0)


@on_every_engine
def test_hundred_cancelled_acquires_leave_nothing(rig, client, namespace, wait_until) -> None:
    rng = random.Random(5)

    async def main() -> None:
        async with rig.async_client(namespace=namespace) as cancelled:
            for number in range(100):
                task = asyncio.create_task(cancelled.lock(rng.choice(["held", "free"]), ttl=5).acquire())
                for _ in range(number % 8):
                    await asyncio.sleep(0)
                if number >= 8:
                    await asyncio.sleep(rng.random() * 0.006)  # pause: cancelled at any moment
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
    closed_at = time.monotonic()

    def nothing_is_left() -> bool:
        # An attempt that the engine executed after its release ends by its ttl (E6), and the next claim removes it.
        if time.monotonic() > closed_at + 8:
            for name in ("held", "free"):
                if lease := client.lock(name).try_acquire():
                    lease.release()
        return rig.residue(namespace) == 0

    wait_until(nothing_is_left, 60)


@on_every_engine
def test_queue_advances_when_waiters_are_cancelled(rig, namespace, wait_until) -> None:
    rng = random.Random(4)

    async def main() -> None:
        async with rig.async_client(namespace=namespace, call_timeout=30) as client:

            async def work() -> None:
                # An attempt may land after its own release on another connection; then only its ttl ends it (E6).
                async with client.lock("hot", ttl=5, wait=60):
                    await asyncio.sleep(0.002)  # pause: others queue meanwhile

            tasks = [asyncio.create_task(work()) for _ in range(150)]
            while not all(task.done() for task in tasks):
                rng.choice(tasks).cancel()
                await asyncio.sleep(rng.random() * 0.002)
            await asyncio.gather(*tasks, return_exceptions=True)
            async with client.lock("hot", wait=20):  # cancelled claims do not block the queue
                pass

    asyncio.run(main())
    wait_until(lambda: rig.residue(namespace) == 0)


def client_threads() -> set[threading.Thread]:
    """The running threads of all clients."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("leasehold-") or "zk_" in thread.name}


@on_every_engine
def test_client_closed_in_its_last_loop_leaves_no_thread(rig, client, namespace, wait_until) -> None:
    """This holds even if an earlier loop was closed while one of its tasks waited and kept that loop's engine."""
    with client.lock("a", ttl=60):
        client.inspect()
    other_threads = client_threads()
    moved = rig.async_client(namespace=namespace)

    async def use() -> int:
        async with moved.lock("a", ttl=60, wait=10) as lease:
            return lease.token

    async def start_waiting() -> asyncio.Task[object]:
        waiting = asyncio.create_task(moved.lock("a", ttl=60).acquire())
        while len(client.inspect()) < 2:
            await asyncio.sleep(0.001)
        return waiting

    tokens = [asyncio.run(use()) for _ in range(2)]
    loop = asyncio.new_event_loop()
    with client.lock("a", ttl=60) as held:
        waiting = loop.run_until_complete(start_waiting())
        loop.close()
    tokens += [held.token, *(asyncio.run(use()) for _ in range(2))]
    assert tokens == sorted(set(tokens))
    assert not waiting.done()
    waiting._log_destroy_pending = False
    asyncio.run(moved.close())
    # Close it as garbage collection would, but outermost first: the ending wait must not use the closed loop.
    waiting.get_coro().close()
    del waiting
    gc.collect()
    wait_until(lambda: client_threads() <= other_threads)


# ----------------------------------------------------------------- two clients


def test_asyncio_waiters_queue_in_order_behind_a_blocking_holder(rig, client, namespace) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as other:
            order = []
            held = client.lock("a", ttl=60).acquire()

            async def wait(number: int) -> None:
                async with other.lock("a"):
                    order.append(number)

            tasks = []
            for number in range(10):
                tasks.append(asyncio.create_task(wait(number)))
                while len(await other.inspect("a")) < number + 2:
                    await asyncio.sleep(0.001)
            held.release()
            await asyncio.gather(*tasks)
            assert order == list(range(10))

    asyncio.run(main())


@on_every_engine
def test_blocking_and_asyncio_clients_see_the_same_lock(rig, client, namespace, wait_until) -> None:
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
    wait_until(lambda: rig.residue(namespace) == 0)


@on_every_engine
def test_handoff_is_pushed_to_the_waiter(rig, client, namespace, wait_until) -> None:
    with rig.client(namespace=namespace) as other:
        lease = client.lock("a", ttl=60).acquire()
        taken = []
        thread = threading.Thread(target=lambda: taken.append((other.lock("a").acquire(), time.monotonic())))
        thread.start()
        wait_until(lambda: len(client.inspect("a")) == 2)
        released = time.monotonic()
        lease.release()
        thread.join(30)
        check_seconds(taken[0][1] - released, 2, "the periodic re-check would take up to 5 s")
        taken[0][0].release()


@pytest.mark.parametrize("rig", each(BREAK_NOTICE), indirect=True)
def test_holder_is_notified_of_a_break_while_its_loop_is_blocked(rig, client, namespace, wait_until) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as blocked:
            lease = await blocked.lock("job", ttl=300).acquire()
            assert client.break_lock("job", token=lease.token)
            wait_until(lambda: not lease.held, 60)
            with pytest.raises(LeaseLost):
                lease.check()

    asyncio.run(main())


def test_mismatched_kind_of_a_held_name_is_refused(rig, client, namespace) -> None:
    with rig.client(namespace=namespace) as other:
        with client.lock("a"), pytest.raises(Mismatch):
            other.semaphore("a", 2).acquire(wait=0)
        with other.semaphore("a", 2), pytest.raises(Mismatch):
            client.semaphore("a", 3).acquire(wait=1)
        with client.lock("a", wait=0):
            pass


# ------------------------------------------------------------------- processes


@on_every_engine
def test_forked_child_is_a_separate_client(client, run_in_fork) -> None:
    lease = client.lock("a", ttl=60).acquire()

    def child() -> None:
        assert not lease.held
        assert lease.lost_reason == "forked"
        assert client.lock("a").try_acquire() is None
        with client.lock("b"):
            assert {holding.name for holding in client.inspect()} == {"a", "b"}
        client.close()

    for _ in range(3):
        run_in_fork(child)
    lease.renew()
    assert lease.release()


@on_every_engine
def test_waiters_in_parent_and_child_are_woken_after_a_fork(client, run_in_fork, wait_until) -> None:
    childs_lease, parents_lease = client.lock("mine", ttl=60).acquire(), client.lock("other", ttl=60).acquire()

    def wait_for(name: str) -> None:
        client.lock(name, wait=30).acquire().release()

    def check_woken_by(lease: Lease, waiter: threading.Thread) -> None:
        wait_until(lambda: len(client.inspect(lease.name)) == 2)
        began = time.monotonic()
        lease.release()
        waiter.join(60)
        check_elapsed(began, HEARTBEAT_INTERVAL - 1, "woken by the periodic re-check")

    parent_waiter = threading.Thread(target=wait_for, args=("other",))
    parent_waiter.start()
    wait_until(lambda: len(client.inspect("other")) == 2)
    child_waiter = threading.Thread(target=run_in_fork, args=(lambda: wait_for("mine"),))
    child_waiter.start()
    check_woken_by(childs_lease, child_waiter)
    check_woken_by(parents_lease, parent_waiter)
    assert client.inspect() == []


@on_every_engine
def test_exiting_child_does_not_end_its_parents_lease(client, run_in_fork) -> None:
    with client.lock("a", ttl=60) as lease:
        run_in_fork(lambda: None)
        run_in_fork(gc.collect)
        lease.renew()


@on_every_engine
def test_child_forked_beside_a_loop_leaves_its_connections_alone(rig, namespace, run_in_fork) -> None:
    async def main() -> None:
        async with rig.async_client(namespace=namespace) as client:
            lease = await client.lock("a", ttl=60).acquire()
            run_in_fork(gc.collect)
            await lease.renew()
            assert await lease.release()

    asyncio.run(main())


@pytest.mark.extended
def test_child_forked_from_a_busy_client_can_lock(client, run_in_fork) -> None:
    """Whatever other threads do during the fork, the child can lock, and the parent continues."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with client.lock("busy", ttl=60), client.semaphore("many", 2, ttl=60):
                pass

    def fork() -> None:
        try:
            for _ in range(5):
                run_in_fork(lambda: client.lock(f"child-{os.getpid()}", wait=20).call(lambda: None))
        finally:
            stop.set()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    fork()
    for thread in threads:
        thread.join(60)
    assert client.inspect("busy") == []


@pytest.mark.extended
def test_eight_processes_count_in_one_file_without_lost_updates(rig, child, tmp_path) -> None:
    machine = rig.client_path()
    rig.join(machine, machine)
    file = tmp_path / "count"
    file.write_text("0")
    children = [child("count", machine.url, f"hot-{os.getpid()}", file, 50) for _ in range(8)]
    counted = sorted(tuple(pair) for earlier in children for pair in earlier.read_message(120))
    assert file.read_text() == "400"
    assert [number for number, _ in counted] == list(range(400))
    assert all(earlier < later for (_, earlier), (_, later) in pairwise(counted))
