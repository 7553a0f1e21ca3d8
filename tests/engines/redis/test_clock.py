"""The Redis engine when the clock of its server jumps."""

from __future__ import annotations

import threading

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from leasehold import Client, LeaseLost
from leasehold.engines.redis.protocol import lock_keys
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.redis_servers import url


@pytest.fixture
def server_with_fake_clock():
    rig_or_skip(RedisRig)
    if not CAN_FAKE_CLOCK:
        pytest.skip("no false clocks: apt-get install faketime")
    server = RedisServer(fake_clock=True).start()
    yield server
    server.kill()


def test_forward_clock_jump_expires_lease_and_renew_reports_it(server_with_fake_clock) -> None:
    with Client(url(server_with_fake_clock)) as holder, Client(url(server_with_fake_clock)) as other:
        lease = holder.lock("job", ttl=30).acquire()
        server_with_fake_clock.set_clock(60)
        theirs = other.lock("job").acquire(wait=20)
        assert theirs.token > lease.token, "both clients may believe they hold it: a fence must decide"
        with pytest.raises(LeaseLost):
            lease.renew()


def test_backward_clock_jump_extends_leases_and_tokens_rise(server_with_fake_clock) -> None:
    with Client(url(server_with_fake_clock)) as client, Client(url(server_with_fake_clock)) as other:
        first = client.lock("job", ttl=30).acquire()
        server_with_fake_clock.set_clock(-3600)
        assert other.lock("job").try_acquire() is None
        second = client.lock("another", ttl=30).acquire()  # in any bucket
        assert first.release()
        third = other.lock("job", ttl=0.5).acquire(wait=5)
        assert third.token > first.token
        assert second.held
        third.renew()
        third.release()
        fourth = client.lock("job").acquire()
        assert fourth.token > third.token


@pytest.mark.parametrize("min_hold", [0.0, 0.3])
def test_released_name_is_free_after_clock_goes_back(start_redis, min_hold) -> None:
    if not CAN_FAKE_CLOCK:
        pytest.skip("no false clocks: apt-get install faketime")
    server = start_redis(fake_clock=True)
    with Client(url(server)) as one, Client(url(server)) as other:
        lease = one.lock("job", ttl=60, min_hold=min_hold).acquire()
        waiter = threading.Thread(target=lambda: other.lock("job", wait=20).acquire().release())
        waiter.start()
        poll(lambda: len(one.inspect()) == 2, 60, lambda: "the claim is queued")
        server.set_clock(-3600)
        lease.release()
        waiter.join(60)
        assert not waiter.is_alive(), one.inspect()
        assert not server.ask("EXISTS", *lock_keys("", "job")[1:]), "the keys would stay for an hour"
