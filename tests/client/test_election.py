"""Elections: one leader at a time, terms in order, and what observers see of them."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, ConfigError, LeaseLost, NotAcquired, SelfDeadlock, Unsupported
from leasehold.core.timing import TERM_VISIBLE
from leasehold.engines.memory import TRAITS
from tests.support import probe

# ------------------------------------------------------------- campaign
from tests.support.timing import check_elapsed


def test_candidate_campaigns_and_resigns(bench) -> None:
    first_election, second_election = (bench.client(holder=name).election("boss", ttl=5) for name in ("web-1", "web-2"))
    assert first_election.leader() is None
    assert not first_election.resign()
    term = first_election.campaign()
    assert term.held
    leader = second_election.leader()
    assert (leader.name, leader.token, leader.holder.label) == ("boss", term.token, "web-1")
    with pytest.raises(NotAcquired, match="web-1"):
        second_election.campaign(wait=0)
    with pytest.raises(SelfDeadlock, match="resign"):
        first_election.campaign()
    assert first_election.resign()
    assert not first_election.resign()
    assert first_election.leader() is None
    bench.clock.advance(TERM_VISIBLE)
    second = second_election.campaign(wait=0)
    assert second.token > term.token
    second_election.resign()


def test_lead_with_block_leads_and_raises_when_term_is_lost(bench) -> None:
    election = bench.client().election("boss")
    with election.lead() as term:
        assert election.leader().token == term.token
    assert election.leader() is None
    bench.clock.advance(TERM_VISIBLE)
    client = bench.client()
    with pytest.raises(LeaseLost, match="broke"), election.lead() as term:
        client.break_lock("boss", token=term.token)
        term.wait_lost(60)


def test_election_checks_options_and_required_traits(bench) -> None:
    client = bench.client()
    with pytest.raises(ConfigError, match="cannot be reentrant"):
        client.election("boss", reentrant=True)
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.election("boss", timeout=3)
    with pytest.raises(TypeError, match=r"ttl= .* wait="):
        client.election("boss").campaign(timeout=3)
    probe.engine(client).traits = TRAITS._replace(fencing=False)
    with pytest.raises(Unsupported, match="fencing"):
        client.election("boss")
    probe.engine(client).traits = TRAITS._replace(outlives=False)
    assert probe.lock_of(client.election("boss")).options.min_hold == 0, "min_hold needs the trait outlives"
    probe.engine(client).traits = TRAITS
    assert probe.lock_of(client.election("boss", min_hold=5)).options.min_hold == 5
    assert probe.lock_of(client.election("boss", max_hold=0.5)).options.min_hold == 0.5
    assert "boss" in repr(client.election("boss"))


# ------------------------------------------------------------- observing


@pytest.mark.extended  # an observer that gets no processor for a second misses a term
def test_observer_sees_current_term_and_each_later_term_once(url) -> None:
    with Client(url) as client, Client(url) as other:
        election = client.election("boss", ttl=5)
        first = election.campaign()
        seen = []

        def observe_terms() -> None:
            seen.extend(other.election("boss", ttl=5).observe(seconds=6))

        thread = threading.Thread(target=observe_terms)
        thread.start()
        tokens = [first.token]
        for _ in range(3):  # each is resigned at once, but stays visible for TERM_VISIBLE
            election.resign()
            tokens.append(election.campaign(wait=10).token)
        election.resign()
        thread.join(30)
        assert not thread.is_alive()
        assert [term.token for term in seen] == tokens
        assert not any(term.missed for term in seen)


def test_observer_reports_missed_terms(bench) -> None:
    election, other = bench.client().election("boss"), bench.client()
    terms = other.election("boss").observe()
    tokens = [election.campaign().token]
    assert next(terms).token == tokens[0]
    election.resign()
    bench.clock.advance(TERM_VISIBLE)
    tokens.append(election.campaign().token)
    election.resign()
    bench.clock.advance(TERM_VISIBLE)
    tokens.append(election.campaign().token)
    third = next(terms)
    assert (third.token, third.missed) == (tokens[2], True)
    election.resign()
    bench.clock.advance(0.5)
    bench.transport.silent = True
    bench.clock.advance(TERM_VISIBLE)


def test_observe_ends_after_its_seconds(url) -> None:
    with Client(url) as client:
        began = time.monotonic()
        assert list(client.election("boss").observe(seconds=0.3)) == []
        assert time.monotonic() - began >= 0.3
        check_elapsed(began, 3)
        assert list(client.election("boss").observe(seconds=0)) == []
        with pytest.raises(ConfigError, match="seconds"):
            client.election("boss").observe(seconds=-1)


def test_observer_retries_unresponsive_engine(bench, wait_until) -> None:
    observer, election = bench.client().election("boss"), bench.client().election("boss")
    term = election.campaign()
    bench.transport.silent = True
    seen = []
    thread = threading.Thread(target=lambda: seen.append(next(observer.observe())))
    thread.start()
    calls = bench.transport.calls
    wait_until(lambda: bench.transport.calls > calls)
    bench.transport.silent = False
    bench.clock.advance(1)
    thread.join(30)
    assert not thread.is_alive()
    assert seen[0].token == term.token
    election.resign()
