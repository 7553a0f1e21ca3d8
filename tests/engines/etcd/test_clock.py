"""How long claims live: rounded ttls, the server's minimum, dead waiters and paused holders."""

from __future__ import annotations

import signal
import time

import pytest

from leasehold import Client
from leasehold.model import Busy, Grant
from tests.support.timing import check_elapsed


@pytest.mark.extended  # a busy machine needs more than the ttl for a call
def test_ttl_is_rounded_up_to_whole_seconds(url) -> None:
    with Client(url) as client:
        assert (client.traits.min_ttl, client.traits.ttl_step) == (2.0, 1.0)
        with client.lock("job", ttl=0.5) as lease:
            assert 1.5 < lease.ttl <= 2.0
            lease.renew()
            assert 1.9 < lease.ttl <= 2.0
            lease.renew(7.2)
            assert 7.5 < lease.ttl <= 8.0
            assert lease.remaining > 7
            lease.renew(3)
            assert 2.9 < lease.ttl <= 3.0
            assert client.inspect()[0].left > 5, "a shorter renewal must not shorten the lease at etcd"


@pytest.mark.faults
def test_waiters_of_a_dead_client_expire(url, make_driver, eventually) -> None:
    dead, holder, other = make_driver(url), make_driver(url), make_driver(url)
    held = holder.acquire(holder.claim())
    assert isinstance(dead.attempt(dead.claim(queue=True)), Busy)
    waiting = other.claim(queue=True)
    assert other.attempt(waiting).position == 1
    holder.release(held)
    assert isinstance(other.attempt(waiting), Busy), "etcd does not know yet that the waiter ahead is dead"
    began = time.monotonic()
    eventually(lambda: isinstance(other.attempt(waiting), Grant), 25)
    check_elapsed(began, 15 + 3)


def test_longer_election_timeout_raises_min_ttl(start_member) -> None:
    member = start_member("--heartbeat-interval", "200", "--election-timeout", "4000")
    with Client(f"etcd://127.0.0.1:{member.port}") as client, client.lock("job", ttl=2) as lease:
        assert 5 < lease.ttl <= 6
        assert client.traits.min_ttl == 6.0
        lease.renew()
        assert 5.9 < lease.ttl <= 6


def test_holder_paused_beyond_its_ttl_does_not_report_a_break(url, child) -> None:
    """The watch reports deleted keys, and the watchdog reports passed deadlines: whichever comes first, no operator
    broke these leases."""
    holder = child("lose", url, 100, 3)
    assert holder.read_message() == "holding"
    holder.signal(signal.SIGSTOP)
    with Client(url) as client:
        for number in range(100):
            client.lock(str(number)).acquire(wait=60).release()
    holder.signal(signal.SIGCONT)
    assert set(holder.read_message()) <= {"stalled", "unreachable", "expired"}
