"""Clients of ZooKeeper cut off, killed and stopped: whoever loses its lease knows before anybody else has it."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from leasehold import Client, LeaseLost, LeaseState, Unavailable
from leasehold.testing.servers.proxy import Proxy


@pytest.mark.parametrize(("session", "ttl"), [(2.0, 30.0), (6.0, 1.5)], ids=["session-ends-it", "ttl-ends-it"])
def test_a_client_cut_off_stops_before_anybody_else_begins(
    session, ttl, url_of, server, proxy, watcher, in_line, until
) -> None:
    with Client(url_of(proxy, session=session), call_timeout=1) as one, Client(url_of(server, session=session)) as two:
        both = watcher(one, two, ttl=ttl)
        following = both.follow()
        until(lambda: in_line(two) == 1)
        proxy.cut()
        cut = time.monotonic()
        until(lambda: both.first.state is LeaseState.AT_RISK or not both.first.held)
        following.join(30)
        assert both.granted_at - cut < min(session, ttl) * 1.1 + 4, "within its session or its ttl, and a tick or two"
        assert both.first.lost_reason == "unreachable"
        both.close()
        proxy.mend()
        with pytest.raises(LeaseLost):
            both.first.renew()


def test_a_server_that_falls_silent_is_left_however_much_it_is_asked(url_of, server, session_of, until) -> None:
    """Two ways to one server. A driver that counts from what it sent last would never find out."""
    ways, over = [Proxy(server.port), Proxy(server.port)], threading.Event()
    with Client(url_of(*ways, session=10), call_timeout=0.2) as client:
        lease = client.lock("a", ttl=60).acquire(wait=30)

        def ask() -> None:
            while not over.is_set():
                with suppress(Unavailable):
                    client.ping()

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        session = session_of(client)
        used = session._keeper._connection._tried[2]
        next(way for way in ways if way.port == used).cut()
        cut = time.monotonic()
        until(lambda: not lease.held or (session._connected and session._keeper._connection._tried[2] != used))
        print(f"left after {time.monotonic() - cut:.2f} s")
        over.set()
        for thread in threads:
            thread.join(30)
        until(lambda: lease.state is not LeaseState.AT_RISK)
        assert lease.held
        assert lease.release()
    for way in ways:
        way.close()


def test_a_broken_connection_puts_at_risk_at_once_and_heals(url_of, proxy, until) -> None:
    """SUSPENDED: not after a missed renewal, but as soon as the connection is seen to be gone."""
    events: list[str] = []
    with Client(url_of(proxy), on_event=lambda event: events.append(event.kind)) as client:
        lease = client.lock("a", ttl=600).acquire()
        proxy.reset()
        until(lambda: "at_risk" in events, 5)
        assert lease.held
        until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()


def test_waiters_outlast_a_broken_connection(url_of, server, proxy, watcher, in_line, until) -> None:
    with Client(url_of(server)) as holder, Client(url_of(proxy)) as waiter:
        both = watcher(holder, waiter)
        following = both.follow()
        until(lambda: in_line(holder) == 1)
        for _ in range(5):
            proxy.reset()
        released = time.monotonic()
        assert both.first.release()
        following.join(30)
        assert both.granted_at - released < 4, "it looked again as soon as it was connected"


# ------------------------------------------------------------------------------------------------------------ processes


def test_a_killed_holder_is_followed_within_its_session(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    holder.hear()
    waiter = child("wait", url, "a", 30)
    assert waiter.hear() == "waiting"
    holder.kill()
    killed = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert waiter.hear()["at"] - killed < 2 + 4


def test_a_killed_waiter_holds_up_nobody_for_longer_than_its_session(url_of, server, child) -> None:
    url = url_of(server, session=2)
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        dead = child("wait", url, "a", 60)
        assert dead.hear() == "waiting"
        next_ = child("wait", url, "a", 60)
        assert next_.hear() == "waiting"
        dead.kill()
        lease.release()
        released = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert next_.hear()["at"] - released < 2 + 4


def test_a_stopped_holder_loses_its_lease_and_finds_out(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    first = holder.hear()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client, client.lock("a", wait=30) as lease:
        assert lease.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.go()
        said = holder.hear()
        assert not said["held"]
        assert not said["released"]
        lease.renew()
