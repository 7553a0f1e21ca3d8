"""A delay is kept when a holder vanished, by everybody who could know of it, and by nobody after a clean release."""

from __future__ import annotations

import base64
import json
import random
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold import Client, NotAcquired
from leasehold.engines.etcd.delays import Delays
from leasehold.engines.etcd.line import Note, Seen
from leasehold.engines.etcd.taking import Taking
from leasehold.engines.etcd.watch import Watcher
from leasehold.model import Busy, Grant, Holder
from leasehold.testing.servers.etcd import coded

DELAY = 2.0


@pytest.fixture
def vanish(member, claims):
    """Takes away the key of a grant, as an operator would; the moment it was done."""

    def take(key: str) -> float:
        began = time.monotonic()
        member.revoke(claims()[key])
        return began

    return take


def test_a_delay_is_kept_by_those_in_line_when_a_key_is_taken_away(url, claims, vanish, in_line, eventually) -> None:
    """A revoked lease leaves no time to tell its holder: the next in line waits the holder's delay."""
    with Client(url) as client, Client(url) as other:
        lease = client.lock("job", ttl=60, delay=DELAY).acquire()
        (key,) = claims()
        waiting = in_line(other)
        began = vanish(key)
        eventually(lambda: not lease.held, 1.0)
        assert DELAY <= waiting.granted() - began < DELAY + 2


def test_a_clean_release_of_a_delay_wakes_the_next_at_once(url, in_line) -> None:
    with Client(url) as client, Client(url) as other:
        for _ in range(20):  # the release falls into the beginning of the watch, more often than not
            lease = client.lock("job", delay=30).acquire()
            waiting = in_line(other)
            began = time.monotonic()
            lease.release()
            assert waiting.granted() - began < 2


def test_a_release_nobody_heard_of_is_found_in_history(url, bare) -> None:
    """It looks, and the holder is gone: that it was a release is history, which etcd tells."""
    holder, other = bare(url), bare(url)
    held, waiting = holder.takes(holder.claim(delay=30.0)), other.claim(queue=True)
    other.engine._shared.watcher.follow = lambda *_, **__: None
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(held)
    busy = other.attempt(waiting)
    assert isinstance(busy, Busy)
    assert busy.left > 25, "for all it knows"
    assert granted_within(other, waiting, 2.0)


def granted_within(seat, claim, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if isinstance(seat.attempt(claim), Grant):
            return True
        time.sleep(0.01)
    return False


def test_what_history_has_forgotten_is_waited_out(url, bare, member, monkeypatch) -> None:
    holder, other = bare(url), bare(url)
    held, waiting = holder.takes(holder.claim(delay=DELAY)), other.claim(queue=True)
    watcher, recall = other.engine._shared.watcher, Watcher.recall
    monkeypatch.setattr(watcher, "follow", lambda *_, **__: None)
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(held)

    def too_late(mark, key, seen) -> None:
        member.compact()
        recall(watcher, mark, key, seen)

    monkeypatch.setattr(watcher, "recall", too_late)
    began = time.monotonic()
    assert granted_within(other, waiting, 20.0)
    assert DELAY <= time.monotonic() - began < DELAY + 2


@pytest.mark.parametrize("late", [False, True])
def test_a_delay_is_handed_on_by_one_that_leaves_the_line(
    url, member, prefix, claims, vanish, in_line, eventually, late
) -> None:
    """The first in line waits a delay out, and gives up: those behind it have not seen who it was that vanished."""
    with Client(url) as one, Client(url) as two, Client(url) as three:
        lease = one.lock("job", ttl=60, delay=DELAY).acquire()
        (key,) = claims()
        first = in_line(two, lock=two.lock("job", wait=1.0))
        last = None if late else in_line(three)
        began = vanish(key)
        eventually(lambda: rests(member, prefix)[0] > 0)
        last = last or in_line(three)
        assert DELAY <= last.granted() - began < 1.0 + DELAY + 2
        first.thread.join(10)
        assert first.errors
        assert not lease.held


def rests(member, prefix: str) -> list[float]:
    """What the claims wait out themselves, in line."""
    found = member.ask("kv/range", key=coded(f"{prefix}lh1/q/".encode()), range_end=coded(f"{prefix}lh1/q0".encode()))
    line = sorted(found.get("kvs", []), key=lambda kv: int(kv["create_revision"]))
    return [json.loads(base64.b64decode(kv["value"])).get("rest", 0.0) for kv in line]


@pytest.mark.parametrize("which", [0, 1])
def test_a_reader_that_vanished_is_waited_out_though_the_others_released(url, claims, vanish, in_line, which) -> None:
    """A writer is told of the last reader's end alone."""
    with Client(url) as reading, Client(url) as writer:
        leases, keys = [], []
        for _ in range(3):
            leases.append(reading.rwlock("job").read(ttl=60, delay=DELAY).acquire())
            keys += [key for key in claims() if key not in keys]
        waiting = in_line(writer)
        began = vanish(keys[which])
        vanished = leases.pop(which)
        assert [lease.release() for lease in leases] == [True, True]
        assert DELAY <= waiting.granted() - began < DELAY + 2
        assert not vanished.held


def test_a_permit_that_vanished_rests(url, claims, vanish, in_line) -> None:
    with Client(url) as one, Client(url) as two:
        permits = one.semaphore("job", 2, ttl=60, delay=DELAY)
        first = permits.acquire()
        (kept,) = claims()
        second = permits.acquire()
        waiting = in_line(two, lock=two.semaphore("job", 2))
        (key,) = [key for key, lease in claims().items() if key != kept and two._desk.book.client not in key]
        began = vanish(key)
        assert DELAY <= waiting.granted() - began < DELAY + 2
        assert not second.held
        assert first.release()


@pytest.mark.parametrize("permits", [True, False])
def test_any_holder_that_vanishes_after_the_first_look_is_missed(
    url, bare, vanish, claims, monkeypatch, permits
) -> None:
    """A newcomer has entered the line, and before it looks again one of several holders is gone: not the oldest."""
    holder, other = bare(url), bare(url)
    kind, held = ({"kind": "semaphore", "limit": 2}, {}) if permits else ({}, {"mode": "shared"})
    kept = holder.takes(holder.claim(**kind, **held))
    known = set(claims())
    holder.takes(holder.claim(**kind, **held, delay=DELAY))
    (second,) = set(claims()) - known
    settle, began = Taking._settle, list[float]()

    async def late(taking: Taking):
        began.append(vanish(second))
        return await settle(taking)

    monkeypatch.setattr(Taking, "_settle", late)
    waiting = other.claim(queue=True, **kind)
    assert isinstance(other.attempt(waiting), Busy)
    holder.release(kept)
    assert granted_within(other, waiting, 20.0)
    assert DELAY <= time.monotonic() - began[0] < DELAY + 2


def test_one_that_had_its_turn_and_vanished_unheard_is_waited_out(url, bare, member, claims, monkeypatch) -> None:
    """When it was last seen it still waited; of its grant, and of its end, nothing came through."""
    first, second, last = bare(url), bare(url), bare(url)
    held, next_one, waiting = first.takes(first.claim()), second.claim(queue=True, delay=DELAY), last.claim(queue=True)
    monkeypatch.setattr(last.engine._shared.watcher, "follow", lambda *_, **__: None)
    assert isinstance(second.attempt(next_one), Busy)
    assert isinstance(last.attempt(waiting), Busy)
    first.release(held)
    assert isinstance(second.attempt(next_one), Grant)
    began = time.monotonic()
    member.revoke(next(lease for key, lease in claims().items() if second.book.client in key))
    assert isinstance(last.attempt(waiting), Busy)
    assert granted_within(last, waiting, 20.0)
    assert DELAY <= time.monotonic() - began < DELAY + 2


def test_a_waiter_whose_place_is_taken_away_too_has_not_forgotten(url, bare, member, claims) -> None:
    holder, other = bare(url), bare(url)
    holder.takes(holder.claim(delay=DELAY))
    waiting = other.claim(queue=True)
    assert isinstance(other.attempt(waiting), Busy)
    began = time.monotonic()
    for key in claims():
        member.delete(key)
    busy = other.attempt(waiting)
    assert isinstance(busy, Busy)
    assert granted_within(other, waiting, 20.0)
    assert DELAY <= time.monotonic() - began < DELAY + 2


@pytest.mark.faults
def test_a_crowd_some_of_whom_vanish_and_some_give_up(url, member, claims) -> None:
    """Nobody is let in before the delay of whoever vanished is over, as long as three stood in line and saw it."""
    end, rest, inside, problems, vanished = time.monotonic() + 40, [0.0], list[int](), list[str](), list[float]()
    guard = threading.Lock()

    def work(number: int) -> None:
        dice = random.Random(number)
        with Client(url) as client:
            while time.monotonic() < end:
                wait = 60 if number < 4 else dice.random() * 1.5
                try:
                    lease = client.lock("job", ttl=20, delay=1.0 if dice.random() < 0.8 else 0, wait=wait).acquire()
                except NotAcquired:
                    continue
                with guard:
                    if inside or time.monotonic() < rest[0]:
                        problems.append(f"{number}: {inside} {rest[0] - time.monotonic()}")
                    inside.append(number)
                time.sleep(dice.random() * 0.03)
                found = claims()
                mine = [key for key in found if client._desk.book.client in key]
                vanishes = lease._claim.delay and dice.random() < 0.3 and len(found) > 3
                with guard:
                    inside.remove(number)
                    if vanishes:
                        rest[0] = time.monotonic() + 1.0
                        vanished.append(rest[0])
                if vanishes:
                    member.revoke(found[mine[0]])
                    assert lease.wait_lost(5)
                else:
                    lease.release()

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join(120)
    assert problems == []
    assert len(vanished) > 5
    assert claims() == {}


def test_one_that_only_hoped_to_hold_leaves_no_delay(url, bare, monkeypatch) -> None:
    """A claim stands in line as a holder until it has looked: one that gives up before that had no turn."""
    holder, hopeful, last = bare(url), bare(url), bare(url)
    held, hoping, waiting = holder.takes(holder.claim()), hopeful.claim(queue=True, delay=30.0), last.claim(queue=True)
    monkeypatch.setattr(hopeful.engine._shared.leases, "take", once_only(hopeful.engine._shared.leases.take))
    with pytest.raises(RuntimeError):
        hopeful.attempt(hoping)
    assert isinstance(last.attempt(waiting), Busy)
    hopeful.release(hoping)
    holder.release(held)
    assert granted_within(last, waiting, 2.0)


def once_only(true):
    calls: list[int] = []

    async def take(*words):
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("interrupted")
        return await true(*words)

    return take


# ------------------------------------------------------------- what is known


def seen(created: int, state: str = "held") -> Seen:
    note = Note(f"{created}", state, 1, 5.0, Holder("x"), 0.0, 5.0 if state == "waiting" else 0.0)
    return Seen(b"%d" % created, "", "job", "lock", 1, "exclusive", created, 1, note)


def test_an_end_that_was_heard_needs_no_history() -> None:
    delays = Delays()
    assert delays.see([seen(1)], 10, now=100.0) == []
    assert delays.unknown
    delays.ended(b"1", seen(1, "released"), now=101.0)
    assert not delays.unknown
    assert delays.left(101.0) == 0.0


def test_who_is_found_gone_is_asked_for_once_and_feared_until_then() -> None:
    delays = Delays()
    delays.see([seen(1)], 10, now=100.0)
    assert delays.see([], 20, now=102.0) == [(b"1", 10)]
    assert delays.see([], 21, now=103.0) == []
    assert delays.left(103.0) == 4.0
    delays.ended(b"1", seen(1), now=104.0)
    assert (delays.unknown, delays.left(104.0)) == (False, 3.0), "from when it was missed, not from when it was told"


def test_the_end_of_a_later_claim_on_the_same_chair_says_nothing() -> None:
    delays = Delays()
    delays.see([seen(1)], 10, now=100.0)
    delays.ended(b"1", seen(7, "released")._replace(key=b"1", mode="shared"), now=101.0)
    assert delays.unknown


ENDS = st.sampled_from(["released", "held", "waiting", "cooling", "forgotten"])


@given(st.lists(st.tuples(ENDS, st.booleans()), min_size=1, max_size=5))
def test_a_name_rests_unless_every_end_was_a_good_one(ends: list[tuple[str, bool]]) -> None:
    """Readers that vanish one after the other, heard of at once, or missed and found in history."""
    delays, now = Delays(), 100.0
    ahead = [seen(number)._replace(mode="shared") for number in range(1, len(ends) + 1)]
    delays.see(ahead, 10, now)
    for number, (end, missed) in enumerate(ends):
        now += 0.1
        if missed:
            delays.see(ahead[number + 1 :], 11 + number, now)
            assert delays.left(now) >= 4.9 - 0.1 * number
        last = None if end == "forgotten" else seen(number + 1, end)._replace(mode="shared")
        delays.ended(ahead[number].key, last, now)
        assert delays.unknown == (number + 1 < len(ends))
    vanished = any(end in ("held", "waiting", "forgotten") for end, _ in ends)
    assert (delays.left(now) > 4.0) == vanished
