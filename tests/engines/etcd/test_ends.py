"""What ends a claim, what does not, and who is told."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, LeaseLost, Mismatch, NotAcquired
from leasehold.model import Alive, Busy, Gone, Grant


@pytest.mark.parametrize("how", ["revoke", "delete", "break"])
def test_a_holder_is_told_within_a_second(url, member, how, claims) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=60).acquire()
        told = threading.Event()
        lease.on_lost(lambda _: told.set())
        (key,) = claims()
        began = time.monotonic()
        if how == "break":
            assert operator.break_lock("job", token=lease.token)
        elif how == "delete":
            member.delete(key)
        else:
            member.revoke(claims()[key])
        assert told.wait(10)
        assert time.monotonic() - began < 1.0
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()
        operator.lock("job").acquire(wait=5).release()


def test_a_ttl_is_whole_seconds_and_the_lease_says_so(url) -> None:
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
            assert client.inspect()[0].left > 5, "a life once promised is not shortened at the engine"


@pytest.mark.faults
def test_waiters_left_by_a_dead_client_lapse(url, bare, eventually) -> None:
    dead, holder, other = bare(url), bare(url), bare(url)
    held = holder.takes(holder.claim())
    assert isinstance(dead.attempt(dead.claim(queue=True)), Busy)
    waiting = other.claim(queue=True)
    assert other.attempt(waiting).place == 1
    holder.release(held)
    assert isinstance(other.attempt(waiting), Busy), "one that stands ahead is alive for all etcd knows"
    began = time.monotonic()
    eventually(lambda: isinstance(other.attempt(waiting), Grant), 25)
    assert time.monotonic() - began < 15 + 3


def test_a_cooling_key_does_not_stand_in_its_own_clients_way(url) -> None:
    """Its chair is taken, and the next claim needs another."""
    with Client(url) as client:
        with client.lock("job", min_hold=2):
            pass
        assert [holding.state for holding in client.inspect()] == ["cooling"]
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0)
        with client.lock("job", wait=10), client.semaphore("other", 2):
            pass


def test_giving_up_behind_ones_own_cooling_key_leaves_it_there(url, eventually) -> None:
    with Client(url) as client:
        with client.lock("job", min_hold=5):
            pass
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0.2)
        eventually(lambda: len(client.inspect()) == 1)
        assert [holding.state for holding in client.inspect()] == ["cooling"]


def test_a_lease_written_down_is_renewed_and_released_by_another_process(url, bare) -> None:
    one, other = bare(url), bare(url)
    claim = one.claim(ttl=10.0, delay=1.0)
    held = one.takes(claim)
    renewed = other.renew(held)
    assert isinstance(renewed, Alive)
    assert 9 < renewed.ttl <= 10
    assert isinstance(other.renew(held._replace(token=held.token + 1)), Gone)
    assert not other.release(held._replace(token=held.token + 1))
    assert other.release(held)
    assert not other.release(held)
    assert isinstance(other.renew(held), Gone)


def test_a_stray_ends_a_place_and_never_a_grant(url, bare) -> None:
    one, other = bare(url), bare(url)
    held, waiting = one.takes(one.claim()), one.claim(queue=True)
    assert isinstance(one.attempt(waiting), Busy)
    assert not other.release(held._replace(id="", token=0))
    assert isinstance(one.renew(held), Alive)
    assert not other.release(waiting._replace(id=""))
    assert isinstance(one.renew(waiting), Gone)


def test_a_repeated_attempt_after_a_lapse_is_a_new_grant(url, member, bare, claims) -> None:
    seat = bare(url)
    claim = seat.claim()
    first = seat.takes(claim)
    (key,) = claims()
    member.delete(key)
    second = seat.takes(claim)
    assert second.token > first.token
    assert isinstance(seat.renew(first), Gone)
    assert isinstance(seat.renew(second), Alive), "the older token's end is not its own"
    assert seat.release(claim)


def test_keys_of_strangers_below_the_prefix_harm_nobody(url, member, prefix) -> None:
    with Client(url) as client:
        with client.lock("a"):
            pass
        for key in ("q/x", "q/:a", "q/:d/l/x", "q/:c/l/x/y/z", "q/%zz:b/l/x/1", "q/:a/s-1/s/1"):
            member.put(f"{prefix}lh1/{key}", "\xff{")
        assert client.inspect() == []
        member.put(f"{prefix}lh1/q/:z/l/x/1", "[" * 100_000)
        with pytest.raises(NotAcquired) as busy:
            client.lock("z").acquire(wait=0)
        assert busy.value.holder == "?"
        with pytest.raises(NotAcquired) as busy:
            client.lock("d").acquire(wait=0)
        assert busy.value.holder is None
        with client.lock("b", wait=0):
            pass


def test_another_kind_is_refused_before_it_stands_in_line(url, member, bare, claims) -> None:
    holder, other, behind = bare(url), bare(url), bare(url)
    held, waiting = holder.takes(holder.claim()), behind.claim(queue=True)
    for _ in range(2):
        with pytest.raises(Mismatch):
            other.attempt(other.claim(queue=True, kind="semaphore", limit=2))
        assert isinstance(behind.attempt(waiting), Busy)
    assert len(claims()) == 2
    holder.release(held)
    assert isinstance(behind.attempt(waiting), Grant)


def test_a_waiter_hangs_on_a_lease_of_its_own_kind(url, member, bare, claims) -> None:
    """Not on one of its ttl: that may be shorter than two heart-beats, or an hour long (E7)."""
    holder, other = bare(url), bare(url)
    held, waiting = holder.takes(holder.claim(ttl=60.0)), other.claim(ttl=60.0, queue=True)
    other.attempt(waiting)
    lives = {int(member.ask("lease/timetolive", ID=lease)["grantedTTL"]) for lease in claims().values()}
    assert lives == {60, 15}
    holder.release(held)
    assert isinstance(other.attempt(waiting), Grant)
    (lease,) = claims().values()
    assert member.ask("lease/timetolive", ID=lease)["grantedTTL"] == "60"
