"""Behind a pooler in transaction mode (a real PgBouncer): a client owns no session and may leave nothing on one."""

from __future__ import annotations

import logging
import threading
import time

import psycopg
import pytest

from harness.rigs.postgresql import pooler
from leasehold import Client, ConfigError, transaction
from leasehold.testing.conformance.suite import Absent
from tests.support import probe_postgresql
from tests.support.timing import check_elapsed


@pytest.fixture
def port(database):
    try:
        return pooler(own=True).port
    except Absent as absent:
        pytest.skip(str(absent))


def test_waiters_are_woken_with_a_direct_listen_url(database, port, wait_until) -> None:
    url = database.url(port=port, listen_url=database.server.url())
    with Client(url) as client, Client(url) as other:
        lease = client.lock("job", ttl=60).acquire()
        assert client.traits.push
        got = []
        thread = threading.Thread(target=lambda: got.append(other.lock("job", wait=30).acquire()))
        thread.start()
        wait_until(lambda: len(client.inspect()) == 2)
        began = time.monotonic()
        lease.release()
        thread.join(30)
        check_elapsed(began, 1.5)
        assert got[0].release()


def test_commit_through_the_pooler_releases_the_lease(database, port) -> None:
    pooled = database.server.url(port=port)
    with Client(database.url()) as client:
        with client.lock("job") as lease, psycopg.connect(pooled, prepare_threshold=None) as connection:
            transaction.release_on_commit(lease, connection)
            assert client.lock("job").locked()
            connection.commit()
            assert not client.lock("job").locked()
        with client.lock("job") as lease, psycopg.connect(pooled, autocommit=True) as connection:
            with pytest.raises(ConfigError, match="not in a transaction"):
                transaction.release_on_commit(lease, connection)
            lease.verify()


def test_pooler_without_a_listen_url_is_detected(database, port, caplog) -> None:
    caplog.set_level(logging.WARNING)
    with Client(database.url(port=port)) as client:
        lease = client.lock("job", ttl=60).acquire()
        assert "listen_url" in caplog.text
        assert not client.traits.push
        assert not client.traits.break_notice
        lease.release()


def test_polling_waiters_are_served_in_order(database, port, wait_until) -> None:
    url = database.url(port=port, listen="no")
    served: list[int] = []
    with Client(url, call_timeout=20) as client:
        assert not client.traits.push
        assert client.traits.fair
        lease = client.lock("job", ttl=60).acquire()
        threads = []

        def work(number: int) -> None:
            with client.lock("job", wait=60):
                served.append(number)

        for number in range(4):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda number=number: len(client.inspect()) == number + 2)
        lease.release()
        for thread in threads:
            thread.join(60)
    assert served == [0, 1, 2, 3]


def test_only_the_head_of_the_queue_polls_often(database, port, wait_until) -> None:
    url = database.url(port=port, listen="no")
    with Client(url, call_timeout=20) as client:
        lease = client.lock("job", ttl=60).acquire()
        threads = [
            threading.Thread(target=lambda: client.lock("job", wait=60).acquire().release(), daemon=True)
            for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(client.inspect()) == 21)

        def attempts() -> int:
            database.ask("create extension if not exists pg_stat_statements")
            query = f'select "{database.schema}".lh\\_attempt%'
            return database.ask("select sum(calls)::integer from pg_stat_statements where query like %s", query)[0][0]

        before, began = attempts(), time.monotonic()
        wait_until(lambda: time.monotonic() - began > 2)
        rate = (attempts() - before) / (time.monotonic() - began)
        assert rate < 30, "twenty waiters that all polled five times a second would make 100"
        lease.release()
        for thread in threads:
            thread.join(60)
        assert not client.inspect()


def test_client_leaves_no_setting_on_a_pooled_session(database, port) -> None:
    with Client(database.url(port=port, listen="no")) as client:
        for _ in range(3):
            with client.lock("job"):
                pass
    with database.server.connect(prepare_threshold=None) as direct, _connect_through_pooler(database, port) as pooled:
        for setting in ("statement_timeout", "lock_timeout", "synchronous_commit", *probe_postgresql.SESSION_SETTINGS):
            show = f"show {setting}"
            assert pooled.execute(show).fetchone() == direct.execute(show).fetchone(), setting


def _connect_through_pooler(database, port):
    return psycopg.connect(database.server.url(port=port), autocommit=True, prepare_threshold=None)


def test_other_default_isolation_behind_a_pooler_is_refused(database, port) -> None:
    database.ask("create database stern")
    database.ask("alter database stern set default_transaction_isolation = 'serializable'")
    try:
        direct, pooled = database.server.url("stern"), f"{database.server.url('stern', port=port)}?listen=no"
        with Client(direct) as client, client.lock("job"):
            pass  # a direct session sets its own isolation level
        with Client(pooled) as client, pytest.raises(ConfigError, match="READ COMMITTED"):
            client.lock("job").try_acquire()
    finally:
        database.ask("drop database stern with (force)")


def test_listen_url_to_another_database_is_detected(database, port, caplog) -> None:
    caplog.set_level(logging.WARNING)
    elsewhere = database.server.url("template1")
    with Client(database.url(port=port, listen_url=elsewhere)) as client, client.lock("job") as lease:
        assert "another database" in caplog.text
        assert lease.held
