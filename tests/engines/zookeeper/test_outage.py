"""Clients are cut off, killed and stopped: a client that loses its lease knows before the next client holds it."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from harness.servers.process import free_ports
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseLost, LeaseState, Unavailable
from leasehold.model import Grant


@pytest.mark.parametrize(("session", "ttl"), [(2.0, 30.0), (6.0, 1.5)], ids=["session-ends-it", "ttl-ends-it"])
def test_client_cut_off_stops_trusting_before_the_next_grant(
    session, ttl, url_of, server, proxy, client_pair, count_waiters, wait_until
) -> None:
    with Client(url_of(proxy, session=session), call_timeout=1) as one, Client(url_of(server, session=session)) as two:
        pair = client_pair(one, two, ttl=ttl)
        waiter_thread = pair.start_second()
        wait_until(lambda: count_waiters(two) == 1)
        proxy.cut()
        cut = time.monotonic()
        wait_until(lambda: pair.first_lease.state is LeaseState.AT_RISK or not pair.first_lease.held)
        waiter_thread.join(30)
        assert pair.granted_at - cut < min(session, ttl) * 1.1 + 4, "granted later than session or ttl allow"
        assert pair.first_lease.lost_reason == "unreachable"
        pair.close()
        proxy.restore()
        with pytest.raises(LeaseLost):
            pair.first_lease.renew()


def test_client_leaves_a_silent_server_even_under_constant_calls(url_of, server, session_of, wait_until) -> None:
    """Two proxies lead to one server. A driver that counts silence from its last request would never detect it."""
    proxies, stop = [Proxy(server.port), Proxy(server.port)], threading.Event()
    with Client(url_of(*proxies, session=10), call_timeout=0.2) as client:
        lease = client.lock("a", ttl=60).acquire(wait=30)

        def ask() -> None:
            while not stop.is_set():
                with suppress(Unavailable):
                    client.ping()

        threads = [threading.Thread(target=ask) for _ in range(20)]
        for thread in threads:
            thread.start()
        session = session_of(client)
        used = session._kazoo._connection._last_server[2]
        next(proxy for proxy in proxies if proxy.port == used).cut()
        cut = time.monotonic()
        wait_until(
            lambda: not lease.held or (session._connected and session._kazoo._connection._last_server[2] != used)
        )
        print(f"left after {time.monotonic() - cut:.2f} s")
        stop.set()
        for thread in threads:
            thread.join(30)
        wait_until(lambda: lease.state is not LeaseState.AT_RISK)
        assert lease.held
        assert lease.release()
    for proxy in proxies:
        proxy.close()


def test_broken_connection_puts_a_lease_at_risk_until_reconnected(url_of, proxy, wait_until) -> None:
    """kazoo's SUSPENDED: the lease is at risk as soon as the connection breaks, not after a failed renewal."""
    events: list[str] = []
    with Client(url_of(proxy), on_event=lambda event: events.append(event.kind)) as client:
        lease = client.lock("a", ttl=600).acquire()
        proxy.reset()
        wait_until(lambda: "at_risk" in events, 5)
        assert lease.held
        wait_until(lambda: lease.state is LeaseState.HELD, 10)
        assert lease.release()


def test_waiter_survives_a_broken_connection(url_of, server, proxy, client_pair, count_waiters, wait_until) -> None:
    with Client(url_of(server)) as holder, Client(url_of(proxy)) as waiter:
        pair = client_pair(holder, waiter)
        waiter_thread = pair.start_second()
        wait_until(lambda: count_waiters(holder) == 1)
        for _ in range(5):
            proxy.reset()
        released = time.monotonic()
        assert pair.first_lease.release()
        waiter_thread.join(30)
        assert pair.granted_at - released < 4, "the waiter did not re-check when it reconnected"


# ------------------------------------------------------------------------------------------------------------ processes


def test_lock_of_a_killed_holder_is_granted_within_its_session_timeout(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    holder.read_message()
    waiter = child("wait", url, "a", 30)
    assert waiter.read_message() == "waiting"
    holder.kill()
    killed = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert waiter.read_message()["at"] - killed < 2 + 4


def test_killed_waiter_blocks_the_queue_for_at_most_its_session(url_of, server, child) -> None:
    url = url_of(server, session=2)
    with Client(url) as client:
        lease = client.lock("a", ttl=60).acquire()
        dead = child("wait", url, "a", 60)
        assert dead.read_message() == "waiting"
        next_waiter = child("wait", url, "a", 60)
        assert next_waiter.read_message() == "waiting"
        dead.kill()
        lease.release()
        released = time.clock_gettime(time.CLOCK_BOOTTIME)
        assert next_waiter.read_message()["at"] - released < 2 + 4


def test_stopped_holder_loses_its_lease_and_detects_it(url_of, server, child) -> None:
    url = url_of(server, session=2)
    holder = child("hold", url, "a", 30)
    first = holder.read_message()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client, client.lock("a", wait=30) as lease:
        assert lease.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.send_newline()
        reply = holder.read_message()
        assert not reply["held"]
        assert not reply["released"]
        lease.renew()


def test_repeated_release_does_not_take_its_first_try_for_a_break(url, url_of, proxy, make_driver, wait_until) -> None:
    """The first request ends the grant, but its answer is lost; the second one finds no grant."""
    driver, other = make_driver(url_of(proxy)), make_driver(url)
    held = driver.acquire(driver.claim())
    answers: list[bool | None] = []
    proxy.lose_answers()
    thread = threading.Thread(target=lambda: answers.append(driver.release(held, 60)))
    thread.start()
    wait_until(lambda: isinstance(other.attempt(other.claim()), Grant), 30)
    proxy.restore()
    thread.join(60)
    assert answers == [None], "False would mean that the lease was broken"


def test_refused_connection_fails_after_one_round_of_all_servers() -> None:
    """Far sooner than `call_timeout`, and with every address in the error."""
    ports = free_ports(2)
    with Client(f"zookeeper://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", call_timeout=120) as client:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(Unavailable, match=f"127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}.*refused"):
                client.ping()
            assert time.monotonic() - began < 60


def test_server_that_starts_after_a_refusal_is_used_by_the_next_call(server, proxy, root) -> None:
    port = proxy.port
    proxy.close()
    with Client(f"zookeeper://127.0.0.1:{port}{root}", call_timeout=60) as client:
        with pytest.raises(Unavailable, match="refused"):
            client.ping()
        revived = Proxy(server.port, listen_port=port)
        client.ping()
        client.close()
        revived.close()


def test_restarting_server_that_refuses_is_waited_for(server, url_of) -> None:
    """A client that was connected before waits until `call_timeout`."""
    proxy = Proxy(server.port)
    with Client(url_of(proxy), call_timeout=60) as client:
        client.ping()
        port = proxy.port
        proxy.close()
        thread = threading.Thread(target=client.ping)
        thread.start()
        thread.join(1.0)
        assert thread.is_alive(), "the call did not wait for the server"
        revived = Proxy(server.port, listen_port=port)
        thread.join(60)
        assert not thread.is_alive()
        client.lock("a").acquire(wait=5).release()
        client.close()
        revived.close()
