"""The simulated runtime: repeatable, and as hard on its processes as the real world is."""

import asyncio
import os
import subprocess
import sys

import pytest

from leasehold.runtime.simulated import DRIFT, Process, World

TRACE = """
from leasehold.runtime.simulated import Process, World
world = World(7)
seen = []
async def walk(process, name):
    signal = process.signal()
    for _ in range(20):
        await process.sleep(process.fraction())
        seen.append((name, process.now(), process.wall(), process.entropy(4).hex()))
        await signal.wait(0.01)
for name in "abcd":
    process = Process(world, name)
    process.spawn(walk(process, name), name)
world.run(30)
print(seen)
"""


def trace(hash_seed):
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(
        [sys.executable, "-c", TRACE], check=True, capture_output=True, text=True, env=environment
    ).stdout


def test_the_same_seed_gives_the_same_run_in_every_interpreter():
    assert trace("1") == trace("2") != ""


@pytest.fixture
def world():
    return World(1)


@pytest.fixture
def process(world):
    return Process(world, "p")


def test_time_passes_only_in_run(world, process):
    before = process.now()
    assert process.now() == before
    world.run(10)
    assert process.now() - before == pytest.approx(10, rel=DRIFT)


def test_clocks_drift_but_within_the_margin(world):
    clocks = [Process(world, str(number)) for number in range(50)]
    before = [clock.now() for clock in clocks]
    world.run(1000)
    passed = [clock.now() - start for clock, start in zip(clocks, before, strict=True)]
    assert all(996 <= seconds <= 1004 for seconds in passed)
    assert max(passed) - min(passed) > 4


def test_true_time_is_the_inverse_of_the_clock(world, process):
    world.run(12.5)
    assert process.true_time(process.now()) == pytest.approx(12.5)


def test_a_sleep_never_ends_early_on_its_own_clock(world, process):
    async def naps():
        for _ in range(100):
            seconds = process.fraction()
            end = process.now() + seconds
            await process.sleep(seconds)
            assert end <= process.now() < end + 0.01

    world.finish(process.spawn(naps(), "naps"), 200)


def test_a_signal_is_remembered_taken_once_and_may_time_out(world, process):
    async def waits():
        signal = process.signal()
        signal.set()
        signal.set()
        return [await signal.wait(1), await signal.wait(1)]

    assert world.finish(process.spawn(waits(), "waits"), 5) == [True, False]


def test_a_signal_wakes_a_waiter_at_once(world, process):
    signal = process.signal()

    async def waits():
        return await signal.wait(60)

    task = process.spawn(waits(), "waits")
    world.run(1)
    assert not task.done
    signal.set()
    world.run(0.01)
    assert task.result() is True


def test_cancellation_arrives_at_the_await_even_when_its_answer_came_first(world, process):
    signal, seen = process.signal(), []

    async def waits():
        try:
            await signal.wait(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    task = process.spawn(waits(), "waits")
    world.run(1)
    signal.set()
    task.cancel()
    world.run(1)
    assert task.done
    assert seen == ["cancelled"]
    assert not task.cancel()
    with pytest.raises(asyncio.CancelledError):
        task.result()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_cancel_at_the_nth_await(world, process, number):
    reached = []

    async def walks():
        for place in range(3):
            reached.append(place)
            await process.sleep(1)

    task = process.spawn(walks(), "walks")
    task.cancel_at = number
    world.run(10)
    assert task.done
    assert reached == list(range(number))


def test_a_paused_process_does_nothing_and_its_clock_goes_on(world, process):
    seen = []

    async def ticks():
        while True:
            await process.sleep(1)
            seen.append(process.now())

    process.spawn(ticks(), "ticks")
    world.run(3.5)
    process.pause()
    world.run(10)
    assert len(seen) == 3
    process.resume()
    world.run(0.1)
    assert len(seen) == 4
    assert seen[3] - seen[2] > 9


def test_a_timer_called_off_while_paused_stays_off(world, process):
    seen = []
    timer = process.later(1, lambda: seen.append("fired"))
    process.pause()
    world.run(2)
    timer.cancel()
    process.resume()
    world.run(2)
    assert seen == []


def test_a_crash_closes_coroutines_and_whatever_they_still_await(world, process):
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
    process.when_dead.append(lambda: seen.append("noticed"))
    world.run(1)
    process.crash()
    process.crash()
    world.run(100)
    assert seen == [GeneratorExit, "finally", "noticed"]
    assert task.done
    assert process.spawn(works(), "stillborn").done


def test_a_process_may_crash_itself(world, process):
    seen = []

    async def dies():
        process.crash()
        seen.append("last words")
        await process.sleep(1)
        seen.append("never")

    process.spawn(dies(), "dies")
    world.run(10)
    assert seen == ["last words"]


def test_interrupt_cancels_the_body_once_and_knows_its_own(world, process):
    verdicts = []

    async def body(fires, cancels):
        interrupt = process.interrupt()
        try:
            if fires:
                interrupt.fire()
            if cancels:
                process.world.current.cancel()
            await process.sleep(1)
            error = None
        except asyncio.CancelledError as cancelled:
            error = type(cancelled)
        verdicts.append(interrupt.disarm(error))
        interrupt.fire()
        await process.sleep(1)

    for fires, cancels in [(False, False), (True, False), (False, True), (True, True)]:
        world.finish(process.spawn(body(fires, cancels), "body"), 10)
    assert verdicts[:3] == [False, True, False]
    assert verdicts[3] is False  # somebody else's cancellation goes on


def test_aside_runs_in_the_same_process_and_outlives_other_tasks(world, process):
    seen = []

    async def beside(runtime):
        assert runtime is process
        await runtime.sleep(5)
        seen.append("done")

    async def main():
        process.aside(beside, "beside")
        await process.sleep(60)

    task = process.spawn(main(), "main")
    world.run(1)
    task.cancel()
    world.run(10)
    assert seen == ["done"]


def test_owner_is_the_running_task(world, process):
    async def me():
        await process.sleep(1)
        return process.owner()

    first, second = process.spawn(me(), "first"), process.spawn(me(), "second")
    world.run(2)
    assert (first.result(), second.result()) == (first, second)
    assert process.owner() is process
    assert process.interrupt() is None


def test_tasks_can_be_waited_for_also_when_they_die(world, process):
    other = Process(world, "other")

    async def waits(task):
        await task.ended()
        await task.ended()
        return world.time

    waited = process.spawn(waits(other.spawn(other.sleep(60), "sleeps")), "waits")
    world.run(5)
    other.crash()
    assert world.finish(waited, 1) == pytest.approx(5, abs=0.1)


def test_call_runs_the_function_and_may_lose_its_answer(world, process):
    seen = []

    async def calls():
        return await process.call(seen.append, 1)

    task = process.spawn(calls(), "calls")
    task.cancel_at = 1
    world.run(1)
    assert seen == [1]
    with pytest.raises(asyncio.CancelledError):
        task.result()


def test_an_error_nobody_caught_ends_the_run_and_says_where(world, process):
    async def fails():
        await process.sleep(1)
        raise ValueError("no")

    process.spawn(fails(), "fails")
    with pytest.raises(ValueError, match="no") as caught:
        world.run(5)
    assert "seed 1" in caught.value.__notes__[0]


def test_finish_gives_up_in_time(world, process):
    with pytest.raises(TimeoutError, match="p/sleeps"):
        world.finish(process.spawn(process.sleep(60), "sleeps"), 5)


def test_a_guard_held_over_an_await_is_found(world, process):
    guard = process.guard()

    async def holds():
        with guard:
            await process.sleep(1)

    process.spawn(holds(), "first")
    process.spawn(holds(), "second")
    with pytest.raises(RuntimeError, match="guard"):
        world.run(5)


def test_only_simulated_things_can_be_awaited(world, process):
    async def strays():
        await asyncio.sleep(0)

    process.spawn(strays(), "strays")
    with pytest.raises(TypeError, match="through its runtime"):
        world.run(1)


def test_the_wall_clock_can_be_stepped_and_the_other_does_not_care(world, process):
    wall, now = process.wall(), process.now()
    process.step_wall(-3600)
    assert process.wall() == pytest.approx(wall - 3600)
    assert process.now() == now


def test_bind_is_always_right_here(process):
    assert process.bind()
    process.close()
    assert process.bind()
    assert "p" in repr(process)
