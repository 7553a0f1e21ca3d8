"""The MySQL engine when its server, its sessions or the network fail. `make faults` runs the long tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import closing, suppress

import pytest

from harness.servers.folders import scratch
from harness.servers.mysql import MariaDB
from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, NotAcquired, Unavailable, Unsupported
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema
from tests.support import probe, probe_sql
from tests.support.contention import wait_in_vain
from tests.support.slow_network import check_lease_is_kept
from tests.support.timing import check_elapsed


def url_of(server: MariaDB, user: str = "root", port: int | None = None) -> str:
    return f"mysql://{user}@127.0.0.1:{port or server.port}/leasehold"


def test_grant_and_waiter_survive_a_server_restart(mariadb, wait_until) -> None:
    server = mariadb()
    with Client(url_of(server), ttl=60, call_timeout=30) as client, Client(url_of(server), call_timeout=30) as other:
        lease = client.lock("job").acquire()
        got: list[int] = []

        def wait() -> None:
            with other.lock("job", wait=60, ttl=60) as taken:
                got.append(taken.token)

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: len(client.inspect()) == 2)
        server.restart()
        lease.verify()
        assert lease.release()
        thread.join(60)
        assert got[0] > lease.token


def test_pause_longer_than_the_ttl_grants_nothing_late(mariadb) -> None:
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


def test_client_recovers_when_its_sessions_are_killed(mysql, wait_until) -> None:
    with Client(mysql.named_url("hunted"), ttl=60) as client, Client(mysql.url(), ttl=60) as other:
        client.inspect()
        blocking = other.lock("taken").acquire()
        wait_in_vain(client.lock("taken"), lambda: probe.engine_state(client)["mysql"].address)
        with client.lock("job") as lease:
            wait_until(lambda: len(mysql.sessions("hunted")) == 4)
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
            wait_until(lambda: any(each.state == "waiting" for each in other.inspect()))
            blocking.release()
            thread.join(60)
            assert got


@pytest.mark.faults  # starts its own servers
def test_server_idle_timeout_does_not_apply_to_our_sessions(mariadb, wait_until) -> None:
    server = mariadb("wait-timeout=1", "interactive-timeout=1")
    with Client(url_of(server)) as client:
        client.inspect()
        session = probe_sql.session(client)
        began = time.monotonic()
        wait_until(lambda: time.monotonic() - began > 2.2)
        assert session.usable()


@pytest.mark.faults  # starts its own servers
def test_connection_limit_is_unavailable_or_falls_back_to_polling(mariadb) -> None:
    server = mariadb()
    server.run("create user lone", "grant all on *.* to lone with max_user_connections 1")
    with Client(url_of(server, "lone"), call_timeout=3, ttl=60) as first:
        lease = first.lock("job").acquire()
        with Client(url_of(server, "lone"), call_timeout=2) as second, pytest.raises(Unavailable):
            second.lock("other", wait=0).acquire()
        # With one connection, and none for wake-ups, a client polls.
        with Client(url_of(server)) as other:
            held = other.lock("taken", ttl=60).acquire()
            threading.Timer(1.0, held.release).start()
            with first.lock("taken", wait=30) as taken:
                assert taken.held
            assert not first.traits.push
        lease.release()


def test_name_locked_by_another_transaction_is_unavailable_in_time(mysql, wait_until) -> None:
    with Client(mysql.url()) as client, Client(mysql.url(), call_timeout=1.0) as impatient:
        client.lock("job").acquire().release()  # which creates the tables
        with mysql.lock_all_buckets():
            began = time.monotonic()
            with pytest.raises(Unavailable):
                impatient.lock("job", wait=0).acquire()
            check_elapsed(began, 1.5)
        with client.lock("job", wait=60) as lease:
            assert lease.held


def test_deadlock_with_a_foreign_transaction_is_retried(mysql, wait_until) -> None:
    """The server aborts one of the two. If it aborts the engine's call, the call had no effect and is retried."""
    with Client(mysql.url(), call_timeout=20, ttl=60) as client:
        lease = client.lock("job").acquire()
        released: list[bool] = []
        with mysql.server.connect(autocommit=False) as stranger, stranger.cursor() as cursor:
            cursor.execute(f"select * from `{mysql.schema}`.lh_bucket for update")
            thread = threading.Thread(target=lambda: released.append(lease.release()))
            thread.start()
            wait_until(lambda: mysql.is_blocked(""), every=0.2)  # the release has the grant and waits for the bucket
            with suppress(Exception):
                cursor.execute(f"select * from `{mysql.schema}`.lh_grant for update")
            stranger.rollback()
        thread.join(30)
        assert released == [True]
        assert not client.inspect()


@pytest.mark.faults  # starts its own servers
def test_read_only_server_is_unavailable(mariadb) -> None:
    server = mariadb()
    with Client(url_of(server), call_timeout=2) as client:
        lease = client.lock("job", ttl=60).acquire()
        server.run("set global read_only = 1")
        with Client(url_of(server), call_timeout=2) as other, pytest.raises(Unavailable, match="replica"):
            other.ping()
        server.run("set global read_only = 0")
        assert lease.release()


@pytest.mark.faults  # starts its own servers
def test_listener_follows_the_calls_to_another_server(mariadb, wait_until) -> None:
    first_server, second_server = mariadb(), mariadb()
    proxy = Proxy(first_server.port)
    try:
        with Client(url_of(first_server, port=proxy.port), ttl=60, call_timeout=10) as client:
            with Client(url_of(first_server)) as other, other.lock("job", ttl=60), pytest.raises(NotAcquired):
                client.lock("job", wait=1).acquire()
            listener = probe.engine_state(client)["mysql"]
            before = listener.address
            assert before
            proxy.target = ("127.0.0.1", second_server.port)
            probe_sql.session(client).shutdown()
            with Client(url_of(second_server)) as other, other.lock("job", ttl=60), pytest.raises(NotAcquired):
                client.lock("job", wait=3).acquire()
            assert listener.address not in ("", before)
    finally:
        proxy.close()


@pytest.mark.faults  # starts its own servers
def test_relaxed_durability_is_declared_in_the_traits(mariadb) -> None:
    server = mariadb("innodb-flush-log-at-trx-commit=2")
    with Client(url_of(server)) as client:
        client.ping()
        assert client.traits.survives == "nothing"
        with pytest.raises(Unsupported):
            client.lock("job", require={"survives-restart"}).acquire()


@pytest.mark.faults  # starts its own servers
def test_statement_past_its_deadline_is_ended_by_the_server(mariadb, wait_until) -> None:
    server = mariadb()
    with Client(url_of(server), call_timeout=1, ttl=60) as client:
        client.lock("job").acquire().release()
        with server.connect(autocommit=False) as session, session.cursor() as cursor:
            cursor.execute("select 1 from leasehold.lh_bucket for update")
            with pytest.raises(Unavailable):
                client.lock("job", wait=0).acquire()
            waits = "select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
            wait_until(lambda: not server.ask(waits), every=0.2)


def test_release_is_pending_while_privileges_are_revoked(mysql, wait_until) -> None:
    with Client(mysql.url()) as owner:
        owner.inspect()
    with Client(mysql.create_granted_role("tenant"), ttl=60) as client:
        lease = client.lock("job").acquire()
        mysql.server.run("revoke all privileges, grant option from tenant")
        with pytest.raises(Unavailable):
            lease.renew()
        assert lease.held, "a refused call says nothing about the lease"
        with pytest.raises(ConfigError):
            client.lock("other").try_acquire()
        assert not lease.release(), "the release is not confirmed, so it is pending"
        mysql.server.run(*schema.statements(schema.grants("tenant", mysql.schema)))
        wait_until(lambda: not mysql.ask("select 1 from {s}.lh_grant"))
    mysql.drop_role("tenant")


def test_client_that_vanished_during_a_call_locks_no_bucket(mysql, wait_until) -> None:
    """The server ended the client's call but left its transaction open, in a session whose client never hangs up: for
    the hours until TCP keepalive notices."""
    neighbour = next(name for name in map(str, range(20_000)) if bucket(name) == bucket("job"))
    with (
        Client(mysql.url(), ttl=60, call_timeout=2) as client,
        closing(Proxy(mysql.server.port)) as proxy,
        closing(mysql.server.connect(autocommit=False)) as session,
    ):
        client.inspect()
        vanished = Client(mysql.url(port=proxy.port, procedures="no"), call_timeout=1, ttl=60)
        lease = vanished.lock("job").acquire()
        session.cursor().execute(f"select 1 from `{mysql.schema}`.lh_grant lock in share mode")
        thread = threading.Thread(target=lease.release)
        thread.start()
        wait_until(lambda: mysql.is_blocked(""), every=0.2)  # the release has locked the bucket, and waits for the row
        proxy.cut()
        thread.join(30)
        wait_until(lambda: not mysql.is_blocked(""), every=0.2)  # the server has ended the call
        session.rollback()

        def is_free() -> bool:
            try:
                return client.lock(neighbour).acquire().release()
            except Unavailable:
                return False

        wait_until(is_free, 12.0)
        vanished.close()


@pytest.mark.faults
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small disk")
def test_full_disk_is_unavailable_until_space_is_freed(mariadb) -> None:
    folder = scratch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=711", "none", folder], check=True)
    try:
        server = mariadb("innodb-log-file-size=8M", folder=folder)
        with Client(url_of(server), ttl=300, call_timeout=2) as client:
            lease, leases = client.lock("held").acquire(), []
            with open(os.path.join(folder, "filler"), "ab") as file:
                file.write(b"\0" * max(0, shutil.disk_usage(folder).free - 4096))
            with pytest.raises(Unavailable):  # the log has room for a while, the tables do not
                for number in range(10_000):
                    leases.append(client.lock(f"{number}", purpose="x" * 200, wait=0).acquire())
            os.unlink(os.path.join(folder, "filler"))
            server.restart()
            lease.verify()
            for each in (lease, *leases):
                assert each.release()
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.faults
def test_slow_network_costs_no_lease(mysql) -> None:
    """The first renewal opens a session, which takes several round trips."""
    with closing(Proxy(mysql.server.port)) as proxy:
        check_lease_is_kept(mysql.url(port=proxy.port), [proxy])
