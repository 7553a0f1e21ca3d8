"""The health of Redis servers: one, a primary behind sentinels, or the nodes of a cluster.

Asked of each server: `PING` and `TIME` in one round trip, then `INFO` and `CONFIG GET`. Any of these may be denied to
the user of the URL: the fields they would fill are None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

import hiredis

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.engines.probe import (
    Health,
    MemberHealth,
    RoundTrip,
    Storage,
    WeakSetting,
    describe_down,
    parse_float,
    parse_int,
    probe_each,
    ratio,
    timed,
)
from leasehold.engines.redis.cluster import SlotMap
from leasehold.engines.redis.discovery import DiscoveryNode
from leasehold.engines.redis.sentinel import SentinelSet, parse_primary
from leasehold.engines.redis.server import (
    CONNECTION_ERRORS,
    RedisEndpoint,
    describe_error,
    encode_command,
    is_error_reply,
)
from leasehold.engines.redis.server_settings import Unreachable, info_fields
from leasehold.engines.redis.topology import RedisOptions, parse_single_server
from leasehold.engines.redis.url import parse_cluster_url, parse_sentinel_url
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Runtime, maybe_await
from leasehold.runtime.net.blocking import SocketAddress

_TIME: Final = encode_command("PING") + encode_command("TIME")
_INFO_SECTIONS: Final = ("server", "clients", "memory", "persistence", "stats", "replication")
_MIN_REPLICAS: Final = "min-replicas-to-write"
_SETTINGS: Final = ("appendfsync", _MIN_REPLICAS, "protected-mode", "bind")
_DETAILS: Final = encode_command("INFO", *_INFO_SECTIONS) + b"".join(
    encode_command("CONFIG", "GET", setting) for setting in _SETTINGS
)
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1"})
_OPEN: Final = WeakSetting(
    "protected-mode",
    "no",
    "every machine that reaches this server may break locks: set requirepass or protected-mode yes",
)
_DISCOVERY_SHARE: Final = 0.4  # of the time, for the sentinels or the map of a cluster


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    if config.scheme == "redis+sentinel":
        return await _sentinel_health(config, runtime, deadline)
    if config.scheme == "redis+cluster":
        return await _cluster_health(config, runtime, deadline)
    server, options = parse_single_server(config)
    (member,) = members = _confirmed(await probe_servers([server], runtime, deadline), options)
    return Health(
        "redis",
        up=member.up and member.role != "replica",
        members=members,
        has_leader=None if member.role is None else member.role == "primary",
        voting=1,
        reachable=int(member.up),
        error=member.error or (_NOT_PRIMARY if member.role == "replica" else None),
    )


_NOT_PRIMARY: Final = "this server is a replica and cannot grant locks"


async def probe_servers(
    servers: Sequence[RedisEndpoint], runtime: Runtime, deadline: float
) -> tuple[MemberHealth, ...]:
    async def probe(server: RedisEndpoint, until: float) -> MemberHealth:
        return await _probe(server, runtime, until)

    return await probe_each(servers, probe, lambda server: str(server.address), runtime, deadline)


def _confirmed(members: tuple[MemberHealth, ...], options: RedisOptions) -> tuple[MemberHealth, ...]:
    """With `min_replicas` in the URL, replicas confirm each grant, whatever the primary requires for its writes."""
    if not options.min_replicas:
        return members
    return tuple(
        replace(member, findings=tuple(each for each in member.findings if each.setting != _MIN_REPLICAS))
        for member in members
    )


async def _sentinel_health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    """The members are the primary and the sentinels; the sentinels vote, and should report the same primary."""
    url = parse_sentinel_url(config)
    now = runtime.now()
    until = now + (deadline - now) * _DISCOVERY_SHARE
    primary: tuple[MemberHealth, ...] = ()
    error = None
    try:
        server = await SentinelSet(url.nodes, url.service, url.make_server, runtime).find(runtime, until)
    except LeaseholdError as failure:
        error = str(failure)
    else:
        now = runtime.now()
        primary = _confirmed(await probe_servers([server], runtime, now + (deadline - now) / 2), url.options)
    request = encode_command("SENTINEL", "CKQUORUM", url.service) + encode_command("SENTINEL", "MASTER", url.service)
    alarms: dict[str, None] = {}
    reported: dict[str, _Reported] = {}

    async def probe(node: DiscoveryNode, until: float) -> MemberHealth:
        ((quorum, found), trip) = await timed(runtime, lambda: node.query(request, 2, runtime, until))
        notes = []
        if is_error_reply(quorum, "NOQUORUM"):
            alarms[server_text(quorum)] = None
        elif isinstance(quorum, hiredis.ReplyError):
            notes.append(server_text(quorum))
        try:
            reported[str(node.address)] = _Reported(*parse_primary(node, url.service, found), _run_id(found))
        except LeaseholdError as failure:
            notes.append(str(failure))
        return MemberHealth(
            str(node.address), up=True, round_trip=trip.seconds, role="sentinel", notes=tuple(dict.fromkeys(notes))
        )

    sentinels = await probe_each(url.nodes, probe, lambda node: str(node.address), runtime, deadline)
    differences = _differences(reported)
    sentinels = tuple(replace(each, findings=differences.get(each.member, ())) for each in sentinels)
    found = bool(primary) and primary[0].up and primary[0].role != "replica"
    return Health(
        "redis",
        up=found,
        members=(*primary, *sentinels),
        has_leader=found,
        voting=len(sentinels),
        reachable=sum(each.up for each in sentinels),
        alarms=tuple(alarms),
        error=None if found else error or describe_down(primary) or _NOT_PRIMARY,
    )


class _Reported(NamedTuple):
    """The primary, as one sentinel reports it."""

    epoch: int
    address: SocketAddress
    run_id: bytes = b""


def _run_id(reply: Sequence[Any]) -> bytes:
    """Of the primary, in a reply to SENTINEL MASTER that has been checked. Empty while the sentinel cannot reach it."""
    run_id = dict(zip(reply[::2], reply[1::2], strict=True)).get(b"runid")
    return run_id if isinstance(run_id, bytes) else b""


def _differences(reported: Mapping[str, _Reported]) -> dict[str, tuple[WeakSetting, ...]]:
    """The sentinels that report another primary than the others, by address. The latest failover counts; of several
    primaries without a failover between them, the one that most sentinels report. One server may have two addresses."""
    if not reported:
        return {}
    epoch = max(primary.epoch for primary in reported.values())
    latest = Counter(primary.address for primary in reported.values() if primary.epoch == epoch)
    ((address, _),) = latest.most_common(1)
    run_ids = {primary.run_id for primary in reported.values() if primary.address == address and primary.run_id}
    found: dict[str, tuple[WeakSetting, ...]] = {}
    for member, primary in reported.items():
        if primary.address == address or primary.run_id in run_ids:
            continue
        if primary.epoch == epoch:
            advice = "clients of different sentinels use different servers: monitor the same server with all sentinels"
            found[member] = (WeakSetting("sentinel monitor", "another server", advice),)
        else:
            advice = "it does not know of the last failover: check that it reaches the other sentinels and the servers"
            found[member] = (WeakSetting("sentinel config-epoch", "behind", advice),)
    return found


async def _cluster_health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    """The members are the nodes that own slots. All must be up: each has a part of the names."""
    url = parse_cluster_url(config)
    slot_map = SlotMap(url)
    now = runtime.now()
    try:
        await slot_map.find(runtime, now + (deadline - now) * _DISCOVERY_SHARE)
    except LeaseholdError as failure:
        return Health("redis", up=False, has_leader=False, error=str(failure))
    owners = [address for address in dict.fromkeys(slot_map.owners) if address is not None]
    nodes = [slot_map.server(address) for address in owners]
    members = _confirmed(await probe_servers(nodes, runtime, deadline), url.options)
    covered = None not in slot_map.owners
    reachable = sum(each.up for each in members)
    up = covered and reachable == len(members)
    error = describe_down(members) or (None if covered else "some hash slots have no node")
    return Health(
        "redis", up, members, has_leader=covered, voting=len(members), reachable=reachable, error=None if up else error
    )


async def _probe(server: RedisEndpoint, runtime: Runtime, deadline: float) -> MemberHealth:
    stream = await server.open_unchecked(runtime, deadline)
    certificate_end = stream.certificate_end()
    try:
        (pong, time), trip = await timed(runtime, lambda: maybe_await(stream.calls(_TIME, 2, deadline)))
        info, *settings = await maybe_await(stream.calls(_DETAILS, 1 + len(_SETTINGS), deadline))
    except CONNECTION_ERRORS as error:
        raise Unreachable(f"{server} did not answer: {describe_error(error)}", engine="redis") from error
    finally:
        stream.close()
    if isinstance(pong, hiredis.ReplyError) and not is_error_reply(pong, "NOPERM"):
        raise server.map_error(pong)  # LOADING, MASTERDOWN: it does not serve requests
    if pong != b"PONG" and not isinstance(pong, hiredis.ReplyError):
        raise Unreachable(f"{server} sent an unexpected reply to PING", engine="redis")
    known = {name: value for name, reply in zip(_SETTINGS, settings, strict=True) if (value := _setting(reply))}
    member = _parse_info(str(server.address), info_fields(info), known, trip)
    if server.anonymous and _is_open(known):
        member = replace(member, findings=(*member.findings, _OPEN))
    offset = trip.clock_offset(_seconds(time))
    denied = [
        f"{command} is not allowed"
        for command, reply in (("TIME", time), ("INFO", info), ("CONFIG GET", settings[0]))
        if isinstance(reply, hiredis.ReplyError)
    ]
    return replace(
        member,
        clock_offset=offset,
        certificate_left=None if certificate_end is None else certificate_end - runtime.wall(),
        anonymous=server.anonymous,
        notes=tuple(denied),
    )


def _parse_info(member: str, fields: Mapping[str, str], settings: Mapping[str, str], trip: RoundTrip) -> MemberHealth:
    role = {"master": "primary", "slave": "replica"}.get(fields.get("role", ""))
    used, limit = parse_int(fields.get("used_memory")), parse_int(fields.get("maxmemory"))
    hits, misses = parse_int(fields.get("keyspace_hits")), parse_int(fields.get("keyspace_misses"))
    fork = parse_float(fields.get("latest_fork_usec"))
    version = fields.get("valkey_version") or fields.get("redis_version")
    return MemberHealth(
        member,
        up=True,
        round_trip=trip.seconds,
        role=role,
        version=server_text(version) if version else None,
        server_id=server_text(fields["run_id"]) if "run_id" in fields else None,
        storage=() if used is None else (Storage("maxmemory", used, limit or None),),
        replicas=parse_int(fields.get("connected_slaves")),
        replication_lag=_lag(role, fields),
        clock_error=trip.seconds / 2,
        memory=used,
        evictions=parse_int(fields.get("evicted_keys")),
        connections_ratio=ratio(parse_int(fields.get("connected_clients")), parse_int(fields.get("maxclients"))),
        cache_hit_ratio=None if hits is None or misses is None else ratio(hits, hits + misses),
        disk_seconds=None if fork is None else fork / 1e6,
        findings=tuple(_findings(role, fields, settings)),
    )


def _lag(role: str | None, fields: Mapping[str, str]) -> float | None:
    """Seconds since the slowest replica, or this one, last confirmed what it received."""
    if role == "replica":
        return parse_float(fields.get("master_last_io_seconds_ago")) if _linked(fields) else None
    lags = [
        lag
        for name, value in fields.items()
        if name.startswith("slave") and name[5:].isdecimal()
        if (lag := parse_float(dict(_pairs(value)).get("lag"))) is not None and lag >= 0
    ]
    return max(lags, default=None)


def _linked(fields: Mapping[str, str]) -> bool:
    return fields.get("master_link_status") == "up"


def _findings(role: str | None, fields: Mapping[str, str], settings: Mapping[str, str]) -> list[WeakSetting]:
    found = []

    def add(setting: str, value: str, advice: str) -> None:
        found.append(WeakSetting(setting, server_text(value), advice))

    policy, fsync = fields.get("maxmemory_policy"), settings.get("appendfsync")
    if policy not in (None, "noeviction"):
        add("maxmemory-policy", policy, "a held lock may be evicted: set maxmemory-policy noeviction")
    if fields.get("aof_enabled") == "0":
        add("appendonly", "no", "a restart frees every lock: set appendonly yes and appendfsync always")
    elif fields.get("aof_enabled") == "1" and fsync not in (None, "always"):
        add("appendfsync", fsync, "a crash may free locks that were just granted: set appendfsync always")
    if fields.get("aof_last_write_status") not in (None, "ok"):
        add(
            "aof_last_write_status",
            fields["aof_last_write_status"],
            "the append-only file cannot be written: free disk space",
        )
    if role == "primary" and parse_int(fields.get("connected_slaves")) and settings.get(_MIN_REPLICAS) == "0":
        add(
            _MIN_REPLICAS,
            "0",
            "a primary that is cut off from its replicas still grants: add min_replicas=1 to the URL, "
            "or set min-replicas-to-write 1",
        )
    if role == "replica" and not _linked(fields):
        add("master_link_status", fields.get("master_link_status", ""), "this replica has lost its primary")
    return found


def _is_open(settings: Mapping[str, str]) -> bool:
    """Whether clients of other machines are accepted without a password."""
    addresses = settings.get("bind", "*").split()
    return settings.get("protected-mode") == "no" and any(each.lstrip("-") not in _LOOPBACK for each in addresses)


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(name, value) for name, found, value in (item.partition("=") for item in text.split(",")) if found]


def _setting(reply: Any) -> str | None:
    with suppress(TypeError, ValueError, AttributeError):
        _, value = reply
        return str(value.decode(errors="replace"))
    return None


def _seconds(reply: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        seconds, microseconds = reply
        return int(seconds) + int(microseconds) / 1e6
    return None
