"""Valid and invalid URLs; no secret is shown."""

from __future__ import annotations

import logging
import pickle
import time

import pytest

from harness.servers.process import free_ports
from leasehold import Client, ConfigError, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.etcd.url import parse_url


@pytest.mark.parametrize(
    ("text", "hosts", "root"),
    [
        ("etcd://", ["localhost:2379"], "lh1/"),
        ("etcd://a", ["a:2379"], "lh1/"),
        ("etcd://a:1,b:2,c/", ["a:1", "b:2", "c:2379"], "lh1/"),
        ("etcd://u:p@a/my/app/", ["a:2379"], "my/app/lh1/"),
        ("etcd://u%40x:p%3A%2F%3F@[::1]:9,[fe80::1]/x%20y", ["[::1]:9", "[fe80::1]:2379"], "x y/lh1/"),
    ],
)
def test_url_is_parsed_into_endpoints_and_root(text, hosts, root) -> None:
    found = parse_url(EngineConfig.parse(text, 5.0))
    assert ([str(each) for each in found.endpoints], found.root) == (hosts, root)
    if "%3A" in text:
        assert (found.user, found.password) == ("u@x", "p:/?")


@pytest.mark.parametrize(
    "text",
    [
        "etcd://a:0",
        "etcd://a:99999",
        "etcd://a:x",
        "etcd://a,,b",
        "etcd://a,a",
        "etcd://:2379",
        "etcd://[::1",
        "etcd://user@a",
        "etcd://a?timeout=3",
        "etcd://a?ca=/etc/passwd",
        "etcds://a?ca=/no/such/file",
        "etcds://a?ca=/etc/hostname",
        "etcds://a?key=/etc/hostname",
        "etcd://a/" + "x" * 256,
        "etcd://a/%00",
    ],
)
def test_invalid_url_is_refused_when_the_client_is_built(text) -> None:
    with pytest.raises(ConfigError):
        Client(text)


def test_refused_connection_is_unavailable_at_once() -> None:
    (port,) = free_ports(1)
    began = time.monotonic()
    with Client(f"etcd://user:hunter2@127.0.0.1:{port}", call_timeout=5) as client:
        with pytest.raises(Unavailable) as caught:
            client.lock("a").acquire()
        assert "hunter2" not in str(caught.value) + repr(client) + repr(caught.value.__cause__)
        assert str(port) in str(caught.value)
    assert time.monotonic() - began < 2, "the client waited although nothing was sent"


def test_no_secret_reaches_etcd_the_logs_or_errors(proxied_url, proxy, caplog) -> None:
    caplog.set_level(logging.DEBUG)
    captured: list[bytes] = []
    proxy.watch = lambda outward, data: captured.append(data)
    with Client(proxied_url) as client:
        lease = client.lock("job").acquire()
        lease.renew()
        secret, output = lease._claim.id, f"{client.inspect()} {lease!r} {client!r}"
        assert not any(secret.encode() in data for data in captured)
        assert secret not in output + caplog.text
        assert lease._claim.id_hash not in output
        pickle.loads(pickle.dumps(client)).close()
        lease.release()
