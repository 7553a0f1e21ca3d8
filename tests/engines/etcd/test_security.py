"""Access control, TLS, and secrets that are never shown."""

from __future__ import annotations

import itertools
import logging
import pickle
import socket
import ssl
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.servers.etcd import Etcd
from harness.servers.folders import scratch
from harness.servers.process import free_ports
from leasehold import Client, ConfigError, Unavailable
from leasehold.engines.etcd.grpc.connect import tls_handshake
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.rpc import RpcClient
from tests.support import probe, probe_etcd
from tests.support.timing import check_elapsed


@pytest.fixture
def enable_users(etcdctl):
    return partial(make_users, etcdctl)


def make_users(etcdctl, member: Etcd, prefix: str) -> str:
    """Enable users and a role that has only the permissions listed in docs/guarantees/etcd.md."""
    etcdctl(member, "user", "add", "root:top")
    etcdctl(member, "role", "add", "locks")
    etcdctl(member, "role", "grant-permission", "--prefix=true", "locks", "readwrite", f"{prefix}/lh1/")
    etcdctl(member, "user", "add", "app:s3cr:t/?")
    etcdctl(member, "user", "grant-role", "app", "locks")
    etcdctl(member, "user", "grant-role", "root", "root")
    etcdctl(member, "auth", "enable")
    return f"etcd://app:s3cr%3At%2F%3F@127.0.0.1:{member.port}/{prefix}"


def test_role_with_the_documented_permissions_suffices(start_member, enable_users, eventually, start_waiter) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url) as client, Client(url) as other:
        client.ping()
        lease = client.lock("job").acquire()
        waiting = start_waiter(other)
        lease.renew(60)
        assert other.break_lock("job", token=lease.token)
        began = time.monotonic()
        eventually(lambda: not lease.held)
        check_elapsed(began, 2, "the role may not watch: the break was found at the next renewal")
        waiting.wait_granted(60)
        with client.semaphore("s", 2), client.rwlock("r").read(), client.lock("d", delay=1):
            pass
        with client.lock("m", min_hold=2):
            pass
        assert client.once("k", lambda: 1) == other.once("k", lambda: 2) == 1
        probe.rebase(client, 0)
    with pytest.raises(ConfigError) as denied, Client(url.replace("/app", "/elsewhere")) as client:
        client.lock("job").acquire()
    assert "s3cr" not in str(denied.value)
    for wrong in (f"etcd://app:wrong@127.0.0.1:{member.port}/app", f"etcd://127.0.0.1:{member.port}/app"):
        with pytest.raises(ConfigError), Client(wrong) as client:
            client.lock("job").acquire()


def test_user_without_auth_enabled_is_a_config_error(start_member) -> None:
    with pytest.raises(ConfigError), Client(f"etcd://app:pw@127.0.0.1:{start_member().port}") as client:
        client.ping()


def test_expired_auth_token_is_replaced_silently(start_member, enable_users, start_waiter, etcdctl) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=20) as client, Client(url, call_timeout=20) as other:
        lease = client.lock("job", ttl=30).acquire()
        waiting = start_waiter(other)
        member.restart()  # the member forgets all auth tokens
        lease.verify()
        etcdctl(member, "user", "add", "somebody:x", user="root:top")  # auth tokens now have an old revision
        lease.verify()
        assert lease.release()
        waiting.wait_granted(60)


@pytest.mark.parametrize("token", ["", "wrong.1"])
def test_login_that_ends_again_during_a_call_is_no_config_error(start_member, enable_users, monkeypatch, token) -> None:
    """Users and roles may be changed several times, and another call may discard the token that this one is to send."""
    plain_get, ended = RpcClient.get_connection, []

    async def get_connection(rpc: RpcClient, deadline: float) -> GrpcConnection:
        connection = await plain_get(rpc, deadline)
        if threading.current_thread() is threading.main_thread() and len(ended) < 3:
            ended.extend(probe_etcd.replace_login(rpc, token))
        return connection

    with Client(enable_users(start_member(), "app")) as client:
        client.lock("warm").acquire().release()
        monkeypatch.setattr(RpcClient, "get_connection", get_connection)
        with client.lock("job") as lease:
            assert lease.held
        assert len(ended) == 3


def test_watch_refused_for_an_expired_login_is_restarted(start_member, enable_users, eventually) -> None:
    """etcd refuses the watch on a stream that stays open, so nothing else would renew the login or the watch."""
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=20) as client, Client(url, call_timeout=20) as other:
        lease = client.lock("job", ttl=60).acquire()
        eventually(lambda: probe_etcd.watch_stream(client))
        other.ping()
        member.restart()
        other.ping()
        eventually(lambda: probe_etcd.watch_stream(client))
        began = time.monotonic()
        assert other.break_lock("job", token=lease.token)
        eventually(lambda: not lease.held)
        check_elapsed(began, 3, "the break was not notified but found at the next renewal")


def test_revoked_permission_puts_a_lease_at_risk_then_loses_it(start_member, enable_users, eventually, etcdctl) -> None:
    member = start_member()
    url = enable_users(member, "app")
    with Client(url, call_timeout=1) as client:
        lease = client.lock("job", ttl=4).acquire()
        etcdctl(member, "user", "revoke-role", "app", "locks", user="root:top")
        eventually(lambda: lease.state == "AT_RISK", 4)
        with pytest.raises(ConfigError, match="permit"):
            client.lock("other").acquire()
        assert lease.wait_lost(10)
        assert lease.lost_reason == "unreachable"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tls")

    def run(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    run(
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-days",
        "2",
        "-subj",
        "/CN=ca",
    )
    for who in ("server", "client"):
        (folder / "ext").write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        run(
            "req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{who}.key", "-out", f"{who}.csr", "-subj", f"/CN={who}"
        )
        sign = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "ext")
        run("x509", "-req", "-in", f"{who}.csr", "-out", f"{who}.crt", *sign)
    run("rsa", "-in", "client.key", "-aes256", "-passout", "pass:x", "-out", "locked.key")
    return folder


class TlsEtcd(Etcd):
    """A member that accepts only TLS clients with a certificate."""

    def __init__(self, certificates: Path) -> None:
        port, peer = free_ports(2)
        urls = (
            "--listen-client-urls",
            f"https://127.0.0.1:{port}",
            "--advertise-client-urls",
            f"https://127.0.0.1:{port}",
        )
        files = ("--cert-file", f"{certificates}/server.crt", "--key-file", f"{certificates}/server.key")
        trust = ("--client-cert-auth", "true", "--trusted-ca-file", f"{certificates}/ca.crt")
        super().__init__(scratch(), port, [peer], 0, *urls, *files, *trust)

    def command(self) -> list[str]:
        arguments = list(super().command())
        index = arguments.index("--client-cert-auth")
        return [*arguments[:index], "--client-cert-auth=true", *arguments[index + 2 :]]

    def ready(self) -> bool:
        return "ready to serve client requests" in self.log_tail() or "serving client traffic" in self.log_tail()


def test_tls_requires_certificates_on_both_sides(certificates, start_waiter) -> None:
    member = TlsEtcd(certificates).start()
    try:
        own = f"ca={certificates}/ca.crt&cert={certificates}/client.crt&key={certificates}/client.key"
        for host in ("127.0.0.1", "localhost"):
            with Client(f"etcds://{host}:{member.port}/app?{own}") as client, client.lock("job") as lease:
                waiting = start_waiter(client)
                lease.renew()
                assert lease.release()
                waiting.wait_granted(60)
        threads = []
        with Client(f"etcds://127.0.0.1:{member.port}?{own}") as client:

            def work() -> None:
                for _ in range(10):
                    with client.lock("job"):
                        pass

            threads = [threading.Thread(target=work) for _ in range(10)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        refused = {
            "no certificate": f"etcds://127.0.0.1:{member.port}?ca={certificates}/ca.crt",
            "a server nobody vouches for": f"etcds://127.0.0.1:{member.port}",
            "no TLS": f"etcd://127.0.0.1:{member.port}",
        }
        for why, url in refused.items():
            began = time.monotonic()
            with pytest.raises(Unavailable), Client(url, call_timeout=2) as client:
                client.ping()
            check_elapsed(began, 2.5, why)
        locked = own.replace("client.key", "locked.key")
        with pytest.raises(ConfigError, match="encrypted"):
            Client(f"etcds://127.0.0.1:{member.port}?{locked}")
    finally:
        member.kill()


def test_no_secret_reaches_etcd_the_logs_or_errors(proxied_url, proxy, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    captured: list[bytes] = []
    proxy.watch = lambda outward, data: captured.append(data)
    with Client(proxied_url) as client:
        lease = client.lock("job").acquire()
        lease.renew()
        secret, output = probe.claim(lease).id, f"{client.inspect()} {lease!r} {client!r}"
        assert not any(secret.encode() in data for data in captured)
        assert secret not in output + caplog.text
        assert probe.claim(lease).id_hash not in output
        pickle.loads(pickle.dumps(client)).close()
        lease.release()


def test_tls_handshake_without_end_is_ended_at_the_deadline() -> None:
    """OpenSSL ignores any number of HelloRequest messages, so a flood of them kept a call busy for ever."""
    clock = itertools.count()
    sock = Mock(spec=socket.socket)
    sock.recv.side_effect = [b"\x16\x03\x03\x00\x04\0\0\0\0"] * 100
    with pytest.raises(TimeoutError):
        tls_handshake(sock, ssl.create_default_context(), "host", lambda: float(next(clock)), 20.0)
    assert sock.recv.call_count < 20
