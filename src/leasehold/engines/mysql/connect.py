"""How a session begins: the host's address, PyMySQL's hand-shake, and what is settled before the first call.

PyMySQL blocks, with a timeout that starts anew with every read; so a thread makes the hand-shake, and whoever asked for
it waits until its deadline and then hangs up. Whether a proxy stands between that hands our calls to other sessions is
seen by the server's own number of the session, which such a proxy does not know.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Any, Final

import pymysql

from leasehold.engines.mysql.errors import ENGINE, SERVER, connection_refused, no_answer
from leasehold.engines.mysql.session import MySession
from leasehold.engines.mysql.url import MyTarget
from leasehold.engines.sql.connect import resolve, split_deadline
from leasehold.engines.sql.session import DatabaseServer, SqlConnectionLost, SqlServerError
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_MAX_TIMEOUT: Final = 31_536_000  # seconds: a year, the most a server counts to here
_MAX_HANDSHAKE_WAIT: Final = 86_400.0  # seconds, the most PyMySQL waits for a word during a hand-shake

# What a session of ours needs, whatever the server's defaults. `completion_type`: a commit begins no transaction, and
# ends no session. One that lost its client without a goodbye is found by the system's own probes.
_SETTINGS: Final = (
    "set session time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, "
    f"completion_type = 0, sql_select_limit = {2**64 - 1}, sql_big_selects = 1, "
    f"wait_timeout = {_MAX_TIMEOUT}, lock_wait_timeout = %(lock_wait_seconds)d, group_concat_max_len = {2**24}"
)
# MariaDB ends a call that nobody waits for any more; and the transaction that such a call may leave open, with what it
# has locked, if we are gone without a goodbye. 0: no limit. MySQL can do neither for calls.
_LIMITS: Final = {
    True: "max_statement_time = %(statement_seconds)d, idle_transaction_timeout = %(statement_seconds)d",
    False: "max_execution_time = 0",
}
_ISOLATION: Final = b"set session transaction isolation level read committed, read write"
_SESSION_QUERY: Final = (
    b"select connection_id(), concat_ws(' ', @@hostname, @@port, @@server_id, @@datadir), "
    b"@@global.innodb_flush_log_at_trx_commit, @@global.read_only, @@global.log_bin, @@session.binlog_format"
)


class _Handshake:
    """What a thread of its own is busy with, and whoever waits for it may give up."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.result: tuple[socket.socket, int, bool] | None = None
        self.error: Exception | None = None
        self.cancelled = False  # nobody waits for it any more

    def run(self, target: MyTarget, address: str, seconds: float) -> None:
        try:
            found = _perform_handshake(self, target, address, max(0.001, min(seconds, _MAX_HANDSHAKE_WAIT)))
        except Exception as error:
            self.error = error
            return
        self.result = found
        if self.cancelled:
            found[0].close()

    def cancel(self) -> None:
        self.cancelled = True
        if self.result is not None:
            self.result[0].close()
        elif self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class _PyMySQLConnection(pymysql.Connection):  # type: ignore[misc]
    """Where the URL names nothing for TLS, PyMySQL has it if the server does, and checks nobody. To read all the
    system's authorities for that would be nine tenths of a hand-shake."""

    def _create_ssl_ctx(self, named: Any) -> Any:
        if named:
            return super()._create_ssl_ctx(named)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def _perform_handshake(
    handshake: _Handshake, target: MyTarget, address: str, seconds: float
) -> tuple[socket.socket, int, bool]:
    """The socket of a session, the server's number of it as it said, and whether it is MariaDB."""
    handshake.sock = sock = socket.socket(
        socket.AF_UNIX if target.path else socket.AF_INET6 if ":" in address else socket.AF_INET
    )
    try:
        sock.settimeout(seconds)
        sock.connect(target.path or (address, target.port))
        if not target.path:
            _set_socket_options(sock)
        connection = _PyMySQLConnection(
            **target.arguments, defer_connect=True, read_timeout=seconds, write_timeout=seconds
        )
        connection.connect(sock)
    except BaseException:
        sock.close()
        raise
    # It is ours from here on. The reader must be closed, or the socket would stay open when we close it.
    sock, connection._sock = connection._sock, None
    connection._rfile.close()
    connection._rfile, connection._closed = None, True
    return sock, connection.server_thread_id[0], "mariadb" in connection.server_version.lower()


def _set_socket_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def open_session(target: MyTarget, runtime: Runtime, deadline: float, statement_time: float) -> MySession:
    """A session with the first address of the host that takes us: of the time left, each gets an equal share."""
    failure = no_answer(0.0)
    found = [""] if target.path else await resolve(target.host, runtime, deadline, SERVER, ENGINE)
    for number, address in enumerate(found):
        until = split_deadline(runtime, deadline, len(found) - number)
        try:
            return await _connect_address(target, address, runtime, until, statement_time)
        except Unavailable as error:
            failure = error
    raise failure


async def _connect_address(
    target: MyTarget, address: str, runtime: Runtime, deadline: float, statement_time: float
) -> MySession:
    began, handshake, signal = runtime.now(), _Handshake(), runtime.signal()

    async def run(_: Runtime) -> None:
        try:
            handshake.run(target, address, deadline - began)
        finally:
            signal.set()

    runtime.start_thread(run, "leasehold-connect")
    try:
        answered = await signal.wait(deadline - began)
    except BaseException:
        handshake.cancel()
        raise
    if not answered:
        handshake.cancel()
        raise no_answer(deadline - began)
    if handshake.result is None:
        assert handshake.error is not None
        raise connection_refused(handshake.error) from handshake.error
    sock, connection_id, mariadb = handshake.result
    session = MySession(sock, runtime)
    try:
        await _prepare_session(session, connection_id, mariadb, deadline, statement_time)
    except (SqlServerError, SqlConnectionLost) as error:
        session.close()
        raise Unavailable(f"{SERVER}: {error}", engine=ENGINE) from error
    except BaseException:
        session.close()
        raise
    return session


async def _prepare_session(
    session: MySession, connection_id: int, mariadb: bool, deadline: float, statement_time: float
) -> None:
    """See who is there, and have the session as we need it."""
    statement_seconds = min(_MAX_TIMEOUT, int(statement_time + 0.999))
    settings = f"{_SETTINGS}, {_LIMITS[mariadb]}" % {
        "lock_wait_seconds": max(statement_seconds, 1),
        "statement_seconds": statement_seconds,
    }
    await session.execute(settings.encode(), (), deadline)
    await session.execute(_ISOLATION, (), deadline)
    ((reported_id, identity, flush, read_only, *_),) = await session.execute(_SESSION_QUERY, (), deadline)
    if read_only not in ("0", "OFF"):
        raise Unavailable("MySQL: this server is read-only: a replica, which cannot grant locks", engine=ENGINE)
    session.connection_id = connection_id
    session.server = DatabaseServer(reported_id == str(connection_id), identity or "", flush == "1")
