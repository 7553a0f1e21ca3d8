"""The health probe on real servers: roles with and without rights, unsafe settings, a standby."""

import pytest

from harness.servers.postgresql import PostgreSQL
from tests.support.health import RUNTIMES, probe, probe_silent, settings_found, storage_of


@pytest.fixture
def start_server(require_server):
    """Start servers for this test alone, so that it may break them."""
    started = []

    def start(*settings: str, **kwargs) -> PostgreSQL:
        with require_server():
            started.append(PostgreSQL(*settings, **kwargs))
        return started[-1].start()

    yield start
    for server in started:
        server.kill()


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_a_superuser_sees_everything(database, runtime):
    server = database.server
    health = probe(server.url(), runtime=runtime)
    assert (health.engine, health.up, health.has_leader, health.error) == ("postgresql", True, True, None)
    (member,) = health.members
    assert (member.member, member.role, member.findings) == (f"127.0.0.1:{server.port}", "primary", ())
    assert member.version == server.ask("show server_version")[0][0]
    assert storage_of(member, "database").used > 1 << 20
    assert 0 < storage_of(member, "filesystem").used_ratio < 1
    assert 0 < member.connections_ratio < 1
    assert 0 < member.cache_hit_ratio <= 1
    assert member.round_trip > 0
    assert member.clock_error == member.round_trip / 2
    assert (member.replicas, member.replication_lag, member.notes) == (0, None, ())


def test_role_without_rights_sees_no_disk_and_no_lag(start_server, wait_until):
    primary = start_server()
    primary.ask("create role plain login")
    primary.ask("create role monitor login in role pg_monitor")
    standby = primary.standby().start()
    try:
        wait_until(lambda: primary.ask("select state from pg_stat_replication") == [("streaming",)])
        (member,) = probe(primary.url(user="plain")).members
        assert (member.up, member.role, member.replicas, member.replication_lag) == (True, "primary", 1, None)
        assert storage_of(member, "database").used > 1 << 20
        assert storage_of(member, "filesystem") is None
        assert "grant pg_monitor" in member.notes[0]
        assert settings_found(member) == {"synchronous_standby_names": "empty"}
        wait_until(lambda: probe(primary.url(user="monitor")).members[0].replication_lag is not None, every=0.1)
        assert probe(primary.url(user="monitor")).members[0].notes == ()
        primary.ask("alter system set synchronous_standby_names = 'ANY 1 (*)'")
        primary.ask("select pg_reload_conf()")
        wait_until(lambda: settings_found(probe(primary.url()).members[0]) == {}, every=0.1)
    finally:
        standby.kill()


def test_standby_alone_is_no_primary_and_a_pair_has_one(start_server, wait_until):
    primary = start_server()
    standby = primary.standby().start()
    try:
        wait_until(lambda: primary.ask("select state from pg_stat_replication") == [("streaming",)])
        health = probe(standby.url())
        assert (health.up, health.has_leader, health.reachable) == (False, False, 0)
        assert (health.members[0].up, health.members[0].role) == (True, "replica")
        assert health.error == "no server of the URL is a primary"
        wait_until(lambda: probe(standby.url()).members[0].replication_lag is not None, every=0.1)
        pair = probe(f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres")
        assert (pair.up, [member.role for member in pair.members]) == (True, ["replica", "primary"])
        primary.kill()
        health = probe(f"postgresql://postgres@127.0.0.1:{standby.port},127.0.0.1:{primary.port}/postgres")
        assert (health.up, [member.up for member in health.members]) == (False, [True, False])
        wait_until(lambda: probe(standby.url()).members[0].replication_lag is None, every=0.1)
    finally:
        standby.kill()


def test_probe_finds_settings_that_lose_commits(start_server):
    server = start_server("fsync=off", "full_page_writes=off", "synchronous_commit=off")
    (member,) = probe(server.url()).members
    assert settings_found(member) == {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_paused_server_is_down_by_the_deadline(start_server, runtime):
    server = start_server()
    server.pause()
    health = probe_silent(server.url(), runtime)
    assert (health.up, health.has_leader, health.members[0].up) == (False, None, False)
    assert (health.members[0].storage, health.members[0].connections_ratio) == ((), None)


def test_probe_creates_no_schema(start_server):
    server = start_server()
    assert probe(server.url()).up
    assert server.ask("select 1 from pg_namespace where nspname = 'leasehold'") == []


def test_unknown_role_is_down_and_no_password_is_shown(database):
    port = database.server.port
    health = probe(f"postgresql://stranger:hunter2-secret@127.0.0.1:{port}/postgres")
    assert not health.up
    assert "does not exist" in health.error
    assert "hunter2" not in repr(health)
