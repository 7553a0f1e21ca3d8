"""If a holder vanishes, every waiter that could see it waits out its delay; after a release no waiter does."""

from __future__ import annotations

import base64
import json
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.servers.etcd import encode_base64
from leasehold import Client, NotAcquired
from leasehold.engines.etcd.attempt import EtcdAttempt
from leasehold.engines.etcd.delays import DelayTracker
from leasehold.engines.etcd.queue import Entry, EntryValue
from leasehold.engines.etcd.watch import Watcher
from leasehold.model import Busy, Grant, Holder
from tests.support import probe, probe_etcd
from tests.support.timing import check_elapsed, check_seconds

DELAY = 2.0


@pytest.fixture
def revoke_lease_of(member, claims):
    """Revokes the lease of a grant's key, as an operator would; returns the time."""

    def revoke(key: str) -> float:
        began = time.monotonic()
        member.revoke(claims()[key])
        return began

    return revoke


def test_waiter_keeps_the_delay_when_the_holders_lease_is_revoked(
    url, claims, revoke_lease_of, start_waiter, eventually
) -> None:
    """A holder learns of the revocation too late to stop in time, so the next waiter waits out the holder's delay."""
    with Client(url) as client, Client(url) as other:
        lease = client.lock("job", ttl=60, delay=DELAY).acquire()
        (key,) = claims()
        waiting = start_waiter(other)
        began = revoke_lease_of(key)
        eventually(lambda: not lease.held)
        check_elapsed(began, 1.0, "notified, not found at the next renewal")
        waited = waiting.wait_granted() - began
        assert waited >= DELAY
        check_seconds(waited, DELAY + 2)


def test_release_of_a_lock_with_delay_wakes_the_waiter_at_once(url, start_waiter) -> None:
    with Client(url) as client, Client(url) as other:
        for _ in range(20):  # most releases happen while the watch is being created
            lease = client.lock("job", delay=30).acquire()
            waiting = start_waiter(other)
            began = time.monotonic()
            lease.release()
            check_seconds(waiting.wait_granted() - began, 2)


def test_missed_release_is_found_in_watch_history(url, make_driver) -> None:
    """The waiter re-checks and the holder is gone. Only etcd's history shows that it was a release."""
    holder, other = make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim(delay=300.0)), other.claim(queue=True)
    probe_etcd.watcher(other.engine).watch_conflict = lambda *_, **__: None
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(held)
    busy = other.attempt(waiting)
    assert isinstance(busy, Busy)
    assert busy.left > 200, "before it knows of the release, the waiter must expect the delay"
    assert granted_within(other, waiting, 60.0)


def granted_within(driver, claim, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if isinstance(driver.attempt(claim), Grant):
            return True
        time.sleep(0.01)
    return False


def test_delay_is_waited_out_when_history_is_compacted(url, make_driver, member, monkeypatch) -> None:
    holder, other = make_driver(url), make_driver(url)
    held, waiting = holder.acquire(holder.claim(delay=DELAY)), other.claim(queue=True)
    watcher, watch_history = probe_etcd.watcher(other.engine), Watcher.watch_history
    monkeypatch.setattr(watcher, "watch_conflict", lambda *_, **__: None)
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(held)

    def compact_first(id_hash, key, since_revision) -> None:
        member.compact()
        watch_history(watcher, id_hash, key, since_revision)

    monkeypatch.setattr(watcher, "watch_history", compact_first)
    began = time.monotonic()
    assert granted_within(other, waiting, 20.0)
    assert time.monotonic() - began >= DELAY
    check_elapsed(began, DELAY + 2)


@pytest.mark.parametrize("late", [False, True])
def test_waiter_that_gives_up_hands_the_delay_to_the_next_waiter(
    url, member, prefix, claims, revoke_lease_of, make_driver, eventually, late
) -> None:
    """The first waiter gives up while it waits out a delay. The waiters behind it have not seen the vanished holder."""
    holder, first, last = make_driver(url), make_driver(url), make_driver(url)
    holder.acquire(holder.claim(delay=DELAY))
    (key,) = claims()
    first_claim, last_claim = first.claim(queue=True), last.claim(queue=True)
    assert isinstance(first.attempt(first_claim), Busy)
    if not late:
        assert isinstance(last.attempt(last_claim), Busy)
    began = revoke_lease_of(key)
    eventually(lambda: isinstance(first.attempt(first_claim), Grant) or remaining_delays(member, prefix)[0] > 0)
    if late:
        last.attempt(last_claim)
    first.release(first_claim)
    assert granted_within(last, last_claim, 60.0)
    assert time.monotonic() - began >= DELAY
    check_elapsed(began, 1.0 + DELAY + 2)


def remaining_delays(member, prefix: str) -> list[float]:
    """The remaining delay that each queued claim stores in its key."""
    found = member.ask(
        "kv/range", key=encode_base64(f"{prefix}lh1/q/".encode()), range_end=encode_base64(f"{prefix}lh1/q0".encode())
    )
    entries = sorted(found.get("kvs", []), key=lambda kv: int(kv["create_revision"]))
    return [json.loads(base64.b64decode(kv["value"])).get("remaining_delay", 0.0) for kv in entries]


@pytest.mark.parametrize("which", [0, 1])
def test_delay_of_a_vanished_reader_is_kept_when_the_others_release(
    url, claims, revoke_lease_of, start_waiter, which
) -> None:
    """A waiting writer is notified only of the last reader's end."""
    with Client(url) as reading, Client(url) as writer:
        leases, keys = [], []
        for _ in range(3):
            leases.append(reading.rwlock("job").read(ttl=60, delay=DELAY).acquire())
            keys += [key for key in claims() if key not in keys]
        waiting = start_waiter(writer)
        began = revoke_lease_of(keys[which])
        vanished = leases.pop(which)
        assert [lease.release() for lease in leases] == [True, True]
        waited = waiting.wait_granted() - began
        assert waited >= DELAY
        check_seconds(waited, DELAY + 2)
        assert not vanished.held


def test_delay_of_a_vanished_permit_is_waited_out(url, member, lease_of, start_waiter) -> None:
    with Client(url) as one, Client(url) as two:
        permits = one.semaphore("job", 2, ttl=60, delay=DELAY)
        first = permits.acquire()
        second = permits.acquire()
        waiting = start_waiter(two, lock=two.semaphore("job", 2))
        began = time.monotonic()
        member.revoke(lease_of(probe.claim(second).id_hash))
        waited = waiting.wait_granted() - began
        assert waited >= DELAY
        check_seconds(waited, DELAY + 2)
        assert not second.held
        assert first.release()


@pytest.mark.parametrize("permits", [True, False])
def test_holder_vanishing_while_a_waiter_enqueues_keeps_its_delay(
    url, make_driver, revoke_lease_of, claims, monkeypatch, permits
) -> None:
    """After a new waiter enqueues and before it re-checks, one of several holders vanishes, and not the oldest."""
    holder, other = make_driver(url), make_driver(url)
    kind, held = ({"kind": "semaphore", "limit": 2}, {}) if permits else ({}, {"mode": "shared"})
    kept = holder.acquire(holder.claim(**kind, **held))
    known = set(claims())
    holder.acquire(holder.claim(**kind, **held, delay=DELAY))
    (second,) = set(claims()) - known
    requeue, began = getattr(*probe_etcd.REQUEUE_AS_WAITER), list[float]()

    async def vanish_then_requeue(attempt: EtcdAttempt):
        began.append(revoke_lease_of(second))
        return await requeue(attempt)

    monkeypatch.setattr(*probe_etcd.REQUEUE_AS_WAITER, vanish_then_requeue)
    waiting = other.claim(queue=True, **kind)
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(kept)
    assert granted_within(other, waiting, 20.0)
    assert time.monotonic() - began[0] >= DELAY
    check_elapsed(began[0], DELAY + 2)


def test_delay_of_a_vanished_grant_is_kept_if_its_events_were_missed(
    url, make_driver, member, lease_of, monkeypatch
) -> None:
    """The last waiter saw the vanished claim waiting, and missed the events of its grant and its end."""
    first, second, last = make_driver(url), make_driver(url), make_driver(url)
    held, next_claim, waiting = (
        first.acquire(first.claim()),
        second.claim(queue=True, delay=DELAY),
        last.claim(queue=True),
    )
    monkeypatch.setattr(probe_etcd.watcher(last.engine), "watch_conflict", lambda *_, **__: None)
    assert isinstance(second.attempt(next_claim), Busy)
    assert isinstance(last.attempt(waiting), Busy)
    first.release(held)
    assert isinstance(second.attempt(next_claim), Grant)
    began = time.monotonic()
    member.revoke(lease_of(next_claim.id_hash))
    assert isinstance(last.attempt(waiting), Busy)
    assert granted_within(last, waiting, 20.0)
    assert time.monotonic() - began >= DELAY
    check_elapsed(began, DELAY + 2)


def test_waiter_whose_key_is_deleted_still_waits_out_the_delay(url, make_driver, member, claims) -> None:
    holder, other = make_driver(url), make_driver(url)
    holder.acquire(holder.claim(delay=DELAY))
    waiting = other.claim(queue=True)
    assert isinstance(other.attempt(waiting), Busy)
    began = time.monotonic()
    for key in claims():
        member.delete(key)
    busy = other.attempt(waiting)
    assert isinstance(busy, Busy)
    assert granted_within(other, waiting, 20.0)
    assert time.monotonic() - began >= DELAY
    check_elapsed(began, DELAY + 2)


@pytest.mark.faults
def test_delays_are_kept_while_many_clients_vanish_or_give_up(url, member, claims, lease_of) -> None:
    """No client is granted the lock during the delay of a vanished holder, if three waiters were there to see it."""
    end, delayed_until, inside, problems, vanished = (
        time.monotonic() + 40,
        [0.0],
        list[int](),
        list[str](),
        list[float](),
    )
    mutex = threading.Lock()

    def work(number: int) -> None:
        rng = random.Random(number)
        with Client(url) as client:
            while time.monotonic() < end:
                wait = 60 if number < 4 else rng.random() * 1.5
                try:
                    lease = client.lock("job", ttl=20, delay=1.0 if rng.random() < 0.8 else 0, wait=wait).acquire()
                except NotAcquired:
                    continue
                with mutex:
                    if inside or time.monotonic() < delayed_until[0]:
                        problems.append(f"{number}: {inside} {delayed_until[0] - time.monotonic()}")
                    inside.append(number)
                time.sleep(rng.random() * 0.03)
                found = claims()
                vanishes = probe.claim(lease).delay and rng.random() < 0.3 and len(found) > 3
                with mutex:
                    inside.remove(number)
                    if vanishes:
                        delayed_until[0] = time.monotonic() + 1.0
                        vanished.append(delayed_until[0])
                if vanishes:
                    member.revoke(lease_of(probe.claim(lease).id_hash))
                    assert lease.wait_lost(60)
                else:
                    lease.release()

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(120)
    assert problems == []
    assert len(vanished) > 5
    assert claims() == {}


def test_optimistic_claim_that_gives_up_leaves_no_delay(url, make_driver, monkeypatch) -> None:
    """A claim joins the queue optimistically as held, until it has read the queue. If it gives up before that, it never
    held the name and leaves no delay."""
    holder, optimist, last = make_driver(url), make_driver(url), make_driver(url)
    held, optimistic_claim, waiting = (
        holder.acquire(holder.claim()),
        optimist.claim(queue=True, delay=300.0),
        last.claim(queue=True),
    )
    monkeypatch.setattr(
        probe_etcd.state(optimist.engine).leases, "get", once_only(probe_etcd.state(optimist.engine).leases.get)
    )
    with pytest.raises(RuntimeError):
        optimist.attempt(optimistic_claim)
    assert isinstance(last.attempt(waiting), Busy)
    optimist.release(optimistic_claim)
    holder.release(held)
    assert granted_within(last, waiting, 60.0)


def once_only(original):
    calls: list[int] = []

    async def fake_get(*args):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("interrupted")
        return await original(*args)

    return fake_get


# -------------------------------------------------------------- DelayTracker


def make_entry(create_revision: int, state: str = "held") -> Entry:
    value = EntryValue(f"{create_revision}", state, 1, 5.0, Holder("x"), 0.0, 5.0 if state == "waiting" else 0.0)
    return Entry(b"%d" % create_revision, "", "job", "lock", 1, "exclusive", create_revision, 1, value)


def test_observed_release_needs_no_history() -> None:
    delays = DelayTracker()
    assert delays.observe([make_entry(1)], 10, now=100.0) == []
    assert delays.has_unknown_ends
    delays.entry_ended(b"1", make_entry(1, "released"), now=101.0)
    assert not delays.has_unknown_ends
    assert delays.left(101.0) == 0.0


def test_missing_holder_is_looked_up_once_and_delays_until_answered() -> None:
    delays = DelayTracker()
    delays.observe([make_entry(1)], 10, now=100.0)
    assert delays.observe([], 20, now=102.0) == [(b"1", 10)]
    assert delays.observe([], 21, now=103.0) == []
    assert delays.left(103.0) == 4.0
    delays.entry_ended(b"1", make_entry(1), now=104.0)
    assert (delays.has_unknown_ends, delays.left(104.0)) == (False, 3.0), (
        "counted from when the holder was missing, not from the answer"
    )


def test_end_of_a_later_claim_on_the_same_slot_key_is_ignored() -> None:
    delays = DelayTracker()
    delays.observe([make_entry(1)], 10, now=100.0)
    delays.entry_ended(b"1", make_entry(7, "released")._replace(key=b"1", mode="shared"), now=101.0)
    assert delays.has_unknown_ends


ENDS = st.sampled_from(["released", "held", "waiting", "cooling", "forgotten"])


@given(st.lists(st.tuples(ENDS, st.booleans()), min_size=1, max_size=5))
def test_name_is_delayed_unless_every_holder_ended_cleanly(ends: list[tuple[str, bool]]) -> None:
    """Readers end one after the other. The tracker sees each end at once, or misses it and finds it in history."""
    delays, now = DelayTracker(), 100.0
    ahead = [make_entry(number)._replace(mode="shared") for number in range(1, len(ends) + 1)]
    delays.observe(ahead, 10, now)
    for number, (end, missed) in enumerate(ends):
        now += 0.1
        if missed:
            delays.observe(ahead[number + 1 :], 11 + number, now)
            assert delays.left(now) >= 4.9 - 0.1 * number
        last = None if end == "forgotten" else make_entry(number + 1, end)._replace(mode="shared")
        delays.entry_ended(ahead[number].key, last, now)
        assert delays.has_unknown_ends == (number + 1 < len(ends))
    vanished = any(end in ("held", "waiting", "forgotten") for end, _ in ends)
    assert (delays.left(now) > 4.0) == vanished
