"""The SQLite engine between real processes: exclusion, order, and killed or stopped holders and waiters."""

from __future__ import annotations

import signal
import sqlite3
import time
from itertools import pairwise

import pytest

from leasehold import Client
from leasehold.core.timing import RESERVATION_TTL
from leasehold.engines.sqlite import schema
from tests.support.lock_child import ALLOW_TRIGGERS
from tests.support.timing import check_elapsed, check_seconds


def boot_time() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class GrantRecorder:
    """Records with triggers, inside the engine's transactions, the order of grants and the passed-over waiters."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.executescript(
            """
            create table let_in (n integer primary key, ticket integer unique, token integer);
            create table passed_over (ticket integer);
            create trigger saw_let_in after insert on lh_grant when new.state in (1, 2) begin
                insert or ignore into let_in (ticket, token) values (new.ticket, new.token);
            end;
            create trigger saw_reserved after update on lh_grant begin
                insert or ignore into let_in (ticket, token) values (new.ticket, new.token);
            end;
            create trigger saw_passed_over after insert on lh_waiter when new.passed = 1 begin
                insert into passed_over values (new.ticket);
            end;
            """
        )

    def passed_over(self) -> set[int]:
        return {ticket for (ticket,) in self.db.execute("select ticket from passed_over")}

    def waiter_count(self) -> int:
        (count,) = self.db.execute("select count(*) from lh_waiter").fetchone()
        return int(count)

    def check_order(self, grants: int) -> int:
        """Check that grants follow tickets, except for passed-over waiters; return the number of those."""
        passed_over = self.passed_over()
        rows = self.db.execute("select ticket, token from let_in order by n").fetchall()
        tickets = [ticket for ticket, _ in rows if ticket not in passed_over]
        assert tickets == sorted(tickets)
        assert len({ticket for ticket, _ in rows}) == grants
        self.db.close()
        return len(passed_over)


def record_grants(url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> GrantRecorder:
    with Client(url) as client:
        client.ping()
    monkeypatch.setenv(ALLOW_TRIGGERS, "1")  # for the children
    monkeypatch.setattr(schema, "check_schema", lambda db, path: None)
    return GrantRecorder(path)


def test_eight_processes_increment_one_file_exclusively(url, path, tmp_path, child, monkeypatch) -> None:
    recorder = record_grants(url, path, monkeypatch)
    file = tmp_path / "counter"
    file.write_text("0")
    workers = [child("count", url, "hot", file, 40) for _ in range(8)]
    counted = sorted(tuple(pair) for worker in workers for pair in worker.read_message(600))
    assert file.read_text() == "320"
    assert [number for number, _ in counted] == list(range(320))
    assert all(first < second for (_, first), (_, second) in pairwise(counted))
    print(f"passed over: {recorder.check_order(320)} of 320")


@pytest.mark.faults  # the same with fewer is below
def test_thousand_waiters_from_twenty_processes_each_acquire_once(url, path, child, wait_until, monkeypatch) -> None:
    check_many_waiters(url, path, child, wait_until, monkeypatch, processes=20, threads=50)


@pytest.mark.extended
def test_two_hundred_waiters_from_ten_processes_each_acquire_once(url, path, child, wait_until, monkeypatch) -> None:
    check_many_waiters(url, path, child, wait_until, monkeypatch, processes=10, threads=20)


def check_many_waiters(url, path, child, wait_until, monkeypatch, processes: int, threads: int) -> None:
    recorder = record_grants(url, path, monkeypatch)
    with Client(url, ttl=120) as client:
        with client.lock("crowd"):
            children = [child("crowd", url, "crowd", threads) for _ in range(processes)]
            for process in children:
                process.send_newline()
            wait_until(lambda: recorder.waiter_count() == processes * threads, 600, 0.05)
            began = time.monotonic()
        tokens = [token for process in children for token in process.read_message(600)]
        assert len(set(tokens)) == len(tokens) == processes * threads
        assert client.inspect() == []
    lasted = time.monotonic() - began
    print(
        f"passed over: {recorder.check_order(len(tokens) + 1)} of {len(tokens)}; "
        f"{lasted / len(tokens) * 1e3:.2f} ms each"
    )


def test_killed_head_of_the_queue_does_not_delay_next_waiter(url, child, path, monkeypatch) -> None:
    recorder = record_grants(url, path, monkeypatch)
    holder = child("hold", url, "a", 60)
    holder.read_message()
    head, second = (wait_until_queued(child("wait", url, "a", 60)) for _ in range(2))
    head.kill()
    released = boot_time()
    holder.send_newline()
    check_seconds(second.read_message()["at"] - released, RESERVATION_TTL / 2)
    assert len(recorder.passed_over()) == 1
    recorder.db.close()


def wait_until_queued(waiter):
    assert waiter.read_message() == "waiting"
    return waiter


def test_stopped_holder_loses_its_lease_and_detects_it(url, child) -> None:
    holder = child("hold", url, "a", 1)
    first = holder.read_message()
    holder.signal(signal.SIGSTOP)
    with Client(url) as client:
        second = client.lock("a").acquire(wait=30)
        assert second.token > first["token"]
        holder.signal(signal.SIGCONT)
        holder.send_newline()
        message = holder.read_message()
        assert message["held"] is False
        assert message["reason"] in ("stalled", "expired", "unknown", "unreachable")
        assert message["released"] is False
        assert second.held
        second.renew()


def test_stopped_head_is_passed_over_and_returns_to_its_position(url, child, wait_until) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        head = wait_until_queued(child("wait", url, "a", 60))
        second = wait_until_queued(child("wait", url, "a", 60))
        head.signal(signal.SIGSTOP)
        lease.release()
        second.read_message(RESERVATION_TTL + 10)
        third = wait_until_queued(child("wait", url, "a", 60))
        assert [holding.state for holding in client.inspect("a")] == ["held", "passed over", "waiting"]
        head.signal(signal.SIGCONT)
        wait_until(lambda: [holding.state for holding in client.inspect("a")] == ["held", "waiting", "waiting"])
        second.send_newline()
        head.read_message()  # before the third waiter, which came later
        head.send_newline()
        third.read_message()


def test_killing_a_process_inside_a_transaction_loses_no_grant(url, path, child) -> None:
    granted: dict[str, int] = {}
    for round_ in range(6):
        one = child("churn", url)
        assert one.read_message() == "on"
        for _ in range(round_ * 7 + 1):  # kill it at another moment each time
            name, token = one.read_message()
            granted[name] = token
        one.kill()
        granted |= dict(one.read_all_messages())
    with Client(url) as client:
        found = {one.name: one.token for one in client.inspect()}
        assert granted.items() <= found.items()
        with client.lock("next") as lease:
            assert lease.token > max(granted.values())
    with sqlite3.connect(path) as db:
        assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()


def test_open_transaction_of_another_process_is_unavailable_at_deadline(url, path) -> None:
    from leasehold import Unavailable

    with Client(url, call_timeout=0.5) as client:
        client.ping()
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        began = time.monotonic()
        with pytest.raises(Unavailable, match="locked by other processes"):
            client.lock("a").acquire()
        assert time.monotonic() - began >= 0.5
        check_elapsed(began, 1.0)
        other.execute("rollback")
        other.close()
        with client.lock("a", wait=0) as lease:
            assert lease.held
