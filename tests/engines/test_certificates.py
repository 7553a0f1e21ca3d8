"""Servers whose certificate has expired, or is another's: every engine refuses them, and tells them nothing."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from leasehold import Client, ConfigError, Unavailable
from tests.support.certificates import Authority, Certificate
from tests.support.tls_clients import TLS_CLIENTS

NAMES = ("IP:127.0.0.1", "IP:127.0.0.2", "DNS:localhost")


class TlsServer:
    """Notes what it is told over TLS, and hangs up."""

    def __init__(self, engine: str, certificate: Certificate) -> None:
        self._engine, self.received = engine, b""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        self._context.set_alpn_protocols(["h2", "http/1.1"])
        self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=self._listener.accept()[:1], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if self._engine == "postgresql":
                connection.recv(8)
            connection.sendall(TLS_CLIENTS[self._engine].greeting)
            if self._engine == "mysql":
                connection.recv(36)
            with self._context.wrap_socket(connection, server_side=True) as tls:
                self.received += tls.recv(1000)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module", params=["another name", "another authority", "expired", "good"])
def certificate(
    request: pytest.FixtureRequest, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> Certificate:
    match request.param:
        case "another name":
            return authority.issue("name", "DNS:elsewhere")
        case "another authority":
            return Authority(tmp_path_factory.mktemp("other")).issue("authority", *NAMES)
        case "expired":
            return authority.issue("expired", *NAMES, days=-1)
    return authority.issue("good", *NAMES)


@pytest.fixture
def server(engine: str, certificate: Certificate) -> Iterator[TlsServer]:
    found = TlsServer(engine, certificate)
    yield found
    found.close()


@pytest.mark.parametrize("engine", sorted(TLS_CLIENTS))
def test_certificate_that_is_not_the_servers_is_refused(engine, server, authority, certificate) -> None:
    found = TLS_CLIENTS[engine]
    url = (found.url + found.verifying).replace("sslmode=require&", "")
    url = url.format(port=server.port, certificate=authority.cert)
    with Client(url, call_timeout=3) as client, pytest.raises((ConfigError, Unavailable)) as caught:
        client.ping()
    is_good = Path(certificate.cert).stem == "good"
    assert ("certificate" in str(caught.value)) != is_good
    assert bool(server.received) == is_good, "what the client says when it has verified the server"
