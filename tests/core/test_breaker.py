"""When the circuit breaker opens, probes and closes."""

from __future__ import annotations

from leasehold.core.breaker import MAX_UNANSWERED, PROBE_INTERVAL, Breaker


def opened(at: float = 100.0) -> Breaker:
    breaker = Breaker()
    assert [breaker.on_silence(at) for _ in range(MAX_UNANSWERED)] == [False] * 4 + [True]
    return breaker


def test_breaker_opens_after_5_unanswered_calls_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(MAX_UNANSWERED - 1):
            assert not breaker.on_silence(100.0)
        assert not breaker.on_answer()  # the row is broken
        assert breaker.retry_in(100.0) == 0.0
    assert opened().open


def test_open_breaker_sends_one_probe_a_second() -> None:
    breaker = opened(100.0)
    assert breaker.retry_in(100.25) == 0.75
    passed = [at / 10 for at in range(1000, 1100) if not breaker.retry_in(at / 10)]
    assert passed == [101.0 + second * PROBE_INTERVAL for second in range(9)]


def test_unanswered_probe_keeps_breaker_open_and_answer_closes_it() -> None:
    breaker = opened(100.0)
    assert breaker.retry_in(101.0) == 0.0
    assert not breaker.on_silence(101.5)  # open already: no second report
    assert breaker.retry_in(101.75) == 0.25
    assert breaker.on_answer()
    assert not breaker.on_answer()
    assert breaker.retry_in(101.75) == 0.0
