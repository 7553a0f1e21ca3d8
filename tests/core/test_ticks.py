"""When a schedule is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core.ticks import Ticks


def ticks(missed="skip", every=60.0, offset=0.0, late=30.0, most=100):
    return Ticks(every, offset, missed, late, most)


@pytest.mark.parametrize(
    ("missed", "now", "settled", "due"),
    [
        ("skip", 600.0, -1, [10]),
        ("skip", 630.0, -1, [10]),
        ("skip", 631.0, -1, []),  # too late: missed
        ("skip", 600.0, 10, []),
        ("last", 659.0, 5, [10]),
        ("last", 659.0, 10, []),
        ("all", 659.0, 5, [6, 7, 8, 9, 10]),
        ("all", 659.0, 10, []),
        ("all", 659.0, 12, []),  # others, whose clocks are ahead, have been there
    ],
)
def test_what_is_due(missed, now, settled, due):
    assert list(ticks(missed).due(now, settled)) == due


def test_catching_up_is_bounded():
    assert list(ticks("all", most=3).due(659.0, 0)) == [8, 9, 10]


def test_nothing_was_missed_before_a_schedule_existed():
    assert ticks().before_the_first(600.0) == 9  # the tick of this moment is run
    assert ticks().before_the_first(659.0) == 10


@given(st.floats(0.1, 1e6), st.floats(0, 1e6), st.floats(1e6, 4e9))
def test_everybody_calls_a_tick_by_the_same_number(every, offset, now):
    some = ticks(every=every, offset=offset)
    number = some.number(now)
    assert some.at(number) <= now + 1e-3
    assert some.at(number + 1) > now - 1e-3
