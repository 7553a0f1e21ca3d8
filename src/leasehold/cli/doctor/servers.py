"""Judges the health of an engine's servers. Pure: what it judges was read by `leasehold.engines.health`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from leasehold.cli.doctor.findings import CLIENT_CLOCK, NO_MONITORING, SINGLE_REDIS, Finding, Severity
from leasehold.engines.probe import Encryption, Health, MemberHealth

_STORAGE_WARNING: Final = 0.8
_STORAGE_DANGER: Final = 0.95
_CONNECTIONS_WARNING: Final = 0.9
_LAG_WARNING: Final = 10.0  # seconds
_OFFSET_WARNING: Final = 0.5
_CERTIFICATE_WARNING: Final = 14.0  # days
_MANY_ELECTIONS: Final = 10
_DEAD_ROWS_NOTE: Final = 100_000  # of a table; autovacuum begins with 500, and runs once a minute
_DEAD_ROWS_WARNING: Final = 1_000_000
_DEAD_SHARE: Final = 0.5  # of all rows of the table
_SLOW_DISK: Final = 0.1  # seconds; etcd recommends that its log is synced within a tenth of this

_LOCAL: Final = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?|/[^:]*)(:[0-9]+)?\Z")
_VERSION: Final = re.compile(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})")
_ENCRYPTED_SCHEMES: Final = {"redis": "rediss://", "etcd": "etcds://", "http": "https://"}
_TLS_OPTIONS: Final = {  # of engines whose URL does not say by its scheme whether connections are encrypted
    "postgresql": "add sslmode=verify-full&sslrootcert=FILE to the URL, with the certificate of the authority",
    "mysql": "add ssl_ca=FILE to the URL, with the certificate of the authority",
}
_HOST_OPTIONS: Final = {
    "postgresql": "write sslmode=verify-full in the URL",
    "mysql": "take ssl_verify_identity=no out of the URL",
}
_VERIFIED: Final = {
    "unverified": "TLS, without verifying the certificate",
    "authority": "TLS, certificate verified for any host",
    "verified": "TLS, certificate and host name verified",
}

# Settings with which a live lock may disappear, so that a second holder is granted.
_DANGEROUS_SETTINGS: Final = frozenset({"maxmemory-policy", "fsync", "aof_last_write_status", "sentinel monitor"})
_ALARM_FIXES: Final = {
    "NOSPACE": "free space, and end the alarm: etcdctl compact, etcdctl defrag, then etcdctl alarm disarm",
    "NOQUORUM": "start the missing sentinels: until then no replica takes the place of a primary that fails",
    "CORRUPT": "replace the member whose data is corrupt: its log names it",
}
_LOST_ON_RESTART: Final = frozenset({"appendonly", "appendfsync"})
_LOST_VOTES: Final = (
    "a node that restarts forgets its votes, and a second holder may get a majority while the first still trusts its "
    "lease: set appendonly yes and appendfsync always"
)


def check_servers(health: Health, scheme: str) -> Iterator[Finding]:
    yield _check_up(health, scheme)
    yield from _check_encryption(health, scheme)
    yield from _check_access(health)
    yield from _check_members(health)
    for alarm in health.alarms:
        fix = _ALARM_FIXES.get(alarm.partition(" ")[0], "see the engine's own log")
        yield Finding("alarm", "danger", f"the engine has raised the alarm {alarm}", fix, "E5")
    for member in health.members:
        yield from _check_member(health, member)
    if health.engine == "redlock":
        yield from _check_nodes(health)


def _check_up(health: Health, scheme: str) -> Finding:
    if health.up:
        return Finding("reachable", "ok", ", ".join(_describe(member) for member in health.members if member.up))
    fix = f"{_fix_of_down(health, scheme)}: no lock is granted until this is fixed"
    return Finding("reachable", "danger", health.error or "the engine cannot grant locks", fix, "E5")


def _fix_of_down(health: Health, scheme: str) -> str:
    error = health.error or ""
    if health.alarms:
        return "disarm the alarm, as said below"
    if "replica" in error or "is a primary" in error:
        return "write the address of the primary in the URL"
    if scheme == "sqlite":
        return "make the file usable, as said above"
    if scheme in ("http", "https") and "engine" in error:
        return "check the engine of this lock server, on the server's machine: leasehold -u URL-OF-THE-ENGINE doctor"
    return "check the URL and its credentials, the network and the servers"


def _describe(member: MemberHealth) -> str:
    behind = member.engine and f"in front of {member.engine}"
    parts = [part for part in (member.role, member.version and f"version {member.version}", behind) if part]
    return f"{member.member} ({', '.join(parts)})" if parts else member.member


def _check_encryption(health: Health, scheme: str) -> Iterator[Finding]:
    exposed = [member.member for member in health.members if not _LOCAL.match(member.member)]
    if exposed and scheme in _ENCRYPTED_SCHEMES:
        yield Finding(
            "encryption",
            "warning",
            f"passwords and locks cross the network to {exposed[0]} unencrypted",
            f"enable TLS on the servers and write {_ENCRYPTED_SCHEMES[scheme]} in the URL",
            "E5",
        )
    for member in health.members:
        if member.encryption is not None and health.engine in _TLS_OPTIONS:
            yield from _check_tls(health.engine, member, member.encryption)


def _check_tls(engine: str, member: MemberHealth, encryption: Encryption) -> Iterator[Finding]:
    fix = _TLS_OPTIONS[engine]
    if _LOCAL.match(member.member):
        if encryption != "none":
            yield Finding("encryption", "ok", f"{member.member}: {_VERIFIED[encryption]}")
    elif encryption == "none":
        text = f"passwords and locks cross the network to {member.member} unencrypted"
        yield Finding("encryption", "warning", text, f"enable TLS on the server, and {fix}", "E5")
    elif encryption == "unverified":
        text = f"the certificate of {member.member} is not verified: any host in between can pose as the server"
        yield Finding("encryption", "warning", text, fix, "E5")
    elif encryption == "authority":
        text = f"every host with a certificate of the same authority can pose as {member.member}"
        yield Finding("encryption", "note", text, _HOST_OPTIONS[engine], "E5")
    else:
        yield Finding("encryption", "ok", f"{member.member}: {_VERIFIED[encryption]}")


def _check_access(health: Health) -> Iterator[Finding]:
    """Servers that other machines reach, and that require no password."""
    exposed = [each.member for each in health.members if each.anonymous and not _LOCAL.match(each.member)]
    if exposed:
        yield Finding(
            "access",
            "warning",
            f"every program that reaches {exposed[0]} can take, release and break locks: no password is needed",
            "give the server's users passwords, or API keys, and write them in the URL: leasehold docs security",
            "E1",
        )


def _check_members(health: Health) -> Iterator[Finding]:
    if health.up:
        for member in health.members:
            if not member.up:
                fix = "start it again, or take it out of the URL"
                yield Finding("members", "warning", f"{member.member} is down: {member.error}", fix, "E5")
    voting, reachable = health.voting, health.reachable
    if voting is None or voting < 2:
        return
    if voting % 2 == 0:
        yield Finding(
            "quorum",
            "note",
            f"{voting} voting servers survive no more failures than {voting - 1}",
            "use an odd number of voting servers",
        )
    if health.up and reachable is not None:
        spare = reachable - (voting // 2 + 1)
        if spare <= 0:
            yield Finding(
                "quorum",
                "warning",
                f"{reachable} of {voting} voting servers are reachable: the next failure stops all locks",
                "restart the missing servers",
                "E5",
            )
        else:
            yield Finding("quorum", "ok", f"{reachable} of {voting} voting servers are reachable")


def _check_member(health: Health, member: MemberHealth) -> Iterator[Finding]:
    yield from _check_settings(health, member)
    yield from _check_storage(member)
    if member.evictions:
        yield Finding(
            "evictions",
            "danger",
            f"{member.member} has evicted {member.evictions} keys; a lock may have been among them",
            "set maxmemory-policy noeviction, and give the server more memory",
            "E1",
        )
    if member.replication_lag is not None and member.replication_lag > _LAG_WARNING:
        yield Finding(
            "replication",
            "warning",
            f"a replica of {member.member} is {member.replication_lag:.0f} s behind: a failover loses newer grants",
            "find out why the replica is slow before it becomes the primary",
            "E1",
        )
    if member.connections_ratio is not None and member.connections_ratio >= _CONNECTIONS_WARNING:
        yield Finding(
            "connections",
            "warning",
            f"{member.connections_ratio:.0%} of the connections of {member.member} are in use",
            "raise the server's limit of connections, or use fewer clients per process",
            "E5",
        )
    yield from _check_clock(health, member)
    yield from _check_certificate(member)
    yield from _check_version(health, member)
    if (member.leader_changes or 0) > _MANY_ELECTIONS:
        yield Finding(
            "leader",
            "note",
            f"{member.member} has seen {member.leader_changes} changes of leader since it started",
            "if no server was restarted, the members' disks or the network between them are too slow",
            "E5",
        )
    if member.disk_seconds is not None and member.disk_seconds > _SLOW_DISK and health.engine in ("etcd", "sqlite"):
        yield Finding(
            "disk",
            "warning",
            f"writes of {member.member} take up to {member.disk_seconds * 1000:.0f} ms: each grant waits for one",
            "move its data to a faster disk",
        )
    yield from _check_tables(member)
    for note in member.notes:
        yield Finding(
            "visibility",
            "note",
            f"{member.member}: {note}",
            "allow it, for the user of the URL if the server has users, or monitor the server in another way",
            red_flag=NO_MONITORING,
        )


def _check_settings(health: Health, member: MemberHealth) -> Iterator[Finding]:
    for each in member.findings:
        severity: Severity = "danger" if each.setting in _DANGEROUS_SETTINGS else "warning"
        lost_on_restart = each.setting in _LOST_ON_RESTART
        alone = health.engine == "redis" and health.voting == 1 and lost_on_restart
        yield Finding(
            "settings",
            severity,
            f"{member.member}: {each.setting} is {each.value}",
            _LOST_VOTES if health.engine == "redlock" and lost_on_restart else each.advice,
            "E1",
            SINGLE_REDIS if alone else "",
        )
    if member.up and not member.findings and not member.notes:
        yield Finding("settings", "ok", f"{member.member}: nothing unsafe")


def _check_storage(member: MemberHealth) -> Iterator[Finding]:
    for storage in member.storage:
        used = storage.used_ratio
        if used is None or used < _STORAGE_WARNING:
            continue
        severity: Severity = "danger" if used >= _STORAGE_DANGER else "warning"
        yield Finding(
            "storage",
            severity,
            f"the {storage.store} of {member.member} is {used:.0%} full",
            "free or add space: a full engine grants no locks",
            "E5",
        )


def _check_tables(member: MemberHealth) -> Iterator[Finding]:
    for table in member.tables:
        if table.dead < max(_DEAD_ROWS_NOTE, _DEAD_SHARE * (table.live + table.dead)):
            continue
        yield Finding(
            "bloat",
            "warning" if table.dead >= _DEAD_ROWS_WARNING else "note",
            f"{table.name} at {member.member} has {table.dead} dead rows, {table.live} live ones: calls get slower",
            f"run VACUUM on {table.name}, turn autovacuum on, and end transactions that have been open for hours",
            "E5",
        )


def _check_clock(health: Health, member: MemberHealth) -> Iterator[Finding]:
    offset = member.clock_offset
    if offset is None or abs(offset) <= _OFFSET_WARNING + (member.clock_error or 0.0):
        return
    decides = health.engine == "redlock"  # nodes that disagree about the time end votes at different instants
    yield Finding(
        "clock offset",
        "danger" if decides else "note",
        f"the clock of {member.member} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this machine's",
        "synchronise the clocks of all servers and clients by NTP",
        "E8",
        CLIENT_CLOCK,
    )


def _check_certificate(member: MemberHealth) -> Iterator[Finding]:
    if member.certificate_left is None:
        return
    days = member.certificate_left / 86_400
    if days < _CERTIFICATE_WARNING:
        text = f"the certificate of {member.member} ends in {days:.1f} days, and with it every connection"
        yield Finding("certificate", "warning", text, "renew the server's certificate", "E5")
    else:
        yield Finding("certificate", "ok", f"{member.member}: verified, ends in {days:.0f} days")


def _check_version(health: Health, member: MemberHealth) -> Iterator[Finding]:
    """Versions of etcd whose own bugs end leases or lose data. The numbers are those of etcd's change log."""
    found = _VERSION.match(member.version or "") if health.engine == "etcd" else None
    if found is None:
        return
    version = (int(found[1]), int(found[2]), int(found[3]))
    if (3, 5, 0) <= version < (3, 5, 3):
        yield Finding(
            "version",
            "danger",
            f"etcd {member.version} of {member.member} may damage its data in a crash: members then disagree",
            "upgrade to the latest release of 3.5",
            "E1",
        )
    elif (health.voting or 1) > 1 and (version < (3, 4, 31) or (3, 5, 0) <= version < (3, 5, 13)):
        yield Finding(
            "version",
            "warning",
            f"etcd {member.version} of {member.member}: a leader that was replaced while it was stuck, for example "
            "because of a slow disk, may end leases that their holders still renew",
            "upgrade to 3.4.31, 3.5.13 or later",
            "E1",
        )


def _check_nodes(health: Health) -> Iterator[Finding]:
    if len(health.members) < 3:
        text = f"a majority of {len(health.members)} nodes survives no failure"
        yield Finding("nodes", "danger", text, "use three or five independent Redis servers", "E1")
    ids = [member.server_id for member in health.members if member.server_id]
    if len(set(ids)) < len(ids):
        text = "two nodes of the URL are the same Redis server: it has more than one vote"
        yield Finding("nodes", "danger", text, "name each server once", "E1")
    hosts = [member.member.rpartition(":")[0] for member in health.members]
    if len(set(hosts)) < len(hosts):
        text = "several nodes are on one host, so they fail together"
        yield Finding("nodes", "warning", text, "put each node on a machine of its own", "E1")
