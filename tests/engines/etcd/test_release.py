"""What ends a claim, what does not, and which clients are notified."""

from __future__ import annotations

import threading
import time

import pytest

from leasehold import Client, LeaseLost, Mismatch, NotAcquired
from leasehold.model import Alive, Busy, Gone, Grant
from leasehold.runtime.base import run_sync


@pytest.mark.parametrize("how", ["revoke", "delete", "break"])
def test_holder_is_notified_of_revoke_delete_or_break_within_a_second(url, member, how, claims) -> None:
    with Client(url) as client, Client(url) as operator:
        lease = client.lock("job", ttl=60).acquire()
        lost_event = threading.Event()
        lease.on_lost(lambda _: lost_event.set())
        (key,) = claims()
        began = time.monotonic()
        if how == "break":
            assert operator.break_lock("job", token=lease.token)
        elif how == "delete":
            member.delete(key)
        else:
            member.revoke(claims()[key])
        assert lost_event.wait(10)
        assert time.monotonic() - began < 1.0
        assert lease.lost_reason == "broken"
        with pytest.raises(LeaseLost):
            lease.check()
        operator.lock("job").acquire(wait=5).release()


def test_ttl_is_rounded_up_to_whole_seconds(url) -> None:
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
            assert client.inspect()[0].left > 5, "a shorter renewal must not shorten the lease at etcd"


@pytest.mark.faults
def test_waiters_of_a_dead_client_expire(url, make_driver, eventually) -> None:
    dead, holder, other = make_driver(url), make_driver(url), make_driver(url)
    held = holder.acquire(holder.claim())
    assert isinstance(dead.attempt(dead.claim(queue=True)), Busy)
    waiting = other.claim(queue=True)
    assert other.attempt(waiting).position == 1
    holder.release(held)
    assert isinstance(other.attempt(waiting), Busy), "etcd does not know yet that the waiter ahead is dead"
    began = time.monotonic()
    eventually(lambda: isinstance(other.attempt(waiting), Grant), 25)
    assert time.monotonic() - began < 15 + 3


def test_client_can_queue_behind_its_own_cooling_key(url) -> None:
    """The cooling key is in use, so the next claim needs another key."""
    with Client(url) as client:
        with client.lock("job", min_hold=2):
            pass
        assert [holding.state for holding in client.inspect()] == ["cooling"]
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0)
        with client.lock("job", wait=10), client.semaphore("other", 2):
            pass


def test_cooling_key_stays_when_its_client_gives_up_waiting(url, eventually) -> None:
    with Client(url) as client:
        with client.lock("job", min_hold=5):
            pass
        with pytest.raises(NotAcquired):
            client.lock("job").acquire(wait=0.2)
        eventually(lambda: len(client.inspect()) == 1)
        assert [holding.state for holding in client.inspect()] == ["cooling"]


def test_saved_lease_is_renewed_and_released_by_another_process(url, make_driver) -> None:
    one, other = make_driver(url), make_driver(url)
    claim = one.claim(ttl=10.0, delay=1.0)
    held = one.acquire(claim)
    renewed = other.renew(held)
    assert isinstance(renewed, Alive)
    assert 9 < renewed.ttl <= 10
    assert isinstance(other.renew(held._replace(token=held.token + 1)), Gone)
    assert not other.release(held._replace(token=held.token + 1))
    assert other.release(held)
    assert not other.release(held)
    assert isinstance(other.renew(held), Gone)


def test_release_without_id_ends_a_queued_claim_but_never_a_grant(url, make_driver) -> None:
    one, other = make_driver(url), make_driver(url)
    held, waiting = one.acquire(one.claim()), one.claim(queue=True)
    assert isinstance(one.attempt(waiting), Busy)
    assert not other.release(held._replace(id="", token=0))
    assert isinstance(one.renew(held), Alive)
    assert not other.release(waiting._replace(id=""))
    assert isinstance(one.renew(waiting), Gone)


def test_repeated_attempt_after_key_deletion_is_a_new_grant(url, member, make_driver, claims) -> None:
    driver = make_driver(url)
    claim = driver.claim()
    first = driver.acquire(claim)
    (key,) = claims()
    member.delete(key)
    second = driver.acquire(claim)
    assert second.token > first.token
    assert isinstance(driver.renew(first), Gone)
    assert isinstance(driver.renew(second), Alive), "the end of the first grant ended the second"
    assert driver.release(claim)


def test_foreign_keys_below_the_prefix_are_harmless(url, member, prefix) -> None:
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


def test_mismatched_kind_is_refused_before_it_is_queued(url, member, make_driver, claims) -> None:
    holder, other, behind = make_driver(url), make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim()), behind.claim(queue=True)
    for _ in range(2):
        with pytest.raises(Mismatch):
            other.attempt(other.claim(queue=True, kind="semaphore", limit=2))
        assert isinstance(behind.attempt(waiting), Busy)
    assert len(claims()) == 2
    holder.release(held)
    assert isinstance(behind.attempt(waiting), Grant)


def test_waiter_uses_a_queue_lease_and_not_one_of_its_ttl(url, member, make_driver, claims) -> None:
    """A ttl may be shorter than two heartbeats or an hour long, so it must not decide when a waiter expires (E7)."""
    holder, other = make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim(ttl=60.0)), other.claim(ttl=60.0, queue=True)
    other.attempt(waiting)
    ttls = {int(member.ask("lease/timetolive", ID=lease)["grantedTTL"]) for lease in claims().values()}
    assert ttls == {60, 15}
    holder.release(held)
    assert isinstance(other.attempt(waiting), Grant)
    (lease,) = claims().values()
    assert member.ask("lease/timetolive", ID=lease)["grantedTTL"] == "60"


@pytest.mark.parametrize("delay", [0.0, 2.0])
def test_release_of_a_broken_lease_says_that_it_was_over(url, make_driver, eventually, delay) -> None:
    """Even if another client has held the name meanwhile, and released it."""
    one, other = make_driver(url), make_driver(url)
    claim = other.claim()
    held = one.acquire(one.claim(delay=delay))
    assert run_sync(other.engine.break_("", "job", held.token, other.deadline()))
    eventually(lambda: isinstance(other.attempt(claim), Grant))
    successor = other.acquire(claim)
    assert not one.release(held)
    assert isinstance(other.renew(successor), Alive), "the late release ended the successor"
    assert other.release(successor)
    assert not other.release(successor)
    assert one.release(one.acquire(one.claim(delay=delay)))
