"""The health of an etcd cluster: of each endpoint in the URL, and of the cluster as a whole.

Asked of each endpoint: its status, which includes the alarms, and its metrics, where alone etcd shows its quota. The
cluster is down if a read that needs a majority is not answered, or if an alarm is raised: with NOSPACE etcd still has a
leader and still answers reads, but refuses every grant. Nothing is written: etcd's own call that lists alarms is an
entry in the log of every member.
"""

from __future__ import annotations

import re
import ssl
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.engines.etcd import messages, queue
from leasehold.engines.etcd.rpc import ClusterMemory, RpcClient
from leasehold.engines.etcd.url import Endpoint, EtcdUrl, parse_url
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
from leasehold.errors import AccessDenied, LeaseholdError
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import SocketAddress

_MEMBERS_SHARE: Final = 0.7  # of the time; the rest is for the cluster
_FSYNC: Final = "etcd_disk_wal_fsync_duration_seconds"
_SAMPLES: Final = re.compile(  # only those that are used: a reply may have any number
    r"^(etcd_server_quota_backend_bytes|process_resident_memory_bytes|etcd_server_leader_changes_seen_total"
    rf"|{_FSYNC}_count|{_FSYNC}_bucket\{{le=\"[0-9.e+-]{{1,20}}\"\}}) (\S{{1,40}})$",
    re.MULTILINE,
)
_MAX_ALARMS: Final = 8  # etcd has two kinds
_SLOW_SHARE: Final = 0.99  # of all syncs of the log were at least as fast as `disk_seconds`


class _Status(NamedTuple):
    member_id: int
    leader: int
    alarms: tuple[str, ...]
    is_learner: bool


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    url, metrics_tls = parse_url(config), parse_url(config).tls
    if metrics_tls is not None:
        metrics_tls.set_alpn_protocols(["http/1.1"])
    statuses: dict[Endpoint, _Status] = {}

    async def probe(endpoint: Endpoint, until: float) -> MemberHealth:
        member, statuses[endpoint] = await _probe(url, endpoint, runtime, until)
        address = SocketAddress(endpoint.host, endpoint.port)
        member = replace(
            member,
            certificate_left=await certificate_left(address, metrics_tls, runtime, until),
            anonymous=not url.user and url.tls is None,  # with TLS, certificates of clients may be required
        )
        return await _add_metrics(member, endpoint, metrics_tls, runtime, until)

    now = runtime.now()
    members = await probe_each(url.endpoints, probe, str, runtime, now + (deadline - now) * _MEMBERS_SHARE)
    alarms = tuple(dict.fromkeys(alarm for status in statuses.values() for alarm in status.alarms))
    cluster = Health(
        "etcd",
        up=False,
        members=members,
        has_leader=any(status.leader for status in statuses.values()) if statuses else None,
        alarms=alarms,
        error=describe_down(members),
    )
    if not statuses:
        return cluster
    rpc = RpcClient(replace(url, endpoints=tuple(statuses)), runtime, ClusterMemory())
    try:
        voters = await _read_voters(rpc, deadline)
        await _read_by_majority(rpc, url, deadline)
    except LeaseholdError as error:
        return replace(cluster, error=str(error))
    finally:
        rpc.close()
    if voters is not None:
        # An endpoint that is down does not say which member it is: if the URL leaves members out, the number of
        # reachable ones is not known.
        answered = {status.member_id for status in statuses.values()} & voters
        reachable = len(answered) if len(url.endpoints) >= len(voters) else None
        cluster = replace(cluster, voting=len(voters), reachable=reachable)
    if alarms:
        return replace(cluster, error=f"etcd refuses grants because of the alarm {', '.join(alarms)}")
    return replace(cluster, up=True, error=None)


async def _probe(url: EtcdUrl, endpoint: Endpoint, runtime: Runtime, deadline: float) -> tuple[MemberHealth, _Status]:
    rpc = RpcClient(replace(url, endpoints=(endpoint,)), runtime, ClusterMemory())
    try:
        await rpc.call(messages.STATUS, messages.EmptyMessage(), deadline)  # connects, and signs in
        status, trip = await timed(runtime, lambda: rpc.call(messages.STATUS, messages.EmptyMessage(), deadline))
    finally:
        rpc.close()
    member_id = status.header.member_id if status.header is not None else 0
    role = "learner" if status.is_learner else "follower"
    member = MemberHealth(
        str(endpoint),
        up=True,
        round_trip=trip.seconds,
        role=None if not status.leader else "leader" if status.leader == member_id else role,
        version=server_text(status.version) or None,
        storage=(Storage("quota", status.db_size),),
        unapplied_entries=max(0, status.raft_index - status.raft_applied_index),
    )
    alarms = tuple(server_text(alarm) for text in status.errors for alarm in re.findall(r"alarm:([A-Z]\w*)", text))
    return member, _Status(member_id, status.leader, alarms[:_MAX_ALARMS], bool(status.is_learner))


async def _read_voters(rpc: RpcClient, deadline: float) -> set[int] | None:
    with suppress(AccessDenied):
        listed = await rpc.call(messages.MEMBERS, messages.EmptyMessage(), deadline)
        return {member.id for member in listed.members if not member.is_learner}
    return None


async def _read_by_majority(rpc: RpcClient, url: EtcdUrl, deadline: float) -> None:
    """A read that is answered only with a leader and a majority. A user who may not read the key is answered, too."""
    with suppress(AccessDenied):
        await rpc.call(messages.RANGE, messages.RangeRequest(queue.token_base_key(url.root)), deadline)


async def _add_metrics(
    member: MemberHealth, endpoint: Endpoint, tls: ssl.SSLContext | None, runtime: Runtime, deadline: float
) -> MemberHealth:
    request = f"GET /metrics HTTP/1.0\r\nHost: {endpoint}\r\n\r\n".encode()
    try:
        text = await fetch_text(SocketAddress(endpoint.host, endpoint.port), tls, request, runtime, deadline)
    except OSError as error:
        return replace(member, notes=(f"/metrics was not read: {server_text(error)}",))
    head, _, body = text.partition("\r\n\r\n")
    if head.split(" ", 2)[1:2] != ["200"]:
        return replace(member, notes=("/metrics is not served here, so quota, memory and disk are not known",))
    samples = {each[1]: each[2] for each in _SAMPLES.finditer(body)}
    (storage,) = member.storage
    return replace(
        member,
        storage=(replace(storage, limit=parse_int(samples.get("etcd_server_quota_backend_bytes")) or None),),
        memory=parse_int(samples.get("process_resident_memory_bytes")),
        leader_changes=parse_int(samples.get("etcd_server_leader_changes_seen_total")),
        disk_seconds=_slow_fsync(samples),
    )


def _slow_fsync(samples: dict[str, str]) -> float | None:
    """The bound of the histogram's bucket with the 99th percentile, since the member started."""
    count = parse_float(samples.get(f"{_FSYNC}_count"))
    for name, value in samples.items():  # buckets come in rising order
        bound = re.fullmatch(_FSYNC + r'_bucket\{le="([0-9.e+-]+)"\}', name)
        if bound and count and (parse_float(value) or 0.0) >= _SLOW_SHARE * count:
            return parse_float(bound[1])
    return None
