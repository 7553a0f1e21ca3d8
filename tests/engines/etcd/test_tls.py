"""TLS with server and client certificates."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from harness.servers.etcd import Etcd
from harness.servers.process import free_ports, scratch
from leasehold import Client, ConfigError, Unavailable


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
                waiting.wait_granted(20)
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
            assert time.monotonic() - began < 2.5, why
        locked = own.replace("client.key", "locked.key")
        with pytest.raises(ConfigError, match="encrypted"):
            Client(f"etcds://127.0.0.1:{member.port}?{locked}")
    finally:
        member.kill()
