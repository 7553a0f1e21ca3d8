"""The arithmetic of a benchmark, on a clock that only moves when a case runs."""

from itertools import cycle

import pytest

from leasehold.cli.bench import measurement
from leasehold.cli.bench.measurement import BenchCase, format_results, measure


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 0.0
        speed = 1.0  # every duration is multiplied by this

        def case(self, name, seconds, times=10):
            def run(count):
                self.now += seconds * count * self.speed

            return BenchCase(name, run, times)

    found = Clock()
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: found.now)
    return found


def test_ratio_is_taken_within_its_round(clock):
    speeds = iter([1.0, 1.2, 0.9, 1.1, 1.0])

    def slower(_number, _rounds):
        clock.speed = next(speeds)  # the machine drifts from round to round: the ratios do not

    base, other = measure([clock.case("base", 0.001), clock.case("other", 0.003)], 5, slower)
    assert (base.ratio, base.low, base.high) == (1.0, 1.0, 1.0)
    assert other.ratio == pytest.approx(3.0)
    assert other.low == pytest.approx(other.high)
    assert base.micros == pytest.approx(1000)


def test_range_of_two_rounds_stays_within_what_was_measured(clock):
    durations = cycle([0.001, 0.010])

    def run(count):
        clock.now += next(durations) * count

    _, other = measure([clock.case("base", 0.001), BenchCase("other", run, 10)], 2)
    assert 1.0 <= other.low < other.high <= 10.0


def test_disturbed_round_is_repeated(clock):
    reported = []

    def disturb(number, _rounds):
        reported.append(number)
        clock.speed = 9.0 if len(reported) == 3 else 1.0

    (base,) = measure([clock.case("base", 0.001)], 4, disturb)
    assert reported == [1, 2, 3, 3, 4]
    assert base.micros == pytest.approx(1000)


def test_measurement_takes_at_most_twice_the_rounds_on_slower_machine(clock):
    reported = []

    def slow_down(number, _rounds):
        reported.append(number)
        clock.speed = 1.0 if len(reported) < 2 else 9.0

    (base,) = measure([clock.case("base", 0.001)], 4, slow_down)
    assert len(reported) == 8, "twice as many rounds as asked for, and no more"
    assert base.micros > 1000


def test_case_without_count_is_calibrated_to_its_duration(clock):
    counted = []
    slow = clock.case("slow", 0.5, times=0)
    quick = clock.case("quick", 0.0001, times=0)

    def run(count):
        counted.append(count)
        quick.run(count)

    measure([slow, BenchCase("quick", run)], 2)
    assert counted[-1] == pytest.approx(500, rel=0.01), "a twentieth of a second"
    text = format_results("title", measure([slow], 2))
    assert "slow" in text
    assert "1.00" in text
