"""How a session begins: name resolution, PyMySQL's handshake, and the settings before the first call.

PyMySQL blocks, and its timeout restarts with every read. So a thread makes the handshake, and the caller waits for it
until the deadline and then hangs up. A proxy that hands calls to other sessions is detected by the server's connection
id: such a proxy does not know it.

In a slow network the first renewal has to open a session in a part of the ttl, so a session takes two requests: the
login, and everything else in one. That is one request with several statements, not several requests sent at once:
ProxySQL hangs up if a request comes before the last one is answered. If a proxy does not offer several statements, they
are sent one by one.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Final, NamedTuple

from pymysql.constants import CLIENT

from leasehold.engines.mysql.driver import SafeConnection, connect_socket, new_socket
from leasehold.engines.mysql.errors import ENGINE, SERVER, connection_refused, no_answer
from leasehold.engines.mysql.session import MySession
from leasehold.engines.mysql.url import MyTarget
from leasehold.engines.sql.connect import resolve, split_deadline
from leasehold.engines.sql.session import DatabaseServer, Decoding, Row, SqlConnectionLost, SqlServerError
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime

_MAX_TIMEOUT: Final = 31_536_000  # seconds: a year, the largest value the server accepts here
_MAX_HANDSHAKE_WAIT: Final = 86_400.0  # seconds that a handshake takes at most

# The settings of a session, whatever the server's defaults. completion_type: a commit starts no new transaction and
# does not end the session. wait_timeout: a session whose client vanished is found by TCP keepalive instead.
_SETTINGS: Final = (
    "set session time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, "
    f"completion_type = 0, sql_select_limit = {2**64 - 1}, sql_big_selects = 1, "
    f"wait_timeout = {_MAX_TIMEOUT}, lock_wait_timeout = %(lock_wait_seconds)d, group_concat_max_len = {2**24}"
)
# MariaDB ends a call after its client has stopped waiting, and the transaction with its locks that such a call may
# leave open if the client has vanished. 0: no limit. MySQL can do neither for procedure calls.
_LIMITS: Final = {
    True: "max_statement_time = %(statement_seconds)d, idle_transaction_timeout = %(statement_seconds)d",
    False: "max_execution_time = 0",
}
_CHARACTER_SET: Final = "set names utf8mb4"  # some servers ignore the one in the login
_ISOLATION: Final = "set session transaction isolation level read committed, read write"
_SESSION_QUERY: Final = (
    "select connection_id(), concat_ws(' ', @@hostname, @@port, @@server_id, @@datadir), "
    "@@global.innodb_flush_log_at_trx_commit, @@global.read_only, @@global.log_bin, @@session.binlog_format"
)


class _Login(NamedTuple):
    """What a handshake results in."""

    sock: socket.socket
    connection_id: int  # as the server reported it
    mariadb: bool
    multi_statements: bool  # a request may have several statements


class _Handshake:
    """A handshake that runs in its own thread; the caller may cancel it."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.connection: _LoginConnection | None = None  # its socket replaces `sock` once TLS has begun
        self.result: _Login | None = None
        self.error: Exception | None = None
        self.cancelled = False

    def run(self, target: MyTarget, address: str, seconds: float) -> None:
        try:
            found = _perform_handshake(self, target, address, min(seconds, _MAX_HANDSHAKE_WAIT))
        except Exception as error:
            self.error = error
            return
        self.result = found
        if self.cancelled:
            found.sock.close()

    def cancel(self) -> None:
        self.cancelled = True
        if self.result is not None:
            self.result.sock.close()
        elif (sock := (self.connection and self.connection._sock) or self.sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class _LoginConnection(SafeConnection):
    def set_character_set(self, *_: object) -> None:
        """`_prepare_session` does."""


def _perform_handshake(handshake: _Handshake, target: MyTarget, address: str, seconds: float) -> _Login:
    password = target.password.read().encode()  # on the handshake's thread; PyMySQL would encode text as Latin-1
    until = time.monotonic() + seconds
    handshake.sock = sock = new_socket(target, address)
    try:
        connect_socket(sock, target, address, seconds)
        handshake.connection = connection = _LoginConnection(**target.arguments, password=password, defer_connect=True)
        connection.allow(until - time.monotonic())
        connection.connect(sock)
    except BaseException:
        sock.close()
        raise
    # Take the socket over from PyMySQL. Its reader must be closed, or closing the socket would leave it open.
    sock, connection._sock = connection._sock, None
    connection._rfile.close()
    connection._rfile, connection._closed = None, True
    mariadb = "mariadb" in connection.server_version.lower()
    multi_statements = bool(connection.server_capabilities & CLIENT.MULTI_STATEMENTS)
    return _Login(sock, connection.server_thread_id[0], mariadb, multi_statements)


async def open_session(
    target: MyTarget, runtime: Runtime, deadline: float, statement_time: float, *, allow_replica: bool = False
) -> MySession:
    """A session with the first address that accepts the connection. Each address gets an equal share of the time.
    `allow_replica`: not for locks."""
    failure = no_answer(0.0, target.address)
    found = [""] if target.path else await resolve(target.host, runtime, deadline, SERVER, ENGINE)
    for number, address in enumerate(found):
        until = split_deadline(runtime, deadline, len(found) - number)
        try:
            return await _connect_address(target, address, runtime, until, statement_time, allow_replica)
        except Unavailable as error:
            failure = error
    raise failure


async def _connect_address(
    target: MyTarget, address: str, runtime: Runtime, deadline: float, statement_time: float, allow_replica: bool
) -> MySession:
    began, handshake, signal = runtime.now(), _Handshake(), runtime.signal()

    async def run(_: Runtime) -> None:
        try:
            handshake.run(target, address, deadline - began)
        finally:
            signal.set()

    try:
        runtime.start_thread(run, "leasehold-connect")
    except RuntimeError:  # the interpreter exits, and this is the watchdog's thread, which has releases to send
        await run(runtime)
    try:
        answered = await signal.wait(deadline - began)
    except BaseException:
        handshake.cancel()
        raise
    if not answered:
        handshake.cancel()
        raise no_answer(deadline - began, target.address)
    if handshake.result is None:
        assert handshake.error is not None  # noqa: S101  # for the type checker
        if isinstance(handshake.error, LeaseholdError):  # there is no password
            raise handshake.error
        raise connection_refused(handshake.error, target.address) from handshake.error
    session = MySession(handshake.result.sock, runtime)
    try:
        await _prepare_session(session, handshake.result, deadline, statement_time, allow_replica)
    except (SqlServerError, SqlConnectionLost) as error:
        session.close()
        raise Unavailable(f"{SERVER}: {error}", engine=ENGINE) from error
    except BaseException:
        session.close()
        raise
    return session


async def _prepare_session(
    session: MySession, login: _Login, deadline: float, statement_time: float, allow_replica: bool
) -> None:
    """Apply the session's settings, identify the server, and refuse a replica unless it is allowed."""
    statement_seconds = min(_MAX_TIMEOUT, int(statement_time + 0.999))
    settings = f"{_SETTINGS}, {_LIMITS[login.mariadb]}" % {
        "lock_wait_seconds": max(statement_seconds, 1),
        "statement_seconds": statement_seconds,
    }
    statements = (_CHARACTER_SET, settings, _ISOLATION, _SESSION_QUERY)
    rows: list[Row] = []
    # If one of several statements in a request fails, the server does not execute those behind it.
    for request in ("; ".join(statements),) if login.multi_statements else statements:
        rows = await session.execute(request.encode(), (), deadline)
    with Decoding(SERVER, ENGINE):
        ((reported_id, identity, flush, read_only, *_),) = rows
    if read_only not in ("0", "OFF") and not allow_replica:
        raise Unavailable(
            "MySQL: this server is read-only (a replica) and cannot grant locks; connect to the primary", engine=ENGINE
        )
    session.connection_id = login.connection_id
    session.server = DatabaseServer(reported_id == str(login.connection_id), identity or "", flush == "1")
