"""How `leasehold doctor` judges what it has read: a row per planted fault, and a healthy engine without findings."""

from dataclasses import replace

import pytest

from leasehold.cli.doctor import host
from leasehold.cli.doctor.findings import Finding, worst
from leasehold.cli.doctor.real_lock import describe_promises
from leasehold.cli.doctor.servers import check_servers
from leasehold.engines.probe import Health, MemberHealth, Storage, Table, WeakSetting
from leasehold.model import Traits

MEMBER = MemberHealth("127.0.0.1:1", up=True, round_trip=0.001, role="primary", version="7", server_id="a")
HEALTHY = Health("redis", up=True, members=(MEMBER,), has_leader=True, voting=1, reachable=1)
NODES = tuple(replace(MEMBER, member=f"127.0.0.{n}:1", server_id=str(n)) for n in range(1, 4))
REDLOCK = Health("redlock", up=True, members=NODES, voting=3, reachable=3)


def with_member(health=HEALTHY, **changes):
    return replace(health, members=(replace(health.members[0], **changes), *health.members[1:]))


def unsafe(health, scheme="redis"):
    return [each for each in check_servers(health, scheme) if each.severity != "ok"]


def etcd(version=None, voting=3):
    return replace(with_member(version=version), engine="etcd", voting=voting, reachable=voting)


@pytest.mark.parametrize(
    "health",
    [
        *(HEALTHY, REDLOCK, etcd(), etcd("3.4.31"), etcd("3.5.13"), etcd("3.6.0"), etcd("3.4.23", voting=1)),
        with_member(certificate_left=90 * 86_400.0),
        with_member(anonymous=True),  # on this machine
        with_member(leader_changes=2),
        with_member(tables=(Table("lh_grant", 0, 99_999), Table("lh_waiter", 10_000_000, 2_000_000))),
        with_member(replace(HEALTHY, engine="mysql"), encryption="none"),  # on this machine
        with_member(replace(HEALTHY, engine="postgresql"), encryption="unverified"),
    ],
)
def test_healthy_servers_have_no_findings(health):
    assert unsafe(health) == []


@pytest.mark.parametrize(
    ("health", "check", "severity"),
    [
        (replace(HEALTHY, up=False, error="refused"), "reachable", "danger"),
        (replace(HEALTHY, alarms=("NOSPACE",)), "alarm", "danger"),
        (with_member(REDLOCK, up=False, error="refused"), "members", "warning"),
        (replace(HEALTHY, voting=3, reachable=2), "quorum", "warning"),
        (replace(HEALTHY, voting=4, reachable=4), "quorum", "note"),
        (with_member(findings=(WeakSetting("maxmemory-policy", "allkeys-lru", "mend"),)), "settings", "danger"),
        (with_member(findings=(WeakSetting("appendonly", "no", "mend"),)), "settings", "warning"),
        (with_member(findings=(WeakSetting("fsync", "off", "mend"),)), "settings", "danger"),
        (with_member(findings=(WeakSetting("sentinel monitor", "another server", "mend"),)), "settings", "danger"),
        (with_member(findings=(WeakSetting("sentinel config-epoch", "behind", "mend"),)), "settings", "warning"),
        (with_member(tables=(Table("lh_grant", 10, 100_000),)), "bloat", "note"),
        (with_member(tables=(Table("lh_grant", 10, 1_000_000),)), "bloat", "warning"),
        (with_member(storage=(Storage("quota", 85, 100),)), "storage", "warning"),
        (with_member(storage=(Storage("quota", 96, 100),)), "storage", "danger"),
        (with_member(evictions=1), "evictions", "danger"),
        (with_member(replication_lag=11.0), "replication", "warning"),
        (with_member(connections_ratio=0.95), "connections", "warning"),
        (with_member(clock_offset=-3.0, clock_error=0.01), "clock offset", "note"),
        (with_member(REDLOCK, clock_offset=3.0, clock_error=0.01), "clock offset", "danger"),
        (with_member(replace(HEALTHY, engine="etcd"), disk_seconds=0.5), "disk", "warning"),
        (with_member(notes=("INFO is not allowed",)), "visibility", "note"),
        (replace(REDLOCK, members=NODES[:2], voting=None), "nodes", "danger"),
        (with_member(REDLOCK, server_id="2"), "nodes", "danger"),
        (with_member(REDLOCK, member="127.0.0.2:9"), "nodes", "warning"),
        (with_member(member="10.0.0.5:6379"), "encryption", "warning"),
        (with_member(certificate_left=3 * 86_400.0), "certificate", "warning"),
        (with_member(leader_changes=11), "leader", "note"),
        (etcd("3.4.23"), "version", "warning"),
        (etcd("3.5.12"), "version", "warning"),
        (etcd("3.5.2", voting=1), "version", "danger"),
    ],
)
def test_planted_fault_is_found_once_with_a_fix(health, check, severity):
    (finding,) = unsafe(health)
    assert (finding.check, finding.severity) == (check, severity)
    assert finding.fix


@pytest.mark.parametrize(
    ("scheme", "changes", "fix"),
    [
        ("redis", {"error": "refused"}, "check the URL"),
        ("redis", {"error": "this server is a replica and cannot grant locks"}, "address of the primary"),
        ("postgresql", {"error": "no server of the URL is a primary"}, "address of the primary"),
        ("etcd", {"error": "etcd refuses grants", "alarms": ("NOSPACE",)}, "disarm the alarm"),
        ("sqlite", {"error": "can be written by every user: `chmod o-w x`"}, "make the file usable"),
        ("http", {"error": "the engine did not answer"}, "on the server's machine"),
        ("http", {"error": "Connection refused"}, "check the URL"),
    ],
)
def test_fix_of_an_engine_that_grants_nothing_names_the_cause(scheme, changes, fix):
    found = unsafe(replace(HEALTHY, up=False, engine=scheme, **changes), scheme)
    assert fix in found[0].fix
    assert found[0].fix.endswith("no lock is granted until this is fixed")


def test_alarm_of_sentinels_without_a_quorum_says_what_does_not_happen():
    (finding,) = unsafe(replace(HEALTHY, alarms=("NOQUORUM 1 usable Sentinels. Not enough",)))
    assert (finding.check, finding.promise) == ("alarm", "E5")
    assert "start the missing sentinels" in finding.fix


def test_alarm_of_a_full_etcd_names_the_commands_that_end_it():
    assert "etcdctl alarm disarm" in unsafe(replace(HEALTHY, alarms=("NOSPACE",)))[0].fix


@pytest.mark.parametrize("member", ["localhost:6379", "127.0.0.1:6379", "[::1]:6379", "/run/redis.sock"])
def test_local_servers_need_no_encryption(member):
    assert unsafe(with_member(member=member)) == []


@pytest.mark.parametrize("engine", ["postgresql", "mysql"])
@pytest.mark.parametrize(
    ("encryption", "severity", "text"),
    [("none", "warning", "unencrypted"), ("unverified", "warning", "not verified"), ("authority", "note", "authority")],
)
def test_connection_of_a_database_that_a_host_in_between_can_read(engine, encryption, severity, text):
    far = with_member(replace(HEALTHY, engine=engine), member="10.0.0.5:1", encryption=encryption)
    (finding,) = unsafe(far, engine)
    assert (finding.check, finding.severity, finding.promise) == ("encryption", severity, "E5")
    assert text in finding.found
    assert "URL" in finding.fix


@pytest.mark.parametrize("scheme", ["rediss", "etcds", "zookeeper", "https"])
def test_server_for_everybody_on_the_network_is_a_warning(scheme):
    (finding,) = unsafe(with_member(member="10.0.0.5:6379", anonymous=True), scheme)
    assert (finding.check, finding.severity) == ("access", "warning")
    assert "10.0.0.5:6379" in finding.found


def test_redis_without_a_log_is_the_red_flag_of_a_single_redis():
    (finding,) = unsafe(with_member(findings=(WeakSetting("appendonly", "no", "mend"),)))
    assert finding.red_flag == "single-redis-as-truth"


def test_redlock_node_without_a_log_is_a_warning_of_a_second_holder():
    (finding,) = unsafe(with_member(REDLOCK, findings=(WeakSetting("appendonly", "no", "mend"),)))
    assert (finding.severity, finding.promise) == ("warning", "E1")
    assert "second holder" in finding.fix


def test_engine_without_tokens_is_the_red_flag_of_no_owner_check():
    *_, finding = describe_promises(Traits(fencing=False, survives="restart"))
    assert (finding.severity, finding.red_flag) == ("warning", "no-owner-check")


def test_engine_without_notifications_is_a_note_that_names_the_pooler():
    *_, finding = describe_promises(Traits(fencing=True, push=False, survives="restart"))
    assert (finding.check, finding.severity) == ("hand-off", "note")
    assert "listen_url" in finding.fix


def test_promises_name_what_a_lock_may_require():
    (finding,) = describe_promises(Traits(fencing=True, survives="restart"))
    assert "locks may require fencing," in finding.found
    assert "survives-restart" in finding.found
    assert "survives-minority" not in finding.found


@pytest.mark.parametrize(("state", "severity"), [(0, "ok"), (5, "note"), (None, "note")])
def test_host_clock_is_judged_by_the_kernels_answer(state, severity):
    assert host.check_clock(state).severity == severity


@pytest.mark.parametrize(
    ("path", "severity"),
    [
        ("/srv/locks.db", "ok"),
        ("/srv/share/locks.db", "danger"),
        ("/srv/shared/locks.db", "ok"),
        ("/mnt/a b/x", "danger"),
    ],
)
def test_file_on_a_network_file_system_is_a_danger(path, severity):
    mounts = ["/dev/sda / ext4 rw 0 0", "nas:/x /srv/share nfs4 rw 0 0", "nas:/y /mnt/a\\040b cifs rw 0 0", "broken"]
    assert host.check_file_system(path, mounts).severity == severity


def test_worst_finding_decides():
    assert worst([]) == "ok"
    assert worst([Finding("a", "note", ""), Finding("b", "danger", ""), Finding("c", "warning", "")]) == "danger"
