"""The simulated runtime: repeatable, with the faults that real processes meet."""

import asyncio
import os
import subprocess
import sys

import pytest

from leasehold.runtime.simulated import DRIFT, Process, Simulator

TRACE = """
from leasehold.runtime.simulated import Process, Simulator
simulator = Simulator(7)
seen = []
async def walk(process, name):
    signal = process.signal()
    for _ in range(20):
        await process.sleep(process.random())
        seen.append((name, process.now(), process.wall(), process.random_bytes(4).hex()))
        await signal.wait(0.01)
for name in "abcd":
    process = Process(simulator, name)
    process.spawn(walk(process, name), name)
simulator.run(30)
print(seen)
"""


def trace(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", TRACE], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_same_seed_gives_same_run_in_every_interpreter():
    assert trace("1") == trace("2") != ""


@pytest.fixture
def simulator():
    return Simulator(1)


@pytest.fixture
def process(simulator):
    return Process(simulator, "p")


def test_simulated_time_passes_only_in_run(simulator, process):
    before = process.now()
    assert process.now() == before
    simulator.run(10)
    assert process.now() - before == pytest.approx(10, rel=DRIFT)


def test_process_clocks_drift_within_the_margin(simulator):
    clocks = [Process(simulator, str(number)) for number in range(50)]
    before = [clock.now() for clock in clocks]
    simulator.run(1000)
    passed = [clock.now() - start for clock, start in zip(clocks, before, strict=True)]
    assert all(996 <= seconds <= 1004 for seconds in passed)
    assert max(passed) - min(passed) > 4


def test_true_time_is_the_inverse_of_now(simulator, process):
    simulator.run(12.5)
    assert process.true_time(process.now()) == pytest.approx(12.5)


def test_sleep_never_ends_early_on_its_own_clock(simulator, process):
    async def naps():
        for _ in range(100):
            seconds = process.random()
            end = process.now() + seconds
            await process.sleep(seconds)
            assert end <= process.now() < end + 0.01

    simulator.run_until_complete(process.spawn(naps(), "naps"), 200)


def test_signal_is_remembered_consumed_once_and_may_time_out(simulator, process):
    async def waits():
        signal = process.signal()
        signal.set()
        signal.set()
        return [await signal.wait(1), await signal.wait(1)]

    assert simulator.run_until_complete(process.spawn(waits(), "waits"), 5) == [True, False]


def test_signal_wakes_a_waiter_at_once(simulator, process):
    signal = process.signal()

    async def waits():
        return await signal.wait(60)

    task = process.spawn(waits(), "waits")
    simulator.run(1)
    assert not task.done
    signal.set()
    simulator.run(0.01)
    assert task.result() is True


def test_cancellation_reaches_the_await_even_after_its_result(simulator, process):
    signal, seen = process.signal(), []

    async def waits():
        try:
            await signal.wait(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = process.spawn(waits(), "waits")
    simulator.run(1)
    signal.set()
    task.cancel()
    simulator.run(1)
    assert task.done
    assert seen == ["cancelled"]
    assert not task.cancel()
    with pytest.raises(asyncio.CancelledError):
        task.result()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_cancel_at_cancels_task_at_the_nth_await(simulator, process, number):
    reached = []

    async def walks():
        for step in range(3):
            reached.append(step)
            await process.sleep(1)

    task = process.spawn(walks(), "walks")
    task.cancel_at = number
    simulator.run(10)
    assert task.done
    assert reached == list(range(number))


def test_paused_process_does_nothing_while_its_clock_continues(simulator, process):
    seen = []

    async def ticks():
        while True:
            await process.sleep(1)
            seen.append(process.now())

    process.spawn(ticks(), "ticks")
    simulator.run(3.5)
    process.pause()
    simulator.run(10)
    assert len(seen) == 3
    process.resume()
    simulator.run(0.1)
    assert len(seen) == 4
    assert seen[3] - seen[2] > 9


def test_timer_cancelled_while_paused_never_fires(simulator, process):
    seen = []
    timer = process.call_later(1, lambda: seen.append("fired"))
    process.pause()
    simulator.run(2)
    timer.cancel()
    process.resume()
    simulator.run(2)
    assert seen == []


def test_crash_closes_coroutines_and_their_awaits(simulator, process):
    seen = []

    async def works():
        try:
            await process.sleep(60)
        except BaseException as error:
            seen.append(type(error))
            raise
        finally:
            seen.append("finally")
            await process.sleep(1)
            seen.append("never")

    task = process.spawn(works(), "works")
    process.on_crash.append(lambda: seen.append("noticed"))
    simulator.run(1)
    process.crash()
    process.crash()
    simulator.run(100)
    assert seen == [GeneratorExit, "finally", "noticed"]
    assert task.done
    assert process.spawn(works(), "stillborn").done


def test_process_can_crash_itself(simulator, process):
    seen = []

    async def dies():
        process.crash()
        seen.append("last words")
        await process.sleep(1)
        seen.append("never")

    process.spawn(dies(), "dies")
    simulator.run(10)
    assert seen == ["last words"]


def test_interrupt_cancels_body_once_and_recognises_its_own(simulator, process):
    verdicts = []

    async def body(fires, cancels):
        interrupt = process.interrupt()
        try:
            if fires:
                interrupt.fire()
            if cancels:
                process.simulator.current_task.cancel()
            await process.sleep(1)
            error = None
        except asyncio.CancelledError as cancelled:
            error = type(cancelled)
        verdicts.append(interrupt.disarm(error))
        interrupt.fire()
        await process.sleep(1)

    for fires, cancels in [(False, False), (True, False), (False, True), (True, True)]:
        simulator.run_until_complete(process.spawn(body(fires, cancels), "body"), 10)
    assert verdicts[:3] == [False, True, False]
    assert verdicts[3] is False  # a cancellation from elsewhere propagates


def test_start_thread_task_shares_process_and_outlives_its_creator(simulator, process):
    seen = []

    async def background(runtime):
        assert runtime is process
        await runtime.sleep(5)
        seen.append("done")

    async def main():
        process.start_thread(background, "beside")
        await process.sleep(60)

    task = process.spawn(main(), "main")
    simulator.run(1)
    task.cancel()
    simulator.run(10)
    assert seen == ["done"]


def test_owner_is_the_running_task(simulator, process):
    async def me():
        await process.sleep(1)
        return process.owner()

    first, second = process.spawn(me(), "first"), process.spawn(me(), "second")
    simulator.run(2)
    assert (first.result(), second.result()) == (first, second)
    assert process.owner() is process
    assert process.interrupt() is None


def test_task_can_be_joined_when_its_process_crashes(simulator, process):
    other = Process(simulator, "other")

    async def waits(task):
        await task.join()
        await task.join()
        return simulator.time

    waited = process.spawn(waits(other.spawn(other.sleep(60), "sleeps")), "waits")
    simulator.run(5)
    other.crash()
    assert simulator.run_until_complete(waited, 1) == pytest.approx(5, abs=0.1)


def test_cancelled_call_runs_function_and_loses_its_result(simulator, process):
    seen = []

    async def calls():
        return await process.call(seen.append, 1)

    task = process.spawn(calls(), "calls")
    task.cancel_at = 1
    simulator.run(1)
    assert seen == [1]
    with pytest.raises(asyncio.CancelledError):
        task.result()


def test_uncaught_error_ends_run_and_names_the_seed(simulator, process):
    async def fails():
        await process.sleep(1)
        raise ValueError("no")

    process.spawn(fails(), "fails")
    with pytest.raises(ValueError, match="no") as caught:
        simulator.run(5)
    assert "seed 1" in caught.value.__notes__[0]


def test_run_until_complete_times_out(simulator, process):
    with pytest.raises(TimeoutError, match="p/sleeps"):
        simulator.run_until_complete(process.spawn(process.sleep(60), "sleeps"), 5)


def test_mutex_held_over_an_await_is_detected(simulator, process):
    mutex = process.mutex()

    async def holds():
        with mutex:
            await process.sleep(1)

    process.spawn(holds(), "first")
    process.spawn(holds(), "second")
    with pytest.raises(RuntimeError, match="mutex"):
        simulator.run(5)


def test_awaiting_outside_the_runtime_raises_type_error(simulator, process):
    async def awaits_asyncio():
        await asyncio.sleep(0)

    process.spawn(awaits_asyncio(), "strays")
    with pytest.raises(TypeError, match="what the runtime provides"):
        simulator.run(1)


def test_stepping_the_wall_clock_does_not_change_now(simulator, process):
    wall, now = process.wall(), process.now()
    process.step_wall_clock(-3600)
    assert process.wall() == pytest.approx(wall - 3600)
    assert process.now() == now


def test_bind_of_simulated_process_is_always_true(process):
    assert process.bind()
    process.close()
    assert process.bind()
    assert "p" in repr(process)
