"""MariaDB with a full disk, a failover to a replica, and real TLS."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from harness.servers.process import scratch
from harness.servers.proxy import Proxy
from leasehold import Client, ConfigError, LeaseLost, NotAcquired, Unavailable

pytestmark = pytest.mark.faults  # each test starts its own servers


def url_of(port: int, query: str = "", user: str = "root") -> str:
    return f"mysql://{user}@127.0.0.1:{port}/leasehold{query}"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small disk")
def test_full_disk_is_unavailable_until_space_is_freed(mariadb) -> None:
    folder = scratch()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m,mode=711", "none", folder], check=True)
    try:
        server = mariadb("innodb-log-file-size=8M", folder=folder)
        with Client(url_of(server.port), ttl=300, call_timeout=2) as client:
            lease, leases = client.lock("held").acquire(), []
            with open(os.path.join(folder, "filler"), "ab") as file:
                file.write(b"\0" * max(0, shutil.disk_usage(folder).free - 4096))
            with pytest.raises(Unavailable):  # the log has room for a while, the tables do not
                for number in range(10_000):
                    leases.append(client.lock(f"{number}", purpose="x" * 200, wait=0).acquire())
            os.unlink(os.path.join(folder, "filler"))
            server.restart()
            lease.verify()
            for each in (lease, *leases):
                assert each.release()
    finally:
        subprocess.run(["umount", "-l", folder], check=False)


def test_failover_to_a_replica_may_lose_a_grant_but_tokens_still_rise(mariadb, wait_until) -> None:
    primary, replica = mariadb("log-bin=b", "server-id=1"), mariadb("log-bin=b", "server-id=2")
    replica.follow(primary)
    proxy = Proxy(primary.port)
    try:
        url = url_of(proxy.port)
        with Client(url, ttl=60, call_timeout=5) as client, Client(url, ttl=60, call_timeout=5) as other:
            copied = client.lock("copied").acquire()
            wait_until(
                lambda: (
                    replica.ask("show databases like 'leasehold'") and replica.ask("select * from leasehold.lh_grant")
                )
            )
            replica.run("stop slave")  # from here on nothing reaches the replica
            lease = client.lock("job").acquire()
            primary.kill()
            proxy._target = ("127.0.0.1", replica.port)
            second = other.lock("job", wait=20).acquire()
            assert second.token > lease.token, "two holders, but a fence can tell them apart"
            with pytest.raises(LeaseLost):
                lease.renew()
            assert other.lock("copied").try_acquire() is None, "the replicated grant is still held"
            assert second.release()
            assert copied.release()
    finally:
        proxy.close()


# ---------------------------------------------------------------------- TLS

_SERVER = ("ca.pem", "server.pem", "server.key")


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


def test_tls_verifies_certificates_and_host_name(mariadb, certificate_path) -> None:
    server = mariadb(
        *(f"ssl-{what}={certificate_path(file)}" for what, file in zip(("ca", "cert", "key"), _SERVER, strict=True))
    )
    server.run("create user safe require x509", "grant all on *.* to safe")
    files = {"ssl_ca": "ca.pem", "ssl_cert": "client.pem", "ssl_key": "client.key"}
    query = "?" + "&".join(f"{option}={certificate_path(file)}" for option, file in files.items())
    url = url_of(server.port, query, "safe")
    with Client(url, ttl=60) as client, Client(url, ttl=60) as other, client.lock("job") as lease:
        with pytest.raises(NotAcquired):
            other.lock("job", wait=1).acquire()  # the listener connects by TLS, too
        assert other._core.registry.shared["mysql"].address
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
        with Client(url_of(server.port, bad, "safe"), call_timeout=5) as client, pytest.raises(ConfigError):
            client.ping()
    by_name = url_of(server.port, f"?ssl_ca={certificate_path('ca.pem')}").replace("127.0.0.1", "localhost")
    with Client(by_name, call_timeout=5) as client, pytest.raises(ConfigError):  # not in the certificate
        client.ping()
    with Client(f"{by_name}&ssl_verify_identity=no", call_timeout=5) as client:
        client.ping()
