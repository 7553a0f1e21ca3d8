"""SQLite between real processes: exclusion, order, and what becomes of the dead."""

from __future__ import annotations

import signal
import sqlite3
import time
from itertools import pairwise

import pytest

from leasehold import Client
from leasehold.core.timing import RESERVATION


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Witness:
    """Writes down, inside the very transactions, who was let in in which order and who was passed over."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.executescript(
            """
            create table let_in (n integer primary key, ticket integer unique, token integer);
            create table passed_over (ticket integer);
            create trigger saw_let_in after insert on lh_grant when new.state in (1, 2) begin
                insert or ignore into let_in (ticket, token) values (new.ticket, new.token);
            end;
            create trigger saw_passed_over after insert on lh_waiter when new.passed = 1 begin
                insert into passed_over values (new.ticket);
            end;
            """
        )

    def passed_over(self) -> set[int]:
        return {ticket for (ticket,) in self.db.execute("select ticket from passed_over")}

    def waiting(self) -> int:
        (count,) = self.db.execute("select count(*) from lh_waiter").fetchone()
        return int(count)

    def check(self, grants: int) -> int:
        """Everybody was let in by ticket, but for those passed over: how many were."""
        over = self.passed_over()
        rows = self.db.execute("select ticket, token from let_in order by n").fetchall()
        tickets = [ticket for ticket, _ in rows if ticket not in over]
        assert tickets == sorted(tickets)
        assert len({ticket for ticket, _ in rows}) == grants
        self.db.close()
        return len(over)


def witness(url: str, path: str) -> Witness:
    with Client(url) as client:
        client.ping()
    return Witness(path)


def test_eight_processes_count_in_one_plain_file(url, path, tmp_path, child) -> None:
    saw = witness(url, path)
    file = tmp_path / "counter"
    file.write_text("0")
    workers = [child("count", url, "hot", file, 500) for _ in range(8)]
    counted = sorted(tuple(pair) for worker in workers for pair in worker.hear(600))
    assert file.read_text() == "4000"
    assert [number for number, _ in counted] == list(range(4000))
    assert all(one < two for (_, one), (_, two) in pairwise(counted))
    print(f"passed over: {saw.check(4000)} of 4000")


def test_a_thousand_waiters_from_twenty_processes_are_served_once_each(url, path, child, until) -> None:
    serve_a_crowd(url, path, child, until, processes=20, threads=50)


def test_two_hundred_waiters_from_ten_processes_are_served_once_each(url, path, child, until) -> None:
    serve_a_crowd(url, path, child, until, processes=10, threads=20)


def serve_a_crowd(url, path, child, until, processes: int, threads: int) -> None:
    saw = witness(url, path)
    with Client(url, ttl=120) as client:
        with client.lock("crowd"):
            crowds = [child("crowd", url, "crowd", threads) for _ in range(processes)]
            for one in crowds:
                one.go()
            until(lambda: saw.waiting() == processes * threads, 600, 0.05)
            began = time.monotonic()
        taken = [token for one in crowds for token in one.hear(600)]
        assert len(set(taken)) == len(taken) == processes * threads
        assert client.inspect() == []
    lasted = time.monotonic() - began
    print(f"passed over: {saw.check(len(taken) + 1)} of {len(taken)}; {lasted / len(taken) * 1e3:.2f} ms each")


def test_a_killed_holder_is_followed_within_its_ttl(url, child) -> None:
    holder = child("hold", url, "a", 2)
    first = holder.hear()
    waiter = child("wait", url, "a", 2)
    assert waiter.hear() == "waiting"
    holder.kill()
    killed = boot_time()
    second = waiter.hear()
    assert second["at"] - killed < 2 + 0.5
    assert second["token"] > first["token"]


def test_a_killed_head_of_the_line_holds_up_nobody(url, child, path) -> None:
    saw = witness(url, path)
    holder = child("hold", url, "a", 60)
    holder.hear()
    head, second = (in_line(child("wait", url, "a", 60)) for _ in range(2))
    head.kill()
    released = boot_time()
    holder.go()
    assert second.hear()["at"] - released < RESERVATION / 2
    assert len(saw.passed_over()) == 1
    saw.db.close()


def in_line(waiter):
    assert waiter.hear() == "waiting"
    return waiter


def test_a_stopped_holder_loses_its_lease_and_finds_out(url, child) -> None:
    holder = child("hold", url, "a", 1)
    first = holder.hear()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client:
        second = client.lock("a").acquire(wait=30)
        assert second.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.go()
        said = holder.hear()
        assert said["held"] is False
        assert said["reason"] in ("stalled", "lapsed", "unknown", "unreachable")
        assert said["released"] is False
        assert second.held
        second.renew()


def test_a_stopped_head_of_the_line_is_passed_over_and_comes_back(url, child, until) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        head = in_line(child("wait", url, "a", 60))
        second = in_line(child("wait", url, "a", 60))
        head.signal(signal.SIGSTOP)
        lease.release()
        second.hear(RESERVATION + 10)
        third = in_line(child("wait", url, "a", 60))
        assert [one.state for one in client.inspect("a")] == ["held", "passed over", "waiting"]
        head.signal(signal.SIGCONT)
        until(lambda: [one.state for one in client.inspect("a")] == ["held", "waiting", "waiting"])
        second.go()
        head.hear()  # before the third, who came later
        head.go()
        third.hear()


def test_killed_inside_transactions_nothing_is_lost(url, path, child) -> None:
    granted: dict[str, int] = {}
    for round_ in range(6):
        one = child("churn", url)
        assert one.hear() == "on"
        for _ in range(round_ * 7 + 1):  # another instant each time
            name, token = one.hear()
            granted[name] = token
        one.kill()
        granted |= dict(one.heard())
    with Client(url) as client:
        found = {one.name: one.token for one in client.inspect()}
        assert granted.items() <= found.items()
        with client.lock("next") as lease:
            assert lease.token > max(granted.values())
    with sqlite3.connect(path) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_process_stopped_inside_its_transaction_stops_the_rest_until_their_deadline(url, path) -> None:
    from leasehold import Unavailable

    with Client(url, call_timeout=0.5) as client:
        client.ping()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        began = time.monotonic()
        with pytest.raises(Unavailable, match="locked by other processes"):
            client.lock("a").acquire()
        assert 0.5 <= time.monotonic() - began < 1.0
        other.execute("rollback")
        other.close()
        with client.lock("a", wait=0) as lease:
            assert lease.held
