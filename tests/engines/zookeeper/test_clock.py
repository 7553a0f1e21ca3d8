"""Clocks that jump or run too fast expire no live holder, and no session is trusted for longer than its leader does."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.zookeeper import Ensemble
from leasehold import Client, NotAcquired
from leasehold.core.timing import DRIFT
from leasehold.engines.zookeeper.connection import HEARTBEAT_SHARE
from leasehold.engines.zookeeper.session_expiry import SessionExpiry
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_zookeeper


@pytest.mark.extended  # the holder must renew every second
@pytest.mark.parametrize("step_of_clock", [10.0, -10.0, 1e6])
def test_leader_clock_jump_expires_no_live_holder(url, monkeypatch, step_of_clock) -> None:
    """As the waiter sees it: its own writes are stamped by another clock than the holder's renewals."""
    original = getattr(*probe_zookeeper.RECORD_WRITE)

    def record_write(self, mine, sent, life, waits, stat) -> None:
        original(self, mine, sent, life, waits, stat._replace(mtime=stat.mtime + int(step_of_clock * 1000)))

    with Client(url) as one, Client(url) as two:
        one.ping()  # connect first: an attempt may take no longer than the ttl
        lease = one.lock("a", ttl=2).acquire()
        monkeypatch.setattr(*probe_zookeeper.RECORD_WRITE, record_write)
        with pytest.raises(NotAcquired):
            two.lock("a", wait=4.5).acquire()
        lease.check()
        assert lease.release()


@pytest.mark.extended  # the holder must renew every second
def test_fast_clock_of_a_waiter_expires_no_live_holder(url) -> None:
    """A holder expires only by both clocks: here the waiter's clock runs 100 times too fast, the leader's does not."""
    began = time.monotonic()
    fast_runtime = Threads(lambda: 100 * (time.monotonic() - began))
    with Client(url) as one, Client(url, runtime=fast_runtime, call_timeout=500) as two:
        lease = one.lock("a", ttl=2.0).acquire()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert two.lock("a", ttl=200).try_acquire() is None
        lease.check()
        assert lease.release()


FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@pytest.mark.faults
@pytest.mark.skipif(not os.path.exists(FAKETIME), reason="libfaketime is not installed: apt-get install faketime")
@pytest.mark.parametrize("ahead", [10, -10])
def test_leader_clocks_ten_seconds_apart_expire_no_live_holder(
    ahead, wait_until, tmp_path, url_of, client_pair, count_waiters
) -> None:
    """The next leader's clock is ten seconds off: live holders stay, and a holder that stops renewing still expires."""
    rig_or_skip(ZookeeperRig)
    clocks = [tmp_path / f"clock{n}" for n in range(3)]
    environments = []
    for clock in clocks:
        clock.write_text("+0")
        environments.append(
            {
                "LD_PRELOAD": FAKETIME,
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_CACHE_DURATION": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
        )
    ensemble = Ensemble({"tickTime": 2000}, environments).started  # libfaketime is slow: an election takes seconds
    try:
        url = url_of(*ensemble.members, session=40)
        with Client(url, call_timeout=30) as one, Client(url, call_timeout=30) as two:
            pair = client_pair(
                one, two, ttl=25.0
            )  # the longest that a session of 40 s allows: an election may take most of it
            waiter_thread = pair.start_second()
            wait_until(lambda: count_waiters(two) == 1)
            leader = ensemble.leader()
            for member, clock in zip(ensemble.members, clocks, strict=True):
                if member is not leader:
                    clock.write_text(f"{ahead:+d}")
            leader.kill()
            ensemble.leader()
            end = time.monotonic() + 32
            wait_until(lambda: time.monotonic() > end or not pair.first_lease.held or len(pair.leases) > 1, 60)
            assert pair.first_lease.held, f"a clock ended a live holder: {pair.first_lease.lost_reason}"
            pair.stop_renewing()  # its session stays alive
            waiter_thread.join(120)
            assert len(pair.leases) == 2
    finally:
        ensemble.kill()


SESSION_ID = 7


def connected_expiry(timeout: float = 40.0) -> SessionExpiry:
    expiry = SessionExpiry(DRIFT)
    expiry.on_connected(0.0, timeout, SESSION_ID)
    return expiry


def test_connect_confirms_the_session_at_once():
    assert connected_expiry().expires_at(SESSION_ID) == 40.0 * (1 - DRIFT)


def test_answer_alone_confirms_nothing():
    expiry = connected_expiry()
    for now in range(1, 100):
        expiry.on_answered(now - 0.1, now)
        expiry.provable_heartbeat(now)
    assert expiry.expires_at(SESSION_ID) == 40.0 * (1 - DRIFT), (
        "a follower that is cut off from the leader still answers"
    )


def test_write_confirms_heartbeats_answered_a_quarter_session_earlier():
    expiry = connected_expiry()
    expiry.on_answered(5.0, 5.1)
    assert expiry.provable_heartbeat(15.0) == 0.0, "the leader may not know of the heartbeat when it executes the write"
    assert expiry.provable_heartbeat(15.2) == 5.0
    expiry.on_answered(20.0, 20.1)
    assert expiry.provable_heartbeat(30.0) == 5.0
    assert expiry.provable_heartbeat(30.2) == 20.0
    expiry.confirm(20.0)
    assert expiry.expires_at(SESSION_ID) == 20.0 + 40.0 * (1 - DRIFT)
    expiry.confirm(5.0)
    assert expiry.expires_at(SESSION_ID) == 20.0 + 40.0 * (1 - DRIFT), "an older heartbeat moved the expiry back"


def test_reconnect_to_another_server_discards_earlier_heartbeats():
    expiry = connected_expiry()
    expiry.on_answered(50.0, 50.1)
    expiry.on_connected(49.0, 40.0, SESSION_ID)
    assert expiry.provable_heartbeat(500.0) == 49.0


def test_resumed_session_is_confirmed_by_the_next_write():
    expiry = connected_expiry()
    expiry.on_connected(30.0, 40.0, SESSION_ID)
    assert expiry.expires_at(SESSION_ID) == 40.0 * (1 - DRIFT), "a deposed leader confirms the session too"
    expiry.confirm(expiry.provable_heartbeat(30.1))
    assert expiry.expires_at(SESSION_ID) == 30.0 + 40.0 * (1 - DRIFT)


@given(
    tick=st.floats(0.1, 5.0),
    ticks=st.floats(2.0, 20.0),
    steps=st.lists(st.tuples(st.floats(0.001, 8.0), st.booleans()), min_size=1, max_size=40),
    phase=st.floats(0.0, 1.0),
)
def test_session_expiry_is_never_later_than_the_leaders(tick, ticks, steps, phase):
    """A follower reports heartbeats to the leader every half tick, and is cut off right after the last write."""
    timeout = tick * ticks
    expiry = connected_expiry(timeout)
    heartbeat_at, leader_counts_from, now = 0.0, 0.0, 0.0
    next_report = tick / 2 * phase
    for pause, write in steps:
        now += pause
        while next_report <= now:
            if heartbeat_at > leader_counts_from:
                leader_counts_from = next_report
            next_report += tick / 2
        provable_at = expiry.provable_heartbeat(now)
        heartbeat_at = now
        expiry.on_answered(now, now)
        if write:
            expiry.confirm(provable_at)
            assert expiry.expires_at(SESSION_ID) <= leader_counts_from + timeout + 1e-9


def test_session_in_steady_use_is_trusted_for_two_thirds():
    expiry, now, renewed = connected_expiry(), 0.0, 0.0
    for _ in range(500):
        now += 40.0 * HEARTBEAT_SHARE
        expiry.on_answered(now, now + 0.01)
        if now - renewed > 40.0 * 0.65 / 3:  # a renewal at a third of the ttl
            provable_at = expiry.provable_heartbeat(now)
            expiry.confirm(provable_at)
            renewed = now
            assert expiry.expires_at(SESSION_ID) - now >= 40.0 * 0.65


def test_replaced_session_is_not_trusted():
    expiry = connected_expiry()
    expiry.on_connected(50.0, 40.0, SESSION_ID + 1)
    assert expiry.expires_at(SESSION_ID) == float("-inf")
    assert expiry.expires_at(SESSION_ID + 1) > 50.0
