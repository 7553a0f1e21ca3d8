"""Real TLS, passwords, hosts between client and server that ask for the password itself, and odd values of accounts."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pymysql
import pytest

from harness.servers.folders import scratch
from harness.servers.process import poll
from leasehold import Client, ConfigError, NotAcquired, Unavailable
from leasehold.core.names import bucket
from tests.support import probe, probe_mysql
from tests.support.password_thief import SECRET, SWITCHES, PasswordThief


@pytest.fixture
def certificate_path():
    """Gives the path of a file: a CA, certificates that it signed for 127.0.0.1, and another CA."""
    folder = scratch()
    os.chmod(folder, 0o755)

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)

    for who, name in (("ca", "authority"), ("other", "stranger")):
        subject = ("-subj", f"/CN={name}", "-keyout", f"{who}.key", "-out", f"{who}.pem")
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    with open(os.path.join(folder, "names"), "w", encoding="ascii") as names:
        names.write("subjectAltName=IP:127.0.0.1")
    for who in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={who}", "-keyout", f"{who}.key", "-out", who)
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", who, *signed, "-out", f"{who}.pem")
        os.chmod(os.path.join(folder, f"{who}.key"), 0o644)
    return lambda name: os.path.join(folder, name)


@pytest.mark.parametrize("delay", [2**63 - 1, -(2**63)])
def test_delay_of_an_account_cannot_make_a_release_of_others_fail(mysql, delay) -> None:
    account = f"odd-{mysql.schema}"
    with Client(mysql.url()) as client, client.lock("job") as lease:
        mysql.create_granted_role(account)
        values = f"'', {bucket('job')}, 'job', 'h', '', '', '', 1, '', 'exclusive', 'lock', 1, 1000000, {delay}, 0"
        call = f"call `{mysql.schema}`.lh_attempt_v1({values}, true, 0, 1000)"
        with mysql.server.connect(user=account) as session, pytest.raises(pymysql.Error):
            session.cursor().execute(call)
        assert [holding.state for holding in client.inspect()] == ["held"]
        assert lease.release()


@pytest.mark.extended
def test_tls_verifies_certificates_and_host_name(mariadb, certificate_path) -> None:
    server_files = {"ca": "ca.pem", "cert": "server.pem", "key": "server.key"}
    server = mariadb(*(f"ssl-{what}={certificate_path(file)}" for what, file in server_files.items()))
    server.run("create user safe require x509", "grant all on *.* to safe")
    server_url = f"mysql://safe@127.0.0.1:{server.port}/leasehold"
    files = {"ssl_ca": "ca.pem", "ssl_cert": "client.pem", "ssl_key": "client.key"}
    query = "?" + "&".join(f"{option}={certificate_path(file)}" for option, file in files.items())
    url = f"{server_url}{query}"
    with Client(url, ttl=60) as client, Client(url, ttl=60) as other, client.lock("job") as lease:
        with pytest.raises(NotAcquired):
            other.lock("job", wait=1).acquire()  # the listener connects by TLS, too
        assert probe.engine_state(other)["mysql"].address
        lease.renew()
        ciphers = server.ask(
            "select count(*) from information_schema.processlist where user = 'safe' and command <> 'Daemon'"
        )
        assert ciphers[0][0] >= 4
    for bad in (
        f"?ssl_ca={certificate_path('other.pem')}",  # another CA
        f"?ssl_ca={certificate_path('nowhere.pem')}",
        "",  # the account requires TLS
    ):
        with Client(f"{server_url}{bad}", call_timeout=5) as client, pytest.raises(ConfigError):
            client.ping()
    by_name = f"mysql://root@localhost:{server.port}/leasehold?ssl_ca={certificate_path('ca.pem')}"
    with Client(by_name, call_timeout=5) as client, pytest.raises(ConfigError):  # not in the certificate
        client.ping()
    with Client(f"{by_name}&ssl_verify_identity=no", call_timeout=5) as client:
        client.ping()


def test_non_ascii_password_works_and_a_wrong_one_is_not_shown(mysql) -> None:
    mysql.server.run("create user `kéy` identified by 'pä$$ w'")
    mysql.server.run("grant all on *.* to `kéy`")
    try:
        with Client(mysql.url("kéy:pä$$ w")) as client:
            client.ping()
        with Client(mysql.url("kéy:wrong")) as client, pytest.raises(ConfigError) as refused:
            client.ping()
        assert "wrong" not in str(refused.value)
    finally:
        mysql.server.run("drop user `kéy`")


@pytest.fixture(params=SWITCHES)
def thief(request: pytest.FixtureRequest) -> Iterator[PasswordThief]:
    thief = PasswordThief(SWITCHES[request.param])
    yield thief
    thief.close()


def test_password_is_not_sent_in_clear_text_without_tls(thief) -> None:
    """PyMySQL sends it to any host that asks, although the server itself may use a challenge."""
    url = f"mysql://user:{SECRET}@127.0.0.1:{thief.port}/locks"
    with Client(url, call_timeout=30) as client, pytest.raises(ConfigError, match="in clear text"):
        client.ping()
    assert b"user\0" in thief.received
    assert SECRET.encode() not in thief.received


def test_login_is_refused_if_the_server_offers_no_tls(thief, certificate, monkeypatch) -> None:
    """PyMySQL 1.1 signed in without TLS, so a host in between had only to say that the server has none."""
    probe_mysql.allow_login_without_tls(monkeypatch)
    url = f"mysql://user:{SECRET}@127.0.0.1:{thief.port}/locks?ssl_ca={certificate[1]}"
    with Client(url, call_timeout=30) as client, pytest.raises(ConfigError, match="does not offer TLS"):
        client.ping()
    assert not thief.received


def test_verification_without_an_authority_is_refused() -> None:
    """The option was ignored, so the URL looked safer than it was."""
    with pytest.raises(ConfigError, match="ssl_verify_identity needs ssl_ca"):
        Client("mysql://127.0.0.1/locks?ssl_verify_identity=yes")


_GREETING = (  # of a server that offers TLS
    b"\x49\0\0\0\x0a8.0.0\0\1\0\0\0aaaaaaaa\0\xff\xff\x21\2\0\xff\xff\x15" + bytes(10) + b"aaaaaaaaaaaa\0"
    b"mysql_native_password\0"
)


def test_tls_is_used_if_the_server_offers_it_and_the_url_says_nothing() -> None:
    """PyMySQL 1.1 did not: whoever listened could read names."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def first_request() -> bytes:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(_GREETING)
                return connection.recv(36)  # the handshake of TLS may have arrived, too

        request = pool.submit(first_request)
        url = f"mysql://u:p@127.0.0.1:{listener.getsockname()[1]}/leasehold"
        with Client(url, call_timeout=30) as client, pytest.raises(Unavailable):
            client.ping()
        assert request.result(30).startswith(b"\x20\0\0")  # 32 bytes ask for TLS: a login is longer


def test_login_over_tls_that_drips_without_end_leaves_no_thread(certificate) -> None:
    """The caller gave up in time, but could not hang up: its thread read byte after byte, for days."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    given_up = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.sendall(_GREETING)
            connection.recv(36, socket.MSG_WAITALL)  # asks for TLS
            with context.wrap_socket(connection, server_side=True) as tls:
                tls.recv(1024)
                tls.sendall(b"\0\0\x08\3")  # begins a packet of 512 KiB
                while not given_up.wait(0.1):
                    tls.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        try:
            url = f"mysql://u:p@127.0.0.1:{listener.getsockname()[1]}/leasehold?ssl_ca={certificate[1]}"
            with Client(url, call_timeout=0.5) as client, pytest.raises(Unavailable):
                client.ping()
            poll(
                lambda: "leasehold-connect" not in {thread.name for thread in threading.enumerate()},
                10,
                lambda: "the thread of the login has ended",
            )
        finally:
            given_up.set()
