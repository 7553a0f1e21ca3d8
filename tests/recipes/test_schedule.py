"""Schedules: one run per tick, whatever is missed, fails or overlaps. Fleets of processes: tests/stores."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime

import pytest

import leasehold
from leasehold import Client, ConfigError, Unavailable
from leasehold.runtime.threads import Threads
from leasehold.stores.memory import MemoryStore


def minute(number: int) -> datetime:
    return datetime.fromtimestamp(number * 60, UTC)


def test_one_run_per_tick_in_the_whole_fleet(fleet):
    ran = []
    members = [fleet(600.0 + skew) for skew in (2, -2, 0, 1, -1)]
    jobs = [client.schedule("job", 60, store=store) for client, _, store in members]
    for _ in range(300):
        for (_, clock, _), job in zip(members, jobs, strict=True):
            clock.at += 1
            job.run_due(lambda tick: ran.append(tick))
    assert ran == [minute(number) for number in range(10, 16)]


@pytest.mark.parametrize(
    ("missed", "after"),
    [("skip", [20]), ("last", [20]), ("all", [11, 12, 13, 14, 15, 16, 17, 18, 19, 20])],
)
def test_missed_ticks(fleet, missed, after):
    client, clock, store = fleet()
    ran = []
    job = client.schedule("job", 60, missed=missed, store=store)
    assert job.run_due(lambda tick: ran.append(tick)) == [minute(10)]
    clock.at = 1200.0 + 20  # ten minutes of nobody being there
    again = client.schedule("job", 60, missed=missed, store=store)  # as after a restart
    assert again.run_due(lambda tick: ran.append(tick)) == [minute(number) for number in after]
    assert again.run_due(lambda tick: ran.append(tick)) == []
    assert ran == [minute(10), *map(minute, after)]


@pytest.mark.parametrize(("missed", "after"), [("skip", []), ("last", [20]), ("all", [18, 19, 20])])
def test_late_and_far_behind(fleet, missed, after):
    client, clock, store = fleet()
    job = client.schedule("job", 60, missed=missed, most=3, store=store)
    job.run_due(print)
    clock.at = 1200.0 + 40
    assert job.run_due(lambda: None) == [minute(number) for number in after]


def test_a_new_schedule_has_missed_nothing(fleet):
    client, clock, store = fleet(at=659.0)
    job = client.schedule("job", 60, missed="all", store=store)
    assert job.run_due(lambda: None) == []
    clock.at = 660.0
    assert job.run_due(lambda: None) == [minute(11)]


def test_a_tick_that_failed_is_over_unless_it_is_to_be_retried(fleet, caplog):
    client, _, store = fleet()
    runs = []

    def fail():
        runs.append(1)
        raise ValueError("no paper")

    job = client.schedule("job", 60, store=store)
    with caplog.at_level(logging.ERROR, "leasehold.schedule"):
        assert job.run_due(fail) == [minute(10)]
    assert "no paper" in caplog.text
    caplog.clear()
    other, _, _ = fleet()
    assert other.schedule("job", 60, store=store).run_due(fail) == []
    assert len(runs) == 1
    retried = client.schedule("other", 60, store=store, on_failure="retry")
    with caplog.at_level(logging.CRITICAL, "leasehold.schedule"):
        retried.run_due(fail)
        assert other.schedule("other", 60, store=store, on_failure="retry").run_due(lambda: None) == [minute(10)]


def test_a_run_never_overlaps_the_next(fleet):
    first, _, store = fleet()
    second, _, _ = fleet(660.0)
    entered, leave, ran = threading.Event(), threading.Event(), []

    def slow():
        entered.set()
        assert leave.wait(30)
        ran.append("first")

    thread = threading.Thread(target=first.schedule("job", 60, store=store).run_due, args=(slow,))
    thread.start()
    assert entered.wait(30)
    job = second.schedule("job", 60, store=store)
    assert job.run_due(lambda: ran.append("second")) == []
    leave.set()
    thread.join(30)
    assert job.run_due(lambda: ran.append("second")) == [minute(11)]
    assert ran == ["first", "second"]


def test_whatever_a_job_returns_is_left_out(fleet):
    client, _, store = fleet()
    assert client.schedule("job", 60, store=store).run_due(lambda lease: lease) == [minute(10)]


def test_run_goes_on_until_it_is_stopped():
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


def test_run_under_asyncio():
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


@pytest.mark.parametrize(
    "wrong", [{"every": 0}, {"every": 60, "missed": "some"}, {"every": 60, "most": 0}, {"every": 60, "late": 0}]
)
def test_what_cannot_work_is_refused(wrong):
    with Client("memory://") as client, pytest.raises(ConfigError):
        client.schedule("job", **wrong)


def test_run_outlives_a_store_that_is_silent_for_a_while(caplog):
    class Flaky(MemoryStore):
        silent = 6  # reads, each of them repeated once

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
    assert caplog.text.count("could not be looked at") == 3


def test_an_unavailable_store_is_told_to_who_asks():
    class Silent(MemoryStore):
        def write(self, *args):
            raise Unavailable("nobody answers")

    with Client("memory://") as client, pytest.raises(Unavailable):
        client.schedule("job", 60, late=60, store=Silent(Threads())).run_due(lambda: None)
