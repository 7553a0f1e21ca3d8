"""Judges the health of an engine's servers. Pure: what it judges was read by `leasehold.engines.health`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from leasehold.cli.doctor.findings import CLIENT_CLOCK, NO_MONITORING, SINGLE_REDIS, Finding, Severity
from leasehold.engines.probe import Health, MemberHealth

_STORAGE_WARNING: Final = 0.8
_STORAGE_DANGER: Final = 0.95
_CONNECTIONS_WARNING: Final = 0.9
_LAG_WARNING: Final = 10.0  # seconds
_OFFSET_WARNING: Final = 0.5
_SLOW_DISK: Final = 0.1  # seconds; etcd recommends that its log is synced within a tenth of this

_LOCAL: Final = re.compile(r"(localhost|127\.[0-9.]+|\[?::1\]?|/[^:]*)(:[0-9]+)?\Z")
_ENCRYPTED_SCHEMES: Final = {"redis": "rediss://", "etcd": "etcds://", "http": "https://"}

# Settings with which a live lock may disappear, so that a second holder is granted.
_DANGEROUS_SETTINGS: Final = frozenset({"maxmemory-policy", "fsync", "aof_last_write_status"})
_LOST_ON_RESTART: Final = frozenset({"appendonly", "appendfsync"})


def check_servers(health: Health, scheme: str) -> Iterator[Finding]:
    yield _check_up(health)
    yield from _check_encryption(health, scheme)
    yield from _check_members(health)
    for alarm in health.alarms:
        yield Finding("alarm", "danger", f"the engine has raised the alarm {alarm}", "see the engine's own log", "E5")
    for member in health.members:
        yield from _check_member(health, member)
    if health.engine == "redlock":
        yield from _check_nodes(health)


def _check_up(health: Health) -> Finding:
    if health.up:
        return Finding("reachable", "ok", ", ".join(_describe(member) for member in health.members if member.up))
    return Finding(
        "reachable",
        "danger",
        health.error or "the engine cannot grant locks",
        "check the URL and its credentials, the network and the servers: no lock is granted until this is fixed",
        "E5",
    )


def _describe(member: MemberHealth) -> str:
    parts = [part for part in (member.role, member.version and f"version {member.version}") if part]
    return f"{member.member} ({', '.join(parts)})" if parts else member.member


def _check_encryption(health: Health, scheme: str) -> Iterator[Finding]:
    exposed = [member.member for member in health.members if not _LOCAL.match(member.member)]
    if exposed and scheme in _ENCRYPTED_SCHEMES:
        yield Finding(
            "encryption",
            "warning",
            f"passwords and locks cross the network to {exposed[0]} unencrypted",
            f"enable TLS on the servers and write {_ENCRYPTED_SCHEMES[scheme]} in the URL",
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
    if member.disk_seconds is not None and member.disk_seconds > _SLOW_DISK and health.engine in ("etcd", "sqlite"):
        yield Finding(
            "disk",
            "warning",
            f"writes of {member.member} take up to {member.disk_seconds * 1000:.0f} ms: each grant waits for one",
            "move its data to a faster disk",
        )
    for note in member.notes:
        yield Finding(
            "visibility",
            "note",
            f"{member.member}: {note}",
            "give the user of the URL the right to read it, or monitor the server in another way",
            red_flag=NO_MONITORING,
        )


def _check_settings(health: Health, member: MemberHealth) -> Iterator[Finding]:
    for each in member.findings:
        severity: Severity = "danger" if each.setting in _DANGEROUS_SETTINGS else "warning"
        alone = health.engine == "redis" and health.voting == 1 and each.setting in _LOST_ON_RESTART
        yield Finding(
            "settings",
            severity,
            f"{member.member}: {each.setting} is {each.value}",
            each.advice,
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


def _check_nodes(health: Health) -> Iterator[Finding]:
    if len(health.members) < 3:
        yield Finding(
            "nodes",
            "danger",
            f"a majority of {len(health.members)} nodes survives no failure",
            "use three or five independent Redis servers",
            "E1",
        )
    ids = [member.server_id for member in health.members if member.server_id]
    if len(set(ids)) < len(ids):
        yield Finding(
            "nodes",
            "danger",
            "two nodes of the URL are the same Redis server: it has more than one vote",
            "name each server once",
            "E1",
        )
    hosts = [member.member.rpartition(":")[0] for member in health.members]
    if len(set(hosts)) < len(hosts):
        yield Finding(
            "nodes",
            "warning",
            "several nodes are on one host, so they fail together",
            "put each node on a machine of its own",
            "E1",
        )
