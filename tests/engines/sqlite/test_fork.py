"""The SQLite engine after a fork: the child opens its own connection and leaves the parent's alone."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, Unavailable
from leasehold.engines.sqlite import connection as file_module
from tests.support import probe_sqlite


def test_forked_child_opens_its_own_connection(url, path, run_in_fork) -> None:
    with Client(url) as client:
        lease = client.lock("a").acquire()

        def child() -> None:
            assert not lease.held
            assert client.lock("a").try_acquire() is None
            with client.lock("b"):
                assert {holding.name for holding in client.inspect()} == {"a", "b"}
            client.close()
            assert len(list(Path(f"{path}-wakeup").iterdir())) == 1  # the parent's socket

        for _ in range(3):
            run_in_fork(child)
        lease.renew()
        assert lease.release()


def test_fork_during_transactions_of_other_threads_is_safe(url, path, run_in_fork) -> None:
    """The child gets a usable connection, and the parent's threads are not disturbed."""
    stopped = threading.Event()
    errors, connections_before = [], probe_sqlite.connections_never_closed()

    def churn(client: Client, number: int) -> None:
        try:
            while not stopped.is_set():
                with client.lock(f"n{number}"):
                    pass
        except BaseException as error:
            errors.append(error)

    with Client(url) as client:
        threads = [threading.Thread(target=churn, args=(client, number)) for number in range(3)]
        for thread in threads:
            thread.start()

        def child() -> None:
            assert probe_sqlite.connections_never_closed() == connections_before
            for number in range(20):
                with client.lock(f"child{number}"):
                    pass

        for _ in range(10):
            run_in_fork(child)
        stopped.set()
        for thread in threads:
            thread.join(30)
        assert not errors
    db = sqlite3.connect(path)
    assert db.execute("pragma integrity_check").fetchone() == ("ok",)
    db.close()


def test_client_cannot_open_the_file_while_process_forks(url) -> None:
    """A connection opened then, for example by a watchdog that starts, would not be closed before the fork."""
    probe_sqlite.freeze_all()
    with Client(url, call_timeout=0.2) as client:
        try:
            with pytest.raises(Unavailable):
                client.ping()
        finally:
            probe_sqlite.thaw_all()
        client.ping()


def test_each_of_two_forking_threads_thaws_its_own_connections(url, monkeypatch) -> None:
    """The second thread froze a connection made after the first thread froze its own. The first thread could not thaw
    it and thawed none of the others: no client of the process could open a file again."""
    monkeypatch.setattr(*probe_sqlite.FORK_TIMEOUT, 0.05)
    frozen, stopped = threading.Event(), threading.Event()

    def fork() -> None:
        probe_sqlite.freeze_all()
        frozen.set()
        stopped.wait(30)
        probe_sqlite.thaw_all()

    with Client(url) as client:
        client.ping()
        probe_sqlite.freeze_all()
        newcomer = Client(url)
        other = threading.Thread(target=fork)
        other.start()
        frozen.wait(30)
        try:
            probe_sqlite.thaw_all()
        finally:
            stopped.set()
            other.join(30)
        assert not probe_sqlite.forks_in_progress()
        client.ping()
        newcomer.close()


def test_two_forking_threads_freeze_connections_in_same_order(url, monkeypatch) -> None:
    """A set's order changes when it grows: two threads froze the connections in different orders and deadlocked."""
    orders: list[list[file_module.SqliteConnection]] = []
    monkeypatch.setattr(file_module.SqliteConnection, "freeze", lambda file: orders[-1].append(file))
    with Client(url), Client(url):
        connections = getattr(*probe_sqlite.ALL_CONNECTIONS)()
        for order in (connections, connections[::-1]):
            orders.append([])
            monkeypatch.setattr(*probe_sqlite.ALL_CONNECTIONS, order.copy)
            probe_sqlite.freeze_all()
            probe_sqlite.thaw_all()
    assert orders[0] == orders[1]


def test_child_and_parent_see_the_same_locks_after_parent_closes(url, path, run_in_fork) -> None:
    """If the child kept the parent's connection, they would disagree: the parent's close removes the WAL they share."""
    client = Client(url)
    with client.lock("before"):
        pass
    (ready_reader, ready_writer), (go_reader, go_writer) = os.pipe(), os.pipe()

    def child() -> None:
        with client.lock("child", ttl=600):
            os.write(ready_writer, b".")
            os.read(go_reader, 1)
            assert client.lock("third").try_acquire() is None

    thread = threading.Thread(target=run_in_fork, args=(child,))
    thread.start()
    os.read(ready_reader, 1)
    client.close()
    with Client(url) as third, third.lock("third", wait=0):
        assert third.lock("child").try_acquire() is None
        os.write(go_writer, b".")
        thread.join(30)
    for descriptor in (ready_reader, ready_writer, go_reader, go_writer):
        os.close(descriptor)


def test_child_forked_inside_a_transaction_is_refused(url, monkeypatch, run_in_fork) -> None:
    monkeypatch.setattr(*probe_sqlite.FORK_TIMEOUT, 0.05)
    with Client(url) as client:
        client.ping()

        def child() -> None:
            with pytest.raises(ConfigError, match="forked inside a transaction"):
                client.lock("a").acquire()
            with Client(url) as other, pytest.raises(ConfigError, match="forked inside a transaction"):
                other.ping()

        probe_sqlite.connection(client).run_transaction(lambda db: run_in_fork(child), math.inf)
        with client.lock("a"):
            pass
