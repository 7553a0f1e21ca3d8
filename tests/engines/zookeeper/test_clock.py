"""Clocks of leaders and clients that jump or run too fast must not expire a live holder."""

from __future__ import annotations

import os
import time

import pytest

from harness.rigs.zookeeper import ZookeeperRig
from harness.servers.zookeeper import Ensemble
from leasehold import Client, NotAcquired
from leasehold.engines.zookeeper.attempt import ZookeeperAttempt
from leasehold.runtime.threads import Threads
from leasehold.testing.conformance.suite import rig_or_skip


@pytest.mark.parametrize("step_of_clock", [10.0, -10.0, 1e6])
def test_leader_clock_jump_expires_no_live_holder(url, monkeypatch, step_of_clock) -> None:
    """As the waiter sees it: its own writes are stamped by another clock than the holder's renewals."""
    original = ZookeeperAttempt._record_write

    def record_write(self, mine, sent, life, waits, stat) -> None:
        original(self, mine, sent, life, waits, stat._replace(mtime=stat.mtime + int(step_of_clock * 1000)))

    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=0.6).acquire()
        monkeypatch.setattr(ZookeeperAttempt, "_record_write", record_write)
        with pytest.raises(NotAcquired):
            two.lock("a", wait=2.5).acquire()
        lease.check()
        assert lease.release()


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
