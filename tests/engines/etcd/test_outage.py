"""Failures between client and etcd: lost answers, lost watch streams, compacted history."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, Unavailable
from leasehold.model import Grant


def test_lost_answers_never_lead_to_two_grants(url, proxied_url, proxy, member, eventually) -> None:
    """etcd executes the requests and the answers are lost: the client gives up claims whose result it does not know."""
    leases_before = member.leases()
    with Client(url) as other, Client(proxied_url, call_timeout=0.3) as client:
        for wait in (0, 5, 0, 5):
            with client.lock("warm"):
                pass
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=wait)
            proxy.restore()
            with other.lock("job", wait=20) as lease:
                assert [holding.token for holding in other.inspect("job")] == [lease.token]
        held = client.lock("job", ttl=20).acquire(wait=10)
        proxy.lose_answers()
        assert not held.release(), "an unconfirmed release reported success"
        proxy.restore()
        other.lock("job").acquire(wait=20).release()
        eventually(lambda: other.inspect() == [])
    eventually(lambda: member.leases() - leases_before == set(), 40)


def test_waiter_survives_a_lost_watch_stream(url, proxied_url, proxy, start_waiter) -> None:
    with Client(url) as holder, Client(proxied_url) as client:
        lease = holder.lock("job").acquire()
        waiting = start_waiter(client)
        for _ in range(3):
            proxy.reset()
            time.sleep(0.05)
        began = time.monotonic()
        lease.release()
        assert waiting.wait_granted() - began < 3, "the waiter was not woken before its next re-check"


def test_waiter_survives_a_compaction(url, proxied_url, proxy, member, prefix, start_waiter, eventually) -> None:
    """The new watch starts at a revision that was compacted, so the waiter has to re-check."""
    with Client(url) as holder, Client(proxied_url) as client:
        lease = holder.lock("job").acquire()
        waiting = start_waiter(client)
        mine = client.lock("mine").acquire()
        time.sleep(0.3)  # by now the client watches its own key
        proxy.cut()
        lease.release()
        for number in range(5):
            member.put(f"{prefix}noise", str(number))
        member.compact()
        began = time.monotonic()
        proxy.restore()
        assert waiting.wait_granted() - began < 4
        assert holder.break_lock("mine", token=mine.token)
        eventually(lambda: not mine.held, 3)


def test_watch_stream_is_opened_only_for_long_holds(proxied_url, proxy, url, eventually) -> None:
    with Client(proxied_url) as client, Client(url) as operator:
        for _ in range(3):
            with client.lock("short"):
                pass
        time.sleep(0.2)  # long enough to open a watch stream
        assert proxy.accepted == 1, "a second connection was opened for a watch"
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: proxy.accepted == 2, 2)
        assert operator.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 2)


def test_repeated_release_does_not_take_its_first_try_for_a_break(
    url, proxied_url, proxy, make_driver, eventually
) -> None:
    """The first request ends the grant, but its answer is lost; the second one finds no grant."""
    driver, other = make_driver(proxied_url), make_driver(url)
    held = driver.acquire(driver.claim())
    answers: list[bool | None] = []
    proxy.lose_answers()
    thread = threading.Thread(target=lambda: answers.append(driver.release(held, 60)))
    thread.start()
    eventually(lambda: isinstance(other.attempt(other.claim()), Grant), 30)
    proxy.restore()
    thread.join(60)
    assert answers == [None], "False would mean that the lease was broken"


def test_close_is_bounded_when_the_server_is_silent(proxied_url, proxy) -> None:
    """By `call_timeout` + 0.5 s. The best of three tries: the machine may be busy."""
    seconds: list[float] = []
    for _ in range(3):
        client = Client(proxied_url, call_timeout=0.5)
        lease = client.lock("job").acquire()
        client.lock("other").acquire().release()  # its etcd lease is pooled, and close() revokes it
        proxy.cut()
        began = time.monotonic()
        client.close()
        seconds.append(time.monotonic() - began)
        assert not lease.held
        proxy.restore()
    assert min(seconds) < 1.5, seconds
