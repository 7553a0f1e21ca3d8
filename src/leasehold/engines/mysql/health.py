"""The health of a MySQL or MariaDB server.

Any account may ask for settings, status and the time. What needs a right of its own is asked last, each question in a
new session if the server refused the one before: a session is not used again after an error.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.engines.mysql.connect import open_session
from leasehold.engines.mysql.errors import ENGINE
from leasehold.engines.mysql.session import MySession
from leasehold.engines.mysql.url import MyOptions, parse_url
from leasehold.engines.probe import (
    Encryption,
    Health,
    MemberHealth,
    RoundTrip,
    Storage,
    WeakSetting,
    parse_float,
    parse_int,
    probe_each,
    ratio,
    timed,
)
from leasehold.engines.sql.session import Row, SqlConnectionLost, SqlServerError
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime
from leasehold.runtime.net.blocking import certificate_end
from leasehold.runtime.net.tls_socket import TlsSocket

_TIME: Final = b"select unix_timestamp(now(6))"
_SETTINGS: Final = (
    b"select @@version, @@global.read_only, @@global.max_connections, @@global.innodb_flush_log_at_trx_commit, "
    b"@@global.innodb_doublewrite, @@global.log_bin, @@global.sync_binlog"
)
_STATUS: Final = (
    b"show global status where variable_name in ('Threads_connected', 'Memory_used', 'Innodb_row_lock_time_avg', "
    b"'wsrep_cluster_size', 'wsrep_cluster_status', 'Innodb_buffer_pool_reads', 'Innodb_buffer_pool_read_requests')"
)
_SIZE: Final = b"select sum(data_length + index_length) from information_schema.tables where table_schema = '%b'"
_REPLICAS: Final = b"show replica hosts"  # needs REPLICATION SLAVE (MariaDB: REPLICATION MASTER ADMIN)
_REPLICA_STATUS: Final = b"show replica status"  # needs REPLICATION CLIENT (MariaDB: REPLICA MONITOR)
_SECONDS_BEHIND: Final = 32  # its column there, in both servers
_OFF: Final = ("0", "OFF")


async def health(config: EngineConfig, runtime: Runtime, deadline: float) -> Health:
    options = parse_url(config)
    galera: dict[str, str] = {}

    async def probe(options: MyOptions, until: float) -> MemberHealth:
        return await _Probe(options, runtime, until, galera).run()

    members = await probe_each([options], probe, lambda each: each.target.address, runtime, deadline)
    (member,) = members
    size, in_quorum = parse_int(galera.get("wsrep_cluster_size")), galera.get("wsrep_cluster_status") != "non-Primary"
    is_primary = member.role == "primary" and in_quorum
    problem = "this server is read-only (a replica)" if in_quorum else "this Galera node has lost its quorum"
    return Health(
        ENGINE,
        up=is_primary,
        members=members,
        has_leader=is_primary if member.up else None,
        voting=None if size else 1,  # a node of Galera knows the nodes that are left, not how many there were
        reachable=size or int(is_primary),
        error=None if is_primary else member.error or problem,
    )


class _Probe:
    """One probe of one server."""

    def __init__(self, options: MyOptions, runtime: Runtime, deadline: float, galera: dict[str, str]) -> None:
        self._options, self._runtime, self._deadline, self._galera = options, runtime, deadline, galera
        self._session: MySession | None = None
        self._notes: list[str] = []
        self._encryption: Encryption | None = None
        self._certificate_end: float | None = None

    async def run(self) -> MemberHealth:
        try:
            await self._ask(_TIME)
            time, trip = await timed(self._runtime, lambda: self._ask(_TIME))
            status = {str(name): value for name, value in _pairs(await self._ask(_STATUS))}
            self._galera.update({n: v for n, v in status.items() if n.startswith("wsrep_") and v})
            member = _describe(self._options.target.address, await self._ask(_SETTINGS), status, trip)
            member = replace(member, clock_offset=trip.clock_offset(parse_float(_first(time))))
            size = parse_int(_first(await self._ask(_SIZE % _quoted(self._options.database))))
            replicas = await self._ask(_REPLICAS)
            lags = await self._ask(_REPLICA_STATUS)
        finally:
            if self._session is not None:
                self._session.close()
        return replace(
            member,
            storage=() if size is None else (Storage("database", size),),
            replicas=None if replicas is None else len(replicas),
            replication_lag=_lag(lags),
            encryption=self._encryption,
            certificate_left=None if self._certificate_end is None else self._certificate_end - self._runtime.wall(),
            notes=tuple(self._notes),
        )

    async def _ask(self, query: bytes) -> Sequence[Row] | None:
        """The rows, or None if the server refuses the question."""
        if self._session is None:
            left = self._deadline - self._runtime.now()
            self._session = await open_session(
                self._options.target, self._runtime, self._deadline, left, allow_replica=True
            )
            if not self._options.target.path:
                self._encryption = _encryption(self._session.sock)
                self._certificate_end = certificate_end(self._session.sock)
        try:
            return await self._session.execute(query, (), self._deadline)
        except SqlServerError:
            self._session.close()
            self._session = None
            self._notes.append(f"{' '.join(query.decode().split()[:3])} is not allowed")
            return None
        except SqlConnectionLost as error:
            raise Unavailable(f"MySQL: {server_text(error)}", engine=ENGINE) from error


def _describe(
    address: str, settings: Sequence[Row] | None, status: dict[str, str | None], trip: RoundTrip
) -> MemberHealth:
    if not settings or len(settings[0]) != 7:
        raise Unavailable("MySQL sent an unexpected reply to the question for its settings", engine=ENGINE)
    version, read_only, max_connections, flush, doublewrite, log_bin, sync_binlog = settings[0]
    row_lock_time = parse_float(status.get("Innodb_row_lock_time_avg"))
    reads, requests = (parse_int(status.get(f"Innodb_buffer_pool_{name}")) for name in ("reads", "read_requests"))
    misses = ratio(reads, requests)
    return MemberHealth(
        address,
        up=True,
        round_trip=trip.seconds,
        role="primary" if read_only in _OFF else "replica",
        version=server_text(version) if version else None,
        clock_error=trip.seconds / 2,
        memory=parse_int(status.get("Memory_used")),
        connections_ratio=ratio(parse_int(status.get("Threads_connected")), parse_int(max_connections)),
        cache_hit_ratio=None if misses is None else max(0.0, 1 - misses),
        disk_seconds=None if row_lock_time is None else row_lock_time / 1000,
        findings=tuple(_findings(flush, doublewrite, log_bin, sync_binlog)),
    )


def _findings(
    flush: str | None, doublewrite: str | None, log_bin: str | None, sync_binlog: str | None
) -> list[WeakSetting]:
    found = []
    if flush not in (None, "1"):
        advice = "a crash may free locks that were just granted: set innodb_flush_log_at_trx_commit = 1"
        found.append(WeakSetting("innodb_flush_log_at_trx_commit", server_text(flush), advice))
    if doublewrite in _OFF:
        advice = "a crash of the machine may corrupt the tables: set innodb_doublewrite = ON"
        found.append(WeakSetting("innodb_doublewrite", "OFF", advice))
    if log_bin not in (None, *_OFF) and sync_binlog not in (None, "1"):
        advice = "after a crash replicas may lack grants that the primary has: set sync_binlog = 1"
        found.append(WeakSetting("sync_binlog", server_text(sync_binlog), advice))
    return found


def _encryption(sock: socket.socket) -> Encryption:
    if not isinstance(sock, TlsSocket):
        return "none"
    if sock.context.verify_mode != ssl.CERT_REQUIRED:
        return "unverified"
    return "verified" if sock.context.check_hostname else "authority"


def _lag(rows: Sequence[Row] | None) -> float | None:
    """Seconds that a replica is behind; None if this server is none, or if its replication has stopped."""
    lags = [parse_float(row[_SECONDS_BEHIND]) for row in rows or () if len(row) > _SECONDS_BEHIND]
    known = [lag for lag in lags if lag is not None]
    return max(known) if known and len(known) == len(lags) else None


def _pairs(rows: Sequence[Row] | None) -> list[tuple[str | None, str | None]]:
    return [(row[0], row[1]) for row in rows or () if len(row) == 2]


def _first(rows: Sequence[Row] | None) -> str | None:
    return rows[0][0] if rows and rows[0] else None


def _quoted(name: str) -> bytes:
    return name.replace("\\", "\\\\").replace("'", "''").encode()
