"""The two real runtimes: waking from any thread, calling what blocks, guards that know their owner."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import pytest

from leasehold.runtime.base import settle, step
from leasehold.runtime.loop import Loop
from leasehold.runtime.threads import ThreadGuard, Threads


def test_step_runs_to_the_end_and_refuses_to_suspend() -> None:
    async def plain() -> int:
        return await settle(7)

    async def suspends() -> None:
        await asyncio.sleep(0)

    assert step(plain()) == 7
    with pytest.raises(AssertionError, match="use the runtime, not asyncio"):
        step(suspends())


def test_settle_takes_a_value_or_something_to_await() -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        assert await settle(future) == 3
        assert await settle("value") == "value"

    asyncio.run(main())


def test_a_signal_is_remembered_and_taken_once() -> None:
    signal = Threads().signal()
    signal.set()
    signal.set()
    assert step(signal.wait(0)) is True
    assert step(signal.wait(0)) is False
    threading.Timer(0.01, signal.set).start()
    assert step(signal.wait(10)) is True


def test_a_wake_up_taken_without_sleeping_does_not_end_the_next_wait() -> None:
    async def main() -> None:
        signal = Loop().signal()
        signal.set()
        assert await signal.wait(10)  # at once: what the loop was asked to do for it comes after this
        asyncio.get_running_loop().call_later(0.05, signal.set)
        assert await signal.wait(10), "it says that the time passed"

    asyncio.run(main())


def test_a_loops_signal_is_set_from_any_thread_and_outlives_the_loop() -> None:
    kept = []

    async def main() -> None:
        signal = Loop().signal()
        kept.append(signal)
        threading.Timer(0.01, signal.set).start()
        assert await signal.wait(10)
        assert not await signal.wait(0.001)
        signal.set()
        assert await signal.wait(0)

    asyncio.run(main())
    kept[0].set()  # nobody is left to be told: no error


def test_call_blocks_no_loop_and_close_lets_the_worker_go() -> None:
    async def main() -> None:
        runtime = Loop()
        assert await Threads().call(lambda x: x + 1, 1) == 2
        turns = []

        async def turn() -> None:
            while True:
                turns.append(1)
                await runtime.sleep(0.001)

        beside = asyncio.create_task(turn())
        name = await runtime.call(lambda: time.sleep(0.05) or threading.current_thread().name)
        beside.cancel()
        assert name.startswith("leasehold-call")
        assert len(turns) > 3
        runtime.close()
        assert await runtime.call(lambda: 5) == 5  # it may be used again
        runtime.close()
        runtime.close()

    asyncio.run(main())


def test_a_guard_knows_its_owner() -> None:
    guard = Threads().guard()
    assert isinstance(guard, ThreadGuard)
    assert not guard.mine()
    with guard:
        assert guard.mine()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(guard.mine()))
        thread.start()
        thread.join()
        assert seen == [False]
        with guard:
            assert guard.mine()
    assert not guard.mine()


def test_an_owner_is_a_thread_or_a_task_and_never_reused() -> None:
    runtime = Threads()
    owners = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: owners.append(runtime.owner()))
        thread.start()
        thread.join()
    assert len(set(owners)) == 20
    assert runtime.owner() is runtime.owner()

    async def main() -> None:
        loop = Loop()
        assert loop.owner() is asyncio.current_task()
        assert loop.interrupt() is not None
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: done.set_result((loop.owner(), loop.interrupt())))
        assert await done == (runtime.owner(), None)  # no task there: the thread owns it

    asyncio.run(main())


def test_a_task_is_known_in_the_next_loop_before_the_runtime_has_moved_there() -> None:
    loop = Loop()

    async def use() -> None:
        loop.bind()

    async def look() -> tuple[str, str]:
        assert loop.owner() is asyncio.current_task()
        assert loop.interrupt() is not None
        return loop.owner_mark(), Threads().owner_mark()

    asyncio.run(use())
    task, thread = asyncio.run(look())
    assert task != thread


def test_an_interrupt_fired_after_the_body_does_nothing() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        interrupt = Loop().interrupt()
        assert interrupt is not None
        interrupt.fire()
        assert not interrupt.disarm(None)
        await asyncio.sleep(0.01)
        assert task.cancelling() == 0

    asyncio.run(main())


@pytest.mark.parametrize("runtime", [Threads(), Loop()], ids=["threads", "loop"])
def test_a_descriptor_is_waited_for(runtime: Threads | Loop) -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        with near, far:
            assert not await runtime.ready(near.fileno(), 0.01)
            assert await runtime.ready(near.fileno(), 10, write=True)
            threading.Timer(0.01, far.send, (b"!",)).start()
            assert await runtime.ready(near.fileno(), 10)
            assert await runtime.ready(near.fileno(), 0)
            assert await runtime.ready(far.fileno(), 10, read=False, write=True)
            far.shutdown(socket.SHUT_RDWR)
            near.recv(1)
            assert await runtime.ready(near.fileno(), 10), "a hang-up is something to read"

    if runtime.blocking:
        step(main())
    else:
        asyncio.run(main())


def test_a_task_cancelled_while_it_waits_for_a_descriptor_leaves_nothing_behind() -> None:
    async def main() -> None:
        near, far = socket.socketpair()
        with near, far:
            waiting = asyncio.create_task(Loop().ready(near.fileno(), 10, write=False))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not asyncio.get_running_loop().remove_reader(near.fileno())

    asyncio.run(main())


def test_what_a_closed_loop_had_under_way_is_over_before_the_next_one_begins() -> None:
    """Else a call that nobody waits for any more lands after all that was done to give it up."""
    runtime, began, go, done = Loop(), threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        go.wait(10)
        done.append("slow")

    async def leave(*calls: Callable[[], object]) -> list[asyncio.Task[object]]:
        runtime.bind()
        tasks = [asyncio.create_task(runtime.call(call)) for call in calls]
        while not began.is_set():
            await asyncio.sleep(0.001)
        return tasks

    async def bind() -> bool:
        return runtime.bind()

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(leave(slow, lambda: done.append("never")))
    loop.close()
    threading.Timer(0.1, go.set).start()
    assert not asyncio.run(bind())
    assert done == ["slow"]
    for task in tasks:
        task._log_destroy_pending = False
    runtime.close()
