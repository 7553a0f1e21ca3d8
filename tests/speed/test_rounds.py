"""The arithmetic of a benchmark, on a clock that only moves when a case runs."""

import pytest

from leasehold.speed import rounds
from leasehold.speed.rounds import Case, measure, table


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0
        speed = 1.0  # what everything takes is multiplied by this

        def case(self, name, seconds, times=10):
            def run(count):
                self.now += seconds * count * self.speed

            return Case(name, run, times)

    found = Clock()
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: found.now)
    return found


def test_a_ratio_is_taken_within_its_round(clock):
    speeds = iter([1.0, 1.2, 0.9, 1.1, 1.0])

    def slower(_number, _rounds):
        clock.speed = next(speeds)  # the machine drifts from round to round: the ratios do not

    base, other = measure([clock.case("base", 0.001), clock.case("other", 0.003)], 5, slower)
    assert (base.ratio, base.low, base.high) == (1.0, 1.0, 1.0)
    assert other.ratio == pytest.approx(3.0)
    assert other.low == pytest.approx(other.high)
    assert base.micros == pytest.approx(1000)


def test_a_round_that_was_disturbed_is_repeated(clock):
    told = []

    def disturb(number, _rounds):
        told.append(number)
        clock.speed = 9.0 if len(told) == 3 else 1.0

    (base,) = measure([clock.case("base", 0.001)], 4, disturb)
    assert told == [1, 2, 3, 3, 4]
    assert base.micros == pytest.approx(1000)


def test_a_machine_that_gets_slower_for_good_is_measured_as_it_is(clock):
    told = []

    def slow_down(number, _rounds):
        told.append(number)
        clock.speed = 1.0 if len(told) < 2 else 9.0

    (base,) = measure([clock.case("base", 0.001)], 4, slow_down)
    assert len(told) == 8, "twice as many rounds as asked for, and no more"
    assert base.micros > 1000


def test_a_case_without_a_number_runs_as_often_as_it_takes(clock):
    counted = []
    slow = clock.case("slow", 0.5, times=0)
    quick = clock.case("quick", 0.0001, times=0)

    def run(count):
        counted.append(count)
        quick.run(count)

    measure([slow, Case("quick", run)], 2)
    assert counted[-1] == pytest.approx(500, rel=0.01), "a twentieth of a second"
    text = table("title", measure([slow], 2))
    assert "slow" in text
    assert "1.00" in text
