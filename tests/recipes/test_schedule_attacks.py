"""Ways to have a tick run twice, or never: lost leases, failures, wrong clocks, names that meet."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import pytest

from leasehold import LeaseLost, RunFailed

HOUR = 3600.0


def minute(number: int) -> datetime:
    return datetime.fromtimestamp(number * 60, UTC)


@pytest.fixture
def member(fleet, caplog):
    def join(at: float = 600.0, **options):
        client, clock, store = fleet(at)
        return client.schedule("job", 60, store=store, **options), clock

    with caplog.at_level(logging.CRITICAL, "leasehold.schedule"):
        yield join


def failing(error: Exception):
    def fail():
        raise error

    return fail


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_a_tick_whose_runner_lost_its_lease_is_run_by_the_next(member, missed):
    first, _ = member(missed=missed)
    second, _ = member(missed=missed)
    first.run_due(failing(LeaseLost("schedule:job")))
    assert second.run_due(lambda: None) == [minute(10)]
    assert first.run_due(lambda: None) == []


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_a_tick_to_be_retried_is_retried_by_whoever_looks_next(member, missed):
    alone, clock = member(missed=missed, on_failure="retry")
    assert alone.run_due(failing(ValueError("no paper"))) == [minute(10)]
    other, _ = member(missed=missed, on_failure="retry")
    assert other.run_due(failing(ValueError("still none"))) == [minute(10)]
    clock.at += 1
    assert alone.run_due(lambda: None) == [minute(10)], "in the same process, too"
    assert alone.run_due(lambda: None) == other.run_due(lambda: None) == []


@pytest.mark.parametrize(("missed", "after"), [("all", 11), ("last", 12), ("skip", 12)])
def test_a_tick_that_keeps_failing_holds_up_no_more_than_it_must(member, missed, after):
    """All: in order, until it is too old to be caught up with. The others: until the next one is due."""
    job, clock = member(missed=missed, on_failure="retry", most=2)
    for _ in range(2):
        job.run_due(failing(ValueError("no paper")))
        clock.at += 60
    assert job.run_due(lambda: None)[:1] == [minute(after)]


def test_a_job_whose_own_key_failed_is_logged_like_any_other(member, caplog):
    job, _ = member()
    with caplog.at_level(logging.ERROR, "leasehold.schedule"):
        assert job.run_due(failing(RunFailed("mail", error="no paper"))) == [minute(10)]
    assert "no paper" in caplog.text


@pytest.mark.parametrize("missed", ["skip", "last", "all"])
def test_one_clock_far_ahead_does_not_stop_the_fleet(member, missed, caplog):
    """It ran what was not due; the others go on as if it had not."""
    wrong, _ = member(600.0 + 10 * 365 * 24 * HOUR, missed=missed)
    assert len(wrong.run_due(lambda: None)) == 1
    right, clock = member(missed=missed)
    ran = []
    with caplog.at_level(logging.WARNING, "leasehold.schedule"):
        for _ in range(3):
            ran += right.run_due(lambda: None)
            clock.at += 60
    assert ran == [minute(10), minute(11), minute(12)]
    assert missed == "skip" or "clock" in caplog.text
    again, _ = member(clock.at, missed=missed)
    assert again.run_due(lambda: None) == [minute(13)]


@pytest.mark.parametrize("missed", ["last", "all"])
def test_a_clock_that_was_ahead_for_a_while_runs_nothing_twice(member, missed):
    """Set back, it comes to ticks that it ran before their time."""
    job, clock = member(missed=missed)
    ran = job.run_due(lambda: None)
    for _ in range(90):
        clock.at += 60
        ran += job.run_due(lambda: None)
    early = set(ran)
    fresh, clock = member(660.0, missed=missed)  # right again, and after a restart
    for _ in range(120):
        ran += fresh.run_due(lambda: None)
        clock.at += 60
    assert len(ran) == len(set(ran)), "no tick twice"
    assert set(ran) - early == {minute(number) for number in range(101, 131)}


def test_a_tick_is_no_key_of_once(fleet):
    client, _, store = fleet()
    assert client.once("job@10", lambda: "another thing", store=store) == "another thing"
    assert client.schedule("job", 60, store=store).run_due(lambda: None) == [minute(10)]


def test_a_clock_that_is_set_back_runs_nothing_again(member):
    job, clock = member()
    assert job.run_due(lambda: None) == [minute(10)]
    clock.at -= 50 * 60
    assert job.run_due(lambda: None) == []
    other, _ = member(601.0)
    assert other.run_due(lambda: None) == []
