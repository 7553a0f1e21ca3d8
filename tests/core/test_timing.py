"""Timing: a client never trusts a grant longer than the engine keeps it, and renewals are due in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core import timing

seconds = st.floats(0.01, 1e6)
instants = st.floats(0, 1e6)
jitters = st.floats(0, 1, exclude_max=True)


@given(instants, seconds, st.floats(-timing.DRIFT / 2, timing.DRIFT / 2))
def test_valid_until_precedes_engine_expiry_despite_clock_drift(asked_at: float, ttl: float, drift: float) -> None:
    trusted = timing.valid_until(asked_at, ttl) - asked_at
    assert trusted * (1 + drift) <= ttl * (1 + 1e-9)


@given(instants, seconds, jitters)
def test_renewal_is_due_within_a_third_of_the_ttl(asked_at: float, ttl: float, jitter: float) -> None:
    due = timing.renew_at(asked_at, ttl, jitter)
    assert asked_at < due <= asked_at + ttl / 3 + 1e-6
    assert due < timing.overdue_at(asked_at, ttl) < timing.valid_until(asked_at, ttl) or ttl < 0.02


@given(instants, seconds, jitters)
def test_retry_interval_leaves_time_for_several_retries(now: float, left: float, jitter: float) -> None:
    again = timing.retry_at(now, now + left, jitter)
    assert now < again <= now + max(left / 5, 0.0101)


@given(instants, seconds, seconds)
def test_renewal_deadline_is_within_half_of_remaining_ttl(now: float, left: float, call_timeout: float) -> None:
    deadline = timing.renewal_deadline(now, now + left, call_timeout)
    assert deadline <= now + call_timeout
    assert deadline <= now + max(left / 2, 0.01) + 1e-6
    slow = timing.renewal_deadline(now, now + left, call_timeout, slow=True)
    assert deadline <= slow <= now + max(left * 2 / 3, 0.01) + 1e-6


@given(seconds, st.integers(1, 9), seconds)
def test_server_share_leaves_time_for_other_servers(left: float, servers: int, last_answer: float) -> None:
    share = timing.server_share(left, servers, last_answer)
    assert left / servers <= share <= (left if servers == 1 else 0.9 * left)


def test_server_share_grows_only_with_slow_answers() -> None:
    assert timing.server_share(3.0, 3, 0.02) == 1.0
    assert timing.server_share(3.0, 3, 0.5) == 1.5
    assert timing.server_share(3.0, 3, 60.0) == pytest.approx(2.7)


def test_call_deadline_never_exceeds_the_ttl() -> None:
    assert timing.call_deadline(10.0, 5.0, 30.0) == 15.0
    assert timing.call_deadline(10.0, 5.0, 2.0) == 12.0


@given(st.integers(0, 200), jitters)
def test_backoff_never_exceeds_its_maximum(tries: int, jitter: float) -> None:
    assert 0 <= timing.backoff(tries, 0.05, 2.0, jitter) <= 2.0
    assert timing.backoff(60, 0.05, 2.0, 1.0) == 2.0


def test_waiter_far_behind_attempts_if_unconfirmed_or_after_a_minute() -> None:
    kept = timing.WAITER_TTL * 0.8
    assert timing.needs_no_attempt(100, 0.0, 20.0, 20.0 + kept - 0.1)
    assert not timing.needs_no_attempt(100, 0.0, 20.0, 20.0 + kept)
    assert timing.needs_no_attempt(100, 0.0, 59.0, 59.9)
    assert not timing.needs_no_attempt(100, 0.0, 59.0, 60.0)
    assert not timing.needs_no_attempt(99, 0.0, 20.0, 20.0)
    assert not timing.needs_no_attempt(None, 0.0, 20.0, 20.0)
