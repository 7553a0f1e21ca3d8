"""The health probe on real servers: one, a primary with a replica, sentinels, and a cluster."""

import time

import pytest

from harness.rigs.redis import RedisRig
from harness.servers.redis import CAN_FAKE_CLOCK
from harness.servers.redis_ha import SERVICE, SentinelSetup
from leasehold.runtime.net.blocking import SocketAddress
from leasehold.testing.conformance.suite import rig_or_skip
from tests.support import probe_redis
from tests.support.health import RUNTIMES, probe, probe_silent, settings_found, storage_of


def url(server, options: str = "") -> str:
    return f"redis://127.0.0.1:{server.port}/0{options}"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_a_durable_server_finds_nothing_unsafe(start_redis, runtime):
    server = start_redis("--appendonly", "yes", "--appendfsync", "always", "--maxmemory", "100mb")
    health = probe(url(server), runtime=runtime)
    (member,) = health.members
    assert (health.engine, health.up, health.has_leader, health.error) == ("redis", True, True, None)
    assert (health.voting, health.reachable) == (1, 1)
    assert (member.member, member.role, member.findings) == (f"127.0.0.1:{server.port}", "primary", ())
    assert member.version == server.info("server")["redis_version"]
    assert member.round_trip > 0
    assert member.clock_error == member.round_trip / 2
    memory = storage_of(member, "maxmemory")
    assert (memory.limit, memory.used) == (100 << 20, member.memory)
    assert 0 < memory.used_ratio < 1
    assert member.evictions == 0
    assert 0 < member.connections_ratio < 1
    assert (member.replicas, member.replication_lag) == (0, None)
    assert (member.anonymous, member.certificate_left) == (True, None)


def test_probe_finds_an_eviction_policy_and_a_missing_aof(start_redis):
    server = start_redis("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    for number in range(300):
        server.ask("SET", f"key-{number}", "x" * 10_000)
    (member,) = probe(url(server)).members
    assert settings_found(member) == {"maxmemory-policy": "allkeys-lru", "appendonly": "no"}
    assert 0 < member.evictions <= int(server.info("stats")["evicted_keys"])


def test_probe_finds_an_aof_that_is_not_always_synced(start_redis):
    (member,) = probe(url(start_redis("--appendonly", "yes", "--appendfsync", "everysec"))).members
    assert settings_found(member) == {"appendfsync": "everysec"}


def test_memory_without_a_limit_has_no_ratio(server):
    (member,) = probe(url(server)).members
    assert storage_of(member, "maxmemory").used_ratio is None


@pytest.mark.skipif(not CAN_FAKE_CLOCK, reason="needs libfaketime: run apt-get install faketime")
def test_clock_offset_is_that_of_the_server(start_redis):
    server = start_redis(fake_clock=True)
    server.set_clock(3600)
    (member,) = probe(url(server)).members
    assert abs(member.clock_offset - 3600) <= member.clock_error + 1


def test_fields_that_a_user_may_not_read_are_absent(start_redis):
    server = start_redis()
    server.ask("ACL", "SETUSER", "locks", "on", ">secret", "+ping")
    (member,) = (health := probe(f"redis://locks:secret@127.0.0.1:{server.port}")).members
    assert health.up
    assert health.has_leader is None
    assert (member.role, member.version, member.memory, member.evictions, member.storage) == (
        None,
        None,
        None,
        None,
        (),
    )
    assert (member.clock_offset, member.connections_ratio, member.findings) == (None, None, ())
    assert member.notes == ("TIME is not allowed", "INFO is not allowed", "CONFIG GET is not allowed")
    assert not member.anonymous


def test_wrong_password_is_down_and_not_shown(start_redis):
    server = start_redis(password="correct")
    health = probe(f"redis://:hunter2-secret@127.0.0.1:{server.port}")
    assert not health.up
    assert "denied access" in health.error
    assert "hunter2" not in repr(health)


def test_replica_is_up_but_cannot_grant(start_redis, wait_until):
    primary = start_redis()
    replica = start_redis(primary=primary)
    wait_until(lambda: "state=online" in primary.info("replication").get("slave0", ""))
    health = probe(url(replica))
    assert (health.up, health.has_leader, health.members[0].role) == (False, False, "replica")
    assert health.members[0].up
    assert health.members[0].replication_lag is not None
    assert "min-replicas-to-write" in settings_found(probe(url(primary)).members[0])
    assert "min-replicas-to-write" not in settings_found(probe(f"{url(primary)}?min_replicas=1").members[0])


def test_server_that_other_machines_reach_without_a_password_is_found(start_redis):
    server = start_redis("--protected-mode", "no", "--bind", "127.0.0.1", "127.0.0.2")  # not only its usual address
    assert settings_found(probe(url(server)).members[0])["protected-mode"] == "no"
    server.ask("CONFIG", "SET", "bind", "127.0.0.1 -::1")
    assert "protected-mode" not in settings_found(probe(url(server)).members[0])


def test_stopped_replica_and_lost_primary_are_seen(start_redis, wait_until):
    primary = start_redis("--repl-timeout", "3600")
    replica = start_redis(primary=primary)
    wait_until(lambda: "state=online" in primary.info("replication").get("slave0", ""))
    replica.pause()
    wait_until(lambda: (probe(url(primary)).members[0].replication_lag or 0) >= 2, every=0.1)
    replica.resume()
    primary.kill()
    wait_until(lambda: settings_found(probe(url(replica)).members[0]).get("master_link_status") == "down", every=0.1)
    assert probe(url(replica)).members[0].replication_lag is None


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_paused_server_is_down_by_the_deadline(server, runtime):
    server.pause()
    health = probe_silent(url(server), runtime)
    assert (health.up, health.reachable, health.members[0].up) == (False, 0, False)
    assert health.members[0].memory is None


def test_killed_server_is_down(server):
    server.kill()
    health = probe(url(server))
    assert not health.up
    assert "cannot be reached" in health.error


@pytest.mark.extended  # it needs a server of its own kind
@pytest.mark.parametrize("start_redis", ["valkey"], indirect=True)
def test_version_of_valkey_is_its_own(start_redis) -> None:
    """Valkey also states the version of Redis that it is compatible with."""
    server = start_redis()
    (member,) = probe(url(server)).members
    assert (server.info("server")["server_name"], member.version) == ("valkey", server.info("server")["valkey_version"])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_sentinel_deployment_shows_primary_and_sentinels(runtime):
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    setup = SentinelSetup(down_after=0.5)
    try:
        health = probe(setup.url(), runtime=runtime)
        primary, *sentinels = health.members
        assert (health.up, health.has_leader, health.voting, health.reachable) == (True, True, 3, 3)
        assert (primary.member, primary.role) == (f"127.0.0.1:{setup.primary.port}", "primary")
        assert {each.role for each in sentinels} == {"sentinel"}
        assert health.alarms == ()
        assert {(each.findings, each.notes) for each in sentinels} == {((), ())}
        for sentinel in setup.sentinels[1:]:
            sentinel.kill()
        deadline = time.monotonic() + 30
        while not (health := probe(setup.url(), runtime=runtime)).alarms:
            assert time.monotonic() < deadline, health
        assert "NOQUORUM" in health.alarms[0]
        assert {each.notes for each in health.members[1:]} == {()}
        assert health.reachable == 1
    finally:
        setup.close()


def test_sentinel_that_monitors_another_server_is_found(start_redis):
    rig_or_skip(RedisRig)  # skips if Redis is not installed
    setup = SentinelSetup(down_after=30)
    try:
        *_, odd = setup.sentinels
        odd.ask("SENTINEL", "REMOVE", SERVICE)
        odd.ask("SENTINEL", "MONITOR", SERVICE, "127.0.0.1", start_redis().port, 2)
        found = {each.member: settings_found(each) for each in probe(setup.url()).members[1:]}
        assert found.pop(f"127.0.0.1:{odd.port}") == {"sentinel monitor": "another server"}
        assert set(map(len, found.values())) == {0}
    finally:
        setup.close()


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, {}),
        ({"a": (3, 1), "b": (3, 1)}, {}),
        ({"a": (3, 1), "b": (2, 1)}, {}),  # the same server, before a failover that returned to it
        ({"a": (3, 1), "b": (3, 1), "c": (2, 2)}, {"c": "behind"}),
        ({"a": (2, 2), "b": (2, 2), "c": (3, 1)}, {"a": "behind", "b": "behind"}),  # only `c` knows of the failover
        ({"a": (0, 1), "b": (0, 2), "c": (0, 2)}, {"a": "another server"}),
        ({"a": (0, 1, b"x"), "b": (0, 2, b"x"), "c": (0, 2, b"x")}, {}),  # one server with two addresses
        ({"a": (0, 1, b""), "b": (0, 2, b""), "c": (0, 2, b"x")}, {"a": "another server"}),
    ],
)
def test_latest_failover_decides_which_sentinel_differs(reported, expected):
    primaries = {
        name: probe_redis.ReportedPrimary(epoch, SocketAddress("10.0.0.1", port), *run_id)
        for name, (epoch, port, *run_id) in reported.items()
    }
    assert {name: found.value for name, (found,) in probe_redis.find_differences(primaries).items()} == expected


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_cluster_is_down_while_one_node_is(cluster, runtime):
    seeds = ",".join(f"127.0.0.1:{node.port}" for node in cluster.all)
    health = probe(f"redis+cluster://{seeds}", runtime=runtime)
    assert (health.up, health.voting, health.reachable, health.has_leader) == (True, 3, 3, True)
    assert {member.member for member in health.members} == {f"127.0.0.1:{node.port}" for node in cluster.all}
    cluster.all[1].pause()
    health = probe_silent(f"redis+cluster://{seeds}", runtime, others_answer=True)
    assert (health.up, health.reachable) == (False, 2)
    assert [member.member for member in health.members if not member.up] == [f"127.0.0.1:{cluster.all[1].port}"]


def test_documented_permissions_suffice_for_the_probe(start_redis, rights):
    server = start_redis()
    server.ask("ACL", "SETUSER", "locks", "on", ">secret", *rights.server)
    (member,) = probe(f"redis://locks:secret@127.0.0.1:{server.port}").members
    assert (member.up, member.role, member.notes) == (True, "primary", ())
    assert settings_found(member) == {"appendonly": "no"}
