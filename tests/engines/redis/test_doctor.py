"""`leasehold doctor` on real Redis servers: healthy, unsafe, without rights."""

import pytest

from harness.rigs.redis import RedisRig
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support.certificates import Authority
from tests.support.doctor import examine, unsafe
from tests.support.redis_servers import TlsServer


def url(server, user: str = "") -> str:
    return f"redis://{user}127.0.0.1:{server.port}/0"


def test_durable_server_has_nothing_above_a_note(start_redis):
    assert unsafe(url(start_redis("--appendonly", "yes", "--appendfsync", "always"))) == {}


def test_server_without_a_log_that_evicts_is_a_danger(start_redis):
    server = start_redis("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    for number in range(300):
        server.ask("SET", f"key-{number}", "x" * 10_000)
    found = examine(url(server))
    assert {"single-redis-as-truth"} == {each.red_flag for each in found if "appendonly" in each.found}
    assert {each.check for each in found if each.severity == "danger"} >= {"settings", "evictions", "storage"}


def test_user_without_rights_is_told_which_one_is_missing(start_redis):
    server = start_redis("--appendonly", "yes", "--appendfsync", "always")
    server.ask("ACL", "SETUSER", "locks", "on", ">secret", "+ping", "+info", "+time", "+config|get", "+client")
    found = unsafe(url(server, "locks:secret@"))
    assert set(found) == {"rights"}
    assert "may not" in found["rights"]
    assert "secret" not in str(found)


def test_replica_is_a_danger_and_no_lock_is_tried(start_redis, wait_until):
    primary, replica = start_redis(), start_redis()
    replica.ask("REPLICAOF", "127.0.0.1", primary.port)
    wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
    found = examine(url(replica))
    assert "this server is a replica" in {each.check: each for each in found}["reachable"].found
    assert "lock" not in {each.check for each in found}


@pytest.mark.parametrize(("days", "expected"), [(3, {"certificate"}), (90, set())])
def test_certificate_that_ends_soon_is_a_warning(tmp_path, days, expected):
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    authority = Authority(tmp_path)
    cert, key = authority.issue("server", "IP:127.0.0.1", days=days)
    options = ("--tls-auth-clients", "no", "--appendonly", "yes", "--appendfsync", "always")
    server = TlsServer("--tls-cert-file", str(cert), "--tls-key-file", str(key), *options).start()
    try:
        assert set(unsafe(f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={authority.cert}")) == expected
    finally:
        server.kill()
