"""The health of PostgreSQL servers: of each host in the URL. One of them must be the primary.

A role that may only log in can ask all of this. Members of `pg_monitor` also see the lag of standbys and where the data
are; to other roles PostgreSQL shows these as null, and they are None here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.engines.postgresql.connect import address_of, open_session
from leasehold.engines.postgresql.errors import ENGINE
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.postgresql.url import PgTarget, parse_url
from leasehold.engines.probe import (
    Encryption,
    Health,
    MemberHealth,
    Storage,
    Table,
    WeakSetting,
    describe_down,
    filesystem,
    parse_float,
    parse_int,
    probe_each,
    ratio,
    timed,
)
from leasehold.engines.sql.session import Row, SqlConnectionLost, SqlServerError
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

# Functions are named with their schema: see `_SESSION_QUERY` in connect.py.
_TIME: Final = b"select extract(epoch from pg_catalog.clock_timestamp())"
_SETTINGS: Final = b"""
select pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('server_version'),
    pg_catalog.current_setting('fsync'), pg_catalog.current_setting('full_page_writes'),
    pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('max_connections'),
    (select setting from pg_catalog.pg_settings where name = 'data_directory'),
    pg_catalog.current_setting('synchronous_standby_names')
"""
_SIZES: Final = b"""
select pg_catalog.pg_database_size(pg_catalog.current_database()), pg_catalog.sum(numbackends),
    pg_catalog.sum(blks_hit), pg_catalog.sum(blks_hit) + pg_catalog.sum(blks_read)
    from pg_catalog.pg_stat_database
"""
# The number of standbys, of those whose lag is known, and the longest lag. An idle standby has no lag, but has replayed
# all that was sent.
_STANDBYS: Final = b"""
select pg_catalog.count(*), pg_catalog.count(lag), pg_catalog.max(lag) from (
    select coalesce(extract(epoch from replay_lag), case when replay_lsn >= sent_lsn then 0 end) as lag
        from pg_catalog.pg_stat_replication) as standby
"""
_OWN_LAG: Final = b"""
select case when not exists (select from pg_catalog.pg_stat_wal_receiver) then null
    when pg_catalog.pg_last_wal_receive_lsn() = pg_catalog.pg_last_wal_replay_lsn() then 0
    else extract(epoch from pg_catalog.clock_timestamp() - pg_catalog.pg_last_xact_replay_timestamp()) end
"""
# As far as the server's statistics know. Every role may read them.
_TABLES: Final = b"""
select pg_catalog.string_agg(pg_catalog.concat_ws(' ', relname, n_live_tup, n_dead_tup), ',' order by relname)
    from pg_catalog.pg_stat_user_tables where schemaname = $1 and pg_catalog.starts_with(relname::text, 'lh_')
"""
_GSS: Final = b"""
select coalesce(pg_catalog.bool_or(encrypted), false) from pg_catalog.pg_stat_gssapi
    where pid = pg_catalog.pg_backend_pid()
"""
_ADVICE: Final = {
    "fsync": "a crash of the machine may corrupt or lose all locks: set fsync = on",
    "full_page_writes": "a crash of the machine may corrupt the tables: set full_page_writes = on",
    "synchronous_commit": "a crash may free locks that were just granted: set synchronous_commit = on",
}
_UNCONFIRMED: Final = WeakSetting(
    "synchronous_standby_names",
    "empty",
    "a failover may lose the last grants: set synchronous_standby_names = 'ANY 1 (*)', and run two standbys, "
    "so that one may fail",
)
_TABLE: Final = re.compile(r"(lh_[a-z0-9_]{1,60}) (\d{1,18}) (\d{1,18})(?:,|\Z)")
_MAX_TABLES: Final = 16  # Leasehold has fewer
_ROOT_CERTIFICATE: Final = "~/.postgresql/root.crt"  # which libpq uses unless the URL names another
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    options = parse_url(config)
    hosts = options.target.hosts

    async def probe(params: dict[str, str], until: float) -> MemberHealth:
        target = PgTarget((params | {"target_session_attrs": "any"},), options.target.password)
        return await _probe(target, options.schema, runtime, until)

    members = await probe_each(hosts, probe, address_of, runtime, deadline)
    has_primary = any(each.role == "primary" for each in members)
    answered = any(each.up for each in members)
    return Health(
        ENGINE,
        up=has_primary,
        members=members,
        has_leader=has_primary if answered else None,
        voting=1,
        reachable=int(has_primary),
        error=None if has_primary else describe_down(members) or "no server of the URL is a primary",
    )


async def _probe(target: PgTarget, schema: str, runtime: Runtime, deadline: float) -> MemberHealth:
    (params,) = target.hosts
    session = await open_session(target, runtime, deadline, deadline - runtime.now(), allow_standby=True)
    try:
        await _ask(session, _TIME, 1, deadline)  # prepares the statement
        (server_time,), trip = await timed(runtime, lambda: _ask(session, _TIME, 1, deadline))
        standby, version, fsync, pages, commit, max_connections, data, confirming = await _ask(
            session, _SETTINGS, 8, deadline
        )
        size, connections, hits, blocks = await _ask(session, _SIZES, 4, deadline)
        (tables,) = await _ask(session, _TABLES, 1, deadline, schema)
        replicas: str | None = None
        if standby == "t":
            (lag,) = await _ask(session, _OWN_LAG, 1, deadline)
        else:
            replicas, known, lag = await _ask(session, _STANDBYS, 3, deadline)
            lag = lag if known == replicas else None
        encryption = await _encryption(session, params, runtime, deadline)
    finally:
        session.close()
    used = parse_int(size)
    storage = [Storage("database", used)] if used is not None else []
    if data and _is_local(params, data) and (disk := await runtime.call(filesystem, data)):
        storage.append(disk)
    settings = {"fsync": fsync, "full_page_writes": pages, "synchronous_commit": commit}
    findings = [WeakSetting(name, "off", _ADVICE[name]) for name, value in settings.items() if value == "off"]
    if parse_int(replicas) and confirming == "":
        findings.append(_UNCONFIRMED)
    return MemberHealth(
        address_of(params),
        up=True,
        round_trip=trip.seconds,
        role={"t": "replica", "f": "primary"}.get(standby or ""),
        version=server_text(version) if version else None,
        storage=tuple(storage),
        replicas=parse_int(replicas),
        replication_lag=parse_float(lag),
        clock_offset=trip.clock_offset(parse_float(server_time)),
        clock_error=trip.seconds / 2,
        connections_ratio=ratio(parse_int(connections), parse_int(max_connections)),
        cache_hit_ratio=ratio(parse_int(hits), parse_int(blocks)),
        encryption=encryption,
        tables=tuple(_tables(tables)),
        findings=tuple(findings),
        notes=() if data else ("data_directory is not visible to this role: grant pg_monitor to see the disk",),
    )


async def _ask(session: PgSession, query: bytes, columns: int, deadline: float, *values: str) -> Row:
    """The one row of the answer; nulls if the server refuses the question."""
    try:
        (row,) = await session.execute(query, values, deadline)
        if len(row) != columns:
            raise ValueError("unexpected number of columns")
    except SqlServerError:
        return (None,) * columns
    except (SqlConnectionLost, ValueError) as error:
        raise Unavailable(f"PostgreSQL: {server_text(error)}", engine=ENGINE) from error
    return row


def _tables(text: str | None) -> Iterator[Table]:
    for found in islice(_TABLE.finditer(text or ""), _MAX_TABLES):
        yield Table(found[1], int(found[2]), int(found[3]))


async def _encryption(
    session: PgSession, params: dict[str, Any], runtime: Runtime, deadline: float
) -> Encryption | None:
    if _is_socket(params):
        return None
    options = session.tls_options()
    if options is None:
        (by_kerberos,) = await _ask(session, _GSS, 1, deadline)
        return None if by_kerberos == "t" else "none"
    return await runtime.call(_verification, options)


def _verification(options: dict[str, str]) -> Encryption:
    mode, root = options.get("sslmode"), options.get("sslrootcert") or os.path.expanduser(_ROOT_CERTIFICATE)
    if mode == "verify-full":
        return "verified"
    # With `prefer`, a host in between can refuse TLS, and the client goes on without.
    if mode == "verify-ca" or (mode == "require" and os.path.exists(root)):
        return "authority"
    return "unverified"


def _host(params: dict[str, Any]) -> str:
    return str(params.get("host") or params.get("hostaddr") or "")


def _is_socket(params: dict[str, Any]) -> bool:
    host = _host(params)
    return not host or host.startswith(("/", "@"))


def _is_local(params: dict[str, Any], data: str) -> bool:
    """Whether the path is on this machine. Behind the loopback there may be a tunnel or a container, so there the
    server's file must be in place."""
    if _is_socket(params):
        return True
    return _host(params) in _LOOPBACK and os.path.exists(os.path.join(data, "postmaster.pid"))
