"""The circuit breaker of a client, on a simulated clock."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator

import pytest

from leasehold import Client, ConfigError, Event, NotAcquired, Unavailable
from leasehold.engines import memory
from leasehold.testing import Clock, Faults, drop_answer, drop_request, faulty
from leasehold.testing.clock import ClockThreads
from tests.support import probe


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def client(clock: Clock, faults: Faults, events: list[Event]) -> Iterator[Client]:
    client = Client(
        "memory://",
        engine=faulty(memory.open, faults),
        runtime=ClockThreads(clock),
        on_event=events.append,
        breaker=True,
    )
    yield client
    faults.clear()
    client.close()


def kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events if event.kind.startswith("breaker")]


def fail(client: Client, times: int = 5) -> None:
    """Unanswered pings: unlike attempts, they leave no release for the watchdog to send, which would count too."""
    for _ in range(times):
        with pytest.raises(Unavailable) as caught:
            client.ping()
        assert caught.value.retry_in is None  # it was sent


def refused(client: Client) -> float:
    """When the breaker says that it tries again."""
    with pytest.raises(Unavailable, match="circuit breaker tries again in") as caught:
        client.lock("a", wait=0).acquire()
    assert caught.value.retry_in is not None
    return caught.value.retry_in


def cut_off(faults: Faults) -> None:
    for verb in ("attempt", "renew", "release", "ping", "inspect", "forget"):
        faults.always(verb, drop_request)


def test_breaker_that_is_not_a_bool_is_refused() -> None:
    with pytest.raises(ConfigError, match="breaker must be True or False"):
        Client("memory://", breaker="yes")  # type: ignore[arg-type]


def test_pickled_client_keeps_its_breaker() -> None:
    with Client("memory://", breaker=True) as client, pickle.loads(pickle.dumps(client)) as copy:
        assert probe.client_options(copy).breaker


def test_open_breaker_refuses_at_once_and_says_when_it_retries(client, clock, faults, events, caplog) -> None:
    faults.always("ping", drop_request)
    with caplog.at_level(logging.INFO):
        fail(client)
        assert [refused(client) for _ in range(1000)] == [1.0] * 1000
        clock.advance(0.25)
        assert refused(client) == 0.75
        with pytest.raises(Unavailable, match="circuit breaker"):
            client.inspect()
        assert set(faults.calls) == {"ping"}  # refused attempts were not sent, so nothing is released
        assert not probe.pending_releases(client)
        clock.advance(0.75)
        faults.clear()
        with client.lock("a", wait=0):  # the probe
            pass
        clock.wait_idle()
    assert kinds(events) == ["breaker_opened", "breaker_closed"]
    assert "circuit breaker is open" in caplog.text
    assert "circuit breaker is closed" in caplog.text


def test_open_breaker_sends_one_attempt_a_second(client, clock, faults) -> None:
    cut_off(faults)
    fail(client)
    before = faults.calls.count("attempt")
    for _ in range(100):  # ten seconds
        clock.advance(0.1)
        for _ in range(20):
            with pytest.raises(Unavailable):
                client.lock("a", wait=0).acquire()
    assert 9 <= faults.calls.count("attempt") - before <= 10


def test_renewals_and_releases_pass_open_breaker(client, clock, faults) -> None:
    with client.lock("held", ttl=30) as lease:
        faults.always("ping", drop_request)
        faults.always("renew", drop_request)
        fail(client)
        refused(client)
        clock.advance(15)
        assert faults.calls.count("renew") >= 2
        released = faults.calls.count("release")
        assert lease.release()
        assert faults.calls.count("release") == released + 1


def test_answered_renewal_closes_breaker(client, clock, faults, events) -> None:
    with client.lock("held", ttl=30):
        faults.next("ping", *[drop_request] * 5)
        fail(client)
        refused(client)
        clock.advance(11)
        assert kinds(events) == ["breaker_opened", "breaker_closed"]
        with client.lock("a", wait=0):
            pass


def test_busy_is_an_answer(client, clock, faults, events) -> None:
    with client.lock("a"):
        for _ in range(10):
            faults.next("ping", *[drop_request] * 4)
            fail(client, 4)
            with pytest.raises(NotAcquired):
                client.lock("a", wait=0).acquire()
    clock.wait_idle()
    assert kinds(events) == []


def test_wait_for_engine_follows_breaker_and_releases_what_was_sent(client, clock, faults) -> None:
    faults.always("attempt", drop_answer)
    faults.always("forget", drop_request)
    with clock.skipping(), pytest.raises(Unavailable):
        client.lock("a", wait=20, on_unavailable="wait").acquire()
    assert faults.calls.count("attempt") <= 26
    clock.advance(2)
    faults.clear()
    assert not client.inspect("a")  # the claim that was granted without an answer is released


def test_run_does_not_wait_for_open_breaker(client, faults) -> None:
    cut_off(faults)
    fail(client)
    attempts = faults.calls.count("attempt")
    with client.lock("a", on_unavailable="run") as lease:
        assert not lease.guaranteed
    assert faults.calls.count("attempt") == attempts
