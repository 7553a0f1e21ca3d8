"""Attacks on the PostgreSQL engine that once succeeded."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import contextmanager, suppress
from urllib.parse import quote

import psycopg
import pytest

from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.book import Book
from leasehold.config import EngineConfig
from leasehold.core.names import mark
from leasehold.engines import postgresql
from leasehold.engines.postgresql import schema
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


# -------------------------------------------------------------------- ghosts


def test_a_turn_that_lapsed_and_is_then_given_up_leaves_nothing(database, bare) -> None:
    one = bare()
    assert isinstance(one.attempt(claim_of("first")), Grant)
    assert isinstance(one.attempt(claim_of("second", queue=True)), Busy)
    assert one.release(claim_of("first"))
    database.ask("update {s}.lh_grant set until = 1 where state = 1")  # its turn was not taken in time
    assert not one.release(claim_of("second"))
    assert database.ask("select name from {s}.lh_waiter union select name from {s}.lh_line") == []


def test_what_landed_before_the_role_was_shut_out_is_still_owed(database, until) -> None:
    """The answer is lost, and whoever asks again is refused: that says nothing of the first attempt."""
    with Client(database.url()) as owner:
        owner.inspect()
    database.ask("create role shut login")
    database.ask(schema.grants("shut", database.schema).replace("%", "%%"))
    proxy = Proxy(database.server.port)
    try:
        with Client(database.url("shut", proxy.port), ttl=600, call_timeout=20) as client:
            client.ping()
            client._desk.book.shelf["contended"] = True  # it has met others: it stands in line from the start

            def hear(outward: bool, data: bytes) -> None:
                if outward and b"lh_attempt" in data:
                    proxy.watch = None
                    proxy._answers = False

            proxy.watch = hear
            errors: list[BaseException] = []

            def take() -> None:
                try:
                    client.lock("job", wait=20).acquire()
                except BaseException as error:
                    errors.append(error)

            thread = threading.Thread(target=take)
            thread.start()
            until(lambda: database.ask("select 1 from {s}.lh_grant"))
            database.ask("alter role shut nologin")
            proxy.mend()
            thread.join(30)
            assert len(errors) == 1
            database.ask("alter role shut login")
            until(lambda: not database.ask("select 1 from {s}.lh_grant"), 20)
    finally:
        proxy.close()
        database.ask("drop owned by shut")
        database.ask("drop role shut")


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


def test_only_the_head_of_a_long_line_asks_again_when_nothing_happens(database, bare) -> None:
    one = bare()
    one.attempt(claim_of("holder"))
    line = [claim_of(f"waiter {number}", queue=True) for number in range(4)]
    for claim in line:
        one.attempt(claim)
    replies = step(one.engine.renew(line, one.deadline))
    assert [bool(reply.place) for reply in replies] == [False, True, True, True]  # the watchdog wakes who has no place


# -------------------------------------------------------------------- errors


def test_tables_that_cannot_be_made_are_the_answer_each_time(database) -> None:
    database.ask("create role maker login")
    try:
        with Client(database.url("maker")) as client:
            for _ in range(4):
                with pytest.raises(ConfigError, match="leasehold schema postgresql"):
                    client.lock("job").try_acquire()
    finally:
        database.ask("drop role maker")


def test_a_call_timeout_beyond_what_the_server_can_count(database) -> None:
    with Client(database.url(), call_timeout=1e12, ttl=1e12) as client, client.lock("job") as lease:
        lease.renew()
        assert len(client.inspect()) == 1


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


# --------------------------------------------------------------- connections

MOST = 3 + 2 * 4  # of one client, with what the server has not ended yet


def test_cancelled_calls_do_not_use_up_the_connections(database, until) -> None:
    async def impatient() -> None:
        async with AsyncClient(database.url(application_name="impatient"), call_timeout=5) as client:
            await client.ping()
            for number in range(40):
                with suppress(TimeoutError, Unavailable):
                    await asyncio.wait_for(client.lock("job", wait=5).acquire(), 0.05)
                if number % 10 == 9:
                    assert len(await asyncio.to_thread(database.sessions, "impatient")) <= MOST

    with Client(database.url()) as client:
        client.lock("job").acquire().release()
    with database.server.connect() as session, session.transaction():
        session.execute(f'select 1 from "{database.schema}".lh_bucket for update'.encode())
        asyncio.run(impatient())
    until(lambda: not database.sessions("impatient"))
    until(lambda: not database.ask("select 1 from {s}.lh_grant union select 1 from {s}.lh_line"), 60)


def test_commits_that_no_standby_confirms_do_not_use_up_the_connections(own, until) -> None:
    server = own()
    with Client(f"{server.url()}?application_name=stuck", call_timeout=0.4, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        for number in range(16):
            with pytest.raises(Unavailable):
                client.lock(f"job-{number}", wait=0).acquire()
        mine = "select pid from pg_stat_activity where application_name = 'stuck'"
        assert len(server.ask(mine)) <= MOST
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        until(lambda: not client.inspect(), 30)
        assert client.lock("job", wait=10).acquire().release()
        until(lambda: len(server.ask(mine)) <= 3)


def test_a_client_closed_in_the_midst_of_a_call_takes_the_call_back(database, until) -> None:
    with Client(database.url()) as first:
        first.lock("job").acquire().release()
    client = Client(database.url(application_name="closing"), ttl=600, call_timeout=20)
    client.ping()
    errors: list[BaseException] = []

    def take() -> None:
        try:
            client.lock("job", wait=0).acquire()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    with database.server.connect() as session, session.transaction():
        session.execute(f'select 1 from "{database.schema}".lh_bucket for update'.encode())
        thread.start()
        blocked = "select 1 from pg_stat_activity where application_name = 'closing' and wait_event_type = 'Lock'"
        until(lambda: database.ask(blocked))
        client.close()
    thread.join(30)
    assert [type(error) for error in errors] == [ConfigError]
    until(lambda: not database.ask("select 1 from {s}.lh_grant"))
    until(lambda: not database.sessions("closing"))


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
    session = one.engine._postgresql._session
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


def test_an_address_that_is_silent_leaves_time_for_the_next(database, monkeypatch) -> None:
    look_up, port = socket.getaddrinfo, database.server.port

    def two(host, *rest, **more):
        if host != "two.example":
            return look_up(host, *rest, **more)
        return [(2, 1, 6, "", (address, 0)) for address in ("127.0.0.2", "127.0.0.1")]

    with Client(database.url()) as first:
        first.inspect()
    monkeypatch.setattr(socket, "getaddrinfo", two)
    url = database.url().replace("127.0.0.1", "two.example")
    with socket.create_server(("127.0.0.2", port)), Client(url, call_timeout=8) as client:  # accepts, and says nothing
        assert client.lock("job", wait=0).acquire().release()


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


# ------------------------------------------------------------------ odd things


def test_a_version_that_somebody_deleted_is_made_again(database) -> None:
    with Client(database.url()) as client:
        client.inspect()
        database.ask("truncate {s}.lh_meta")
        database.ask("drop function {s}.lh_inspect_v1(text, text, boolean)")
        assert client.inspect() == []


@pytest.mark.parametrize("prefix", ["a\0b", "\ud800"])
def test_a_prefix_that_no_name_has_is_refused(database, prefix) -> None:
    with Client(database.url()) as client, pytest.raises(ConfigError):
        client.inspect(prefix)
