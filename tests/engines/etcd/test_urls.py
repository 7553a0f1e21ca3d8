"""Valid and invalid URLs; no secret is shown."""

from __future__ import annotations

import pytest

from leasehold import Client, ConfigError
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
        assert (found.user, found.password.read()) == ("u@x", "p:/?")


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
