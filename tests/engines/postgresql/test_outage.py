"""The PostgreSQL engine when its server is killed, paused, out of connections, failed over or out of disk space."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import psycopg
import pytest

from harness.servers.postgresql import PostgreSQL
from harness.servers.process import scratch
from leasehold import Client, LeaseLost, Unavailable
from leasehold.core.names import bucket
from tests.support.timing import check_elapsed


@pytest.fixture
def start_postgresql(database):
    """Start servers for this test alone, so that it may break them."""
    started: list[PostgreSQL] = []

    def start(*settings: str, **options) -> PostgreSQL:
        started.append(PostgreSQL(*settings, **options).start())
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextmanager
def background_waiter(client: Client, name: str, wait_until, **options):
    """Wait for a lock in another thread while the block runs. Yields the list that will get the lease or the error."""
    got: list = []

    def wait() -> None:
        try:
            got.append(client.lock(name, **options).acquire())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    wait_until(lambda: got or client._core.registry.waiting)
    yield got
    thread.join(60)
    assert not thread.is_alive()


def create_schema(url: str) -> None:
    """Create the tables: on a busy machine that takes longer than a short `call_timeout`."""
    with Client(url, call_timeout=20) as client:
        client.lock("job").acquire().release()


# ------------------------------------------------------------ killed, paused


def test_grant_and_waiter_survive_a_server_restart(database, wait_until) -> None:
    options = {"ttl": 60, "call_timeout": 30}
    with Client(database.url(), **options) as client, Client(database.url(), **options) as other:
        lease = client.lock("job").acquire()
        with background_waiter(other, "job", wait_until, wait=60) as got:
            database.server.restart()
            assert lease.held
            lease.verify()
            assert next(holding.state for holding in client.inspect()) == "held"
            wait_until(lambda: any(h.state == "waiting" for h in client.inspect()))
            assert lease.release()
        assert got[0].token > lease.token
        assert got[0].release()


def test_waiter_gives_up_at_its_wait_when_server_is_down(database, wait_until) -> None:
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60, call_timeout=25) as other:
        lease = client.lock("job").acquire()
        try:
            with background_waiter(other, "job", wait_until, wait=2) as got:
                wait_until(lambda: any(h.state == "waiting" for h in client.inspect()))
                database.server.kill()
                wait_until(lambda: got, 12)
            assert isinstance(got[0], Unavailable)
        finally:
            database.server.start()
        assert lease.release()


def test_pause_longer_than_the_ttl_grants_nothing_late(database, wait_until) -> None:
    create_schema(database.url())
    with Client(database.url(), ttl=1.0, call_timeout=0.5) as client, Client(database.url(), call_timeout=0.5) as other:
        lease = client.lock("job").acquire()
        other.ping()
        database.server.pause()
        with pytest.raises(Unavailable):
            other.lock("free", ttl=0.6, wait=0).acquire()
        wait_until(lambda: not lease.held)
        assert lease.lost_reason == "unreachable"
        database.server.resume()
        second = other.lock("job", wait=20).acquire()
        assert second.token > lease.token
        wait_until(
            lambda: [h.name for h in other.inspect()] == ["job"], 20
        )  # the client released what its late attempt was granted
        assert second.release()
        lease.release()


@pytest.mark.parametrize("which", ["calls", "wake-ups", "renewals"])
def test_client_recovers_when_one_of_its_sessions_is_terminated(database, wait_until, which) -> None:
    with Client(database.url(application_name="mine"), ttl=3.0) as client, Client(database.url(), ttl=60) as other:
        lease = client.lock("held", ttl=0.9).acquire()
        wait_until(lambda: len(database.sessions("mine")) == 3)
        taken = other.lock("job").acquire()
        with background_waiter(client, "job", wait_until, wait=60) as got:
            wait_until(lambda: any(h.state == "waiting" for h in other.inspect("job")))
            query_parts = {"calls": "lh_attempt", "wake-ups": "listen", "renewals": "lh_renew"}
            pids = [pid for pid, query in database.sessions("mine").items() if query_parts[which] in query]
            assert pids
            database.ask("select pg_terminate_backend(unnest(%s::integer[]))", pids)
            wait_until(lambda: len(database.sessions("mine")) == 3, 20)  # the client soon reopens it
            taken.release()
        assert got[0].release()
        assert lease.held
        lease.release()


def test_terminated_idle_sessions_are_replaced_silently(database, wait_until) -> None:
    with Client(database.url(application_name="idle")) as client:
        with client.lock("job"):
            pass
        database.terminate_sessions("idle")
        wait_until(lambda: not database.sessions("idle"))
        with client.lock("job") as lease:
            assert lease.held


def test_server_idle_timeout_does_not_apply_to_our_sessions(database, wait_until) -> None:
    database.ask("create role idler login superuser")
    database.ask("alter role idler set idle_session_timeout = '300ms'")
    try:
        with Client(database.url(user="idler", application_name="idler"), ttl=60) as client:
            lease = client.lock("job").acquire()
            before, began = set(database.sessions("idler")), time.monotonic()
            wait_until(lambda: time.monotonic() - began > 1)
            assert set(database.sessions("idler")) == before
            assert lease.release()
    finally:
        database.ask("drop owned by idler cascade")
        database.ask("drop role idler")


# -------------------------------------------------------------------- limits


def test_client_limited_to_one_connection_polls(database, wait_until) -> None:
    database.ask("create role poor login superuser")
    with Client(database.url()) as other:
        other.ping()
        other.inspect()
        database.ask("alter role poor nosuperuser connection limit 1")
        database.ask("grant usage on schema {s} to poor")
        database.ask("grant execute on all functions in schema {s} to poor")
        lease = other.lock("job", ttl=60).acquire()
        try:
            with Client(database.url(user="poor"), ttl=60) as client:
                with background_waiter(client, "job", wait_until, wait=60) as got:
                    assert not client.traits.push
                    wait_until(lambda: any(h.state == "waiting" for h in other.inspect()))
                    lease.release()
                assert got[0].held
                database.ask("alter role poor connection limit 10")
                assert got[0].release()
        finally:
            database.ask("drop owned by poor")
            database.ask("drop role poor")


def test_client_without_any_connection_is_unavailable(database) -> None:
    database.ask("create role unwanted login connection limit 0")
    try:
        url = database.url(user="unwanted")
        with Client(url, call_timeout=1) as client, pytest.raises(Unavailable, match="too many connections"):
            client.lock("job").try_acquire()
    finally:
        database.ask("drop role unwanted")


# ---------------------------------------------------- other transactions


def test_name_locked_by_another_transaction_is_unavailable_in_time(database) -> None:
    create_schema(database.url())
    with Client(database.url(), call_timeout=0.5) as client:
        client.lock("job").acquire().release()
        with database.server.connect() as session, session.transaction():
            session.execute(f'select 1 from "{database.schema}".lh_bucket for update'.encode())
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("job").try_acquire()
            check_elapsed(began, 1.0)
        assert client.lock("job", wait=10).acquire().release()


def test_waiters_survive_a_deadlock_with_a_foreign_transaction(database, wait_until) -> None:
    """A foreign transaction locks rows in another order than the engine does. The server aborts one of the two."""
    first, second = sorted(["a", "b"], key=bucket)
    with Client(database.url(), call_timeout=20, ttl=60) as client, Client(database.url(), ttl=60) as other:
        held = [other.lock(name).acquire() for name in (first, second)]
        with (
            background_waiter(client, first, wait_until, wait=60) as first_got,
            background_waiter(client, second, wait_until, wait=60) as second_got,
        ):
            wait_until(lambda: sum(h.state == "waiting" for h in other.inspect()) == 2)
            lock = f'select 1 from "{database.schema}".lh_bucket where bucket = %s for update'.encode()
            with database.server.connect() as session:
                session.execute("set deadlock_timeout = '20s'")  # the server is to abort the engine's call
                with session.transaction():
                    session.execute(lock, (bucket(second),))
                    began = time.monotonic()
                    wait_until(lambda: _is_blocked(database, "lh_heartbeat"), 20)
                    session.execute(lock, (bucket(first),))
                    check_elapsed(began, 20)
            for lease in held:
                lease.release()
        assert first_got[0].release()
        assert second_got[0].release()


def _is_blocked(database, query_part: str) -> bool:
    query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    return bool(database.server.ask(query, f"%{query_part}%"))


# ------------------------------------------------- commits of unknown outcome


def test_commit_unconfirmed_by_a_standby_is_unavailable(start_postgresql, wait_until) -> None:
    server = start_postgresql()
    create_schema(server.url())
    with Client(server.url(), call_timeout=1.0, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        with pytest.raises(Unavailable):
            client.lock("job", wait=0).acquire()
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: not client.inspect(), 20)  # the client releases the unconfirmed grant
        assert client.lock("job", wait=10).acquire().release()


def test_commit_with_a_cancelled_standby_wait_is_unavailable(start_postgresql, wait_until) -> None:
    server = start_postgresql()
    with Client(f"{server.url()}?application_name=unsure", call_timeout=20, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        errors: list[BaseException] = []

        def take() -> None:
            try:
                client.lock("job", wait=0).acquire()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        waits = "from pg_stat_activity where application_name = 'unsure' and wait_event = 'SyncRep'"
        wait_until(lambda: server.ask(f"select pid {waits}"))
        server.ask(f"select pg_cancel_backend(pid) {waits}")
        thread.join(20)
        assert [type(error) for error in errors] == [Unavailable]
        assert "standby" in str(errors[0])
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: not client.inspect(), 30)


# ------------------------------------------------------------------ failover


def multi_host_url(*servers: PostgreSQL) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/postgres"


def test_failover_to_a_synchronous_standby_loses_no_grant(start_postgresql, wait_until) -> None:
    primary = start_postgresql()
    standby = primary.standby("one").start()
    try:
        primary.ask("alter system set synchronous_standby_names = 'one'")
        primary.ask("select pg_reload_conf()")
        wait_until(lambda: primary.ask("select sync_state from pg_stat_replication") == [("sync",)])
        with (
            Client(multi_host_url(primary, standby), call_timeout=5, ttl=60) as client,
            Client(multi_host_url(primary, standby)) as other,
        ):
            lease = client.lock("job").acquire()
            primary.kill()
            with pytest.raises(Unavailable):
                other.lock("job").try_acquire()
            standby.promote()
            assert other.lock("job").try_acquire() is None
            lease.verify()
            assert lease.release()
            with other.lock("job", wait=10) as second:
                assert second.token > lease.token
    finally:
        standby.kill()


def test_failover_to_an_async_standby_may_lose_a_grant_but_tokens_rise(start_postgresql, wait_until) -> None:
    primary = start_postgresql()
    standby = primary.standby().start()
    try:
        wait_until(lambda: primary.ask("select state from pg_stat_replication") == [("streaming",)])
        with (
            Client(multi_host_url(primary, standby), call_timeout=5, ttl=60) as client,
            Client(multi_host_url(primary, standby)) as other,
        ):
            client.lock("other").acquire().release()
            wait_until(lambda: _has_caught_up(primary))
            ((sender,),) = primary.ask("select pid from pg_stat_replication")
            os.kill(sender, 19)  # from here on nothing reaches the standby
            lease = client.lock("job").acquire()
            primary.kill()
            standby.promote()
            second = other.lock("job", wait=20).acquire()
            assert second.token > lease.token, "two holders, but a fence can tell them apart"
            with pytest.raises(LeaseLost):
                lease.renew()
            assert second.release()
    finally:
        standby.kill()


def _has_caught_up(primary: PostgreSQL) -> bool:
    return primary.ask("select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication") == [(True,)]


def test_standby_grants_nothing(start_postgresql) -> None:
    primary = start_postgresql()
    standby = primary.standby().start()
    try:
        with Client(standby.url()) as client, pytest.raises(Unavailable, match="standby"):
            client.lock("job").try_acquire()
    finally:
        standby.kill()


# ---------------------------------------------------------------------- disk


@pytest.mark.faults
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small disk")
def test_full_disk_is_unavailable_until_space_is_freed(start_postgresql) -> None:
    folder = scratch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m,mode=711", "none", folder], check=True)
    try:
        server = start_postgresql("min_wal_size=32MB", "max_wal_size=32MB", "wal_recycle=off", folder=folder)
        with Client(server.url(), ttl=120, call_timeout=2) as client:
            lease = client.lock("held").acquire()
            filler = os.path.join(folder, "filler")
            with pytest.raises(Unavailable):
                for _ in range(50):
                    with open(filler, "ab") as file:
                        file.write(b"\0" * max(0, shutil.disk_usage(folder).free - 4096))
                    with suppress(psycopg.Error):
                        server.ask("select pg_switch_wal()")  # there is no room for the next segment
                    client.lock("job", wait=0).acquire().release()
            os.unlink(filler)
            server.restart()
            lease.verify()
            assert lease.release()
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
