"""Schedules: one run per tick, whatever is missed, fails or overlaps. With processes: stores/test_processes.py."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from datetime import UTC, datetime

import pytest

import leasehold
from leasehold import Client, ConfigError, Unavailable
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.threads import Threads


def minute(number: int) -> datetime:
    return datetime.fromtimestamp(number * 60, UTC)


def test_each_tick_runs_once_across_clients(add_client):
    ran = []
    clients = [add_client(600.0 + skew) for skew in (2, -2, 0, 1, -1)]
    jobs = [client.schedule("job", 60, store=store) for client, _, store in clients]
    for _ in range(300):
        for (_, clock, _), job in zip(clients, jobs, strict=True):
            clock.at += 1
            job.run_due(lambda tick: ran.append(tick))
    assert ran == [minute(number) for number in range(10, 16)]


@pytest.mark.parametrize(
    ("missed", "after"),
    [("skip", [20]), ("last", [20]), ("all", [11, 12, 13, 14, 15, 16, 17, 18, 19, 20])],
)
def test_missed_ticks_run_according_to_missed_option(add_client, missed, after):
    client, clock, store = add_client()
    ran = []
    job = client.schedule("job", 60, missed=missed, store=store)
    assert job.run_due(lambda tick: ran.append(tick)) == [minute(10)]
    clock.at = 1200.0 + 20  # no client was running for ten minutes
    again = client.schedule("job", 60, missed=missed, store=store)  # as after a restart
    assert again.run_due(lambda tick: ran.append(tick)) == [minute(number) for number in after]
    assert again.run_due(lambda tick: ran.append(tick)) == []
    assert ran == [minute(10), *map(minute, after)]


@pytest.mark.parametrize(("missed", "after"), [("skip", []), ("last", [20]), ("all", [18, 19, 20])])
def test_ticks_beyond_late_and_most_are_skipped(add_client, missed, after):
    client, clock, store = add_client()
    job = client.schedule("job", 60, missed=missed, most=3, store=store)
    job.run_due(print)
    clock.at = 1200.0 + 40
    assert job.run_due(lambda: None) == [minute(number) for number in after]


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
@pytest.mark.parametrize(("at", "first"), [(600.0, [10]), (630.0, [10]), (630.1, []), (659.9, [])])
def test_new_schedule_begins_with_current_tick_unless_it_is_late(add_client, missed, at, first):
    client, clock, store = add_client(at)
    job = client.schedule("job", 60, missed=missed, store=store)
    assert job.run_due(lambda: None) == [minute(number) for number in first]
    clock.at = 660.0
    assert job.run_due(lambda: None) == [minute(11)]


@pytest.mark.parametrize(("missed", "ahead", "behind"), [("skip", [13], [8]), ("last", [13], []), ("all", [13], [])])
def test_client_that_creates_a_schedule_decides_its_first_tick(add_client, missed, ahead, behind):
    """With "last" and "all" the first tick is recorded. Clients whose clocks are behind have nothing to run then."""
    clients = [add_client(600.0 + skew) for skew in (180, -120)]
    jobs = [client.schedule("job", 60, missed=missed, store=store) for client, _, store in clients]
    assert [job.run_due(lambda: None) for job in jobs] == [
        [minute(number) for number in numbers] for numbers in (ahead, behind)
    ]


def test_last_follows_the_clock_that_is_ahead(add_client):
    """A client that is behind created the schedule. The one ahead runs its latest tick, and skips others."""
    clients = [add_client(600.0 + skew) for skew in (-120, 0, 180)]
    jobs = [client.schedule("job", 60, missed="last", store=store) for client, _, store in clients]
    ran = []
    for _ in range(8):
        for job, (_, clock, _) in zip(jobs, clients, strict=True):
            ran += job.run_due(lambda: None)
            clock.at += 60
    assert ran == [minute(number) for number in (8, 10, 13, 14, 15, 16, 17, 18, 19, 20)]


def test_new_schedule_has_no_missed_ticks(add_client):
    client, clock, store = add_client(at=659.0)
    job = client.schedule("job", 60, missed="all", store=store)
    assert job.run_due(lambda: None) == []
    clock.at = 660.0
    assert job.run_due(lambda: None) == [minute(11)]


def test_failed_tick_is_rerun_only_with_on_failure_retry(add_client, caplog):
    client, _, store = add_client()
    runs = []

    def fail():
        runs.append(1)
        raise ValueError("no paper")

    job = client.schedule("job", 60, store=store)
    with caplog.at_level(logging.ERROR, "leasehold.schedule"):
        assert job.run_due(fail) == [minute(10)]
    assert "no paper" in caplog.text
    caplog.clear()
    other, _, _ = add_client()
    assert other.schedule("job", 60, store=store).run_due(fail) == []
    assert len(runs) == 1
    retried = client.schedule("other", 60, store=store, on_failure="retry")
    with caplog.at_level(logging.CRITICAL, "leasehold.schedule"):
        retried.run_due(fail)
        assert other.schedule("other", 60, store=store, on_failure="retry").run_due(lambda: None) == [minute(10)]


def test_runs_of_one_schedule_never_overlap(add_client):
    first, _, store = add_client()
    second, _, _ = add_client(660.0)
    entered, leave, ran = threading.Event(), threading.Event(), []

    def slow():
        entered.set()
        assert leave.wait(30)
        ran.append("first")

    thread = threading.Thread(target=first.schedule("job", 60, store=store).run_due, args=(slow,))
    thread.start()
    assert entered.wait(30)
    job = second.schedule("job", 60, store=store, late=0.2)
    assert job.run_due(lambda: ran.append("too early")) == [], "the first run did not end while the tick was due"
    job = second.schedule("job", 60, store=store)
    later = threading.Thread(target=job.run_due, args=(lambda: ran.append("second"),))
    later.start()
    leave.set()
    thread.join(30)
    later.join(60)
    assert ran == ["first", "second"]


def test_client_does_not_wait_for_a_tick_that_another_one_runs(add_client):
    first, _, store = add_client()
    second, _, _ = add_client()
    results = []

    def check_in_the_second_client():
        results.append(second.schedule("job", 60, store=store).run_due(lambda: results.append("ran twice")))

    assert first.schedule("job", 60, store=store).run_due(check_in_the_second_client) == [minute(10)]
    assert results == [[]]


def test_stop_ends_the_wait_for_another_tick(add_client):
    first, _, store = add_client()
    second, _, _ = add_client(660.0)
    entered, leave, ran = threading.Event(), threading.Event(), []
    thread = threading.Thread(
        target=first.schedule("job", 60, store=store).run_due, args=(lambda: entered.set() or leave.wait(60),)
    )
    thread.start()
    assert entered.wait(30)
    job = second.schedule("job", 86_400, store=store, offset=0, missed="last")  # due until tomorrow
    waiting = threading.Thread(target=job.run, args=(lambda: ran.append(1),))
    waiting.start()
    end = time.monotonic() + 60
    while waiting.is_alive():
        assert time.monotonic() < end
        job.stop()  # again: the first one may come before `run` has begun
        waiting.join(0.05)
    leave.set()
    thread.join(60)
    assert ran == []


def test_job_result_is_not_stored(add_client):
    client, _, store = add_client()
    assert client.schedule("job", 60, store=store).run_due(lambda lease: lease) == [minute(10)]


def test_run_continues_until_stop():
    with Client("memory://") as client:
        ran = []
        job = client.schedule("job", 0.05)

        def work(tick):
            ran.append(tick)
            if len(ran) == 5:
                job.stop()

        job.run(work)
    assert len(ran) == len(set(ran)) == 5
    assert ran == sorted(ran)


def test_async_schedule_runs_stops_and_is_cancelled():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            ran = []
            job = client.schedule("job", 0.05, missed="all")

            async def work(tick):
                await asyncio.sleep(0)
                ran.append(tick)
                if len(ran) == 3:
                    job.stop()

            await asyncio.wait_for(job.run(work), 30)
            assert len(set(ran)) == 3
            task = asyncio.create_task(job.run(work))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def test_stop_before_run_begins_is_not_forgotten():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            ran = []
            job = client.schedule("job", 0.05, missed="all")

            def work():
                ran.append(job.stop())

            task = asyncio.create_task(job.run(work))
            job.stop()  # the task has not begun
            await asyncio.wait_for(task, 30)
            assert not ran
            await asyncio.wait_for(job.run(work), 30)
            assert ran == [None], "a later run must go on until the next stop"

    asyncio.run(main())


def test_stop_of_a_run_that_is_then_cancelled_does_not_end_the_next_one():
    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            ran = []
            job = client.schedule("job", 0.05, missed="all")
            began = asyncio.Event()

            async def wait():
                began.set()
                await asyncio.Event().wait()

            task = asyncio.create_task(job.run(wait))
            await asyncio.wait_for(began.wait(), 30)
            job.stop()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(job.run(lambda: ran.append(job.stop())), 30)
            assert ran == [None]

    asyncio.run(main())


def test_async_schedule_continues_after_its_job_awaited_a_cancelled_task(caplog):
    """Else it would end for ever, and in a TaskGroup without an error."""

    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            ran = []
            job = client.schedule("job", 0.05, missed="all")

            async def work(tick):
                ran.append(tick)
                if len(ran) == 2:
                    job.stop()
                    return
                other = asyncio.ensure_future(asyncio.Event().wait())
                other.cancel()
                await other

            await asyncio.wait_for(job.run(work), 30)
            assert len(set(ran)) == 2

    with caplog.at_level(logging.CRITICAL, "leasehold.schedule"):
        asyncio.run(main())


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": 60, "missed": "some"}, {"every": 60, "most": 0}, {"every": 60, "late": 0}]
)
def test_invalid_schedule_options_are_refused(wrong):
    with Client("memory://") as client, pytest.raises(ConfigError):
        client.schedule("job", **wrong)


def test_run_survives_temporary_store_outage(caplog):
    class Flaky(MemoryStore):
        silent = 6  # reads, each repeated once

        def read(self, key, seconds):
            if self.silent:
                self.silent -= 1
                raise Unavailable("nobody answers")
            return super().read(key, seconds)

    with Client("memory://") as client, caplog.at_level(logging.WARNING, "leasehold.schedule"):
        ran = []
        job = client.schedule("job", 0.1, missed="last", store=Flaky(Threads()))
        assert repr(job) == "<Schedule job every 0.1 s>"
        job.run(lambda: ran.append(1) or job.stop())
    assert ran == [1]
    assert caplog.text.count("could not be checked") == 3


def test_run_due_raises_when_store_is_unavailable():
    class Silent(MemoryStore):
        def write(self, *args):
            raise Unavailable("nobody answers")

    with Client("memory://") as client, pytest.raises(Unavailable):
        client.schedule("job", 60, late=60, store=Silent(Threads())).run_due(lambda: None)
