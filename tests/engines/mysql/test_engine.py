"""What only MySQL has: its URLs, what a renewal says after a break, and killed calls."""

from __future__ import annotations

import ssl
import threading

import pytest

from leasehold import Client, ConfigError, LeaseLost
from leasehold.config import EngineConfig
from leasehold.engines.mysql.url import parse_url


@pytest.mark.parametrize(
    "url",
    [
        "mysql://localhost/db?nope=1",
        "mysql://localhost/db?create=maybe",
        "mysql://localhost/db?procedures=maybe",
        "mysql://localhost/" + "x" * 65,
        "mysql://localhost/db%00",
        "mysql://user:s3cret@[::1/db",
        "mysql://user:s3cret@host:port/db",
        "mysql://a:1,b:2/db",
    ],
)
def test_invalid_url_is_refused_when_the_client_is_built(url) -> None:
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "s3cret" not in str(caught.value)


def test_url_is_parsed_into_connection_options() -> None:
    def options(url: str):
        return parse_url(EngineConfig.parse(url, 5.0))

    parsed_url = options("mysql://u:p%40ss@h:7/a%20b?ssl_ca=/ca.pem&create=no")
    assert (parsed_url.target.host, parsed_url.target.port, parsed_url.database, parsed_url.create) == (
        "h",
        7,
        "a b",
        False,
    )
    assert parsed_url.target.password.read() == "p@ss"
    assert parsed_url.target.arguments["ssl_verify_cert"] is parsed_url.target.arguments["ssl_verify_identity"] is True
    assert options("mariadb://h").database == "leasehold"
    assert options("mysql://h/d?ssl_ca=x&ssl_verify_identity=no").target.arguments["ssl_verify_identity"] is False
    assert options("mysql://h/d?unix_socket=/s").target.path == "/s"
    assert "p@ss" not in repr(parsed_url)


@pytest.mark.parametrize("delay", [0, 30])
@pytest.mark.parametrize("procedures", ["yes", "no"])
def test_renewal_of_a_broken_lease_says_broken(mysql, procedures, delay) -> None:
    url = mysql.url(procedures=procedures)
    with Client(url, ttl=60) as holder, Client(url) as operator:
        leases = [holder.lock(f"job-{number}", delay=delay).acquire() for number in range(3)]
        for lease in leases:
            assert operator.break_lock(lease.name, token=lease.token)
        for lease in leases:
            with pytest.raises(LeaseLost):
                lease.renew()
            assert lease.lost_reason == "broken"
        vanished = holder.lock("vanished").acquire()
        mysql.ask("delete from {s}.lh_grant")
        with pytest.raises(LeaseLost):
            vanished.renew()
        assert vanished.lost_reason == "unknown", "no operator broke it"


def test_renewal_says_broken_for_every_permit_of_one_name(mysql) -> None:
    with Client(mysql.url(), ttl=60) as holder:
        leases = [holder.semaphore("job", 16).acquire() for _ in range(16)]
        for lease in leases:
            assert holder.break_lock("job", token=lease.token)
        for lease in leases:
            with pytest.raises(LeaseLost):
                lease.renew()
        assert {lease.lost_reason for lease in leases} == {"broken"}


def test_killed_call_is_unavailable_and_taken_back(mysql, wait_until) -> None:
    with Client(mysql.named_url("victim"), ttl=60, call_timeout=20) as client:
        client.lock("job").acquire().release()
        errors: list[BaseException] = []

        def take() -> None:
            try:
                client.lock("job", wait=0).acquire()
            except BaseException as error:
                errors.append(error)

        with mysql.lock_all_buckets():
            thread = threading.Thread(target=take)
            thread.start()
            wait_until(lambda: mysql.is_blocked("victim"), every=0.2)
            ((number,),) = mysql.ask(
                "select trx_mysql_thread_id from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"
            )
            mysql.server.run(f"kill query {number}")
            thread.join(30)
        assert [type(error).__name__ for error in errors] == ["Unavailable"]
        wait_until(
            lambda: not mysql.ask("select 1 from information_schema.innodb_trx"), every=0.2
        )  # the killed call left no transaction open
        with client.lock("job", wait=20) as lease:
            assert lease.held


def test_connecting_without_tls_options_makes_no_tls_context(mysql, monkeypatch) -> None:
    """OpenSSL makes contexts under a lock. A child forked while another thread makes one would wait for it for ever."""

    def refuse(*_: object) -> None:
        raise AssertionError("a handshake made a TLS context")

    with monkeypatch.context() as patch:
        patch.setattr(ssl, "SSLContext", refuse)
        with Client(mysql.url(), ttl=60) as client, client.lock("job"):
            assert len(client.inspect()) == 1
