"""zookeeper:// URLs: hosts, credentials, TLS, SASL."""

from __future__ import annotations

import pickle

import pytest

from leasehold import Client, ConfigError
from leasehold.config import EngineConfig
from leasehold.engines.zookeeper.url import parse_url
from tests.support import probe


def parse(url: str):
    return parse_url(EngineConfig.parse(url, 5.0))


def test_url_is_parsed_into_hosts_chroot_and_session():
    location = parse("zookeeper://h1:2181,h2:2182,h3/app/locks")
    assert (location.hosts, location.chroot, location.servers) == (
        "h1:2181,h2:2182,h3",
        "/app/locks",
        "h1:2181,h2:2182,h3:2181",
    )
    assert (location.session_timeout, location.acl[0].perms, location.options) == (40.0, 31, {})
    assert parse("zookeeper://").hosts == "localhost"
    assert parse("zookeeper://[::1]:2181/").chroot == ""
    assert parse("zk://h?session=12.5").session_timeout == 12.5


def test_url_credentials_become_auth_data_and_acl():
    location = parse("zookeeper://web:p%40ss%2Fw%3Ard@h1,h2/app")
    assert location.session_options() == {"auth_data": [("digest", "web:p@ss/w:rd")]}
    assert (location.hosts, location.chroot) == ("h1,h2", "/app")
    assert (location.acl[0].id.scheme, location.acl[0].perms) == ("auth", 31), (
        "nodes and parents belong to the user that created them"
    )
    assert "p@ss" not in repr(location)
    acl = parse("zookeeper://h?acl=digest:web:hash:cdrw,world:anyone:r").acl
    assert [(each.id.scheme, each.id.id, each.perms) for each in acl] == [
        ("digest", "web:hash", 15),
        ("world", "anyone", 1),
    ]


def test_tls_options_are_passed_to_kazoo():
    tls = parse("zookeeper://h?tls=yes&ca=/ca.pem&cert=/c.pem&key=/k.pem&key_password=x").options
    assert tls == {
        "use_ssl": True,
        "verify_certs": True,
        "check_hostname": True,
        "ca": "/ca.pem",
        "certfile": "/c.pem",
        "keyfile": "/k.pem",
        "keyfile_password": "x",
    }
    unverified = parse("zookeeper://h?tls=yes&verify=no").options
    assert not unverified["verify_certs"]
    assert not unverified["check_hostname"]


def test_sasl_without_its_package_is_a_config_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "puresasl", object())
    sasl = parse("zookeeper://web:secret@h?sasl=DIGEST-MD5").session_options()["sasl_options"]
    assert sasl == {"mechanism": "DIGEST-MD5", "service": "zookeeper", "username": "web", "password": "secret"}
    assert parse("zookeeper://h?sasl=GSSAPI&sasl_service=zk").options["sasl_options"]["service"] == "zk"
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigError, match=r"pip install"):
        parse("zookeeper://h?sasl=GSSAPI")


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://h:port",
        "zookeeper://h:99999999",
        "zookeeper://,",
        "zookeeper://h1,,h2",
        "zookeeper://web@h",
        "zookeeper://:p@h",
        "zookeeper://h/a//b",
        "zookeeper://h/../b",
        "zookeeper://h?session=0",
        "zookeeper://h?session=soon",
        "zookeeper://h?session=nan",
        "zookeeper://h?session=3000000",
        "zookeeper://h?tls=true",
        "zookeeper://h?ca=/x",
        "zookeeper://h?verify=no",
        "zookeeper://h?tls=yes&cert=/x",
        "zookeeper://h?acl=world:anyone",
        "zookeeper://h?acl=world:anyone:rx",
        "zookeeper://h?acl=world:anyone:r",
        "zookeeper://h?acl=world:anyone:crwa",
        "zookeeper://h?acl=",
        "zookeeper://h?sasl_service=zk",
        "zookeeper://h?timeout=3",
        "zookeeper://h?session=1&session=2",
    ],
)
def test_invalid_url_is_refused_when_the_client_is_built(url):
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "://h" not in str(caught.value)


def test_password_appears_in_no_error_and_no_repr():
    client = Client("zookeeper://web:hunter2@127.0.0.1:1/app", call_timeout=0.2)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1") as caught:
        client.ping()
    output = f"{client!r} {caught.value!r} {caught.value.__cause__!r} {probe.config(client)!r}"
    assert "hunter2" not in output
    assert "hunter2" not in str(pickle.loads(pickle.dumps(caught.value)))
    client.close()
