"""Multilocks and elections between real processes on three different engines: dining philosophers, reported deadlocks,
killed leaders."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import pytest

from harness.checkers.history import History
from harness.checkers.intervals import check
from harness.rigs import etcd, redis
from leasehold import Client
from tests.support.paths import SUPPORT

SCRIPT = SUPPORT / "multilock_election_child.py"


class EngineSpace(NamedTuple):
    """The engine and the namespace that the processes of a test share."""

    url: str
    namespace: str

    def client(self) -> Client:
        return Client(self.url, namespace=self.namespace, call_timeout=60)


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.extended),
        "redis",
        pytest.param("etcd", marks=pytest.mark.extended),
    ]
)
def engine_space(request, url, require_server) -> EngineSpace:
    with require_server():
        if request.param == "redis":
            url = f"redis://127.0.0.1:{redis.single_server()[0].port}"
        elif request.param == "etcd":
            url = f"etcd://{etcd.single_member_cluster().hosts}"
    return EngineSpace(url, uuid4().hex)


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# ---------------------------------------------------------- dining philosophers


def dine(engine_space, child, folder, philosophers: int, rounds: int) -> None:
    processes = [child("dine", *engine_space, rounds, seed, folder, script=SCRIPT) for seed in range(philosophers)]
    began = time.monotonic()
    for process in processes:
        process.send_newline()
    for process in processes:
        assert process.read_message(1200) == "fed"
    lasted = time.monotonic() - began
    with engine_space.client() as client:
        assert client.inspect() == []
    assert list(folder.iterdir()) == []
    print(f"{philosophers} philosophers x {rounds} rounds in {lasted:.1f} s: {philosophers * rounds / lasted:.0f}/s")


def test_six_philosophers_finish_twenty_five_rounds(engine_space, child, tmp_path) -> None:
    (tmp_path / "table").mkdir()
    dine(engine_space, child, tmp_path / "table", philosophers=6, rounds=25)


@pytest.mark.faults
def test_twenty_philosophers_finish_two_hundred_rounds(engine_space, child, tmp_path) -> None:
    (tmp_path / "table").mkdir()
    dine(engine_space, child, tmp_path / "table", philosophers=20, rounds=200)


# -------------------------------------------------------- nested locks, unsorted


def cycles_of(wants: list[int]) -> set[frozenset[int]]:
    """The cycles if each process holds its own number and waits for the number in `wants`."""
    found = set()
    for start in range(len(wants)):
        path, current = [start], wants[start]
        while current not in path:
            path.append(current)
            current = wants[current]
        found |= {frozenset(path)} if current == start else set()
    return found


def check_reported_deadlocks(engine_space, child, wait_until, wants: list[int]) -> None:
    processes = [
        child("grab", *engine_space, f"n{mine}", f"n{other}", script=SCRIPT) for mine, other in enumerate(wants)
    ]
    number_of = {process.read_message()["owner"]: number for number, process in enumerate(processes)}
    for process in processes:
        process.send_newline()
    with engine_space.client() as client:
        wait_until(lambda: sum(entry.state == "waiting" for entry in client.inspect()) == len(wants), 120)
        began = time.monotonic()
        found = client.deadlocks()
        lasted = time.monotonic() - began
        reported = {frozenset(number_of[wait.waiter.owner] for wait in entry.waits) for entry in found}
        assert reported == cycles_of(wants)
        assert len(found) == len(reported)
        print(f"{len(reported)} circles among {len(wants)} processes named in {lasted * 1e3:.0f} ms")
        for entry in found:
            assert client.break_lock(entry.victim.name, token=entry.victim.token)
        ends = [process.read_message(120) for process in processes]
        assert sorted(set(ends)) == ["LeaseLost", "done"] if found else ["done"]
        assert ends.count("LeaseLost") == len(found)
        assert client.deadlocks() == []


@pytest.mark.extended
def test_every_deadlock_of_nested_locks_is_reported(engine_space, child, wait_until) -> None:
    # cycles 0-1, 2-3-4 and 7-8; 5 waits for 0, and 6 waits for 5
    check_reported_deadlocks(engine_space, child, wait_until, [1, 0, 3, 4, 2, 0, 5, 8, 7])


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(5))
def test_every_deadlock_among_twenty_processes_is_reported(engine_space, child, wait_until, seed) -> None:
    rng = random.Random(seed)
    wants = [rng.choice([other for other in range(20) if other != mine]) for mine in range(20)]
    check_reported_deadlocks(engine_space, child, wait_until, wants)


# ---------------------------------------------------------------- elections


def kill_leaders(engine_space, child, wait_until, kills: int, ttl: float = 2.0, candidates: int = 5) -> None:
    observers = [child("look", *engine_space, "boss", ttl, script=SCRIPT) for _ in range(2)]
    for participant in observers:
        assert participant.read_message() == "on"
    candidate = partial(child, "run", *engine_space, "boss", ttl, script=SCRIPT)
    candidate_by_pid = {
        participant.process.pid: participant for participant in (candidate() for _ in range(candidates))
    }
    events = [(participant.read_message()["at"], pid, "campaigns", 0) for pid, participant in candidate_by_pid.items()]
    led_tokens: list[int] = []
    takeover_times: list[float] = []
    with engine_space.client() as client:
        election = client.election("boss", ttl=ttl)
        killed = boot_time()
        for number in range(kills + 1):
            wait_until(
                lambda: (found := election.leader()) is not None and found.token > max(led_tokens, default=0), 60
            )
            term = election.leader()
            assert term is not None
            message = candidate_by_pid[term.holder.pid].read_message()
            assert (message["what"], message["token"]) == ("leads", term.token)
            events.append((message["at"], term.holder.pid, "leads", term.token))
            led_tokens.append(term.token)
            if number:
                takeover_times.append(message["at"] - killed)
            if number < kills:
                killed = boot_time()
                events.append((killed, term.holder.pid, "dies", term.token))
                candidate_by_pid.pop(term.holder.pid).kill()
                new = candidate()
                candidate_by_pid[new.process.pid] = new
                events.append((new.read_message()["at"], new.process.pid, "campaigns", 0))
    check_history(events)
    assert max(takeover_times) < ttl + 2.0, takeover_times
    for participant in observers:
        seen = [participant.read_message() for _ in led_tokens]
        assert [token for token, _, _ in seen] == led_tokens, "the observer must see every term once and in order"
        assert not any(missed for _, _, missed in seen)
    print(
        f"{kills} leaders killed: the next led after {min(takeover_times):.2f} to "
        f"{max(takeover_times):.2f} s, ttl {ttl} s"
    )


def check_history(events: list[tuple[float, int, str, int]]) -> None:
    """Assert that there were never two leaders. The machine's clock orders the events."""
    clock = [0.0]
    history = History(lambda: clock[0])
    invocations = {}
    for event_time, pid, event, token in sorted(events):
        clock[0] = event_time
        if event == "campaigns":
            invocations[pid] = history.invoke(str(pid), "acquire", "boss")
        elif event == "leads":
            invocations[pid].ok(token=token)
        else:
            history.crashed(str(pid))
    verdict = check(history)
    assert verdict.result == "valid", verdict


@pytest.mark.extended
def test_three_killed_leaders_are_succeeded(engine_space, child, wait_until) -> None:
    kill_leaders(engine_space, child, wait_until, kills=3, ttl=1.0)


@pytest.mark.faults
def test_twenty_killed_leaders_are_succeeded(engine_space, child, wait_until) -> None:
    kill_leaders(engine_space, child, wait_until, kills=20)


@pytest.mark.faults
def test_observers_see_every_term_however_short(engine_space) -> None:
    """Candidates resign as soon as they lead, but each term stays visible for as long as observers need."""
    led_tokens: list[int] = []
    seen: list[list[int]] = [[], []]

    def run_candidate() -> None:
        with engine_space.client() as client:
            election = client.election("boss", ttl=3)
            for _ in range(4):
                led_tokens.append(election.campaign().token)
                assert election.resign()

    def observe(terms: list[int]) -> None:
        with engine_space.client() as client:
            for term in client.election("boss", ttl=3).observe(seconds=120):
                terms.append(term.token)
                assert not term.missed
                if len(terms) == 12:
                    return

    threads = [threading.Thread(target=observe, args=(terms,)) for terms in seen]
    threads += [threading.Thread(target=run_candidate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(180)
    assert seen == [sorted(led_tokens)] * 2
