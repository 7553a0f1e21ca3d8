"""Which load comes next, and whether and why the last one broke."""

from dataclasses import replace

import pytest

from leasehold.cli.bench.ramp import FIRST_RATE, MAX_STEPS, Ramp, RateStep, break_of, cause_of

CALM = RateStep(
    rate=100.0,
    done=100.0,
    p50=1.0,
    p95=2.0,
    p99=3.0,
    errors=0.0,
    error=None,
    client_cpu=0.1,
    machine_cpu=0.2,
    disk_wait=0.0,
)


def climb(breaks):
    """Run a ramp in which a step breaks if `breaks(rate, steps so far)`; returns it with the rates that it offered."""
    ramp, rates = Ramp(50.0), []
    while (rate := ramp.next_rate()) is not None:
        rates.append(rate)
        ramp.add(replace(CALM, rate=rate, done=rate, p99=99.0 if breaks(rate, len(ramp.steps)) else 1.0))
    return ramp, rates


def test_rate_doubles_until_it_breaks_and_then_narrows():
    ramp, rates = climb(lambda rate, _: rate > 1000)
    assert rates[:6] == [50, 100, 200, 400, 800, 1600]
    assert ramp.sustained.rate <= 1000 < ramp.broken.rate <= ramp.sustained.rate * 1.2


def test_step_that_breaks_only_once_is_not_the_limit():
    ramp, rates = climb(lambda rate, steps: steps == 2 or rate > 1000)
    assert rates[:5] == [50, 100, 200, 200, 400]
    assert ramp.sustained.rate > 800


def test_first_rate_that_breaks_is_followed_by_lower_ones():
    ramp, rates = climb(lambda rate, _: rate > 5)
    assert rates[:5] == [FIRST_RATE, FIRST_RATE, 12.5, 12.5, 3.125]
    assert 3 < ramp.sustained.rate <= 5


def test_ramp_ends_when_no_rate_is_sustained():
    ramp, rates = climb(lambda *_: True)
    assert ramp.sustained is None
    assert rates == [50, 50, 12.5, 12.5, 3.125, 3.125]


def test_ramp_ends_when_nothing_breaks_or_steps_never_settle():
    assert climb(lambda *_: False)[0].broken is None
    assert len(climb(lambda _, steps: steps % 3)[1]) <= MAX_STEPS


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, None),
        ({"p99": 51.0}, "p99 was 51 ms"),
        ({"done": 94.0}, "only 94 of 100 pairs a second were done"),
        ({"errors": 0.002, "error": "Unavailable: gone"}, "0.2% of the pairs failed: Unavailable: gone"),
        ({"errors": 0.0005}, None),
    ],
)
def test_step_breaks_by_p99_lag_or_errors(change, text):
    found = break_of(replace(CALM, **change), 50.0)
    assert found is None if text is None else text in found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"client_cpu": 0.95, "machine_cpu": 1.0}, "the clients: "),
        ({"disk_wait": 0.4}, "a disk of this machine"),
        ({"machine_cpu": 0.97}, "the processors of this machine, 97% busy"),
        ({}, "the engine or the network to it"),
        ({"machine_cpu": None, "disk_wait": None}, "the engine or the network to it"),
    ],
)
def test_cause_is_what_was_used_up(change, text):
    assert cause_of(replace(CALM, **change), 2).startswith(text)
