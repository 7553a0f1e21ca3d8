"""The PostgreSQL engine when its server is killed, paused, out of connections or out of disk space."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import suppress

import psycopg
import pytest

from harness.servers.folders import scratch
from harness.servers.proxy import Proxy
from leasehold import Client, Unavailable
from leasehold.core.names import bucket
from leasehold.engines.sql.session import SqlConnectionLost
from leasehold.runtime.base import run_sync
from tests.support import probe, probe_postgresql, probe_sql
from tests.support.slow_network import check_lease_is_kept
from tests.support.timing import check_elapsed

# ------------------------------------------------------------ killed, paused


def test_grant_and_waiter_survive_a_server_restart(database, wait_until, background_waiter) -> None:
    options = {"ttl": 60, "call_timeout": 30}
    with Client(database.url(), **options) as client, Client(database.url(), **options) as other:
        lease = client.lock("job").acquire()
        with background_waiter(other, "job", wait=60) as got:
            database.server.restart()
            assert lease.held
            lease.verify()
            assert next(holding.state for holding in client.inspect()) == "held"
            wait_until(lambda: any(h.state == "waiting" for h in client.inspect()))
            assert lease.release()
        assert got[0].token > lease.token
        assert got[0].release()


@pytest.mark.faults
def test_tokens_rise_after_a_crash_with_durable_no(start_postgresql) -> None:
    """The server writes its log as late as it can, so that a crash loses commits of the client that does not wait."""
    server = start_postgresql("wal_writer_delay=10s", "wal_writer_flush_after=2GB")
    with (
        Client(server.url(), ttl=60, call_timeout=30) as durable_client,
        Client(server.url() + "?durable=no", ttl=60, call_timeout=30) as client,
    ):
        kept, highest = durable_client.lock("kept").acquire(), 0
        for _ in range(3):
            for _ in range(20):
                with client.lock("job", wait=90) as lease:
                    assert lease.token > highest
                    highest = lease.token
            server.kill()
            server.start()
        with client.lock("job", wait=90) as lease:
            assert lease.token > highest
        kept.verify()


def test_waiter_gives_up_at_its_wait_when_server_is_down(database, wait_until, background_waiter) -> None:
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60, call_timeout=25) as other:
        lease = client.lock("job").acquire()
        try:
            with background_waiter(other, "job", wait=8) as got:
                wait_until(lambda: any(h.state == "waiting" for h in client.inspect()))
                database.server.kill()
                wait_until(lambda: got)
            assert isinstance(got[0], Unavailable)
        finally:
            database.server.start()
        assert lease.release()


def test_pause_longer_than_the_ttl_grants_nothing_late(database, wait_until, create_schema) -> None:
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
def test_client_recovers_when_one_of_its_sessions_is_terminated(database, wait_until, which, background_waiter) -> None:
    with Client(database.url(application_name="mine"), ttl=3.0) as client, Client(database.url(), ttl=60) as other:
        lease = client.lock("held", ttl=0.9).acquire()
        wait_until(lambda: len(database.sessions("mine")) == 3)
        taken = other.lock("job").acquire()
        with background_waiter(client, "job", wait=60) as got:
            wait_until(lambda: any(h.state == "waiting" for h in other.inspect("job")))
            query_parts = {"calls": "lh_attempt", "wake-ups": "listen", "renewals": "lh_renew"}
            pids: list[int] = []  # the last query of the watchdog's session may also be a heartbeat: wait for a renewal
            wait_until(
                lambda: (
                    pids.extend(p for p, query in database.sessions("mine").items() if query_parts[which] in query)
                    or pids
                )
            )
            database.ask("select pg_terminate_backend(unnest(%s::integer[]))", pids)
            wait_until(lambda: len(database.sessions("mine")) == 3)  # the client soon reopens it
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


def test_client_limited_to_one_connection_polls(database, wait_until, background_waiter) -> None:
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
                with background_waiter(client, "job", wait=60) as got:
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


def test_name_locked_by_another_transaction_is_unavailable_in_time(database, create_schema) -> None:
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


def test_waiters_survive_a_deadlock_with_a_foreign_transaction(database, wait_until, background_waiter) -> None:
    """A foreign transaction locks rows in another order than the engine does. The server aborts one of the two."""
    first, second = sorted(["a", "b"], key=bucket)
    with Client(database.url(), call_timeout=20, ttl=60) as client, Client(database.url(), ttl=60) as other:
        held = [other.lock(name).acquire() for name in (first, second)]
        with (
            background_waiter(client, first, wait=60) as first_got,
            background_waiter(client, second, wait=60) as second_got,
        ):
            wait_until(lambda: sum(h.state == "waiting" for h in other.inspect()) == 2)
            lock = f'select 1 from "{database.schema}".lh_bucket where bucket = %s for update'.encode()
            with database.server.connect() as session:
                session.execute("set deadlock_timeout = '20s'")  # the server is to abort the engine's call
                with session.transaction():
                    session.execute(lock, (bucket(second),))
                    began = time.monotonic()
                    # At once: later the waiters attempt again, too, and the server may abort that call instead.
                    probe.make_heartbeat_due(client)
                    probe.watchdog(client).wake_by(0.0)
                    wait_until(lambda: _is_blocked(database, "lh_heartbeat"), 60)
                    session.execute(lock, (bucket(first),))
                    check_elapsed(began, 20)
            for lease in held:
                lease.release()
        assert first_got[0].release()
        assert second_got[0].release()


def _is_blocked(database, query_part: str) -> bool:
    query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    return bool(database.server.ask(query, f"%{query_part}%"))


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


def test_session_closed_during_a_call_ends_the_call(database, make_driver) -> None:
    class ClosingConnection:
        """Closes the session at the worst moment: after the input was read and before it is parsed."""

        def __init__(self, session, pg) -> None:
            self._session, self._pg = session, pg

        def __getattr__(self, name: str):
            return getattr(self._pg, name)

        def consume_input(self) -> None:
            self._pg.consume_input()
            self._session.close()

    driver = make_driver(database.url())
    driver.acquire(driver.claim())
    session = probe_sql.session(driver.engine)
    probe_postgresql.replace_libpq(session, lambda pg: ClosingConnection(session, pg))
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            run_sync(session.execute(b"select 1", (), driver.runtime.now() + 5))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(60)
    assert [type(error) for error in errors] == [SqlConnectionLost]


@pytest.mark.faults
def test_slow_network_costs_no_lease(database) -> None:
    """The first renewal opens a connection, which takes several round trips."""
    proxy = Proxy(database.server.port)
    try:
        check_lease_is_kept(database.url(port=proxy.port), [proxy])
    finally:
        proxy.close()
