"""`leasehold doctor` on real MariaDB servers."""

from pathlib import Path

import pytest

from harness.servers.folders import scratch
from tests.support.certificates import Authority
from tests.support.doctor import encryption_from_afar, examine, unsafe
from tests.support.health import RUNTIMES, probe


def test_durable_server_has_nothing_unsafe(mysql):
    assert unsafe(mysql.named_url("root")) == {}


def test_commits_that_are_not_flushed_are_a_warning(mariadb):
    server = mariadb("innodb-flush-log-at-trx-commit=0")
    found = [each for each in examine(f"mysql://root@127.0.0.1:{server.port}/leasehold") if each.check == "settings"]
    assert [(each.severity, each.promise) for each in found] == [("warning", "E1")]


def test_server_without_tls_on_the_network_is_a_warning(mariadb):
    server = mariadb("skip-ssl")
    health = probe(f"mysql://root@127.0.0.1:{server.port}/leasehold")
    assert (health.members[0].encryption, health.members[0].certificate_left) == ("none", None)
    ((severity, found),) = encryption_from_afar(health)
    assert severity == "warning"
    assert "unencrypted" in found


@pytest.mark.parametrize(("days", "unsafe_checks"), [(3, {"certificate"}), (90, set())])
def test_tls_is_judged_by_what_the_url_verifies(mariadb, days, unsafe_checks):
    authority = Authority(Path(scratch()))
    cert, key = authority.issue("server", "IP:127.0.0.1", days=days)
    for file in (authority.cert, cert, key):
        file.chmod(0o644)
    server = mariadb(f"ssl-ca={authority.cert}", f"ssl-cert={cert}", f"ssl-key={key}")
    url = f"mysql://root@127.0.0.1:{server.port}/leasehold"
    expected = {
        "": ("unverified", "warning"),
        f"?ssl_ca={authority.cert}&ssl_verify_identity=no": ("authority", "note"),
        f"?ssl_ca={authority.cert}": ("verified", "ok"),
    }
    for options, (encryption, severity) in expected.items():
        health = probe(url + options)
        assert (health.error, health.members[0].encryption) == (None, encryption), options
        assert [each[0] for each in encryption_from_afar(health)] == [severity], options
    for runtime in RUNTIMES:
        (member,) = probe(f"{url}?ssl_ca={authority.cert}", runtime=runtime).members
        assert (days - 1) * 86_400 < member.certificate_left <= days * 86_400
    assert set(unsafe(f"{url}?ssl_ca={authority.cert}")) == unsafe_checks
