"""Clocks of ZooKeeper's leaders and of its clients that step, or run too fast: they end no live holder."""

from __future__ import annotations

import os
import time

import pytest

from leasehold import Client, NotAcquired
from leasehold.engines.zookeeper.line import Visit
from leasehold.runtime.threads import Threads
from leasehold.testing.servers.zookeeper import Ensemble
from leasehold.testing.suite import made
from leasehold.testing.zookeeper_rig import ZookeeperRig


@pytest.mark.parametrize("step_of_clock", [10.0, -10.0, 1e6])
def test_a_step_of_the_leaders_clock_ends_no_live_holder(url, monkeypatch, step_of_clock) -> None:
    """As the waiter sees it: what the leader writes for it is stamped by another clock than the holder's renewals."""
    true = Visit._wrote

    def wrote(self, mine, sent, life, waits, stat) -> None:
        true(self, mine, sent, life, waits, stat._replace(mtime=stat.mtime + int(step_of_clock * 1000)))

    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=0.6).acquire()
        monkeypatch.setattr(Visit, "_wrote", wrote)
        with pytest.raises(NotAcquired):
            two.lock("a", wait=2.5).acquire()
        lease.check()
        assert lease.release()


def test_a_waiters_fast_clock_ends_no_live_holder(url) -> None:
    """It takes both: here the waiter's own clock runs a hundred times too fast, and the leader's does not."""
    began = time.monotonic()
    hasty = Threads(lambda: 100 * (time.monotonic() - began))
    with Client(url) as one, Client(url, runtime=hasty, call_timeout=500) as two:
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
def test_leaders_clocks_ten_seconds_apart_end_nobodys_lease(ahead, until, tmp_path, url_of, watcher, in_line) -> None:
    """The next leader's clock is ten seconds off: no live holder is ended by that, and a dead one still is."""
    made(ZookeeperRig)
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
    three = Ensemble({"tickTime": 2000}, environments).started  # false clocks are slow: an election takes seconds
    try:
        url = url_of(*three.members, session=40)
        with Client(url, call_timeout=30) as one, Client(url, call_timeout=30) as two:
            both = watcher(one, two, ttl=25.0)  # all of what a session of 40 s allows: the election may take most of it
            following = both.follow()
            until(lambda: in_line(two) == 1)
            leader = three.leader()
            for member, clock in zip(three.members, clocks, strict=True):
                if member is not leader:
                    clock.write_text(f"{ahead:+d}")
            leader.kill()
            three.leader()
            end = time.monotonic() + 32
            until(lambda: time.monotonic() > end or not both.first.held or len(both.leases) > 1, 60)
            assert both.first.held, f"a clock ended a live holder: {both.first.lost_reason}"
            both.stop_renewing()  # but its session lives
            following.join(120)
            assert len(both.leases) == 2
    finally:
        three.kill()
