"""The listener of the MySQL engine: waiters are woken by KILL QUERY, and a liveness session shows that they live."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

import pytest

from harness.servers.proxy import ProxiedConnection, Proxy
from leasehold import Client
from leasehold.model import Busy
from leasehold.runtime.base import run_sync
from tests.support import probe, probe_mysql, probe_sql
from tests.support.contention import wait_in_vain
from tests.support.timing import check_elapsed, check_seconds


def listener_of(client: Client, other: Client, name: str = "met"):
    """The listener of a client that has waited."""
    with other.lock(name, ttl=60):
        wait_in_vain(client.lock(name), lambda: probe.engine_state(client)["mysql"].address)
    return probe.engine_state(client)["mysql"]


def test_release_in_a_new_session_wakes_the_next_waiter(mysql, make_driver, wait_until, monkeypatch) -> None:
    """The session's list of clients to wake is null before its first call."""
    monkeypatch.setattr(*probe_mysql.LISTEN_SECONDS, 600)  # or it would look by itself
    holder, other = make_driver(mysql.url(listen="no")), make_driver(mysql.url())
    held, waiter = holder.acquire(holder.claim()), other.claim(queue=True)
    assert isinstance(other.attempt(waiter), Busy)
    probe_sql.session(holder.engine).close()
    assert holder.release(held)
    wait_until(lambda: other.registry.waiting[waiter.id_hash].woken)


class SharingProxy(Proxy):
    """Greets clients as a proxy does that hands calls to other sessions: with its own connection ids, and perhaps
    without offering several statements in one request."""

    multi_statements = True

    def _send(self, connection: ProxiedConnection, side: socket.socket, data: bytes) -> None:
        if side is connection.server_side and data[3:5] == b"\0\x0a":  # the first packet, and the protocol's version
            greeting, start = bytearray(data), data.index(b"\0", 5) + 1
            greeting[start : start + 4] = b"\xff\xff\xff\0"  # the connection id
            if not self.multi_statements:
                greeting[start + 18] &= 0xFE  # behind 9 bytes of salt, 2 of capabilities, the character set, the status
            data = bytes(greeting)
        super()._send(connection, side, data)


@pytest.mark.parametrize("multi_statements", [True, False])
def test_client_polls_behind_a_proxy_that_shares_sessions(mysql, multi_statements) -> None:
    with (
        closing(SharingProxy(mysql.server.port)) as proxy,
        Client(mysql.url()) as other,
        Client(mysql.url(port=proxy.port)) as client,
    ):
        requests: list[bytes] = []
        proxy.multi_statements = multi_statements
        proxy.watch = lambda from_client, data: requests.append(data) if from_client else None
        held = other.lock("job", ttl=60).acquire()
        wait_in_vain(client.lock("job"), lambda: not client.traits.push)
        held.release()
        with client.lock("job", wait=60) as lease:
            assert lease.held
    assert any(b"; select connection_id()" in each for each in requests) is multi_statements


@pytest.mark.extended
def test_releases_that_wake_one_client_do_not_delay_each_other(mysql) -> None:
    """If two sessions kill one SLEEP(), MariaDB delays the second by 2 s, and with it all sleeping sessions."""
    with Client(mysql.url(), call_timeout=30) as first:
        first.inspect()
    durations: list[float] = []

    def work() -> None:
        with Client(mysql.url(), ttl=60, call_timeout=30) as client:
            for _ in range(25):
                lease = client.lock("job", wait=60).acquire()
                time.sleep(0.001)  # pause: other clients attempt meanwhile
                began = time.monotonic()
                lease.release()
                durations.append(time.monotonic() - began)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(durations) == 150
    check_seconds(max(durations), 1.8)


def test_silently_lost_liveness_session_is_detected(mysql, wait_until) -> None:
    """If a firewall drops one connection of a client but not the other, only the server knows."""
    with Client(mysql.url()) as client, Client(mysql.url()) as other:
        client.inspect()
        listener = listener_of(client, other)
        before = listener.address
        probe_mysql.liveness_session(listener).usable = lambda: True  # the client has not seen the end of the session
        killed = time.monotonic()
        mysql.server.run(f"kill {probe_mysql.liveness_session(listener).connection_id}")
        wait_until(lambda: listener.address != before)
        check_elapsed(killed, 4.0)


def test_accounts_without_kill_privilege_wake_each_other(mysql, wait_until) -> None:
    """The sleep and the kill both run inside procedures, with the rights of the account that created them."""
    with Client(mysql.url()) as owner:
        owner.inspect()
    urls = [mysql.create_granted_role("one"), mysql.create_granted_role("two")]
    got: list[float] = []
    with Client(urls[0], ttl=60) as one, Client(urls[1], ttl=60) as two:
        lease = one.lock("job").acquire()

        def wait() -> None:
            with two.lock("job", wait=60):
                got.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        wait_until(lambda: [each.state for each in one.inspect()] == ["held", "waiting"])
        began = time.monotonic()
        lease.release()
        thread.join(60)
        check_seconds(got[0] - began, 2.5, "woken before its re-check after 5 s")


def test_stale_waiter_row_kills_no_foreign_statement(mysql, make_driver) -> None:
    """The kill hits only a session that holds the user lock of the address. Here no session holds it."""
    driver = make_driver(mysql.url())
    held = driver.acquire(driver.claim())
    waiter = driver.claim(queue=True)
    driver.attempt(waiter)
    mysql.ask("update {s}.lh_waiter set client = 'ffffffffffffffff'")  # a client that ended long ago
    with mysql.server.connect() as stranger, stranger.cursor() as cursor:
        thread = threading.Thread(target=lambda: cursor.execute("select sleep(1)"))
        thread.start()
        assert driver.release(held)
        thread.join(30)
        assert cursor.fetchall() == ((0,),), "the stranger's sleep was not cut short"
    assert [each.state for each in run_sync(driver.engine.inspect("", "", False, driver.deadline()))] == ["passed over"]


def test_killed_liveness_session_is_reopened(mysql, wait_until) -> None:
    with Client(mysql.named_url("mortal"), ttl=60) as client, Client(mysql.url(), ttl=60) as other:
        client.inspect()
        lease = other.lock("job").acquire()
        listener = probe.engine_state(client)["mysql"]
        wait_in_vain(client.lock("job"), lambda: listener.address)
        before = listener.address
        assert before
        mysql.server.run(f"kill {probe_mysql.liveness_session(listener).connection_id}")
        wait_until(
            lambda: not probe_mysql.is_liveness_session_alive(listener) or not listener.address
        )  # noticed here, or earlier by the listener
        wait_in_vain(client.lock("job"), lambda: listener.address not in ("", before))
        lease.release()


@pytest.mark.parametrize(
    "row", ["'reserved', 'x', '1', 'soon', '', 'job'", pytest.param("'reserved', 'x', '1'", marks=pytest.mark.extended)]
)
def test_notification_of_another_form_ends_the_session_quietly(mysql, row, wait_until, caplog) -> None:
    """As from a broken server. The listening thread logged it as an unexpected error, with a traceback."""
    with Client(mysql.url()) as client, Client(mysql.url()) as other:
        listener = listener_of(client, other)
        mysql.drop_verb("listen")
        mysql.ask(f"create procedure {{s}}.lh_listen_v1(address text, seconds int) select {row}")
        wait_until(lambda: not listener.address)
    assert "unexpected" not in caplog.text
