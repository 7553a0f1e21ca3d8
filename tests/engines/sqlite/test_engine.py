"""The SQLite engine in one process: rows, tokens, renewals, and nothing left behind."""

from __future__ import annotations

import math
import os
import sqlite3
import time

import pytest

from leasehold import Client, LeaseholdError, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sqlite.boot_clock import BootClock
from leasehold.engines.sqlite.engine import InFlightAttempt, SqliteEngine, open_with_clock
from leasehold.engines.sqlite.fast_path import acquire_uncontended
from leasehold.model import Alive, Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads
from tests.support import probe, probe_sqlite


def count_rows(path: str) -> int:
    db = sqlite3.connect(path)
    tables = ("lh_grant", "lh_waiter", "lh_queue")
    total = sum(db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)
    db.close()
    return total


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
    engine = probe.engine(client)
    assert isinstance(engine, SqliteEngine)
    return engine


def test_renewals_are_unavailable_one_by_one_when_file_is_locked(url, path) -> None:
    with Client(url) as client, client.lock("a") as lease:
        engine, claims = sqlite_engine(client), [probe.renewal_claim(lease)] * 120
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
            probe_sqlite.attempt_on_worker(engine, claim, flight)
        assert count_rows(path) == 0
        flight = InFlightAttempt(sync=True)

        def abandon_while_running(*args) -> Grant | None:
            flight.abandoned = True  # during the attempt: its release may already have run
            return acquire_uncontended(*args)

        monkeypatch.setattr("leasehold.engines.sqlite.engine.acquire_uncontended", abandon_while_running)
        assert isinstance(probe_sqlite.attempt_on_worker(engine, claim, flight), Grant)
        assert count_rows(path) == 0


@pytest.mark.parametrize(
    "ask",
    [lambda client: client.inspect("\ud800"), lambda client: client.semaphore("s", 1 << 70).acquire(wait=0)],
    ids=["text that is no UTF-8", "a limit beyond 64 bits"],
)
def test_values_sqlite_cannot_store_raise_leasehold_error(url, ask) -> None:
    """Binding a value may raise UnicodeEncodeError or OverflowError, which are not sqlite3.Error."""
    with Client(url) as client, pytest.raises(LeaseholdError):
        ask(client)
