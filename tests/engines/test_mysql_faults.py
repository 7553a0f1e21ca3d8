"""The MySQL engine when its server, its sessions or the network fail. The long ones are for `make faults`."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from leasehold import Client, NotAcquired, Unavailable, Unsupported
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.proxy import Proxy


def url_of(server: MariaDB, user: str = "root", port: int | None = None) -> str:
    return f"mysql://{user}@127.0.0.1:{port or server.port}/leasehold"


def test_killed_and_started_again_every_grant_is_found_again(mariadb, until) -> None:
    server = mariadb()
    with Client(url_of(server), ttl=60, call_timeout=30) as client, Client(url_of(server), call_timeout=30) as other:
        lease = client.lock("job").acquire()
        got: list[int] = []

        def wait() -> None:
            with other.lock("job", wait=60, ttl=60) as taken:
                got.append(taken.token)

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: len(client.inspect()) == 2)
        server.restart()
        lease.verify()
        assert lease.release()
        thread.join(60)
        assert got[0] > lease.token


def test_a_stop_past_the_ttl_hands_out_nothing_late(mariadb) -> None:
    server = mariadb()
    with Client(url_of(server), call_timeout=30) as first:
        first.inspect()
    with Client(url_of(server), ttl=3, call_timeout=2) as client:
        client.lock("job").acquire().release()
        lease = client.lock("held").acquire()
        server.pause()
        with pytest.raises(Unavailable):
            client.lock("job", wait=0).acquire()
        assert lease.wait_lost(10)
        server.resume()
        with Client(url_of(server), call_timeout=20) as other, other.lock("job", wait=20) as taken:
            assert taken.held


def test_each_of_our_sessions_may_be_ended(mysql, until) -> None:
    with Client(mysql.named("hunted"), ttl=6, call_timeout=20) as client, Client(mysql.url(), ttl=60) as other:
        client.inspect()
        blocking = other.lock("taken").acquire()
        with pytest.raises(NotAcquired):
            client.lock("taken", wait=1).acquire()
        with client.lock("job") as lease:
            until(lambda: len(mysql.sessions("hunted")) == 4)
            for session in mysql.sessions("hunted"):
                mysql.server.run(f"kill {session}", missing=True)
            lease.renew()
            lease.check()
            got: list[int] = []

            def wait() -> None:
                with client.lock("taken", wait=60) as taken:
                    got.append(taken.token)

            thread = threading.Thread(target=wait)
            thread.start()
            until(lambda: any(each.state == "waiting" for each in other.inspect()))
            blocking.release()
            thread.join(60)
            assert got


@pytest.mark.faults  # starts servers of its own
def test_an_idle_timeout_of_the_server_does_not_apply_to_us(mariadb, until) -> None:
    server = mariadb("wait-timeout=1", "interactive-timeout=1")
    with Client(url_of(server)) as client:
        client.inspect()
        session = client._desk.engine()._lane._session
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 2.2)
        assert session.usable()


@pytest.mark.faults  # starts servers of its own
def test_with_no_connection_to_be_had_nothing_is_known(mariadb) -> None:
    server = mariadb()
    server.run("create user lone", "grant all on *.* to lone with max_user_connections 1")
    with Client(url_of(server, "lone"), call_timeout=3, ttl=60) as first:
        lease = first.lock("job").acquire()
        with Client(url_of(server, "lone"), call_timeout=2) as second, pytest.raises(Unavailable):
            second.lock("other", wait=0).acquire()
        # With one, but none to be told by, a client polls.
        with Client(url_of(server)) as other:
            held = other.lock("taken", ttl=60).acquire()
            threading.Timer(1.0, held.release).start()
            with first.lock("taken", wait=30) as taken:
                assert taken.held
            assert not first.traits.push
        lease.release()


def test_a_name_kept_by_another_transaction_is_unavailable_in_time(mysql, until) -> None:
    with Client(mysql.url(), call_timeout=1.0) as client:
        client.lock("job").acquire().release()
        with mysql.frozen():
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("job", wait=0).acquire()
            assert time.monotonic() - began < 1.5
        with client.lock("job", wait=10) as lease:
            assert lease.held


def test_a_deadlock_with_a_stranger_passes(mysql, until) -> None:
    """The server ends one of the two; if it is ours, nothing was done, and it is done again."""
    with Client(mysql.url(), call_timeout=20, ttl=60) as client:
        lease = client.lock("job").acquire()
        done: list[bool] = []
        with mysql.server.connect(autocommit=False) as stranger, stranger.cursor() as cursor:
            cursor.execute(f"select * from `{mysql.schema}`.lh_bucket for update")
            thread = threading.Thread(target=lambda: done.append(lease.release()))
            thread.start()
            until(lambda: mysql.blocked(""), every=0.2)  # it has the grant's row, and waits for the bucket
            with suppress(Exception):
                cursor.execute(f"select * from `{mysql.schema}`.lh_grant for update")
            stranger.rollback()
        thread.join(30)
        assert done == [True]
        assert not client.inspect()


@pytest.mark.faults  # starts servers of its own
def test_a_replica_is_not_asked(mariadb) -> None:
    server = mariadb()
    with Client(url_of(server), call_timeout=2) as client:
        lease = client.lock("job", ttl=60).acquire()
        server.run("set global read_only = 1")
        with Client(url_of(server), call_timeout=2) as other, pytest.raises(Unavailable, match="replica"):
            other.ping()
        server.run("set global read_only = 0")
        assert lease.release()


@pytest.mark.faults  # starts servers of its own
def test_calls_that_move_to_another_server_are_heard_there(mariadb, until) -> None:
    one, two = mariadb(), mariadb()
    proxy = Proxy(one.port)
    try:
        with Client(url_of(one, port=proxy.port), ttl=60, call_timeout=10) as client:
            with Client(url_of(one)) as other, other.lock("job", ttl=60), pytest.raises(NotAcquired):
                client.lock("job", wait=1).acquire()
            ear = client._desk.book.shelf["mysql"]
            before = ear.address
            assert before
            proxy._target = ("127.0.0.1", two.port)
            client._desk.engine()._lane._session.shut()
            with Client(url_of(two)) as other, other.lock("job", ttl=60), pytest.raises(NotAcquired):
                client.lock("job", wait=3).acquire()
            assert ear.address not in ("", before)
    finally:
        proxy.close()


@pytest.mark.faults  # starts servers of its own
def test_less_than_durable_is_said(mariadb) -> None:
    server = mariadb("innodb-flush-log-at-trx-commit=2")
    with Client(url_of(server)) as client:
        client.ping()
        assert client.traits.survives == "nothing"
        with pytest.raises(Unsupported):
            client.lock("job", require={"survives-restart"}).acquire()


@pytest.mark.faults  # starts servers of its own
def test_a_statement_that_ran_too_long_is_ended(mariadb, until) -> None:
    server = mariadb()
    with Client(url_of(server), call_timeout=1, ttl=60) as client:
        client.lock("job").acquire().release()
        with server.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute("select 1 from leasehold.lh_bucket for update")
            with pytest.raises(Unavailable):
                client.lock("job", wait=0).acquire()
            waits = "select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
            until(lambda: not server.ask(waits), every=0.2)
