"""The health of a ZooKeeper ensemble: of each server in the URL, by its four-letter words.

`srvr`, which no server refuses, says whether a server serves requests and in which role. `ruok` does not: a
server without a quorum answers `imok`. `mntr` has the details, but must be in `4lw.commands.whitelist`. No session is
opened: creating one is a write that every server logs.
"""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from typing import Any, Final

from kazoo.hosts import collect_hosts
from kazoo.security import Permissions

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.engines.probe import (
    Health,
    MemberHealth,
    Storage,
    certificate_left,
    describe_down,
    fetch_text,
    parse_float,
    parse_int,
    probe_each,
    timed,
)
from leasehold.engines.zookeeper.connection import NOT_SERVING
from leasehold.engines.zookeeper.url import ZookeeperUrl, parse_url
from leasehold.errors import ConfigError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

_NOT_ALLOWED: Final = "is not executed because it is not in the whitelist"
_MODIFY: Final = Permissions.WRITE | Permissions.CREATE | Permissions.DELETE
_FIELDS: Final = re.compile(  # only those that are used: an answer may have any number
    r"^(zk_quorum_size|zk_synced_followers|zk_approximate_data_size|zk_pending_syncs|zk_p99_updatelatency)\t(.{1,40})$",
    re.MULTILINE,
)
_ROLES: Final = frozenset({"leader", "follower", "observer", "standalone"})


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    url = parse_url(config)
    servers = [SocketAddress(host, port) for host, port in collect_hosts(url.hosts)[0]]
    tls = _tls_context(url)
    leader_fields: dict[str, str] = {}
    anonymous = any(acl.id.scheme == "world" and acl.perms & _MODIFY for acl in url.acl)

    async def probe(server: SocketAddress, until: float) -> MemberHealth:
        member, fields = await _probe(server, tls, runtime, until)
        left = await certificate_left(server, tls, runtime, until)
        member = replace(member, certificate_left=left, anonymous=anonymous)
        if member.role in ("leader", "standalone"):
            leader_fields.update(fields)
        return member

    members = await probe_each(servers, probe, str, runtime, deadline)
    serving = [each for each in members if each.up]
    without_quorum = any(not each.up and each.round_trip is not None for each in members)
    voting, reachable = _count_members(members, leader_fields)
    return Health(
        "zookeeper",
        up=bool(serving),  # a server serves requests only while it belongs to a quorum
        members=members,
        has_leader=True if serving else False if without_quorum else None,
        voting=voting,
        reachable=reachable,
        error=None if serving else describe_down(members),
    )


def _count_members(members: tuple[MemberHealth, ...], leader_fields: dict[str, str]) -> tuple[int | None, int | None]:
    """Voting servers, and those in touch with the leader. Only the leader knows them, and only `mntr` says so."""
    if any(each.role == "standalone" for each in members):
        return 1, 1
    voting, synced = parse_int(leader_fields.get("zk_quorum_size")), parse_int(leader_fields.get("zk_synced_followers"))
    return voting, None if voting is None or synced is None else synced + 1


async def _probe(
    server: SocketAddress, tls: ssl.SSLContext | None, runtime: Runtime, deadline: float
) -> tuple[MemberHealth, dict[str, str]]:
    answer, trip = await timed(runtime, lambda: fetch_text(server, tls, b"srvr", runtime, deadline))
    member = MemberHealth(str(server), up=True, round_trip=trip.seconds)
    if NOT_SERVING in answer:
        return replace(member, up=False, error="the server does not serve requests: it has no quorum"), {}
    mode = re.search(r"^Mode: (\w+)\s*$", answer, re.MULTILINE)
    if mode is None or mode[1] not in _ROLES:
        raise Unavailable(f"unexpected answer to srvr: {server_text(answer) or 'empty'}", engine="zookeeper")
    version = re.search(r"^Zookeeper version: ([0-9.]+)", answer, re.MULTILINE)
    latency = re.search(r"^Latency min/avg/max: [^/\n]+/[^/\n]+/(\S+)$", answer, re.MULTILINE)
    member = replace(
        member,
        role=mode[1],
        version=server_text(version[1]) if version else None,
        disk_seconds=_milliseconds(latency[1] if latency else None),
    )
    try:
        details = await fetch_text(server, tls, b"mntr", runtime, deadline)
    except OSError as error:
        return replace(member, notes=(f"mntr was not read: {server_text(error)}",)), {}
    if _NOT_ALLOWED in details:
        return replace(member, notes=("mntr is not in 4lw.commands.whitelist",)), {}
    fields = {each[1]: each[2] for each in _FIELDS.finditer(details)}
    return _with_details(member, fields), fields


def _with_details(member: MemberHealth, fields: dict[str, str]) -> MemberHealth:
    size = parse_int(fields.get("zk_approximate_data_size"))
    slow_update = _milliseconds(fields.get("zk_p99_updatelatency"))
    return replace(
        member,
        storage=() if size is None else (Storage("database", size),),
        unapplied_entries=parse_int(fields.get("zk_pending_syncs")),
        disk_seconds=member.disk_seconds if slow_update is None else slow_update,
    )


def _milliseconds(text: str | None) -> float | None:
    number = parse_float(text)
    return None if number is None else number / 1000


def _tls_context(url: ZookeeperUrl) -> ssl.SSLContext | None:
    """As kazoo makes it for the session."""
    options: dict[str, Any] = url.options
    if not options.get("use_ssl"):
        return None
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "certfile" in options:
            context.load_cert_chain(options["certfile"], options["keyfile"], options.get("keyfile_password", ""))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificates of this zookeeper:// URL cannot be used: {error}") from error
    context.check_hostname = options["check_hostname"]
    context.verify_mode = ssl.CERT_REQUIRED if options["verify_certs"] else ssl.CERT_NONE
    return context
