"""`leasehold doctor` through real lock servers."""

import subprocess
import sys

import pytest

from harness.servers.lock_server import url_of
from leasehold.cli.doctor.servers import check_servers
from leasehold.config import API_KEY_VARIABLE
from tests.support.certificates import Authority
from tests.support.doctor import examine, unsafe
from tests.support.health import RUNTIMES, probe


def test_server_on_this_machine_has_nothing_unsafe(start_lock_server):
    assert unsafe(url_of(start_lock_server("memory://"))) == {}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_engine_behind_the_server_is_named(start_lock_server, runtime):
    health = probe(url_of(start_lock_server("memory://")), runtime=runtime)
    assert [each.engine for each in health.members] == ["memory"]
    assert "in front of memory" in next(check_servers(health, "http")).found


def test_server_whose_engine_is_down_is_a_danger_and_no_lock_is_tried(start_lock_server):
    server = start_lock_server("redis://127.0.0.1:1")  # nothing listens there
    found = {each.check: each for each in examine(url_of(server))}
    assert found["reachable"].severity == "danger"
    assert "leasehold -u URL-OF-THE-ENGINE doctor" in found["reachable"].fix
    assert "lock" not in found


def test_key_without_the_right_to_lock_is_a_danger(start_lock_server, tmp_path, monkeypatch):
    keys = str(tmp_path / "keys.toml")
    command = ["serve", "key", "create", "reader", "--allow", "read:*:", "--keys", keys]
    created = subprocess.run([sys.executable, "-m", "leasehold", *command], capture_output=True, text=True, check=True)
    key = created.stdout.strip()
    monkeypatch.setenv(API_KEY_VARIABLE, key)
    url = url_of(start_lock_server("memory://", "--keys", keys))
    found = unsafe(url)
    assert probe(url).members[0].engine == "memory"
    assert "may not acquire a lock" in found["rights"]
    assert key not in str(found)


@pytest.mark.parametrize(("days", "expected"), [(3, {"certificate"}), (90, set())])
def test_certificate_that_ends_soon_is_a_warning(start_lock_server, tmp_path, days, expected):
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "DNS:localhost", "IP:127.0.0.1", days=days)
    server = start_lock_server("memory://", "--tls-cert", str(cert), "--tls-key", str(key))
    url = f"{url_of(server, scheme='https')}?ca={authority.cert}"
    assert set(unsafe(url)) == expected
    for runtime in RUNTIMES:
        (member,) = probe(url, runtime=runtime).members
        assert (days - 1) * 86_400 < member.certificate_left <= days * 86_400
        assert member.engine == "memory"
