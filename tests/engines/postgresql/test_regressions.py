"""Attacks on the PostgreSQL engine that once succeeded."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import quote

import psycopg
import pytest

from harness.servers.postgresql import PostgreSQL
from harness.servers.proxy import Proxy
from leasehold import Client, Unavailable
from leasehold.config import EngineConfig
from leasehold.core.names import hash_id
from leasehold.engines import postgresql
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql.session import SqlConnectionLost
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import run_sync
from leasehold.runtime.threads import Threads


class PostgresqlEngineDriver:
    """The engine alone, without a client's watchdog."""

    def __init__(self, url: str, call_timeout: float = 20.0) -> None:
        self.runtime = Threads()
        self.registry = ClaimRegistry(self.runtime, "bare")
        self.engine = postgresql.open(EngineConfig.parse(url, call_timeout), self.runtime, self.registry)
        self.deadline = self.runtime.now() + 600

    def attempt(self, claim: Claim) -> Grant | Busy:
        return run_sync(self.engine.attempt(claim, self.deadline))

    def release(self, claim: Claim) -> bool:
        return run_sync(self.engine.release(claim, self.deadline))

    def close(self) -> None:
        run_sync(self.engine.close())


@pytest.fixture
def make_driver(database):
    made: list[PostgresqlEngineDriver] = []

    def make(**options: str) -> PostgresqlEngineDriver:
        made.append(PostgresqlEngineDriver(database.url(**options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def make_claim(secret: str, name: str = "job", **fields) -> Claim:
    return Claim("", name, secret, hash_id(secret), Holder(secret), 60.0, **fields)


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


# ------------------------------------------------------------------ wake-ups


def test_malformed_notifications_do_not_stop_the_listener(database, wait_until) -> None:
    payloads = [
        '["go", [], 0, "", ""]',
        '["lost", {}, 0, "", ""]',
        "[" * 7000,
        f'["head", "x", {"9" * 1000}, "", ""]',
        "{}",
        "\x01",
    ]
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60) as other:
        client.ping()
        address = client._core.registry.shared["postgresql"].address
        assert address
        for payload in payloads:
            database.ask("select pg_notify(%s, %s)", f"lh_{address}", payload)
        lease = other.lock("job").acquire()
        with background_waiter(client, "job", wait_until, wait=60) as got:
            wait_until(lambda: any(h.state == "waiting" for h in other.inspect()))
            lease.release()
        assert got[0].release()
        assert client._core.registry.shared["postgresql"].address == address
        assert any(thread.name == "leasehold-listener" for thread in threading.enumerate())


def test_unprivileged_role_cannot_listen_for_id_hashes(database, make_driver) -> None:
    """Every role may read pg_locks, and a role that knows an id hash could release its claim."""
    database.ask("create role nosy login")
    try:
        driver = make_driver()
        driver.attempt(make_claim("first"))
        driver.attempt(make_claim("second", queue=True))
        with psycopg.connect(database.server.url(user="nosy"), autocommit=True) as nosy:
            seen = nosy.execute(
                "select to_hex(classid::bigint), to_hex(objid::bigint) from pg_locks where locktype = 'advisory'"
            ).fetchall()
            assert seen
            for high, low in seen:
                nosy.execute(f"listen lh_{high.zfill(8)}{low.zfill(8)}".encode())
            driver.release(make_claim("first"))
            assert [note.payload for note in nosy.notifies(timeout=1)] == []
    finally:
        database.ask("drop role nosy")


def test_listen_url_with_another_time_zone_is_the_same_server(database) -> None:
    listen = f"{database.server.url()}?options={quote('-c timezone=Asia/Tokyo')}"
    with Client(database.url(listen_url=listen)) as client:
        client.ping()
        assert client.traits.push


def test_silent_listen_url_does_not_block_a_free_name(database, wait_until) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent_server, Client(database.url()) as first:
        first.inspect()
        listen = f"postgresql://postgres@127.0.0.1:{silent_server.getsockname()[1]}/postgres"
        with Client(database.url(listen_url=listen), call_timeout=30) as client:
            slow_thread = threading.Thread(target=lambda: client.lock("slow", ttl=60).acquire().release())
            slow_thread.start()
            silent_server.settimeout(20)
            silent_server.accept()[0].detach()  # the listener connects and gets no reply
            began = time.monotonic()
            wait_until(lambda: time.monotonic() - began > 6)
            assert client.lock("quick", ttl=2, wait=0).acquire().release()
            slow_thread.join(60)


def test_cancelled_standby_wait_is_detected_with_warnings_off(start_postgresql, wait_until) -> None:
    server = start_postgresql()
    server.ask("alter role postgres set client_min_messages = error")
    with Client(f"{server.url()}?application_name=unsure", call_timeout=20, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        got: list[object] = []

        def take() -> None:
            try:
                got.append(client.lock("job", wait=0).acquire())
            except BaseException as error:
                got.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        waits = "from pg_stat_activity where application_name = 'unsure' and wait_event = 'SyncRep'"
        wait_until(lambda: server.ask(f"select pid {waits}"))
        server.ask(f"select pg_cancel_backend(pid) {waits}")
        thread.join(20)
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        assert [type(each) for each in got] == [Unavailable]
        wait_until(lambda: not client.inspect(), 30)


def test_unconfirmed_commits_do_not_exhaust_the_connections(start_postgresql, wait_until) -> None:
    server = start_postgresql()
    with Client(server.url(), call_timeout=20) as creator:  # creates the tables
        creator.lock("job").acquire().release()
    with Client(f"{server.url()}?application_name=stuck", call_timeout=0.4, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        for number in range(16):
            with pytest.raises(Unavailable):
                client.lock(f"job-{number}", wait=0).acquire()
        own_pids = "select pid from pg_stat_activity where application_name = 'stuck'"
        assert len(server.ask(own_pids)) <= 3 + 2 * 4  # plus sessions that the server has not ended yet
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: not client.inspect(), 30)
        assert client.lock("job", wait=10).acquire().release()
        wait_until(lambda: len(server.ask(own_pids)) <= 3)


def test_session_closed_during_a_call_ends_the_call(database, make_driver) -> None:
    class ClosingConnection:
        """Closes the session at the worst moment: after the input was read and before it is parsed."""

        def __init__(self, session) -> None:
            self._session, self._pg = session, session._pg

        def __getattr__(self, name: str):
            return getattr(self._pg, name)

        def consume_input(self) -> None:
            self._pg.consume_input()
            self._session.close()

    driver = make_driver()
    assert isinstance(driver.attempt(make_claim("first")), Grant)
    session = driver.engine._connection._session
    session._pg = ClosingConnection(session)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            run_sync(session.execute(b"select 1", (), driver.runtime.now() + 5))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert [type(error) for error in errors] == [SqlConnectionLost]


# ------------------------------------------------- failover and host names


def has_caught_up(primary: PostgreSQL) -> bool:
    return primary.ask("select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication") == [(True,)]


@pytest.mark.parametrize("how", ["stopped", "switched"])
def test_client_listens_at_the_new_primary_after_a_failover(start_postgresql, wait_until, caplog, how) -> None:
    """This holds even if the old server keeps the connection open and never replies again."""
    primary = start_postgresql()
    standby = primary.standby().start()
    proxy = Proxy(primary.port)
    both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    url = both if how == "stopped" else primary.url(port=proxy.port)
    try:
        with Client(url, call_timeout=4, ttl=60) as client:
            client.lock("job").acquire().release()
            client.ping()
            listener = client._core.registry.shared["postgresql"]
            before = listener.address
            assert before
            wait_until(lambda: has_caught_up(primary))
            if how == "stopped":
                primary.pause()
            standby.promote()
            if how == "switched":
                proxy._target = ("127.0.0.1", standby.port)
                proxy.reset()
                wait_until(lambda: not listener.address)
            for _ in range(3):  # the first may reach no server; the next finds the new primary
                with suppress(Unavailable):
                    client.lock("job", wait=0).acquire().release()
            assert listener.address not in ("", before)
            assert "another server" not in caplog.text
    finally:
        primary.resume()
        proxy.close()
        standby.kill()


def test_host_from_the_environment_is_resolved_by_the_client(database, monkeypatch) -> None:
    hosts, getaddrinfo = [], socket.getaddrinfo

    def recording_getaddrinfo(host, *args, **kwargs):
        hosts.append(host)
        return getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(
        socket, "getaddrinfo", recording_getaddrinfo
    )  # libpq would resolve the host itself, without a deadline
    monkeypatch.setenv("PGHOST", "localhost")
    monkeypatch.setenv("PGPORT", str(database.server.port))
    with Client("postgresql://postgres@/postgres") as client:
        client.ping()
    assert "localhost" in hosts
