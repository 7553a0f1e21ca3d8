"""The Redis engine while its server is killed, paused, cut off or full, or its clock jumps.

Each test starts its own server. Faults that apply to Redlock, too, are in test_outage_also_redlock.py; what waiters do
during a restart is in test_wakeups_after_restart.py.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.process import poll
from harness.servers.proxy import Proxy
from harness.servers.redis import CAN_FAKE_CLOCK, RedisServer
from leasehold import AsyncClient, Client, ConfigError, LeaseLost, Unavailable
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.foreign_clients import Waiter, serve_fixed_reply


@pytest.fixture
def server():
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    server = RedisServer().start()
    yield server
    server.kill()


@pytest.fixture
def server_with_fake_clock():
    rig_or_skip(RedisRig)
    if not CAN_FAKE_CLOCK:
        pytest.skip("no false clocks: apt-get install faketime")
    server = RedisServer(fake_clock=True).start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def url(server) -> str:
    return f"redis://127.0.0.1:{server.port}"


def has_waiters(client, count=1) -> bool:
    return sum(holding.state == "waiting" for holding in client.inspect()) == count


# ------------------------------------------------ killed, paused, restarted


def test_server_restarted_empty_frees_locks_and_tokens_rise(server, wait_until) -> None:
    with Client(url(server), call_timeout=1) as holder, Client(url(server), call_timeout=1) as other:
        lease = holder.lock("job", ttl=60).acquire()
        server.restart()  # without persistence
        wait_until(lambda: other.ping() >= 0 if is_reachable(other) else False)
        theirs = other.lock("job").acquire()
        assert theirs.token > lease.token, "a fence still remembers the older token"
        with pytest.raises(LeaseLost):
            lease.renew()
        assert lease.lost_reason == "unknown"
        assert theirs.held


def is_reachable(client) -> bool:
    try:
        client.ping()
    except Unavailable:
        return False
    return True


def wait_until_waiter_is_idle(server, holder) -> None:
    """Until a claim waits and its client makes no call: the answer to a call could replace the wake-up under test."""

    def is_idle() -> bool:
        before = server.calls().get("evalsha")
        time.sleep(0.2)  # a waiter re-checks once after it has subscribed
        return server.calls().get("evalsha") == before

    poll(lambda: has_waiters(holder), 10, lambda: "the claim is queued")
    poll(is_idle, 10, lambda: "the waiter makes no more calls")


def test_lease_is_lost_by_client_clock_when_server_is_paused(server) -> None:
    with Client(url(server), call_timeout=0.3) as client:
        lease = client.lock("job", ttl=1).acquire()
        server.pause()
        assert lease.wait_lost(5)
        assert lease.lost_reason == "unreachable"
        server.resume()


def test_full_server_refuses_new_locks_and_keeps_held_ones(server) -> None:
    with Client(url(server), call_timeout=1) as client, Client(url(server), call_timeout=1) as other:
        lease, other_lease = client.lock("kept", ttl=3).acquire(), client.lock("freed").acquire()
        waiter = Waiter(other, "kept")
        wait_until_waiter_is_idle(server, client)
        server.ask("CONFIG", "SET", "maxmemory", 1)
        with pytest.raises(Unavailable, match="OOM"):
            other.lock("new").acquire(wait=0)
        lease.renew()
        assert client.lock("new").locked() is False, "reads are allowed"
        assert other_lease.release()
        assert has_waiters(client), "the waiter keeps its position"
        server.ask("CONFIG", "SET", "maxmemory", 0)
        assert lease.release()
        assert waiter.wait_granted().held


# ------------------------------------------------------------------- network


def test_silent_subscription_is_detected_and_replaced(server, proxy, monkeypatch) -> None:
    from leasehold.engines.redis import pubsub

    monkeypatch.setattr(pubsub, "HEARTBEAT_INTERVAL", 0.3)  # seconds of silence before the listener sends a PING
    with Client(f"redis://127.0.0.1:{proxy.port}", call_timeout=0.3) as client:
        client.lock("job").acquire().release()
        subscription = client._core.registry.shared["redis"].subscriptions
        assert subscription.active
        proxy.cut()
        poll(lambda: not subscription.active, 10, lambda: "the listener gets no reply to its PING")
        proxy.restore()
        poll(lambda: subscription.active, 10, lambda: "the listener is subscribed again")


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n", b"*-1\r\n" * 9, b"", b"$-5\r\n"])
def test_server_that_is_not_redis_is_refused(reply) -> None:
    with serve_fixed_reply(reply) as port:
        client = Client(f"redis://127.0.0.1:{port}", call_timeout=0.3)
        with client, pytest.raises((Unavailable, ConfigError)):
            client.lock("job").acquire()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{port}", call_timeout=0.3) as client:
                with pytest.raises((Unavailable, ConfigError)):
                    await client.lock("job").acquire()

        asyncio.run(main())


# ---------------------------------------------------------------- clock


def test_forward_clock_jump_expires_lease_and_renew_reports_it(server_with_fake_clock) -> None:
    with Client(url(server_with_fake_clock)) as holder, Client(url(server_with_fake_clock)) as other:
        lease = holder.lock("job", ttl=30).acquire()
        server_with_fake_clock.set_clock(60)
        theirs = other.lock("job").acquire(wait=5)
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
