"""Elections: one leader, and terms in order, by hand and as seen by others."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from leasehold import Client, ConfigError, LeaseLost, NotAcquired, SelfDeadlock, Unsupported
from leasehold.core.timing import LINGER
from leasehold.engines.memory import TRAITS

# --------------------------------------------------------------- by hand


def test_one_campaigns_and_resigns(bench) -> None:
    one, two = (bench.client(holder=name).election("boss", ttl=5) for name in ("web-1", "web-2"))
    assert one.leader() is None
    assert not one.resign()
    term = one.campaign()
    assert term.held
    leader = two.leader()
    assert (leader.name, leader.token, leader.holder.label) == ("boss", term.token, "web-1")
    with pytest.raises(NotAcquired, match="web-1"):
        two.campaign(wait=0)
    with pytest.raises(SelfDeadlock, match="resign"):
        one.campaign()
    assert one.resign()
    assert not one.resign()
    assert one.leader() is None
    bench.clock.turn(LINGER)
    second = two.campaign(wait=0)
    assert second.token > term.token
    two.resign()


def test_leading_by_with(bench) -> None:
    election = bench.client().election("boss")
    with election.lead() as term:
        assert election.leader().token == term.token
    assert election.leader() is None
    bench.clock.turn(LINGER)
    client = bench.client()
    with pytest.raises(LeaseLost, match="broke"), election.lead() as term:
        client.break_lock("boss", token=term.token)
        term.wait_lost(10)


def test_what_an_election_needs(bench) -> None:
    client = bench.client()
    with pytest.raises(ConfigError, match="not reentrant"):
        client.election("boss", reentrant=True)
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.election("boss", timeout=3)
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.election("boss").campaign(timeout=3)
    client._desk._engine.traits = replace(TRAITS, fencing=False)
    with pytest.raises(Unsupported, match="fencing"):
        client.election("boss")
    client._desk._engine.traits = replace(TRAITS, outlives=False)
    assert client.election("boss")._lock.options.min_hold == 0, "where nothing outlives its client, nothing lingers"
    client._desk._engine.traits = TRAITS
    assert client.election("boss", min_hold=5)._lock.options.min_hold == 5
    assert client.election("boss", max_hold=0.5)._lock.options.min_hold == 0.5
    assert "boss" in repr(client.election("boss"))


# ------------------------------------------------------------- observing


def test_an_observer_sees_the_term_under_way_and_then_each_once(url) -> None:
    with Client(url) as client, Client(url) as other:
        election = client.election("boss", ttl=5)
        first = election.campaign()
        seen = []

        def look() -> None:
            seen.extend(other.election("boss", ttl=5).observe(seconds=6))

        thread = threading.Thread(target=look)
        thread.start()
        tokens = [first.token]
        for _ in range(3):  # each resigned at once: in view for a second all the same
            election.resign()
            tokens.append(election.campaign(wait=10).token)
        election.resign()
        thread.join(30)
        assert not thread.is_alive()
        assert [term.token for term in seen] == tokens
        assert not any(term.missed for term in seen)


def test_an_observer_that_could_not_look_says_so(bench) -> None:
    election, other = bench.client().election("boss"), bench.client()
    terms = other.election("boss").observe()
    tokens = [election.campaign().token]
    assert next(terms).token == tokens[0]
    election.resign()
    bench.clock.turn(LINGER)
    tokens.append(election.campaign().token)
    election.resign()
    bench.clock.turn(LINGER)
    tokens.append(election.campaign().token)
    third = next(terms)
    assert (third.token, third.missed) == (tokens[2], True)
    election.resign()
    bench.clock.turn(0.5)
    bench.link.silent = True
    bench.clock.turn(LINGER)


def test_an_observation_ends_when_its_time_is_over(url) -> None:
    with Client(url) as client:
        began = time.monotonic()
        assert list(client.election("boss").observe(seconds=0.3)) == []
        assert 0.3 <= time.monotonic() - began < 3
        assert list(client.election("boss").observe(seconds=0)) == []
        with pytest.raises(ConfigError, match="seconds"):
            client.election("boss").observe(seconds=-1)


def test_a_silent_engine_is_asked_again(bench, wait_until) -> None:
    observer, election = bench.client().election("boss"), bench.client().election("boss")
    term = election.campaign()
    bench.link.silent = True
    seen = []
    thread = threading.Thread(target=lambda: seen.append(next(observer.observe())))
    thread.start()
    calls = bench.link.calls
    wait_until(lambda: bench.link.calls > calls)
    bench.link.silent = False
    bench.clock.turn(1)
    thread.join(30)
    assert not thread.is_alive()
    assert seen[0].token == term.token
    election.resign()
