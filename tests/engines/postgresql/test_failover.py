"""The PostgreSQL engine with a standby: commits that it confirms, or not, and a failover to it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import pytest

from harness.servers.postgresql import PostgreSQL
from harness.servers.proxy import Proxy
from leasehold import Client, LeaseLost, Unavailable
from tests.support import probe


def multi_host_url(*servers: PostgreSQL) -> str:
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    return f"postgresql://postgres@{hosts}/postgres"


def has_caught_up(primary: PostgreSQL) -> bool:
    return primary.ask("select replay_lsn >= pg_current_wal_lsn() from pg_stat_replication") == [(True,)]


def test_failover_to_a_synchronous_standby_loses_no_grant(start_postgresql, wait_until) -> None:
    primary = start_postgresql()
    standby = primary.standby("one").start()
    try:
        primary.ask("alter system set synchronous_standby_names = 'one'")
        primary.ask("select pg_reload_conf()")
        wait_until(lambda: primary.ask("select sync_state from pg_stat_replication") == [("sync",)])
        with (
            Client(multi_host_url(primary, standby), call_timeout=20, ttl=60) as client,
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
            with other.lock("job", wait=20) as second:
                assert second.token > lease.token
    finally:
        standby.kill()


def test_failover_to_an_async_standby_may_lose_a_grant_but_tokens_rise(start_postgresql, wait_until) -> None:
    primary = start_postgresql()
    standby = primary.standby().start()
    try:
        wait_until(lambda: primary.ask("select state from pg_stat_replication") == [("streaming",)])
        with (
            Client(multi_host_url(primary, standby), call_timeout=20, ttl=60) as client,
            Client(multi_host_url(primary, standby)) as other,
        ):
            client.lock("other").acquire().release()
            wait_until(lambda: has_caught_up(primary))
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


def test_standby_grants_nothing(start_postgresql) -> None:
    primary = start_postgresql()
    standby = primary.standby().start()
    try:
        with Client(standby.url()) as client, pytest.raises(Unavailable, match="standby"):
            client.lock("job").try_acquire()
    finally:
        standby.kill()


def test_commit_unconfirmed_by_a_standby_is_unavailable(start_postgresql, wait_until, create_schema) -> None:
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
        thread.join(60)
        assert [type(error) for error in errors] == [Unavailable]
        assert "standby" in str(errors[0])
        server.ask("alter system reset synchronous_standby_names")
        server.ask("select pg_reload_conf()")
        wait_until(lambda: not client.inspect(), 30)


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
        thread.join(60)
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


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.extended), "switched"])
def test_client_listens_at_the_new_primary_after_a_failover(start_postgresql, wait_until, caplog, how) -> None:
    """This holds even if the old server keeps the connection open and never replies again."""
    primary = start_postgresql()
    standby = primary.standby().start()
    proxy = Proxy(primary.port)
    both = f"postgresql://postgres@127.0.0.1:{primary.port},127.0.0.1:{standby.port}/postgres"
    url = both if how == "stopped" else primary.url(port=proxy.port)
    try:
        with Client(url, call_timeout=6, ttl=60) as client:
            client.lock("job").acquire().release()
            client.ping()
            listener = probe.engine_state(client)["postgresql"]
            before = listener.address
            assert before
            wait_until(lambda: has_caught_up(primary))
            if how == "stopped":
                primary.pause()
            standby.promote()
            if how == "switched":
                proxy.target = ("127.0.0.1", standby.port)
                proxy.reset()
                wait_until(lambda: not listener.address)

            def listens_elsewhere() -> bool:
                with suppress(Unavailable):  # the first attempt may reach no server; the next finds the new primary
                    client.lock("job", wait=0).acquire().release()
                return listener.address not in ("", before)

            wait_until(listens_elsewhere, 120)
            assert "another server" not in caplog.text
    finally:
        primary.resume()
        proxy.close()
        standby.kill()
