"""Every duration: a grant is never trusted longer than the engine keeps it, and renewals come in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core import timing
from leasehold.errors import ConfigError

seconds = st.floats(0.01, 1e6)
instants = st.floats(0, 1e6)
jitters = st.floats(0, 1, exclude_max=True)


@given(instants, seconds, st.floats(-timing.DRIFT / 2, timing.DRIFT / 2))
def test_trust_ends_before_the_engine_does_though_clocks_drift(asked: float, ttl: float, drift: float) -> None:
    trusted = timing.valid_until(asked, ttl) - asked
    assert trusted * (1 + drift) <= ttl * (1 + 1e-9)


@given(instants, seconds, jitters)
def test_a_renewal_is_due_at_a_third_at_the_latest_and_not_at_once(asked: float, ttl: float, jitter: float) -> None:
    due = timing.renew_at(asked, ttl, jitter)
    assert asked < due <= asked + ttl / 3 + 1e-6
    assert due < timing.overdue_at(asked, ttl) < timing.valid_until(asked, ttl) or ttl < 0.02


@given(instants, seconds, jitters)
def test_after_a_miss_there_is_time_for_several_tries(now: float, left: float, jitter: float) -> None:
    again = timing.retry_at(now, now + left, jitter)
    assert now < again <= now + max(left / 5, 0.0101)


@given(instants, seconds, seconds)
def test_no_renewal_outlasts_a_third_of_the_life_left(now: float, left: float, call_timeout: float) -> None:
    deadline = timing.renewal_deadline(now, now + left, call_timeout)
    assert deadline <= now + call_timeout
    assert deadline <= now + max(left / 3, 0.01) + 1e-6


def test_no_call_has_more_patience_than_the_lease_would_live() -> None:
    assert timing.call_deadline(10.0, 5.0, 30.0) == 15.0
    assert timing.call_deadline(10.0, 5.0, 2.0) == 12.0


@given(st.integers(0, 200), jitters)
def test_backoff_grows_to_its_bound_and_no_further(tries: int, jitter: float) -> None:
    assert 0 <= timing.backoff(tries, 0.05, 2.0, jitter) <= 2.0
    assert timing.backoff(60, 0.05, 2.0, 1.0) == 2.0


def test_an_advised_ttl_outlasts_its_worst_case_so_often() -> None:
    for work, network, safety in ((0.5, 0.2, 3), (2, 5, 3), (60, 1, 1), (0, 1, 10)):
        ttl = timing.advise_ttl(work, network, safety)
        trusted = timing.valid_until(0.0, ttl)
        assert safety * (work + network) <= trusted + 1e-9 <= safety * (work + network) * 1.02
    assert timing.advise_ttl(0, 0) == 1.0
    assert timing.advise_ttl(work=1, network=1) == timing.advise_ttl(1, 1, safety=3)


@pytest.mark.parametrize("wrong", [(-1, 1), (1, -1), (1, 1, 0.5), (float("nan"), 1), (1, float("inf"))])
def test_advice_on_nonsense_is_refused(wrong: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="advise_ttl"):
        timing.advise_ttl(*wrong)
