"""The asyncio API: cancellation, a loss that cancels the body, a blocked loop, clients that outlive a loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from leasehold import AsyncClient, Client, ConfigError, LeaseLost, NotAcquired, SelfDeadlock
from tests.support import probe

pytestmark = pytest.mark.filterwarnings("ignore:.*dropped without release:ResourceWarning")


def run(main: Callable[[], Coroutine[Any, Any, object]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


async def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def test_async_client_covers_the_blocking_api() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            lock = client.lock("a", ttl=30)
            async with lock as lease:
                assert lease.state == "HELD"
                assert await lock.locked()
                await lease.verify()
                await lease.renew(60)
                assert lease.ttl == 60
                assert not await lease.wait_lost(0)
                assert (await client.inspect("a"))[0].token == lease.token
            assert lease.state == "RELEASED"
            second = await lock.try_acquire()
            assert second is not None
            assert await lock.try_acquire() is None
            assert await client.ping() >= 0
            await client.connect()
            permit = await client.semaphore("s", 2).acquire()
            assert permit.slot == 0
            async with client.rwlock("r").read(), client.rwlock("r").read():
                with pytest.raises(NotAcquired):
                    await client.rwlock("r").write(wait=0).acquire()
            assert await client.with_lock("b", lambda lease: lease.name) == "b"
            assert await client.lock("b").call(asyncio.sleep, 0, "slept") == "slept"

    run(main)


def test_lost_lease_cancels_body_and_with_block_raises() -> None:
    async def main() -> None:
        async with AsyncClient("memory://shared-aio") as client:
            with pytest.raises(LeaseLost) as lost:
                async with client.lock("a") as lease:
                    with Client("memory://shared-aio") as operator:
                        assert operator.break_lock("a", token=lease.token)
                    await asyncio.sleep(60)
            assert lost.value.reason == "broken"
            assert isinstance(lost.value.__cause__, asyncio.CancelledError)
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            await asyncio.sleep(0)  # would raise if a cancellation were still pending

    run(main)


def test_max_hold_on_real_clock_cancels_the_body() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            with pytest.raises(LeaseLost, match="max_hold"):
                async with client.lock("a", max_hold=0.1):
                    await asyncio.sleep(60)

    run(main)


def test_body_error_is_kept_with_note_when_lease_is_lost() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            with pytest.raises(KeyError) as error:
                async with client.lock("a") as lease:
                    await client.break_lock("a", token=lease.token)
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        raise KeyError("mine") from None
            assert "is lost" in error.value.__notes__[0]

    run(main)


@pytest.mark.parametrize("kind", ["lock", "multilock"])
def test_loss_found_in_a_task_group_raises_lease_lost(kind: str) -> None:
    async def work(lease: Any) -> None:
        while True:
            lease.check()
            await asyncio.sleep(0)

    async def main() -> None:
        async with AsyncClient("memory://tasks") as client, AsyncClient("memory://tasks") as operator:
            lock = client.lock("a") if kind == "lock" else client.multilock(["a"])
            with pytest.raises(LeaseLost):
                async with lock as lease, asyncio.TaskGroup() as tasks:
                    tasks.create_task(work(lease))
                    [holding] = await operator.inspect("a")
                    await operator.break_lock("a", token=holding.token or 0)
            with pytest.raises(ExceptionGroup) as mixed:
                async with lock as lease:
                    [holding] = await operator.inspect("a")
                    await operator.break_lock("a", token=holding.token or 0)
                    try:
                        await asyncio.sleep(60)
                    except asyncio.CancelledError:
                        raise ExceptionGroup("of tasks", [LeaseLost("a"), ValueError("no paper")]) from None
            assert "lost" in mixed.value.__notes__[0]
            await asyncio.sleep(0)  # would raise if a cancellation were still pending

    run(main)


def test_external_cancellation_propagates_when_lease_is_also_lost() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            inside = asyncio.Event()

            async def body() -> None:
                async with client.lock("a") as lease:
                    inside.set()
                    await client.break_lock("a", token=lease.token)
                    asyncio.current_task().cancel()  # type: ignore[union-attr]
                    await asyncio.sleep(60)

            task = asyncio.create_task(body())
            await inside.wait()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)


@pytest.mark.extended
def test_lease_survives_event_loop_blocked_for_three_ttls() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client, client.lock("a", ttl=1.0) as lease:
            time.sleep(3.0)  # pause: blocks the loop, the fault under test
            assert lease.state == "HELD"
            lease.check()

    run(main)


def test_waiters_are_served_in_order_and_cancelled_waiter_leaves() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            lease = await client.lock("a").acquire()
            order: list[int] = []

            async def work(number: int) -> None:
                async with client.lock("a"):
                    order.append(number)

            tasks = [asyncio.create_task(work(number)) for number in range(5)]
            await wait_until(lambda: len(probe.waiters(client)) == 5)
            tasks[2].cancel()
            await wait_until(lambda: len(probe.waiters(client)) == 4)
            await lease.release()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert order == [0, 1, 3, 4]
            assert await client.inspect() == []

    run(main)


def test_self_deadlock_is_detected_per_task() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client, client.lock("a"):
            with pytest.raises(SelfDeadlock):
                await client.lock("a").acquire()
            other = asyncio.create_task(client.lock("a").acquire(wait=0.01))
            with pytest.raises(NotAcquired):
                await other

    run(main)


def test_async_decorator_accepts_plain_and_async_functions() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:

            @client.locked("u:{x}")
            async def later(x: int, lease: Any) -> str:
                await asyncio.sleep(0)
                return lease.name

            @client.locked("u:{x}", on_busy="skip")
            def now(x: int) -> int:
                return x

            assert await later(3) == "u:3"
            assert await now(4) == 4
            async with client.lock("u:4"):
                assert await asyncio.create_task(now(4)) is None  # type: ignore[arg-type]

    run(main)


def test_blocking_and_async_clients_share_one_memory_engine() -> None:
    order: list[str] = []

    def hold_lock(ready: threading.Event) -> None:
        with Client("memory://both") as client, client.lock("a"):
            order.append("thread")
            ready.wait(60)

    async def main() -> None:
        async with AsyncClient("memory://both") as client:
            ready = threading.Event()
            thread = threading.Thread(target=hold_lock, args=(ready,))
            thread.start()
            await wait_until(lambda: order)
            waiting = asyncio.create_task(client.lock("a").acquire())
            await wait_until(lambda: probe.waiters(client))
            ready.set()
            lease = await waiting
            order.append("task")
            await lease.release()
            thread.join(60)

    run(main)
    assert order == ["thread", "task"]


def test_client_moves_to_next_loop_after_first_is_closed() -> None:
    client = AsyncClient("memory://")

    async def use() -> None:
        async with client.lock("a"):
            pass

    asyncio.run(use())
    asyncio.run(use())
    asyncio.run(client.close())


def test_client_opens_new_engine_in_next_loop() -> None:
    client = AsyncClient("memory://")

    async def ask() -> object:
        await client.ping()
        return probe.engine(client)

    assert asyncio.run(ask()) is not asyncio.run(ask())
    asyncio.run(client.close())


def test_queued_claims_of_closed_loop_are_released() -> None:
    client = AsyncClient("memory://moved")
    holder = Client("memory://moved")
    held = holder.lock("a").acquire()
    loop = asyncio.new_event_loop()
    task = loop.create_task(client.lock("a").acquire())

    async def wait_until_queued() -> None:
        while len(holder.inspect()) < 2:
            await asyncio.sleep(0.002)

    loop.run_until_complete(asyncio.wait_for(wait_until_queued(), 30))
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    keep = [task.get_coro()]  # as when a loop is closed too early: the coroutine never finishes
    loop.close()

    async def use() -> None:
        async with client.lock("b"):
            await wait_until(lambda: len(holder.inspect("a")) == 1)
        await client.close()

    asyncio.run(use())
    held.release()
    holder.close()
    keep[0].close()  # type: ignore[union-attr]


def test_client_is_refused_in_second_loop_while_first_runs() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            await client.ping()
            seen: list[BaseException] = []

            def use_in_other_loop() -> None:
                try:
                    asyncio.run(client.lock("a").acquire())  # type: ignore[arg-type]
                except ConfigError as error:
                    seen.append(error)

            await asyncio.to_thread(use_in_other_loop)
            assert "belongs to another event loop" in str(seen[0])

    run(main)


def test_close_makes_waiters_raise() -> None:
    async def main() -> None:
        client = AsyncClient("memory://closing")
        async with AsyncClient("memory://closing") as holder, holder.lock("a"):
            waiting = asyncio.create_task(client.lock("a").acquire())
            await wait_until(lambda: probe.waiters(client))
            await client.close()
            with pytest.raises(ConfigError, match="closed"):
                await waiting
            assert len(await holder.inspect()) == 1

    run(main)


def test_wait_lost_is_woken_from_watchdog_thread() -> None:
    async def main() -> None:
        async with AsyncClient("memory://") as client:
            lease = await client.lock("a", max_hold=0.1).acquire()
            assert await lease.wait_lost(30)
            assert lease.lost_reason == "max_hold"

    run(main)
