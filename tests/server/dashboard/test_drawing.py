"""Numbers in words, charts and timelines: pure functions of what they are given."""

import re

import pytest

from leasehold.server.dashboard import charts, timeline, words
from leasehold.server.dashboard.page_data import MAX_STEADY, Steady
from leasehold.server.past import PastGrant, PastRenewal, PastWait, Refusal
from tests.support import probe_server

NOW = 1_794_840_000.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.0004, "1 ms"),
        (0.03, "30 ms"),
        (0.0996, "0.1 s"),
        (21.34, "21.3 s"),
        (59.96, "1 min 00 s"),
        (72, "1 min 12 s"),
        (3599.6, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (86_380, "1 d 0 h"),
        (792_000, "9 d 4 h"),
        (-3, "0.0 s"),
    ],
)
def test_duration_has_two_units_at_most(seconds, text):
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1284, "1,284"), (41.66, "41.7"), (4.21, "4.2"), (0.424, "0.42"), (0.0031, "0.0031")]
)
def test_number_shows_the_digits_that_matter(value, text):
    assert words.number(value) == text


def test_long_token_shows_its_end_and_zeros():
    assert words.token(48_213) == "48,213"
    assert words.token(1_794_841_000_000_007).endswith("000,000,007")


@pytest.mark.parametrize("largest", [0, 0.003, 1, 1.01, 7, 9.99, 10, 59, 131, 99_999])
def test_axis_ends_above_the_largest_value_at_a_round_number(largest):
    top, steps = charts.nice_top(largest)
    assert largest <= top <= max(1.0, largest * 2.5)
    assert all(len(f"{top * step / steps:.10g}") <= 7 for step in range(steps + 1))


def test_chart_leaves_gaps_where_nothing_was_measured():
    drawn = str(charts.chart([("l1", [1, None, 2, 3, None])], [NOW + i for i in range(5)], "a title"))
    lines = re.findall(r'class="l1" d="([^"]+)"', drawn)
    assert [line.count("L") for line in lines] == [0, 1]
    assert 'aria-label="a title"' in drawn


def test_title_of_a_chart_is_escaped():
    assert "<script>" not in str(charts.chart([], [NOW, NOW + 1], "<script>"))


def grant(token, began, ended, **fields):
    known = {"fingerprint": f"f{token}", "holder": f"web-{token}", "purpose": None, "mode": "exclusive", "slot": None}
    known |= {"waited": 1.0, "queued": True, "ttl": 10.0, "expires_at": began + 10}
    return PastGrant(token=token, granted_at=began, ended_at=ended, **(known | fields))


def test_timeline_tells_a_loss_in_order():
    lost = grant(
        7,
        NOW - 60,
        NOW - 47,
        end="lost",
        reason="expired",
        renewals=[PastRenewal(NOW - 57, 7.0)],
        refused=[Refusal(NOW - 30, "sql", 8)],
    )
    after = grant(8, NOW - 46, None)
    drawn = timeline.draw("orders/42", [after, lost], [], [timeline.Waiting("x", "web-9", NOW - 5, 1)], NOW)
    assert [step.title for step in drawn.story] == [
        "The last renewal",
        "At risk",
        "Lost",
        "Granted to web-8",
        "The fence refuses a write",
    ]
    assert [step.at for step in drawn.story] == sorted(step.at for step in drawn.story)
    assert drawn.lanes == ("web-7", "web-8", "web-9", "Fence")
    assert "7 refused: 8 seen already" in str(drawn.svg)


def test_timeline_without_a_past_is_not_drawn():
    assert timeline.draw("orders/42", [], [], [], NOW) is None


def test_timeline_of_many_holders_is_bounded():
    grants = [grant(number, NOW - 10 * number, NOW - 10 * number + 9, end="released") for number in range(1, 51)]
    waits = [
        PastWait(fingerprint="f", holder=f"web-{n}", purpose=None, began=NOW - 50, ended=NOW - 9, outcome="granted")
        for n in range(50)
    ]
    drawn = timeline.draw("orders/42", grants, waits, [], NOW)
    assert len(drawn.lanes) == timeline.MAX_LANES
    assert len(drawn.svg) < 50_000


def test_holders_in_a_timeline_are_escaped():
    hostile = "<script>alert(1)</script>"
    drawn = timeline.draw("x", [grant(7, NOW - 9, None, holder=hostile, purpose=hostile)], [], [], NOW)
    assert "<script>" not in drawn.svg + drawn.strip
    assert "&lt;script&gt;" in drawn.svg


def test_instant_that_trembles_stays_and_one_that_moves_is_followed():
    steady = Steady()
    assert steady("ends", "f1", NOW) == NOW
    assert steady("ends", "f1", NOW + 0.2) == NOW
    assert steady("ends", "f2", NOW + 0.2) == NOW + 0.2
    assert steady("ends", "f1", NOW + 5) == NOW + 5


def test_steady_times_are_bounded_and_those_in_use_are_kept():
    steady = Steady()
    for number in range(10 * MAX_STEADY):
        steady("ends", f"gone-{number}", NOW)
        if number % 100 == 0:  # a page that stays open
            assert steady("ends", "f1", NOW + 0.2 * (number % 200 > 0)) == NOW
        assert probe_server.kept_instants(steady) <= 2 * MAX_STEADY
