"""A tick runs once whatever happens to its runner: lost leases, failures, wrong clocks, names that collide."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import pytest

from leasehold import LeaseLost, RunFailed, stores

HOUR = 3600.0


def minute(number: int) -> datetime:
    return datetime.fromtimestamp(number * 60, UTC)


@pytest.fixture
def make_schedule(add_client, caplog):
    def make(at: float = 600.0, **options):
        client, clock, store = add_client(at)
        return client.schedule("job", 60, store=store, **options), clock

    with caplog.at_level(logging.CRITICAL, "leasehold.schedule"):
        yield make


def make_failing(error: BaseException):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_tick_is_rerun_after_its_runner_lost_the_lease(make_schedule, missed):
    first, _ = make_schedule(missed=missed)
    second, _ = make_schedule(missed=missed)
    first.run_due(make_failing(LeaseLost("schedule:job")))
    assert second.run_due(lambda: None) == [minute(10)]
    assert first.run_due(lambda: None) == []


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_failed_tick_with_retry_is_rerun_by_next_client(make_schedule, missed):
    first, clock = make_schedule(missed=missed, on_failure="retry")
    assert first.run_due(make_failing(ValueError("no paper"))) == [minute(10)]
    other, _ = make_schedule(missed=missed, on_failure="retry")
    assert other.run_due(make_failing(ValueError("still none"))) == [minute(10)]
    clock.at += 1
    assert first.run_due(lambda: None) == [minute(10)], "the same process must retry it, too"
    assert first.run_due(lambda: None) == other.run_due(lambda: None) == []


@pytest.mark.parametrize(("missed", "after"), [("all", 11), ("last", 12), ("skip", 12)])
def test_failing_tick_delays_later_ticks_no_longer_than_needed(make_schedule, missed, after):
    """`all` retries in order until the tick is too old to catch up with. The others retry until the next tick is
    due."""
    job, clock = make_schedule(missed=missed, on_failure="retry", most=2)
    for _ in range(2):
        job.run_due(make_failing(ValueError("no paper")))
        clock.at += 60
    assert job.run_due(lambda: None)[:1] == [minute(after)]


def test_run_failed_raised_by_job_is_logged(make_schedule, caplog):
    job, _ = make_schedule()
    with caplog.at_level(logging.ERROR, "leasehold.schedule"):
        assert job.run_due(make_failing(RunFailed("mail", error="no paper"))) == [minute(10)]
    assert "no paper" in caplog.text


def test_schedule_continues_after_job_whose_event_loop_was_cancelled(make_schedule):
    job, clock = make_schedule()
    assert job.run_due(make_failing(asyncio.CancelledError())) == [minute(10)]
    assert job.run_due(lambda: None) == [], "the tick counts as run"
    clock.at += 60
    assert job.run_due(lambda: None) == [minute(11)]


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_tick_is_rerun_after_its_transaction_was_rolled_back(add_client, missed):
    client, _, _ = add_client(600.0)
    with closing(sqlite3.connect(":memory:")) as database:
        database.executescript(stores.schema("sqlite"))
        job = client.schedule("job", 60, missed=missed, store=stores.within(database))
        for end in (database.rollback, database.commit):
            database.execute("begin")
            assert job.run_due(lambda: None) == [minute(10)]
            end()
        database.execute("begin")
        assert job.run_due(lambda: None) == []


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_clock_far_ahead_does_not_stop_other_clients(make_schedule, missed, caplog):
    """The client with the wrong clock ran a tick that was not due. The others continue as if it had not."""
    ahead, _ = make_schedule(600.0 + 10 * 365 * 24 * HOUR, missed=missed)
    assert len(ahead.run_due(lambda: None)) == 1
    correct, clock = make_schedule(missed=missed)
    ran = []
    with caplog.at_level(logging.WARNING, "leasehold.schedule"):
        for _ in range(3):
            ran += correct.run_due(lambda: None)
            clock.at += 60
    assert ran == [minute(10), minute(11), minute(12)]
    assert missed == "skip" or "clock" in caplog.text
    again, _ = make_schedule(clock.at, missed=missed)
    assert again.run_due(lambda: None) == [minute(13)]


@pytest.mark.parametrize("missed", ["last", "all"])
def test_clock_temporarily_ahead_runs_no_tick_twice(make_schedule, missed):
    """After the clock is set back, the client reaches ticks that it ran too early."""
    job, clock = make_schedule(missed=missed)
    ran = job.run_due(lambda: None)
    for _ in range(90):
        clock.at += 60
        ran += job.run_due(lambda: None)
    early = set(ran)
    fresh, clock = make_schedule(660.0, missed=missed)  # the clock is right again, after a restart
    for _ in range(120):
        ran += fresh.run_due(lambda: None)
        clock.at += 60
    assert len(ran) == len(set(ran)), "no tick may run twice"
    assert set(ran) - early == {minute(number) for number in range(101, 131)}


def test_tick_record_does_not_collide_with_once_key(add_client):
    client, _, store = add_client()
    assert client.once("job@10", lambda: "another thing", store=store) == "another thing"
    assert client.schedule("job", 60, store=store).run_due(lambda: None) == [minute(10)]


def test_clock_set_back_runs_no_tick_again(make_schedule):
    job, clock = make_schedule()
    assert job.run_due(lambda: None) == [minute(10)]
    clock.at -= 50 * 60
    assert job.run_due(lambda: None) == []
    other, _ = make_schedule(601.0)
    assert other.run_due(lambda: None) == []
