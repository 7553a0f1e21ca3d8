"""Records in a PostgreSQL table: `postgresql://user:password@host/database`, with the options of libpq."""

from __future__ import annotations

import selectors
import time
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote, urlencode

import psycopg
from psycopg import pq
from psycopg.conninfo import conninfo_attempts, conninfo_to_dict, make_conninfo
from psycopg.waiting import Ready, Wait

from leasehold.config import EngineConfig
from leasehold.core.texts import server_text
from leasehold.credentials import Password
from leasehold.dbapi import POSTGRESQL
from leasehold.engines.postgresql.relay import Relay
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.store import MAX_DATA
from leasehold.records.stores.sql import TABLE, SqlStore, StoreDialect, Table
from leasehold.runtime.base import Runtime
from leasehold.runtime.net import host_names

# The store sets the two that are left out: deadlines are per call, and text is UTF-8.
OPTIONS: Final = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults()) - {
    "client_encoding",
    "connect_timeout",
}

DIALECT: Final = StoreDialect(
    database=POSTGRESQL,
    schema=(
        f'create table if not exists {TABLE} (name text collate "C" primary key, version text not null, '
        "data bytea not null, until double precision)",
        f"create index if not exists {TABLE}_until on {TABLE} (until) where until is not null",
    ),
    now="cast(extract(epoch from clock_timestamp()) as double precision)",
    lock_suffix=" for update",
    is_missing_table=lambda error: isinstance(error, psycopg.errors.UndefinedTable),
)
# The data, and a setting of the transaction that writes them: a record must survive a crash (S2), whatever the role or
# the database has set. Here, because behind a pooler a statement of its own might set it in another session.
_DURABLE_DATA: Final = """case pg_catalog.set_config('synchronous_commit',
    case when pg_catalog.current_setting('synchronous_commit') in ('off', 'local') then 'on'
        else pg_catalog.current_setting('synchronous_commit') end, true)
    when '' then null else :data end"""
_CONFIG_ERRORS: Final = ("08P01", "0A", "22", "28", "3D", "42")  # SQLSTATEs and classes that a retry would not change

_MAX_REPLY: Final = 2 * MAX_DATA + (1 << 20)  # bytes: it has two hex digits for each byte of data
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class DeadlineConnection(psycopg.Connection[Any]):
    """A connection on which nothing waits past a deadline, and that receives no more than its relay allows. psycopg
    itself has no deadlines, and libpq keeps as much as a server sends."""

    deadline = 0.0
    relay: Relay

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:  # psycopg's
        if not self.relay.is_in_step():
            raise psycopg.OperationalError("the server closed the connection or sent a reply without a request")
        try:
            wanted = next(gen)
            while True:
                wanted = gen.send(self._wait_ready(wanted))
        except StopIteration as done:
            return done.value
        except OSError as error:
            raise psycopg.OperationalError(str(error)) from error

    def _wait_ready(self, wanted: int) -> int:
        """What libpq can do now of what it wants to do."""
        relay = self.relay
        while True:
            left, sent = self.deadline - time.monotonic(), relay.send()
            if left <= 0:  # also if a server sends without end
                raise psycopg.OperationalError("no answer in time")
            ready = wanted & Wait.W if sent else 0
            if wanted & Wait.R and (relay.has_unread() or relay.at_end):
                ready |= Ready.R
            if ready:
                return ready
            if _wait_socket(relay.server.fileno(), _READ if sent else _READ | _WRITE, left) & _READ:
                relay.receive()

    def close(self) -> None:
        super().close()
        self.relay.send()  # libpq's last message
        self.relay.close()


class PostgresqlStore(SqlStore):
    table = Table(replace(DIALECT, blob=_DURABLE_DATA))

    def __init__(self, conninfo: str, runtime: Runtime, password: Password | None = None) -> None:
        super().__init__(runtime)
        self._conninfo, self._password = conninfo, password

    def connect(self, seconds: float) -> DeadlineConnection:
        """Connect to the first address that accepts; each gets an equal share of the time left."""
        deadline = time.monotonic() + seconds
        credentials = {} if self._password is None else {"password": self._password.read()}
        params = conninfo_to_dict(self._conninfo, **credentials)
        if "," in str(params.get("host") or params.get("hostaddr") or ""):  # of several hosts, the primary (S2)
            params.setdefault("target_session_attrs", "read-write")
        addresses = conninfo_attempts(_with_addresses(params, deadline))
        for addresses_left in range(len(addresses), 0, -1):
            try:
                connection = _connect_within(addresses[-addresses_left], (deadline - time.monotonic()) / addresses_left)
                break
            except psycopg.OperationalError:
                if addresses_left == 1:
                    raise
        connection.prepare_threshold = None  # behind a pooler the next statement may run on another session
        connection.autocommit = True
        return connection

    def set_timeout(self, connection: Any, seconds: float) -> None:
        connection.deadline, connection.relay.bytes_left = time.monotonic() + seconds, _MAX_REPLY

    def is_in_step(self, connection: Any) -> bool:
        return bool(connection.relay.is_in_step())

    def map_error(self, error: Exception) -> LeaseholdError | None:
        if not isinstance(error, psycopg.Error):
            return None
        error_type = ConfigError if (error.sqlstate or "").startswith(_CONFIG_ERRORS) else Unavailable
        return error_type(f"PostgreSQL store: {server_text(error) or 'no answer in time'}")


def _with_addresses(params: dict[str, Any], deadline: float) -> dict[str, Any]:
    """The parameters with the addresses of their hosts: psycopg would look up names without a deadline. Each name gets
    an equal share of the time left."""
    hosts, ports = (str(params.get(each) or "").split(",") for each in ("host", "port"))
    if not params.get("host") or params.get("hostaddr") or len(ports) not in (1, len(hosts)):
        return params
    found: list[tuple[str, str, str]] = []
    failure: psycopg.OperationalError | None = None
    for number, host in enumerate(hosts):
        port, share = ports[number % len(ports)], (deadline - time.monotonic()) / (len(hosts) - number)
        try:
            named = host and not host.startswith(("/", "@"))
            addresses = host_names.addresses_blocking(host, share) if named else [""]
            found += [(host, address, port) for address in addresses]
        except OSError as error:
            failure = psycopg.OperationalError(f"cannot resolve host {host}: {error.strerror}")
    if failure is not None and not found:
        raise failure
    names, hostaddr, all_ports = (",".join(column) for column in zip(*found, strict=True))
    resolved = params | {"host": names, "hostaddr": hostaddr}
    return resolved | {"port": all_ports} if any(ports) else resolved


def _connect_within(params: Any, seconds: float) -> DeadlineConnection:
    """Connect within `seconds`: psycopg itself counts whole seconds, and at least two."""
    deadline = time.monotonic() + seconds
    pg = pq.PGconn.connect_start(make_conninfo(**params).encode())
    relay = Relay(pg)
    try:
        while (state := _poll(pg)) != pq.PollingStatus.OK:
            if state == pq.PollingStatus.FAILED:
                raise psycopg.OperationalError(pg.get_error_message())
            _wait_polled(pg, relay, state, deadline)
    except BaseException as error:
        pg.finish()
        relay.close()
        if isinstance(error, OSError):
            raise psycopg.OperationalError(str(error)) from error
        raise
    pg.nonblocking = 1  # else a large request waits without a deadline until the server has taken all of it
    connection = DeadlineConnection(pg)
    connection.relay, connection.deadline = relay, deadline
    connection.add_notice_handler(lambda notice: relay.on_notice(notice.sqlstate))
    return connection


def _poll(pg: pq.abc.PGconn) -> int:
    return pq.PollingStatus.FAILED if pg.status == pq.ConnStatus.BAD else pg.connect_poll()


def _wait_polled(pg: pq.abc.PGconn, relay: Relay, state: int, deadline: float) -> None:
    """Wait for what libpq needs to continue."""
    if state != pq.PollingStatus.READING:
        _wait_socket(pg.socket, _WRITE, deadline - time.monotonic())
        return
    relay.attach()
    relay.send()
    while not (relay.has_unread() or relay.at_end):
        _wait_socket(relay.server.fileno(), _READ, deadline - time.monotonic())
        relay.receive()


def _wait_socket(descriptor: int, events: int, seconds: float) -> int:
    """The events that came. Raises OperationalError if none did, or if the time is over already: a server can send
    messages without end."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, events)
        if seconds <= 0 or not (found := selector.select(seconds)):
            raise psycopg.OperationalError("no answer in time")
        return found[0][1]


def open(config: EngineConfig, runtime: Runtime) -> PostgresqlStore:
    options = config.accept(**dict.fromkeys(OPTIONS, str))
    conninfo = config.url.partition("?")[0] + (f"?{urlencode(options, quote_via=quote)}" if options else "")
    try:
        params = conninfo_to_dict(conninfo)
    except psycopg.Error:
        raise ConfigError("this postgresql:// URL cannot be read") from None  # psycopg's text would show the password
    if config.password is not None:
        config.password_or(str(params.get("password") or ""))
    return PostgresqlStore(conninfo, runtime, config.password)
