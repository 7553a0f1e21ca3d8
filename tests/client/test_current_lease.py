"""`current_lease()`: the lease of the `with` or decorated function around the call, in this thread or task."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from contextlib import ExitStack

import pytest

from leasehold import AsyncClient, Client, ConfigError, CurrentLease, LeaseLost, MultiLock, NotAcquired, current_lease
from leasehold.client.held_locks import CURRENT_LEASES
from tests.support import probe


def current_name(name: str | None = None) -> str | None:
    try:
        return current_lease(name).name
    except ConfigError:
        return None


@pytest.fixture
def client():
    with Client("memory://") as client:
        yield client


def test_current_lease_is_that_of_the_innermost_with(client) -> None:
    with client.lock("outer") as outer:
        assert current_lease() is outer
        with client.lock("inner") as inner:
            assert current_lease() is inner
            assert current_lease("outer") is outer
        assert current_lease() is outer
    with pytest.raises(ConfigError, match=r"in no `with` block .* `leasehold run NAME"):
        current_lease()


def test_current_lease_is_that_of_the_decorated_function(client) -> None:
    @client.locked("user:{user_id}")
    def rename(user_id, lease):
        assert current_lease() is lease
        return save()

    def save():
        current_lease().check()
        return current_lease().name

    assert rename(7) == "user:7"
    assert client.once("invoice:1", save) == client.once("invoice:1", save)
    assert client.lock("a").call(save) == "a"
    assert current_name() is None


def test_current_lease_ignores_acquire_without_with(client) -> None:
    lease = client.lock("a").acquire()
    assert current_name() is None
    lease.release()


def test_current_lease_of_another_name_raises_config_error(client, monkeypatch) -> None:
    with client.lock("a"), pytest.raises(ConfigError, match="no current lease of b"):
        current_lease("b")
    for variable, value in {"HELD": "1", "LOCK": "job", "TOKEN": "41", "HOLDER": "web:1", "TTL": "30"}.items():
        monkeypatch.setenv(f"LEASEHOLD_{variable}", value)
    with client.lock("a") as lease:
        assert current_lease() is lease
        assert current_lease("job") == CurrentLease("job", 41, "web:1", 30.0)
        with pytest.raises(ConfigError, match="started this process with job"):
            current_lease("b")
    assert current_lease() == CurrentLease("job", 41, "web:1", 30.0)


def test_current_lease_stays_that_of_its_block_after_its_end(bench) -> None:
    client = bench.client()
    with client.lock("outer", ttl=300), pytest.raises(LeaseLost), client.lock("a", ttl=30):
        bench.clock.at += 31
        current_lease().check()  # not that of `outer`: code below must not go on
    with client.lock("outer"), client.lock("a") as lease:
        lease.release()
        assert current_lease() is lease
        with pytest.raises(LeaseLost):
            current_lease().check()


def test_current_lease_of_multilock_needs_a_name(client) -> None:
    with client.lock("outer"), client.multilock(["b", "a"]) as leases:
        with pytest.raises(ConfigError, match=r"multilock of 'b', 'a': pass the name"):
            current_lease()
        assert current_lease("a") is leases["a"]
        assert current_name("outer") == "outer"
    with client.multilock(["only"]) as leases:
        assert current_lease() is leases["only"]
    assert current_name() is None
    with Client("memory://") as other, MultiLock([other.lock("a"), client.lock("a")]) as leases:
        assert current_lease("a") is leases["a"]


def test_current_lease_is_restored_when_entering_fails(client) -> None:
    held = client.lock("busy").acquire()
    with client.lock("outer") as outer:
        with pytest.raises(NotAcquired), client.lock("busy", wait=0):
            pytest.fail("entered")
        with pytest.raises(NotAcquired), client.multilock(["a", "busy"], wait=0):
            pytest.fail("entered")
        assert current_lease() is outer
        assert len(CURRENT_LEASES.get()) == 1
    held.release()


def test_current_lease_of_reentrant_lock_lasts_until_outer_exit(client) -> None:
    lock = client.lock("a", reentrant=True)
    with lock as outer:
        with lock:
            assert current_lease() is outer
        assert current_lease() is outer
    assert current_name() is None


def test_blocks_left_in_the_order_of_entry_leave_no_entries(client) -> None:
    previous = ExitStack()
    for number in range(50):  # hand over hand: enters the next before it leaves the last one
        following = ExitStack()
        following.enter_context(client.lock(str(number)))
        previous.close()
        assert current_name() == str(number)
        assert len(CURRENT_LEASES.get()) <= 2  # with the one that was just left
        previous = following
    previous.close()
    assert current_name() is None
    assert not any(CURRENT_LEASES.get())  # the next `with` drops what is empty


def test_generator_with_a_lock_sets_the_context_of_its_caller(client) -> None:
    def locked_steps(name):
        with client.lock(name):
            yield current_lease()

    first, second = locked_steps("first"), locked_steps("second")
    first_lease, second_lease = next(first), next(second)
    assert current_lease() is second_lease
    first.close()
    assert current_lease() is second_lease
    second.close()
    assert current_name() is None
    assert (first_lease.state, second_lease.state) == ("RELEASED", "RELEASED")


def test_block_left_in_another_thread_is_current_nowhere(client, in_new_thread) -> None:
    stack = ExitStack()
    stack.enter_context(client.lock("a"))
    assert in_new_thread(current_name) is None  # a thread has a context of its own
    in_new_thread(stack.close)
    assert current_name() is None
    with client.lock("b"):
        assert len(CURRENT_LEASES.get()) == 1  # the entry of `a` is gone


def test_thread_started_with_a_copied_context_has_the_lease(client) -> None:
    seen = []
    with client.lock("a"):
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(lambda: seen.append(current_name()),))
        thread.start()
        thread.join()
    assert seen == ["a"]
    assert context.run(current_name) is None  # the block was left


def test_left_block_keeps_no_lease_alive_in_copied_contexts(client) -> None:
    with client.lock("a") as lease:
        context = contextvars.copy_context()
    kept = weakref.ref(lease)
    del lease
    gc.collect()
    assert kept() is None
    assert context.run(current_name) is None


def test_left_block_keeps_no_ended_thread_in_copied_contexts(client, in_new_thread) -> None:
    def enter_and_leave() -> tuple[contextvars.Context, weakref.ref[object]]:
        with client.lock("a"):
            pass
        return contextvars.copy_context(), weakref.ref(probe.runtime(client).owner())

    context, thread_key = in_new_thread(enter_and_leave)
    gc.collect()
    assert thread_key() is None
    assert context.run(current_name) is None


def test_tasks_have_their_own_current_lease() -> None:
    async def work(client, name):
        async with client.lock(name) as lease:
            await asyncio.sleep(0)
            assert current_lease() is lease
            await current_lease().renew()
            assert await asyncio.to_thread(current_name) == name
        return current_name()

    async def main():
        async with AsyncClient("memory://") as client:
            assert await asyncio.gather(*(work(client, f"task-{n}") for n in range(3))) == [None] * 3

    asyncio.run(main())


def test_child_task_has_the_lease_until_the_block_is_left() -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            left = asyncio.Event()

            async def watch():
                inside = current_name()
                await left.wait()
                return inside, current_name()

            async with client.lock("a"):
                task = asyncio.create_task(watch())
                await asyncio.sleep(0)
            left.set()
            assert await task == ("a", None)

    asyncio.run(main())


def test_async_generator_closed_by_another_task_leaves_no_lease() -> None:
    async def main():
        async with AsyncClient("memory://") as client:

            async def steps():
                async with client.lock("a") as lease:
                    yield lease

            generator = steps()
            lease = await anext(generator)
            assert current_lease() is lease
            await asyncio.create_task(generator.aclose())
            assert current_name() is None
            assert lease.state == "RELEASED"

    asyncio.run(main())


def test_outer_lease_is_current_after_inner_blocks_are_left(client) -> None:
    with client.lock("outer") as outer:
        with client.lock("a"), client.multilock(["b", "c"]):
            pass
        assert current_lease() is outer
        with pytest.raises(RuntimeError), client.lock("a"):
            raise RuntimeError
        assert current_lease() is outer


def test_leaving_a_block_sets_no_context_variable(client) -> None:
    """The garbage collector may leave one while CPython sets another variable of the context, which then crashes."""
    with client.lock("a"):
        before = CURRENT_LEASES.get()
    assert CURRENT_LEASES.get() is before
    with client.multilock(["a", "b"]):
        before = CURRENT_LEASES.get()
    assert CURRENT_LEASES.get() is before


def test_task_that_outlives_its_block_does_not_get_the_outer_lease() -> None:
    """It would write what the inner lock protects, with the token of another name."""

    async def main() -> None:
        async with AsyncClient("memory://") as client, client.lock("outer"):
            left = asyncio.Event()

            async def outlives() -> tuple[str | None, str | None, str | None]:
                await left.wait()
                return current_name(), current_name("inner"), current_name("outer")

            async with client.lock("inner"):
                task = asyncio.create_task(outlives())
            left.set()
            assert await task == (None, None, "outer")
            assert current_name() == "outer"

    asyncio.run(main())
