"""Many names and many candidates between real processes, on three engines of different kinds: philosophers that dine,
circles that are named, leaders that are killed."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pytest

from leasehold import Client
from leasehold.testing import etcd_rig, redis_rig
from leasehold.testing.checker import check
from leasehold.testing.history import History

SCRIPT = Path(__file__).with_name("many_child.py")


class Place(NamedTuple):
    """Where they meet: an engine, and a namespace of the test's own."""

    url: str
    space: str

    def client(self) -> Client:
        return Client(self.url, namespace=self.space, call_timeout=60)


@pytest.fixture(params=["sqlite", "redis", "etcd"])
def place(request, url, present) -> Place:
    with present():
        if request.param == "redis":
            url = f"redis://127.0.0.1:{redis_rig.alone()[0].port}"
        elif request.param == "etcd":
            url = f"etcd://{etcd_rig.alone().hosts}"
    return Place(url, uuid4().hex)


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ---------------------------------------------------------- dining philosophers


def dine(place, child, folder, philosophers: int, rounds: int) -> None:
    table = [child("dine", *place, rounds, seed, folder, script=SCRIPT) for seed in range(philosophers)]
    began = time.monotonic()
    for one in table:
        one.go()
    for one in table:
        assert one.hear(1200) == "fed"
    lasted = time.monotonic() - began
    with place.client() as client:
        assert client.inspect() == []
    assert list(folder.iterdir()) == []
    print(f"{philosophers} philosophers x {rounds} rounds in {lasted:.1f} s: {philosophers * rounds / lasted:.0f}/s")


def test_philosophers_dine(place, child, tmp_path) -> None:
    (tmp_path / "table").mkdir()
    dine(place, child, tmp_path / "table", philosophers=6, rounds=25)


@pytest.mark.faults
def test_twenty_philosophers_dine_two_hundred_times(place, child, tmp_path) -> None:
    (tmp_path / "table").mkdir()
    dine(place, child, tmp_path / "table", philosophers=20, rounds=200)


# -------------------------------------------------------- locked by hand, unsorted


def circles_of(wants: list[int]) -> set[frozenset[int]]:
    """Each holds its own number and wants another's: the circles of that function."""
    found = set()
    for start in range(len(wants)):
        path, at = [start], wants[start]
        while at not in path:
            path.append(at)
            at = wants[at]
        found |= {frozenset(path)} if at == start else set()
    return found


def name_every_circle(place, child, until, wants: list[int]) -> None:
    hands = [child("grab", *place, f"n{mine}", f"n{other}", script=SCRIPT) for mine, other in enumerate(wants)]
    number_of = {hand.hear()["owner"]: number for number, hand in enumerate(hands)}
    for hand in hands:
        hand.go()
    with place.client() as client:
        until(lambda: sum(one.state == "waiting" for one in client.inspect()) == len(wants), 120)
        began = time.monotonic()
        found = client.deadlocks()
        took = time.monotonic() - began
        named = {frozenset(number_of[wait.waiter.owner] for wait in one.waits) for one in found}
        assert named == circles_of(wants)
        assert len(found) == len(named)
        print(f"{len(named)} circles among {len(wants)} processes named in {took * 1e3:.0f} ms")
        for one in found:
            assert client.break_lock(one.victim.name, token=one.victim.token)
        ends = [hand.hear(120) for hand in hands]
        assert sorted(set(ends)) == ["LeaseLost", "done"] if found else ["done"]
        assert ends.count("LeaseLost") == len(found)
        assert client.deadlocks() == []


def test_every_circle_of_hand_made_locking_is_named(place, child, until) -> None:
    # 0-1, 2-3-4, a tail 5 behind the first, a tail 6 behind 5, a circle 7-8
    name_every_circle(place, child, until, [1, 0, 3, 4, 2, 0, 5, 8, 7])


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_every_circle_among_twenty_processes_is_named(place, child, until, seed) -> None:
    chance = random.Random(seed)
    wants = [chance.choice([other for other in range(20) if other != mine]) for mine in range(20)]
    name_every_circle(place, child, until, wants)


# ---------------------------------------------------------------- elections


def kill_leaders(place, child, until, kills: int, ttl: float = 2.0, candidates: int = 5) -> None:
    observers = [child("look", *place, "boss", ttl, script=SCRIPT) for _ in range(2)]
    for one in observers:
        assert one.hear() == "on"
    candidate = partial(child, "run", *place, "boss", ttl, script=SCRIPT)
    field = {one.process.pid: one for one in (candidate() for _ in range(candidates))}
    events = [(one.hear()["at"], pid, "campaigns", 0) for pid, one in field.items()]
    led: list[int] = []
    bounds: list[float] = []
    with place.client() as client:
        election = client.election("boss", ttl=ttl)
        killed = boot_time()
        for number in range(kills + 1):
            until(lambda: (found := election.leader()) is not None and found.token > max(led, default=0), 60)
            term = election.leader()
            assert term is not None
            said = field[term.holder.pid].hear()
            assert (said["what"], said["token"]) == ("leads", term.token)
            events.append((said["at"], term.holder.pid, "leads", term.token))
            led.append(term.token)
            if number:
                bounds.append(said["at"] - killed)
            if number < kills:
                killed = boot_time()
                events.append((killed, term.holder.pid, "dies", term.token))
                field.pop(term.holder.pid).kill()
                new = candidate()
                field[new.process.pid] = new
                events.append((new.hear()["at"], new.process.pid, "campaigns", 0))
    judge(events)
    assert max(bounds) < ttl + 2.0, bounds
    for one in observers:
        seen = [one.hear() for _ in led]
        assert [token for token, _, _ in seen] == led, "every term, once and in order"
        assert not any(missed for _, _, missed in seen)
    print(f"{kills} leaders killed: the next led after {min(bounds):.2f} to {max(bounds):.2f} s, ttl {ttl} s")


def judge(events: list[tuple[float, int, str, int]]) -> None:
    """Never two leaders: told to the checker in the order of the machine's one clock."""
    clock = [0.0]
    history = History(lambda: clock[0])
    asked = {}
    for at, pid, what, token in sorted(events):
        clock[0] = at
        if what == "campaigns":
            asked[pid] = history.invoke(str(pid), "acquire", "boss")
        elif what == "leads":
            asked[pid].ok(token=token)
        else:
            history.crashed(str(pid))
    verdict = check(history)
    assert verdict.result == "valid", verdict


def test_three_leaders_are_killed_and_followed(place, child, until) -> None:
    kill_leaders(place, child, until, kills=3, ttl=1.0)


@pytest.mark.faults
def test_twenty_leaders_are_killed_and_followed(place, child, until) -> None:
    kill_leaders(place, child, until, kills=20)


@pytest.mark.faults
def test_no_term_is_missed_however_short(place) -> None:
    """Candidates that resign as soon as they lead: each term stays in view for as long as observers need."""
    led: list[int] = []
    seen: list[list[int]] = [[], []]

    def stand() -> None:
        with place.client() as client:
            election = client.election("boss", ttl=3)
            for _ in range(4):
                led.append(election.campaign().token)
                assert election.resign()

    def observe(terms: list[int]) -> None:
        with place.client() as client:
            for term in client.election("boss", ttl=3).observe(seconds=120):
                terms.append(term.token)
                assert not term.missed
                if len(terms) == 12:
                    return

    threads = [threading.Thread(target=observe, args=(terms,)) for terms in seen]
    threads += [threading.Thread(target=stand) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert seen == [sorted(led)] * 2
