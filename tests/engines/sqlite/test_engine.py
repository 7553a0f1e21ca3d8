"""The SQLite engine in one process: wake-ups, syncs to disk, and no rows, sockets or threads left behind."""

from __future__ import annotations

import gc
import math
import os
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from leasehold import Client, LeaseLost, Unavailable
from leasehold.config import EngineConfig
from leasehold.core.timing import RESERVATION_TTL
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sqlite import connection as file_module
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.engine import InFlightAttempt, SqliteEngine, open_with_clock
from leasehold.engines.sqlite.fast_path import acquire_uncontended
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from leasehold.model import Alive, Busy, Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads


def count_rows(path: str) -> int:
    db = sqlite3.connect(path)
    tables = ("lh_grant", "lh_waiter", "lh_queue")
    total = sum(db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)
    db.close()
    return total


# -------------------------------------------------------- locks and rows


def test_released_name_leaves_no_rows(url, path) -> None:
    with Client(url) as client:
        for number in range(50):
            with client.lock(f"n{number}"):
                assert count_rows(path) == 1
        with client.semaphore("s", 3), client.rwlock("r").read(), client.rwlock("r").read():
            assert count_rows(path) == 3
        assert count_rows(path) == 0


def test_expired_names_are_swept_by_other_calls(url, path) -> None:
    now = [1000.0]
    runtime = Threads()
    registry = ClaimRegistry(runtime, os.urandom(8).hex())
    engine = open_with_clock(EngineConfig.parse(url, 5.0), runtime, registry, BootClock("m", "b", "n", lambda: now[0]))

    def attempt(name: str) -> Claim:
        claim = Claim("", name, "secret", name, Holder("h"), 10.0)
        assert isinstance(run_sync(engine.attempt(claim, math.inf)), Grant)
        return claim

    for number in range(100):
        attempt(f"old{number}")
    now[0] += 20.0
    assert count_rows(path) == 100
    for number in range(200):
        run_sync(engine.release(attempt(f"new{number}"), math.inf))
    assert count_rows(path) == 0
    run_sync(engine.close())


def test_any_name_and_namespace_can_be_locked(url) -> None:
    names = ["a", "A", "é", "e\u0301", "a/b", "%", "'; drop table lh_grant; --", "名", "x" * 255, " ", "_", "\n"]
    with Client(url, namespace="n's") as one, Client(url, namespace="other") as two:
        leases = [client.lock(name).acquire(wait=0) for client in (one, two) for name in names]
        assert {holding.name for holding in one.inspect()} == set(names)
        assert {holding.name for holding in two.inspect("a")} == {"a", "a/b"}
        assert [holding.name for holding in two.inspect("a", exact=True)] == ["a"]
        assert all(lease.release() for lease in leases)


def test_database_file_does_not_contain_the_claim_id(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        secret = lease._claim.id.encode()
        assert all(secret not in Path(f"{path}{suffix}").read_bytes() for suffix in ("", "-wal"))


def test_tokens_rise_across_clients_when_counter_is_ahead_of_clock(url, path) -> None:
    tokens = []
    for ahead in (0, 1 << 40, 0):
        with Client(url) as client:
            with client.lock("a") as lease:
                tokens.append(lease.token)
            if ahead:
                db = sqlite3.connect(path, isolation_level=None)
                db.execute("update lh_meta set token = token + ?", (ahead,))
                db.close()
    assert tokens == sorted(set(tokens))
    assert tokens[2] > (1 << 40)
    assert tokens[2] < 1 << 53


def sqlite_engine(client: Client) -> SqliteEngine:
    engine = client._core._engine
    assert isinstance(engine, SqliteEngine)
    return engine


def test_renewals_are_unavailable_one_by_one_when_file_is_locked(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        engine, claims = sqlite_engine(client), [lease._claim_for_renewal()] * 120
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        replies = run_sync(engine.renew(claims, time.clock_gettime(time.CLOCK_BOOTTIME) + 0.1))
        assert [type(reply) for reply in replies] == [Unavailable] * 120
        other.execute("rollback")
        other.close()
        replies = run_sync(engine.renew(claims, math.inf))
        assert [type(reply) for reply in replies] == [Alive] * 120


def test_abandoned_attempt_writes_nothing_or_is_undone(url, path, monkeypatch) -> None:
    claim = Claim("", "a", "secret", "mark", Holder("h"), 60.0)
    with Client(url) as client:
        engine, flight = sqlite_engine(client), InFlightAttempt(sync=True)
        flight.abandoned = True  # before the worker starts the attempt
        with pytest.raises(Unavailable):
            engine._attempt(claim, flight)
        assert count_rows(path) == 0
        flight = InFlightAttempt(sync=True)

        def abandon_while_running(*args) -> Grant | None:
            flight.abandoned = True  # during the attempt: its release may already have run
            return acquire_uncontended(*args)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.acquire_uncontended", abandon_while_running)
        assert isinstance(engine._attempt(claim, flight), Grant)
        assert count_rows(path) == 0


@pytest.mark.parametrize("durable", ["yes", "no"])
def test_grants_renewals_and_releases_sync_to_disk_but_waiters_do_not(path, monkeypatch, wait_until, durable) -> None:
    url = f"sqlite://{path}?durable={durable}"
    original, transactions = file_module.SqliteConnection._transact, []

    def transaction(self, db, job, write):
        (level,) = db.execute("pragma synchronous").fetchone()
        answer = original(self, db, job, write)
        transactions.append((level, answer))
        return answer

    monkeypatch.setattr(file_module.SqliteConnection, "_transact", transaction)
    grant_level = 2 if durable == "yes" else 1
    with Client(url) as holder, Client(url) as client:
        held = holder.lock("a").acquire()
        waiter = threading.Thread(target=lambda: client.lock("a", wait=60).acquire().release())
        waiter.start()
        wait_until(lambda: [h.state for h in holder.inspect()] == ["held", "waiting"])
        client._core.watchdog._next_heartbeat_at = 0.0
        client._core.registry.wake_watchdog(0.0)
        wait_until(lambda: any(answer == [Alive(15.0, 0)] for _, answer in transactions))  # a heartbeat
        held.renew()
        held.release()
        waiter.join(20)
        client.lock("b").acquire().release()  # uncontended, although this client now queues at once
        assert [level for level, answer in transactions if isinstance(answer, Grant) or answer is True] == [
            grant_level
        ] * 6
        assert {level for level, answer in transactions if answer == [Alive(15.0, 0)]} == {1}
        assert next(level for level, answer in transactions if isinstance(answer, Busy) and answer.position == 0) == 1
        renewals = [(level, answer[0]) for level, answer in transactions if isinstance(answer, list)]
        assert [level for level, reply in renewals if isinstance(reply, Alive) and reply.ttl > 15.0] == [grant_level]


# --------------------------------------------------------------- wake-ups


def test_deleted_wakeup_socket_is_replaced(url, path, wait_until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        grants = []
        thread = threading.Thread(target=lambda: grants.append(two.lock("a").acquire()))
        thread.start()
        wait_until(lambda: len(one.inspect("a")) == 2)
        for socket_path in Path(f"{path}-wakeup").iterdir():
            socket_path.unlink()
        wait_until(
            lambda: (
                two._core._engine._wakeup_socket.address
                and Path(f"{path}-wakeup", two._core._engine._wakeup_socket.address).exists()
            )
        )
        released_at = time.monotonic()
        lease.release()
        thread.join(30)
        assert time.monotonic() - released_at < 2
        grants[0].release()


def test_waiter_that_dies_before_its_notification_is_passed_over(url, path, wait_until, child, monkeypatch) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()
        dead_waiter = child("wait", url, "a", 60)
        assert dead_waiter.read_message() == "waiting"
        next_waiter = child("wait", url, "a", 60)
        assert next_waiter.read_message() == "waiting"
        dead_waiter.kill()
        addresses = []
        original = WakeupSocket.is_reachable

        def reachable(self, address: str) -> bool:
            addresses.append(address)
            return len(addresses) == 1 or original(self, address)  # reachable when the name was reserved

        monkeypatch.setattr(WakeupSocket, "is_reachable", reachable)
        began = time.monotonic()
        lease.release()
        next_waiter.read_message()
        assert time.monotonic() - began < RESERVATION_TTL / 2


def test_waiter_without_wakeup_socket_still_acquires(url, monkeypatch) -> None:
    def refuse(self) -> int:
        raise PermissionError("no place for a socket")

    monkeypatch.setattr("leasehold.engines.sqlite.wakeup_socket.WakeupSocket._make_folder", refuse)
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a").acquire()
        threading.Timer(0.3, lease.release).start()
        began = time.monotonic()
        with two.lock("a"):
            assert time.monotonic() - began < 4


def test_wakeup_socket_works_with_a_long_path(tmp_path, wait_until) -> None:
    folder = tmp_path / ("deep" * 20) / ("er" * 20)
    with Client(f"sqlite://{folder}/locks.db?durable=no") as one:
        lease = one.lock("a", ttl=600).acquire()
        assert one.break_lock("a", token=lease.token)
        assert lease.wait_lost(5)


def test_stale_sockets_of_killed_processes_are_removed(url, path, child, monkeypatch) -> None:
    process = child("hold", url, "a", 1)
    process.read_message()
    process.kill()
    socket_folder = Path(f"{path}-wakeup")
    assert len(list(socket_folder.iterdir())) == 1
    monkeypatch.setattr("leasehold.engines.sqlite.wakeup_socket._STALE_AFTER", -1.0)
    with Client(url) as client, client.lock("b"):
        assert len(list(socket_folder.iterdir())) == 1  # this client's own
    assert not list(socket_folder.iterdir())


def test_garbage_collected_client_leaves_no_thread_or_socket(url, path, wait_until) -> None:
    client = Client(url)
    with client.lock("a"):
        pass
    assert len(list(Path(f"{path}-wakeup").iterdir())) == 1
    del client
    wait_until(lambda: gc.collect() >= 0 and not list(Path(f"{path}-wakeup").iterdir()))  # reference cycles
    wait_until(lambda: not any("leasehold-wakeup" in thread.name for thread in threading.enumerate()))


def test_replaced_database_file_is_detected(url, path, wait_until) -> None:
    with Client(url) as one, Client(url) as two:
        lease = one.lock("a", ttl=600).acquire()
        for suffix in ("", "-wal", "-shm"):
            os.unlink(f"{path}{suffix}")
        wait_until(lambda: two.lock("b").call(lambda: os.path.exists(path)))
        wait_until(lambda: not one.inspect())
        with two.lock("a", wait=0) as second:
            assert second.token > lease.token
        with pytest.raises(LeaseLost):
            lease.renew()
