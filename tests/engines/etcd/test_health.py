"""The health probe on real members: alarms, a lost leader, and members that are down."""

import re
from contextlib import suppress
from urllib.error import HTTPError

import pytest

from leasehold import Client, Unavailable
from tests.support.health import RUNTIMES, probe, probe_silent, storage_of


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_probe_of_one_member_reads_status_and_metrics(member, url, runtime):
    health = probe(url, runtime=runtime)
    assert (health.engine, health.up, health.has_leader, health.error) == ("etcd", True, True, None)
    assert (health.voting, health.reachable, health.alarms) == (1, 1, ())
    (found,) = health.members
    status = member.ask("maintenance/status")
    assert (found.member, found.up, found.role) == (f"127.0.0.1:{member.port}", True, "leader")
    assert found.version == status["version"]
    metrics = member.get("/metrics")
    quota = storage_of(found, "quota")
    assert quota.limit == float(re.search(r"^etcd_server_quota_backend_bytes (\S+)$", metrics, re.M)[1])
    assert 0 < quota.used_ratio < 1
    assert found.memory > 1 << 20
    assert found.leader_changes >= 1
    assert 0 < found.disk_seconds < 60
    assert found.unapplied_entries >= 0
    assert found.round_trip > 0
    assert (found.clock_offset, found.replication_lag, found.evictions) == (None, None, None)
    assert (found.anonymous, found.certificate_left) == (True, None)


def test_probe_writes_nothing(member, url, eventually):
    def position() -> tuple[str, str]:
        status = member.ask("maintenance/status")
        return status["header"]["revision"], status["raftIndex"]

    def probe_changes_nothing() -> bool:
        before = position()
        probe(url)
        return position() == before

    eventually(probe_changes_nothing)  # not always at once: leases of earlier tests expire in this member meanwhile


def test_full_quota_is_down_although_there_is_a_leader(start_member):
    member = start_member("--quota-backend-bytes", "40000")
    url = f"etcd://127.0.0.1:{member.port}"
    assert storage_of(probe(url).members[0], "quota").limit == 40000
    with suppress(HTTPError):
        for number in range(100):
            member.put(f"filler-{number}", "x" * 10_000)
    with Client(url) as client, pytest.raises(Unavailable, match="NOSPACE"):
        client.lock("job").acquire()
    health = probe(url)
    assert (health.up, health.has_leader, health.alarms) == (False, True, ("NOSPACE",))
    assert "NOSPACE" in health.error
    assert health.members[0].up
    assert storage_of(health.members[0], "quota").used_ratio > 0.5  # what was refused is not part of the size


def test_cluster_without_a_majority_has_no_leader(cluster, eventually):
    health = probe(f"etcd://{cluster.hosts}")
    assert (health.up, health.voting, health.reachable) == (True, 3, 3)
    assert sorted(member.role for member in health.members) == ["follower", "follower", "leader"]
    cluster.leader().kill()
    eventually(lambda: (found := probe(f"etcd://{cluster.hosts}")).up and found.reachable == 2)
    cluster.members[[member.running for member in cluster.members].index(True)].kill()
    health = eventually(lambda: (found := probe(f"etcd://{cluster.hosts}", 3.0)).has_leader is False and found)
    assert not health.up
    assert [member.up for member in health.members].count(True) == 1


def test_members_left_out_of_the_url_make_reachable_absent(cluster):
    health = probe(f"etcd://127.0.0.1:{cluster.members[0].port}")
    assert (health.up, health.voting, health.reachable) == (True, 3, None)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_paused_member_is_down_by_the_deadline(start_member, runtime):
    member = start_member()
    member.pause()
    health = probe_silent(f"etcd://127.0.0.1:{member.port}", runtime)
    assert (health.up, health.has_leader, health.members[0].up) == (False, None, False)
    assert (health.members[0].storage, health.members[0].memory) == ((), None)


def test_role_of_locks_suffices_for_the_probe(start_member, etcdctl):
    member = start_member()
    etcdctl(member, "user", "add", "root:rootpass")
    etcdctl(member, "user", "grant-role", "root", "root")
    etcdctl(member, "user", "add", "locks:hunter2-secret")
    etcdctl(member, "role", "add", "locks")
    etcdctl(member, "role", "grant-permission", "locks", "--prefix=true", "readwrite", "app/lh1/")
    etcdctl(member, "user", "grant-role", "locks", "locks")
    etcdctl(member, "auth", "enable")
    url = f"etcd://locks:hunter2-secret@127.0.0.1:{member.port}/app"
    health = probe(url)
    assert (health.up, health.voting, health.members[0].role) == (True, 1, "leader")
    assert "hunter2" not in repr(health)
    wrong = probe(url.replace("hunter2-secret", "another-secret"))
    assert not wrong.up
    assert "another" not in repr(wrong)
