"""Attacks on the MySQL engine that once succeeded: calls that delayed each other, and unusual server settings."""

from __future__ import annotations

import ssl
import threading
import time
from contextlib import closing

import pytest

from harness.servers.mysql import MariaDB
from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, NotAcquired, Unavailable
from leasehold.core.names import bucket
from leasehold.engines.mysql import schema
from leasehold.model import Busy
from leasehold.runtime.base import run_sync

# ------------------------------------------------------------------ wake-ups


def listener_of(client: Client, other: Client, name: str = "met"):
    """The listener of a client that has waited."""
    with other.lock(name, ttl=60), pytest.raises(NotAcquired):
        client.lock(name, wait=0.5).acquire()
    listener = client._core.registry.shared["mysql"]
    assert listener.address
    return listener


def test_releases_that_wake_one_client_do_not_delay_each_other(mysql) -> None:
    """If two sessions kill one SLEEP(), MariaDB delays the second by 2 s, and with it all sleeping sessions."""
    with Client(mysql.url(), call_timeout=30) as first:
        first.inspect()
    durations: list[float] = []

    def work() -> None:
        with Client(mysql.url(), ttl=60, call_timeout=30) as client:
            for _ in range(25):
                lease = client.lock("job", wait=60).acquire()
                time.sleep(0.001)  # let other clients attempt
                began = time.monotonic()
                lease.release()
                durations.append(time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(durations) == 150
    assert max(durations) < 1.8


def test_silently_lost_liveness_session_is_detected(mysql, wait_until) -> None:
    """If a firewall drops one connection of a client but not the other, only the server knows."""
    with Client(mysql.url()) as client, Client(mysql.url()) as other:
        client.inspect()
        listener = listener_of(client, other)
        before = listener.address
        listener._liveness_session.usable = lambda: True  # the client has not seen the end of the session
        mysql.server.run(f"kill {listener._liveness_session.connection_id}")
        wait_until(lambda: listener.address != before, 4.0)


# --------------------------------------------------------- without procedures


def test_delay_is_waited_out_only_once_without_procedures(mysql, make_driver) -> None:
    """A cooling grant ends with its delay. Its row was taken for an expired grant, and its delay ran a second time."""
    driver = make_driver(mysql.url(procedures="no"))
    held = driver.acquire(driver.claim(delay=3600.0))
    assert run_sync(driver.engine.break_("", "job", held.token, driver.deadline()))
    assert isinstance(driver.attempt(driver.claim()), Busy)
    mysql.ask("update {s}.lh_grant set until = until - 3600 * 1000000")
    assert driver.acquire(driver.claim()).token > held.token


# --------------------------------------------------------------- connections


def test_default_certificates_are_not_loaded_when_unused(mysql, monkeypatch) -> None:
    """Loading took 20 ms, nine tenths of every handshake. Under load, many reconnects used up whole deadlines."""
    loads: list[bool] = []
    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", lambda *_: loads.append(True))
    with Client(mysql.url()) as client:
        client.ping()
    assert not loads


# -------------------------------------------------------------------- rights


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


# ------------------------------------------------------------------ settings


@pytest.fixture(scope="module")
def unusual_server():
    """A server on which tests set defaults that no application would choose."""
    server = MariaDB("innodb-flush-method=nosync").start()
    with Client(f"mysql://root@127.0.0.1:{server.port}/leasehold", call_timeout=30) as client:
        client.inspect()
    yield server
    server.kill()


@pytest.mark.parametrize("procedures", ["yes", "no"])
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("completion_type", "'CHAIN'"),
        ("completion_type", "'RELEASE'"),
        ("sql_select_limit", "1"),
        ("max_join_size", "1"),
        ("tx_read_only", "1"),
        ("tx_isolation", "'SERIALIZABLE'"),
        ("sql_mode", "'ORACLE,NO_BACKSLASH_ESCAPES'"),
        ("autocommit", "0"),
        ("max_statement_time", "0.001"),
    ],
)
def test_server_defaults_do_not_apply_to_our_sessions(unusual_server, setting, value, procedures) -> None:
    ((before,),) = unusual_server.ask(f"select @@global.{setting}")
    url = f"mysql://root@127.0.0.1:{unusual_server.port}/leasehold?procedures={procedures}"
    with unusual_server.connect() as operator, operator.cursor() as cursor:
        cursor.execute(f"set global {setting} = {value}")
        try:
            with Client(url, ttl=60) as client:
                leases = [client.lock(name).acquire() for name in "abc"]
                assert len(client.inspect()) == 3
                for lease in leases:
                    lease.renew()
                    assert lease.release()
        finally:
            cursor.execute(f"set global {setting} = %s", (before,))


# ----------------------------------------------------------- lost clients


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
