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

from leasehold.engines.mysql.meaning import ENGINE, SERVER, refused, silent
from leasehold.engines.mysql.url import Target
from leasehold.engines.mysql.wire import MySession
from leasehold.engines.sql.reach import resolved, share
from leasehold.engines.sql.wire import Failed, Lost, Server
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_LONG: Final = 31_536_000  # seconds: a year, the most a server counts to here
_PROMPT: Final = 86_400.0  # seconds, the most PyMySQL waits for a word during a hand-shake

# What a session of ours needs, whatever the server's defaults. `completion_type`: a commit begins no transaction, and
# ends no session. One that lost its client without a goodbye is found by the system's own probes.
_SETTINGS: Final = (
    "set session time_zone = '+00:00', sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', autocommit = 1, "
    f"completion_type = 0, sql_select_limit = {2**64 - 1}, sql_big_selects = 1, "
    f"wait_timeout = {_LONG}, lock_wait_timeout = %(patience)d, group_concat_max_len = {2**24}"
)
# MariaDB ends a call that nobody waits for any more; and the transaction that such a call may leave open, with what it
# has locked, if we are gone without a goodbye. 0: no limit. MySQL can do neither for calls.
_LIMITS: Final = {
    True: "max_statement_time = %(whole)d, idle_transaction_timeout = %(whole)d",
    False: "max_execution_time = 0",
}
_ISOLATION: Final = b"set session transaction isolation level read committed, read write"
_HELLO: Final = (
    b"select connection_id(), concat_ws(' ', @@hostname, @@port, @@server_id, @@datadir), "
    b"@@global.innodb_flush_log_at_trx_commit, @@global.read_only, @@global.log_bin, @@session.binlog_format"
)


class _HandShake:
    """What a thread of its own is busy with, and whoever waits for it may give up."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.made: tuple[socket.socket, int, bool] | None = None
        self.error: Exception | None = None
        self.over = False  # nobody waits for it any more

    def run(self, target: Target, address: str, seconds: float) -> None:
        try:
            found = _shaken(self, target, address, max(0.001, min(seconds, _PROMPT)))
        except Exception as error:
            self.error = error
            return
        self.made = found
        if self.over:
            found[0].close()

    def give_up(self) -> None:
        self.over = True
        if self.made is not None:
            self.made[0].close()
        elif self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class _Link(pymysql.Connection):  # type: ignore[misc]
    """Where the URL names nothing for TLS, PyMySQL has it if the server does, and checks nobody. To read all the
    system's authorities for that would be nine tenths of a hand-shake."""

    def _create_ssl_ctx(self, named: Any) -> Any:
        if named:
            return super()._create_ssl_ctx(named)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context


def _shaken(shake: _HandShake, target: Target, address: str, seconds: float) -> tuple[socket.socket, int, bool]:
    """The socket of a session, the server's number of it as it said, and whether it is MariaDB."""
    shake.sock = sock = socket.socket(
        socket.AF_UNIX if target.path else socket.AF_INET6 if ":" in address else socket.AF_INET
    )
    try:
        sock.settimeout(seconds)
        sock.connect(target.path or (address, target.port))
        if not target.path:
            _tune(sock)
        link = _Link(**target.arguments, defer_connect=True, read_timeout=seconds, write_timeout=seconds)
        link.connect(sock)
    except BaseException:
        sock.close()
        raise
    # It is ours from here on. The reader must be closed, or the socket would stay open when we close it.
    sock, link._sock = link._sock, None
    link._rfile.close()
    link._rfile, link._closed = None, True
    return sock, link.server_thread_id[0], "mariadb" in link.server_version.lower()


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def opened(target: Target, runtime: Runtime, deadline: float, statement_time: float) -> MySession:
    """A session with the first address of the host that takes us: of the time left, each gets an equal share."""
    failure = silent(0.0)
    found = [""] if target.path else await resolved(target.host, runtime, deadline, SERVER, ENGINE)
    for number, address in enumerate(found):
        until = share(runtime, deadline, len(found) - number)
        try:
            return await _opened(target, address, runtime, until, statement_time)
        except Unavailable as error:
            failure = error
    raise failure


async def _opened(target: Target, address: str, runtime: Runtime, deadline: float, statement_time: float) -> MySession:
    began, shake, signal = runtime.now(), _HandShake(), runtime.signal()

    async def run(_: Runtime) -> None:
        try:
            shake.run(target, address, deadline - began)
        finally:
            signal.set()

    runtime.aside(run, "leasehold-connect")
    try:
        answered = await signal.wait(deadline - began)
    except BaseException:
        shake.give_up()
        raise
    if not answered:
        shake.give_up()
        raise silent(deadline - began)
    if shake.made is None:
        assert shake.error is not None
        raise refused(shake.error) from shake.error
    sock, number, mariadb = shake.made
    session = MySession(sock, runtime)
    try:
        await _greet(session, number, mariadb, deadline, statement_time)
    except (Failed, Lost) as error:
        session.close()
        raise Unavailable(f"{SERVER}: {error}", engine=ENGINE) from error
    except BaseException:
        session.close()
        raise
    return session


async def _greet(session: MySession, number: int, mariadb: bool, deadline: float, statement_time: float) -> None:
    """See who is there, and have the session as we need it."""
    whole = min(_LONG, int(statement_time + 0.999))
    wanted = f"{_SETTINGS}, {_LIMITS[mariadb]}" % {"patience": max(whole, 1), "whole": whole}
    await session.ask(wanted.encode(), (), deadline)
    await session.ask(_ISOLATION, (), deadline)
    ((found, place, flush, read_only, *_),) = await session.ask(_HELLO, (), deadline)
    if read_only not in ("0", "OFF"):
        raise Unavailable("MySQL: this server is read-only: a replica, which cannot grant locks", engine=ENGINE)
    session.number = number
    session.server = Server(found == str(number), place or "", flush == "1")
