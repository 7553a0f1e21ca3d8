"""The way to etcd is hurt: lost answers, lost streams, forgotten history."""

from __future__ import annotations

import time

import pytest

from leasehold import Client, Unavailable


def test_every_answer_may_be_lost_and_nobody_is_granted_twice(url, proxied, proxy, member, eventually) -> None:
    """The requests arrive, and nothing comes back: what was asked for is given up, whatever became of it."""
    there = member.leases()
    with Client(url) as other, Client(proxied, call_timeout=0.3) as client:
        for wait in (0, 5, 0, 5):
            with client.lock("warm"):
                pass
            proxy.lose_answers()
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=wait)
            proxy.mend()
            with other.lock("job", wait=20) as lease:
                assert [holding.token for holding in other.inspect("job")] == [lease.token]
        held = client.lock("job", ttl=20).acquire(wait=10)
        proxy.lose_answers()
        assert not held.release(), "not confirmed"
        proxy.mend()
        other.lock("job").acquire(wait=20).release()
        eventually(lambda: other.inspect() == [])
    eventually(lambda: member.leases() - there == set(), 40)


def test_a_waiter_outlasts_a_lost_stream(url, proxied, proxy, in_line) -> None:
    with Client(url) as holder, Client(proxied) as client:
        lease = holder.lock("job").acquire()
        waiting = in_line(client)
        for _ in range(3):
            proxy.reset()
            time.sleep(0.05)
        began = time.monotonic()
        lease.release()
        assert waiting.granted() - began < 3, "sooner than it would have looked by itself"


def test_a_waiter_outlasts_a_compaction(url, proxied, proxy, member, prefix, in_line, eventually) -> None:
    """The watch begins again where it began, and that is history no more: look for yourself."""
    with Client(url) as holder, Client(proxied) as client:
        lease = holder.lock("job").acquire()
        waiting = in_line(client)
        mine = client.lock("mine").acquire()
        time.sleep(0.3)  # its own key is watched by now
        proxy.cut()
        lease.release()
        for number in range(5):
            member.put(f"{prefix}noise", str(number))
        member.compact()
        began = time.monotonic()
        proxy.mend()
        assert waiting.granted() - began < 4
        assert holder.break_lock("mine", token=mine.token)
        eventually(lambda: not mine.held, 3)


def test_a_short_lock_needs_no_stream_and_a_long_one_has_it(proxied, proxy, url, eventually) -> None:
    with Client(proxied) as client, Client(url) as operator:
        for _ in range(3):
            with client.lock("short"):
                pass
        time.sleep(0.2)  # long enough for a watch to begin, were there one
        assert proxy.accepted == 1, "one connection, and no second for a watch"
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: proxy.accepted == 2, 2)
        assert operator.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held, 2)
