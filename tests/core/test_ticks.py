"""When the ticks of a schedule are due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core.ticks import IntervalTicks


def make_ticks(missed="skip", every=60.0, offset=0.0, late=30.0, most=100):
    return IntervalTicks(missed, most, every, offset, late)


@pytest.mark.parametrize(
    ("missed", "now", "last_completed", "due"),
    [
        ("skip", 600.0, -1, [10]),
        ("skip", 630.0, -1, [10]),
        ("skip", 631.0, -1, []),  # too late: missed
        ("skip", 600.0, 10, []),
        ("last", 659.0, 5, [10]),
        ("last", 659.0, 10, []),
        ("all", 659.0, 5, [6, 7, 8, 9, 10]),
        ("all", 659.0, 10, []),
        ("all", 659.0, 12, []),  # done by other clients, whose clocks are ahead
    ],
)
def test_due_ticks_follow_missed_option(missed, now, last_completed, due):
    assert list(make_ticks(missed).due(now, last_completed)) == due


def test_catching_up_is_limited_by_most():
    assert list(make_ticks("all", most=3).due(659.0, 0)) == [8, 9, 10]


def test_new_schedule_starts_with_the_current_tick():
    assert make_ticks().initial_completed(600.0) == 9  # the tick that is due now is run
    assert make_ticks().initial_completed(659.0) == 10


@given(st.floats(0.1, 1e6), st.floats(0, 1e6), st.floats(1e6, 4e9))
def test_tick_number_matches_its_time_for_any_clock(every, offset, now):
    schedule_ticks = make_ticks(every=every, offset=offset)
    number = schedule_ticks.current_number(now)
    assert schedule_ticks.time_of(number) <= now + 1e-3
    assert schedule_ticks.time_of(number + 1) > now - 1e-3
