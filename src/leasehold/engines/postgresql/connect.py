"""How a session begins: name resolution, the handshake, and the settings before the first call.

Each step has the call's deadline. libpq resolves names without one, so a thread does that. A pooler in between is
detected by the server's process number: a pooler does not know it.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from leasehold.engines.postgresql.errors import ENGINE, SERVER, connection_refused, no_answer
from leasehold.engines.postgresql.session import PgSession
from leasehold.engines.postgresql.url import PgTarget
from leasehold.engines.sql.connect import resolve, split_deadline
from leasehold.engines.sql.session import DatabaseServer, Decoding, SqlConnectionLost, SqlServerError
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime

# The settings of a session. Behind a pooler they are not set: the server session's next user would inherit them.
# tcp_*: the server drops a session whose client vanished after half a minute, and with it its proof of life.
# plan_cache_mode: planning each renewal again would cost as much as the rest of it, so plans are made once and kept.
# enable_seqscan: a plan made while a table was almost empty must not read all of it once it has grown.
# jit: where a sequential scan is unavoidable, its estimated cost is so high that it would be compiled, for 70 ms.
_SETTINGS: Final = {
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
    "enable_seqscan": "off",
    "idle_session_timeout": "0",
    "jit": "off",
    "plan_cache_mode": "force_generic_plan",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
# Functions are named with their schema, and operators only used on types for which PostgreSQL has them exactly: a role
# that may create functions in a schema of the search_path can make others that fit better, and run as this role.
_SESSION_QUERY: Final = b"""
select pg_catalog.pg_backend_pid() = $1::integer, pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('fsync'),
    pg_catalog.concat(
        (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database()), ' ',
        extract(epoch from pg_catalog.pg_postmaster_start_time())),
    (select pg_catalog.count(pg_catalog.set_config(name, value, false))
        from unnest($2::text[], $3::text[]) as wanted (name, value)
        where pg_catalog.pg_backend_pid() = $1::integer and pg_catalog.current_setting(name, true) is not null)
"""


async def open_session(
    target: PgTarget, runtime: Runtime, deadline: float, statement_timeout: float, *, allow_standby: bool = False
) -> PgSession:
    """A session with the first host that accepts the connection. Each host gets an equal share of the time left, and
    each of its addresses an equal share of that. `allow_standby`: not for locks."""
    failure: LeaseholdError = no_answer(0.0, address_of(target.hosts[0]))
    credentials = {} if target.password is None else {"password": await target.password.read_with(runtime, deadline)}
    for number, params in enumerate(target.hosts):
        until = split_deadline(runtime, deadline, len(target.hosts) - number)
        try:
            return await _connect_host(params | credentials, runtime, until, statement_timeout, allow_standby)
        except Unavailable as error:
            failure = error
        except ConfigError as error:
            if len(target.hosts) == 1 or isinstance(failure, ConfigError):
                raise
            failure = error
    raise failure


def address_of(params: dict[str, Any]) -> str:
    """Host and port, without user or password."""
    host = str(params.get("host") or params.get("hostaddr") or "the local socket")
    return f"[{host}]:{params.get('port') or 5432}" if ":" in host else f"{host}:{params.get('port') or 5432}"


async def _connect_host(
    params: dict[str, str], runtime: Runtime, deadline: float, statement_timeout: float, allow_standby: bool
) -> PgSession:
    failure = no_answer(0.0, address_of(params))
    candidates = await _resolve_params(params, runtime, deadline)
    for number, candidate in enumerate(candidates):
        try:
            until = split_deadline(runtime, deadline, len(candidates) - number)
            return await _connect_address(candidate, runtime, until, statement_timeout, allow_standby)
        except Unavailable as error:
            failure = error
    raise failure


async def _connect_address(
    params: dict[str, Any], runtime: Runtime, deadline: float, statement_timeout: float, allow_standby: bool
) -> PgSession:
    pg = pq.PGconn.connect_start(make_conninfo(**params).encode())
    session = PgSession(pg, runtime)
    try:
        began = runtime.now()
        if pg.status == pq.ConnStatus.BAD:
            raise connection_refused(pg.get_error_message())
        while (state := pg.connect_poll()) != pq.PollingStatus.OK:
            if state == pq.PollingStatus.FAILED:
                raise connection_refused(pg.get_error_message())
            # Both: a server can send messages without end that OpenSSL ignores.
            if runtime.now() >= deadline or not await _wait_polled(session, pg, state, runtime, deadline):
                raise no_answer(deadline - began, address_of(params))
        pg.nonblocking = 1
        pg.enter_pipeline_mode()
        await _prepare_session(session, pg, deadline, statement_timeout, allow_standby)
    except (SqlServerError, SqlConnectionLost, psycopg.Error, OSError) as error:
        session.close()
        raise connection_refused(str(error)) from error
    except BaseException:
        session.close()
        raise
    return session


async def _wait_polled(session: PgSession, pg: pq.abc.PGconn, state: int, runtime: Runtime, deadline: float) -> bool:
    """Wait for what libpq needs to continue. False: the deadline has passed."""
    relay = session.relay
    if state != pq.PollingStatus.READING:
        return await runtime.wait_fd(pg.socket, deadline - runtime.now(), read=False, write=True)
    relay.attach()
    relay.send()
    while not (relay.has_unread() or relay.at_end):
        if not await runtime.wait_fd(relay.server.fileno(), deadline - runtime.now()):
            return False
        relay.receive()
    return True


async def _prepare_session(
    session: PgSession, pg: pq.abc.PGconn, deadline: float, statement_timeout: float, allow_standby: bool
) -> None:
    """Identify the server, refuse a standby unless it is allowed, and apply the session's settings."""
    if pg.parameter_status(b"server_encoding") != b"UTF8":
        raise ConfigError("PostgreSQL: lock names are Unicode text; use a database whose encoding is UTF8")
    settings = _SETTINGS | {"statement_timeout": str(int(statement_timeout * 1000))}
    rows = await session.execute(_SESSION_QUERY, (pg.backend_pid, list(settings), list(settings.values())), deadline)
    with Decoding(SERVER, ENGINE):
        ((direct, standby, fsync, identity, _),) = rows
    if standby == "t" and not allow_standby:
        raise Unavailable(
            "PostgreSQL: this server is a standby, which cannot grant locks; connect to the primary", engine=ENGINE
        )
    session.server = DatabaseServer(direct == "t", identity or "", fsync == "on")


async def _resolve_params(params: dict[str, str], runtime: Runtime, deadline: float) -> list[dict[str, str]]:
    """The connection parameters for each address of the host."""
    host = params.get("host", "")
    if not host or host.startswith(("/", "@")) or "hostaddr" in params:
        return [params]
    return [params | {"hostaddr": address} for address in await resolve(host, runtime, deadline, SERVER, ENGINE)]
