"""The health probe on real MariaDB servers: accounts with and without rights, unsafe settings, a replica."""

import pytest

from harness.servers.mysql import MariaDB
from leasehold import Client
from tests.support.health import RUNTIMES, probe, probe_silent, settings_found, storage_of


def url_of(server: MariaDB, user: str = "root") -> str:
    return f"mysql://{user}@127.0.0.1:{server.port}/leasehold"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_root_sees_everything(mysql, runtime):
    server, url = mysql.server, mysql.named_url("root")
    with Client(url) as client, client.lock("job"):
        health = probe(url, runtime=runtime)
    assert (health.engine, health.up, health.has_leader, health.error) == ("mysql", True, True, None)
    assert (health.voting, health.reachable) == (1, 1)
    (member,) = health.members
    assert (member.member, member.role, member.notes) == (f"127.0.0.1:{server.port}", "primary", ())
    assert member.version == server.ask("select @@version")[0][0]
    assert storage_of(member, "database").used > 0
    assert 0 < member.connections_ratio < 1
    assert 0 < member.cache_hit_ratio <= 1
    assert member.memory > 1 << 20
    assert member.disk_seconds >= 0
    assert member.clock_error == member.round_trip / 2
    assert (member.replicas, member.replication_lag) == (0, None)


def test_account_without_rights_sees_no_replicas(mariadb):
    server = mariadb()
    server.run("create user plain@'127.0.0.1'")
    (member,) = probe(url_of(server, "plain")).members
    assert (member.up, member.role, member.replicas, member.replication_lag) == (True, "primary", None, None)
    assert storage_of(member, "database") is None
    assert member.connections_ratio > 0
    assert member.notes == ("show replica hosts is not allowed", "show replica status is not allowed")


def test_probe_finds_commits_that_are_not_flushed(mariadb):
    server = mariadb("innodb-flush-log-at-trx-commit=0", "innodb-doublewrite=OFF", "log-bin=b", "sync-binlog=0")
    (member,) = probe(url_of(server)).members
    assert settings_found(member) == {
        "innodb_flush_log_at_trx_commit": "0",
        "innodb_doublewrite": "OFF",
        "sync_binlog": "0",
    }


def test_replica_shows_its_lag_and_cannot_grant(mariadb, wait_until):
    primary = mariadb("log-bin=b", "server-id=1", "sync-binlog=1")
    replica = mariadb("log-bin=b", "server-id=2", "read-only=1")
    replica.follow(primary)
    wait_until(lambda: probe(url_of(primary)).members[0].replicas == 1, every=0.1)
    wait_until(lambda: probe(url_of(replica)).members[0].replication_lag == 0, every=0.1)
    health = probe(url_of(replica))
    assert (health.up, health.has_leader, health.members[0].role) == (False, False, "replica")
    assert "read-only" in health.error
    replica.run("stop slave")
    assert probe(url_of(replica)).members[0].replication_lag is None


def test_probe_creates_no_database(mariadb):
    server = mariadb()
    assert probe(url_of(server)).up
    assert server.ask("show databases like 'leasehold'") == []


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_paused_server_is_down_by_the_deadline(mariadb, runtime):
    server = mariadb()
    server.pause()
    health = probe_silent(f"mysql://user:hunter2-secret@127.0.0.1:{server.port}/leasehold", runtime)
    assert (health.up, health.has_leader, health.members[0].up) == (False, None, False)
    assert (health.members[0].storage, health.members[0].memory) == ((), None)
    server.resume()
    health = probe(f"mysql://user:hunter2-secret@127.0.0.1:{server.port}/leasehold", runtime=runtime)
    assert "Access denied" in health.error
    assert "hunter2" not in repr(health)
