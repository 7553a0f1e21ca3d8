"""What goes wrong with a real PostgreSQL: killed, stopped, cut off, failed over, out of room."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager, suppress

import psycopg
import pytest

from leasehold import Client, LeaseLost, Unavailable
from leasehold.core.names import bucket
from leasehold.testing.servers.postgresql import PostgreSQL
from leasehold.testing.servers.process import scratch


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


def prepare(url: str) -> None:
    """Make the tables: on a machine with much to do that takes longer than a call of an impatient client may."""
    with Client(url, call_timeout=20) as client:
        client.lock("job").acquire().release()


# ----------------------------------------------------------- killed, stopped


def test_killed_and_started_again_every_grant_is_found_again(database, until) -> None:
    patient = {"ttl": 60, "call_timeout": 30}
    with Client(database.url(), **patient) as client, Client(database.url(), **patient) as other:
        lease = client.lock("job").acquire()
        with waiting(other, "job", until, wait=60) as got:
            database.server.restart()
            assert lease.held
            lease.verify()
            assert next(holding.state for holding in client.inspect()) == "held"
            until(lambda: any(h.state == "waiting" for h in client.inspect()))
            assert lease.release()
        assert got[0].token > lease.token
        assert got[0].release()


def test_nobody_in_line_asks_a_server_that_is_gone_for_longer_than_it_wants_to_wait(database, until) -> None:
    with Client(database.url(), ttl=60) as client, Client(database.url(), ttl=60, call_timeout=25) as other:
        lease = client.lock("job").acquire()
        try:
            with waiting(other, "job", until, wait=2) as got:
                until(lambda: any(h.state == "waiting" for h in client.inspect()))
                database.server.kill()
                until(lambda: got, 12)
            assert isinstance(got[0], Unavailable)
        finally:
            database.server.start()
        assert lease.release()


def test_a_stop_past_the_ttl_hands_out_nothing_late(database, until) -> None:
    prepare(database.url())
    with Client(database.url(), ttl=1.0, call_timeout=0.5) as client, Client(database.url(), call_timeout=0.5) as other:
        lease = client.lock("job").acquire()
        other.ping()
        database.server.pause()
        with pytest.raises(Unavailable):
            other.lock("free", ttl=0.6, wait=0).acquire()
        until(lambda: not lease.held)
        assert lease.lost_reason == "unreachable"
        database.server.resume()
        second = other.lock("job", wait=20).acquire()
        assert second.token > lease.token
        until(lambda: [h.name for h in other.inspect()] == ["job"], 20)  # the attempt that came late was taken back
        assert second.release()
        lease.release()


@pytest.mark.parametrize("which", ["calls", "wake-ups", "renewals"])
def test_each_of_our_sessions_may_be_ended(database, until, which) -> None:
    with Client(database.url(application_name="mine"), ttl=3.0) as client, Client(database.url(), ttl=60) as other:
        lease = client.lock("held", ttl=0.9).acquire()
        until(lambda: len(database.sessions("mine")) == 3)
        taken = other.lock("job").acquire()
        with waiting(client, "job", until, wait=60) as got:
            until(lambda: any(h.state == "waiting" for h in other.inspect("job")))
            words = {"calls": "lh_attempt", "wake-ups": "listen", "renewals": "lh_renew"}
            pids = [pid for pid, query in database.sessions("mine").items() if words[which] in query]
            assert pids
            database.ask("select pg_terminate_backend(unnest(%s::integer[]))", pids)
            until(lambda: len(database.sessions("mine")) == 3, 20)  # missed by nobody for long
            taken.release()
        assert got[0].release()
        assert lease.held
        lease.release()


def test_sessions_that_were_idle_for_long_are_replaced_without_a_word(database, until) -> None:
    with Client(database.url(application_name="idle")) as client:
        with client.lock("job"):
            pass
        database.end("idle")
        until(lambda: not database.sessions("idle"))
        with client.lock("job") as lease:
            assert lease.held


def test_an_idle_timeout_of_the_server_does_not_apply_to_us(database, until) -> None:
    database.ask("create role idler login superuser")
    database.ask("alter role idler set idle_session_timeout = '300ms'")
    try:
        with Client(database.url(user="idler", application_name="idler"), ttl=60) as client:
            lease = client.lock("job").acquire()
            before, began = set(database.sessions("idler")), time.monotonic()
            until(lambda: time.monotonic() - began > 1)
            assert set(database.sessions("idler")) == before
            assert lease.release()
    finally:
        database.ask("drop owned by idler cascade")
        database.ask("drop role idler")


# -------------------------------------------------------------------- limits


def test_with_one_connection_to_be_had_a_client_polls(database, until) -> None:
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
                with waiting(client, "job", until, wait=60) as got:
                    assert not client.traits.push
                    until(lambda: any(h.state == "waiting" for h in other.inspect()))
                    lease.release()
                assert got[0].held
                database.ask("alter role poor connection limit 10")
                assert got[0].release()
        finally:
            database.ask("drop owned by poor")
            database.ask("drop role poor")


def test_with_no_connection_to_be_had_nothing_is_known(database) -> None:
    database.ask("create role unwanted login connection limit 0")
    try:
        url = database.url(user="unwanted")
        with Client(url, call_timeout=1) as client, pytest.raises(Unavailable, match="too many connections"):
            client.lock("job").try_acquire()
    finally:
        database.ask("drop role unwanted")


# ---------------------------------------------------- other transactions


def test_a_name_kept_by_another_transaction_is_unavailable_in_time(database) -> None:
    prepare(database.url())
    with Client(database.url(), call_timeout=0.5) as client:
        client.lock("job").acquire().release()
        with database.server.connect() as session, session.transaction():
            session.execute(f'select 1 from "{database.schema}".lh_bucket for update'.encode())
            began = time.monotonic()
            with pytest.raises(Unavailable):
                client.lock("job").try_acquire()
            assert time.monotonic() - began < 1.0
        assert client.lock("job", wait=10).acquire().release()


def test_a_deadlock_with_a_stranger_is_unavailable_and_passes(database, until) -> None:
    """Somebody locks our rows in another order than we do: one of the two is ended by the server."""
    first, second = sorted(["a", "b"], key=bucket)
    with Client(database.url(), call_timeout=20, ttl=60) as client, Client(database.url(), ttl=60) as other:
        held = [other.lock(name).acquire() for name in (first, second)]
        with waiting(client, first, until, wait=60) as one, waiting(client, second, until, wait=60) as two:
            until(lambda: sum(h.state == "waiting" for h in other.inspect()) == 2)
            lock = f'select 1 from "{database.schema}".lh_bucket where bucket = %s for update'.encode()
            with database.server.connect() as session:
                session.execute("set deadlock_timeout = '20s'")  # let it be ours that is ended
                with session.transaction():
                    session.execute(lock, (bucket(second),))
                    began = time.monotonic()
                    until(lambda: _blocked(database, "lh_beat"), 20)
                    session.execute(lock, (bucket(first),))
                    assert time.monotonic() - began < 20
            for lease in held:
                lease.release()
        assert one[0].release()
        assert two[0].release()


def _blocked(database, what: str) -> bool:
    query = "select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like %s"
    return bool(database.server.ask(query, f"%{what}%"))


# ------------------------------------------------- commits of unknown outcome


def test_a_commit_that_no_standby_confirms_is_unknown(own, until) -> None:
    server = own()
    prepare(server.url())
    with Client(server.url(), call_timeout=1.0, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        with pytest.raises(Unavailable):
            client.lock("job", wait=0).acquire()
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        until(lambda: not client.inspect(), 20)  # what nobody was told of is given back
        assert client.lock("job", wait=10).acquire().release()


def test_a_commit_whose_wait_was_cancelled_is_unknown_though_the_server_says_yes(own, until) -> None:
    server = own()
    with Client(f"{server.url()}?application_name=unsure", call_timeout=20, ttl=60) as client:
        client.lock("job").acquire().release()
        server.ask("alter system set synchronous_standby_names = 'nobody'")
        server.ask("select pg_reload_conf()")
        until(lambda: server.ask("show synchronous_standby_names") == [("nobody",)])
        errors: list[BaseException] = []

        def take() -> None:
            try:
                client.lock("job", wait=0).acquire()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        waits = "from pg_stat_activity where application_name = 'unsure' and wait_event = 'SyncRep'"
        until(lambda: server.ask(f"select pid {waits}"))
        server.ask(f"select pg_cancel_backend(pid) {waits}")
        thread.join(20)
        assert [type(error) for error in errors] == [Unavailable]
        assert "standby" in str(errors[0])
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        until(lambda: not client.inspect(), 30)


# ------------------------------------------------------------------ fail-over


def urls(*servers: PostgreSQL) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/postgres"


def test_a_fail_over_to_a_synchronous_standby_loses_no_grant(own, until) -> None:
    primary = own()
    standby = primary.standby("one").start()
    try:
        primary.ask("alter system set synchronous_standby_names = 'one'")
        primary.ask("select pg_reload_conf()")
        until(lambda: primary.ask("select sync_state from pg_stat_replication") == [("sync",)])
        with Client(urls(primary, standby), call_timeout=5, ttl=60) as client, Client(urls(primary, standby)) as other:
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


def test_a_fail_over_to_an_asynchronous_standby_may_lose_a_grant_and_its_token_still_rises(own, until) -> None:
    primary = own()
    standby = primary.standby().start()
    try:
        until(lambda: primary.ask("select state from pg_stat_replication") == [("streaming",)])
        with Client(urls(primary, standby), call_timeout=5, ttl=60) as client, Client(urls(primary, standby)) as other:
            client.lock("other").acquire().release()
            until(lambda: _caught_up(primary))
            ((sender,),) = primary.ask("select pid from pg_stat_replication")
            os.kill(sender, 19)  # from here on nothing reaches the standby
            lease = client.lock("job").acquire()
            primary.kill()
            standby.promote()
            second = other.lock("job", wait=20).acquire()
            assert second.token > lease.token, "two holders, but the fence tells them apart"
            with pytest.raises(LeaseLost):
                lease.renew()
            assert second.release()
    finally:
        standby.kill()


def _caught_up(primary: PostgreSQL) -> bool:
    return primary.ask("select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication") == [(True,)]


def test_a_standby_grants_nothing(own) -> None:
    primary = own()
    standby = primary.standby().start()
    try:
        with Client(standby.url()) as client, pytest.raises(Unavailable, match="standby"):
            client.lock("job").try_acquire()
    finally:
        standby.kill()


# ---------------------------------------------------------------------- disk


@pytest.mark.faults
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_is_unavailable_and_heals(own) -> None:
    folder = scratch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150m,mode=711", "none", folder], check=True)
    try:
        server = own("min_wal_size=32MB", "max_wal_size=32MB", "wal_recycle=off", folder=folder)
        with Client(server.url(), ttl=120, call_timeout=2) as client:
            lease = client.lock("held").acquire()
            filler = os.path.join(folder, "filler")
            with pytest.raises(Unavailable):
                for _ in range(50):
                    with open(filler, "ab") as file:
                        file.write(b"\0" * max(0, shutil.disk_usage(folder).free - 4096))
                    with suppress(psycopg.Error):
                        server.ask("select pg_switch_wal()")  # the next segment finds no room
                    client.lock("job", wait=0).acquire().release()
            os.unlink(filler)
            server.restart()
            lease.verify()
            assert lease.release()
    finally:
        subprocess.run(["umount", "-l", folder], check=False)
