"""The two real runtimes: signals set from any thread, blocking calls, mutexes that know their owner."""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
import time
from collections.abc import Callable

import pytest

from leasehold.runtime.base import maybe_await, restarting, run_sync
from leasehold.runtime.loop import Loop
from leasehold.runtime.polling import new_poll
from leasehold.runtime.threads import ThreadMutex, Threads
from tests.support import probe_runtime


def test_run_sync_runs_to_the_end_and_refuses_to_suspend() -> None:
    async def plain() -> int:
        return await maybe_await(7)

    async def suspends() -> None:
        await asyncio.sleep(0)

    assert run_sync(plain()) == 7
    with pytest.raises(AssertionError, match="use the runtime, not asyncio"):
        run_sync(suspends())


def test_restarting_thread_runs_again_even_if_logging_fails() -> None:
    class BrokenLogger(logging.Logger):
        def error(self, *_: object, **__: object) -> None:
            errors.append(_)
            raise OSError("disk full")

    errors: list[tuple[object, ...]] = []
    runs: list[int] = []

    async def start(_runtime: object) -> None:
        runs.append(1)
        if len(runs) < 3:
            raise ValueError("injected")

    run_sync(restarting(start, BrokenLogger("broken"), "a thread")(Threads()))
    assert len(runs) == 3
    assert len(errors) == 2


def test_maybe_await_accepts_value_or_awaitable() -> None:
    async def main() -> None:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(3)
        assert await maybe_await(future) == 3
        assert await maybe_await("value") == "value"

    asyncio.run(main())


def test_signal_is_remembered_and_consumed_once() -> None:
    signal = Threads().signal()
    signal.set()
    signal.set()
    assert run_sync(signal.wait(0)) is True
    assert run_sync(signal.wait(0)) is False
    threading.Timer(0.01, signal.set).start()
    assert run_sync(signal.wait(10)) is True


def test_signal_consumed_without_sleep_does_not_end_next_wait() -> None:
    async def main() -> None:
        signal = Loop().signal()
        signal.set()
        assert await signal.wait(10)  # returns before the loop runs the callback that set() scheduled
        asyncio.get_running_loop().call_later(0.05, signal.set)
        assert await signal.wait(10), "the wait ended without the second set()"

    asyncio.run(main())


def test_loop_signal_is_set_from_any_thread_even_after_loop_closed() -> None:
    signals = []

    async def main() -> None:
        signal = Loop().signal()
        signals.append(signal)
        threading.Timer(0.01, signal.set).start()
        assert await signal.wait(10)
        assert not await signal.wait(0.001)
        signal.set()
        assert await signal.wait(0)

    asyncio.run(main())
    signals[0].set()  # no loop is left to wake: no error


def test_call_does_not_block_loop_and_close_stops_worker() -> None:
    async def main() -> None:
        runtime = Loop()
        assert await Threads().call(lambda x: x + 1, 1) == 2
        ticks = []

        async def tick() -> None:
            while True:
                ticks.append(1)
                await runtime.sleep(0.001)

        background = asyncio.create_task(tick())

        def wait_for_ticks() -> str:
            end = time.monotonic() + 30
            while len(ticks) < 4:
                assert time.monotonic() < end, "the loop stood still"
                time.sleep(0.001)
            return threading.current_thread().name

        name = await runtime.call(wait_for_ticks)
        background.cancel()
        assert name.startswith("leasehold-call")
        runtime.close()
        assert await runtime.call(lambda: 5) == 5  # a closed runtime can be used again
        runtime.close()
        runtime.close()

    asyncio.run(main())


def test_mutex_knows_its_owner() -> None:
    mutex = Threads().mutex()
    assert isinstance(mutex, ThreadMutex)
    assert not mutex.held_by_me()
    with mutex:
        assert mutex.held_by_me()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(mutex.held_by_me()))
        thread.start()
        thread.join()
        assert seen == [False]
        with mutex:
            assert mutex.held_by_me()
    assert not mutex.held_by_me()


def test_owner_is_thread_or_task_and_never_reused() -> None:
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
        assert await done == (runtime.owner(), None)  # outside a task the thread is the owner

    asyncio.run(main())


def test_task_owns_in_next_loop_before_runtime_is_rebound() -> None:
    loop = Loop()

    async def use() -> None:
        loop.bind()

    async def identify() -> tuple[str, str]:
        assert loop.owner() is asyncio.current_task()
        assert loop.interrupt() is not None
        return loop.owner_id(), Threads().owner_id()

    asyncio.run(use())
    task, thread = asyncio.run(identify())
    assert task != thread


def test_interrupt_disarmed_before_delivery_cancels_nothing() -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        interrupt = Loop().interrupt()
        assert interrupt is not None
        interrupt.fire()
        assert not interrupt.disarm(None)
        await asyncio.sleep(0.01)  # pause: a cancellation could wrongly arrive
        assert task.cancelling() == 0

    asyncio.run(main())


@pytest.mark.parametrize("runtime", [Threads(), Loop()], ids=["threads", "loop"])
def test_wait_fd_waits_for_readable_or_writable_descriptor(runtime: Threads | Loop) -> None:
    async def main() -> None:
        left, right = socket.socketpair()
        with left, right:
            assert not await runtime.wait_fd(left.fileno(), 0.01)
            assert await runtime.wait_fd(left.fileno(), 10, write=True)
            threading.Timer(0.01, right.send, (b"!",)).start()
            assert await runtime.wait_fd(left.fileno(), 10)
            assert await runtime.wait_fd(left.fileno(), 0)
            assert await runtime.wait_fd(right.fileno(), 10, read=False, write=True)
            right.shutdown(socket.SHUT_RDWR)
            left.recv(1)
            assert await runtime.wait_fd(left.fileno(), 10), "a hang-up makes the descriptor readable"

    if runtime.blocking:
        run_sync(main())
    else:
        asyncio.run(main())


def test_wait_fd_waits_where_eventlet_has_removed_poll(monkeypatch) -> None:
    monkeypatch.delattr("select.poll")
    test_wait_fd_waits_for_readable_or_writable_descriptor(Threads())
    left, right = socket.socketpair()
    with left, right:
        poll = new_poll()
        poll.register(left, select.POLLIN | select.POLLOUT)
        poll.register(right.fileno(), select.POLLIN)
        right.send(b"!")
        assert poll.poll(10_000) == [(left.fileno(), select.POLLIN | select.POLLOUT)]
        poll.modify(left, select.POLLOUT)
        assert poll.poll() == [(left.fileno(), select.POLLOUT)]
        poll.unregister(left)
        assert poll.poll(0) == []
        with pytest.raises(KeyError):
            poll.unregister(left)


def test_cancelled_wait_fd_removes_its_reader() -> None:
    async def main() -> None:
        left, right = socket.socketpair()
        with left, right:
            waiting = asyncio.create_task(Loop().wait_fd(left.fileno(), 10, write=False))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not asyncio.get_running_loop().remove_reader(left.fileno())

    asyncio.run(main())


def test_first_bind_keeps_calls_already_queued_in_this_loop() -> None:
    runtime = Loop()

    async def main() -> None:
        may_finish = threading.Event()
        calls = [asyncio.create_task(runtime.call(may_finish.wait, 30)) for _ in range(3)]
        await asyncio.sleep(0)
        threading.Timer(0.1, may_finish.set).start()  # bind() must not wait for it, but would not hang either
        assert runtime.bind()
        assert await asyncio.gather(*calls) == [True] * 3

    asyncio.run(main())
    runtime.close()


def test_calls_of_closed_loop_finish_before_next_loop_is_bound() -> None:
    """Otherwise an abandoned call could take effect after the release that was to undo it."""
    runtime, began, may_finish, done = Loop(), threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        may_finish.wait(60)
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
    threading.Timer(0.1, may_finish.set).start()
    assert not asyncio.run(bind())
    assert done == ["slow"]
    for task in tasks:
        task._log_destroy_pending = False
    runtime.close()


def test_spawned_work_runs_without_its_caller_and_logs_errors(caplog) -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("ran")

    async def broken() -> None:
        done.append("failed")
        raise ValueError("injected")

    async def in_loop() -> None:
        runtime = Loop()
        runtime.spawn(work(), "some work")
        runtime.spawn(broken(), "broken work")
        assert not done, "it does not run before its caller goes on"
        while probe_runtime.spawned_tasks(runtime):
            await asyncio.sleep(0)

    asyncio.run(in_loop())
    runtime = Threads()
    runtime.spawn(work(), "some work")
    runtime.spawn(broken(), "broken work")
    deadline = time.monotonic() + 60
    while caplog.text.count("unexpected error in broken work") < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sorted(done) == ["failed", "failed", "ran", "ran"]
    assert caplog.text.count("unexpected error in broken work") == 2


def test_spawn_after_the_loop_has_ended_drops_the_work() -> None:
    runtime = Loop()

    async def bind() -> None:
        runtime.bind()

    async def work() -> None:
        raise AssertionError("there is no loop to run this")

    asyncio.run(bind())
    late = work()
    runtime.spawn(late, "late work")
    assert late.cr_frame is None, "closed: no warning that it was never awaited"


def test_spawn_outside_the_loop_runs_in_the_loop() -> None:
    done: list[int] = []

    async def work() -> None:
        done.append(threading.get_ident())

    async def main() -> None:
        runtime = Loop()
        runtime.bind()
        await asyncio.to_thread(runtime.spawn, work(), "from a finaliser")
        while not done:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert done == [threading.get_ident()]
