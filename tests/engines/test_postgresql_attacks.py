"""Attacks on the PostgreSQL engine that once succeeded."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import quote

import psycopg
import pytest

from leasehold import Client, Unavailable
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines import postgresql
from leasehold.engines.sql.wire import Lost
from leasehold.model import Busy, Claim, Grant, Holder
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads
from leasehold.testing.servers.postgresql import PostgreSQL
from leasehold.testing.servers.proxy import Proxy


class Bare:
    """The engine alone, without a client's watchdog."""

    def __init__(self, url: str, call_timeout: float = 20.0) -> None:
        self.runtime = Threads()
        self.book = Book(self.runtime, "bare")
        self.engine = postgresql.open(EngineConfig.parse(url, call_timeout), self.runtime, self.book)
        self.deadline = self.runtime.now() + 600

    def attempt(self, claim: Claim) -> Grant | Busy:
        return step(self.engine.attempt(claim, self.deadline))

    def release(self, claim: Claim) -> bool:
        return step(self.engine.release(claim, self.deadline))

    def close(self) -> None:
        step(self.engine.close())


@pytest.fixture
def bare(database):
    made: list[Bare] = []

    def make(**options: str) -> Bare:
        made.append(Bare(database.url(**options)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def claim_of(word: str, name: str = "job", **more) -> Claim:
    return Claim("", name, word, mark(word), Holder(word), 60.0, **more)


@pytest.fixture
def own(database):
    """A server of the test's own, to be hurt."""
    started: list[PostgreSQL] = []

    def start(*settings: str, **more) -> PostgreSQL:
        started.append(PostgreSQL(*settings, **more).start())
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextmanager
def waiting(client: Client, name: str, until, **options):
    """Somebody in line while the block runs; gives where its lease will be."""
    got: list = []

    def wait() -> None:
        try:
            got.append(client.lock(name, **options).acquire())
        except BaseException as error:
            got.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: got or client._desk.book.waiting)
    yield got
    thread.join(60)
    assert not thread.is_alive()


# ------------------------------------------------------------------ wake-ups


def test_a_note_from_a_stranger_does_not_deafen(database, until) -> None:
    notes = [
        '["go", [], 0, "", ""]',
        '["lost", {}, 0, "", ""]',
        "[" * 7000,
        f'["head", "x", {"9" * 1000}, "", ""]',
        "{}",
        "\x01",
    ]
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60) as other:
        client.ping()
        address = client._desk.book.shelf["postgresql"].address
        assert address
        for note in notes:
            database.ask("select pg_notify(%s, %s)", f"lh_{address}", note)
        lease = other.lock("job").acquire()
        with waiting(client, "job", until, wait=60) as got:
            until(lambda: any(h.state == "waiting" for h in other.inspect()))
            lease.release()
        assert got[0].release()
        assert client._desk.book.shelf["postgresql"].address == address
        assert any(thread.name == "leasehold-ear" for thread in threading.enumerate())


def test_a_role_without_rights_cannot_listen_for_the_marks_of_others(database, bare) -> None:
    """All may read pg_locks; whoever has a mark can release its claim."""
    database.ask("create role nosy login")
    try:
        one = bare()
        one.attempt(claim_of("first"))
        one.attempt(claim_of("second", queue=True))
        with psycopg.connect(database.server.url(user="nosy"), autocommit=True) as nosy:
            seen = nosy.execute(
                "select to_hex(classid::bigint), to_hex(objid::bigint) from pg_locks where locktype = 'advisory'"
            ).fetchall()
            assert seen
            for high, low in seen:
                nosy.execute(f"listen lh_{high.zfill(8)}{low.zfill(8)}".encode())
            one.release(claim_of("first"))
            assert [note.payload for note in nosy.notifies(timeout=1)] == []
    finally:
        database.ask("drop role nosy")


def test_a_listen_url_with_another_time_zone_leads_to_the_same_server(database) -> None:
    listen = f"{database.server.url()}?options={quote('-c timezone=Asia/Tokyo')}"
    with Client(database.url(listen_url=listen)) as client:
        client.ping()
        assert client.traits.push


def test_a_silent_way_to_listen_by_keeps_nobody_from_a_free_name(database, until) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, Client(database.url()) as first:
        first.inspect()
        listen = f"postgresql://postgres@127.0.0.1:{mute.getsockname()[1]}/postgres"
        with Client(database.url(listen_url=listen), call_timeout=30) as client:
            slow = threading.Thread(target=lambda: client.lock("slow", ttl=60).acquire().release())
            slow.start()
            mute.settimeout(20)
            mute.accept()[0].detach()  # somebody is asking for wake-ups, and hears nothing
            began = time.monotonic()
            until(lambda: time.monotonic() - began > 6)
            assert client.lock("quick", ttl=2, wait=0).acquire().release()
            slow.join(60)


def test_a_cancelled_wait_for_a_standby_is_seen_though_warnings_are_off(own, until) -> None:
    server = own()
    server.ask("alter role postgres set client_min_messages = error")
    with Client(f"{server.url()}?application_name=unsure", call_timeout=20, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        got: list[object] = []

        def take() -> None:
            try:
                got.append(client.lock("job", wait=0).acquire())
            except BaseException as error:
                got.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        waits = "from pg_stat_activity where application_name = 'unsure' and wait_event = 'SyncRep'"
        until(lambda: server.ask(f"select pid {waits}"))
        server.ask(f"select pg_cancel_backend(pid) {waits}")
        thread.join(20)
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        assert [type(each) for each in got] == [Unavailable]
        until(lambda: not client.inspect(), 30)


def test_commits_that_no_standby_confirms_do_not_use_up_the_connections(own, until) -> None:
    server = own()
    with Client(server.url(), call_timeout=20) as patient:  # it makes the tables
        patient.lock("job").acquire().release()
    with Client(f"{server.url()}?application_name=stuck", call_timeout=0.4, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        for number in range(16):
            with pytest.raises(Unavailable):
                client.lock(f"job-{number}", wait=0).acquire()
        mine = "select pid from pg_stat_activity where application_name = 'stuck'"
        assert len(server.ask(mine)) <= 3 + 2 * 4  # with what the server has not ended yet
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        until(lambda: not client.inspect(), 30)
        assert client.lock("job", wait=10).acquire().release()
        until(lambda: len(server.ask(mine)) <= 3)


def test_a_session_closed_beneath_its_call_ends_the_call(database, bare) -> None:
    class Torn:
        """Closed at the worst moment: what came was read, and nobody has looked at it."""

        def __init__(self, session) -> None:
            self._session, self._pg = session, session._pg

        def __getattr__(self, name: str):
            return getattr(self._pg, name)

        def consume_input(self) -> None:
            self._pg.consume_input()
            self._session.close()

    one = bare()
    assert isinstance(one.attempt(claim_of("first")), Grant)
    session = one.engine._lane._session
    session._pg = Torn(session)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            step(session.ask(b"select 1", (), one.runtime.now() + 5))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(20)
    assert [type(error) for error in errors] == [Lost]


# ------------------------------------------------------- where the server is


def caught_up(primary: PostgreSQL) -> bool:
    return primary.ask("select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication") == [(True,)]


@pytest.mark.parametrize("how", ["stopped", "switched"])
def test_after_a_fail_over_a_client_listens_where_it_asks(own, until, caplog, how) -> None:
    """Also if the old server still keeps the connection, and never says a word again."""
    primary = own()
    standby = primary.standby().start()
    proxy = Proxy(primary.port)
    both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    url = both if how == "stopped" else primary.url(port=proxy.port)
    try:
        with Client(url, call_timeout=4, ttl=60) as client:
            client.lock("job").acquire().release()
            client.ping()
            ear = client._desk.book.shelf["postgresql"]
            before = ear.address
            assert before
            until(lambda: caught_up(primary))
            if how == "stopped":
                primary.pause()
            standby.promote()
            if how == "switched":
                proxy._target = ("127.0.0.1", standby.port)
                proxy.reset()
                until(lambda: not ear.address)
            for _ in range(3):  # the first may find nobody, the next one knows where to ask
                with suppress(Unavailable):
                    client.lock("job", wait=0).acquire().release()
            assert ear.address not in ("", before)
            assert "another server" not in caplog.text
    finally:
        primary.resume()
        proxy.close()
        standby.kill()


def test_a_host_from_the_environment_is_looked_up_within_the_deadline(database, monkeypatch) -> None:
    asked, look_up = [], socket.getaddrinfo

    def heard(host, *rest, **more):
        asked.append(host)
        return look_up(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", heard)  # libpq would look it up by itself, and for as long as it takes
    monkeypatch.setenv("PGHOST", "localhost")
    monkeypatch.setenv("PGPORT", str(database.server.port))
    with Client("postgresql://postgres@/postgres") as client:
        client.ping()
    assert "localhost" in asked
