"""kazoo, with what a lock cannot use taken off: its retries, its callback threads, its patience, its goodbyes.

One thread per session remains: it writes requests, reads answers, and runs our callbacks, which only note and signal.
Requests go to kazoo's own queue, below its convenience calls: those add results and hops of their own. A flight leaves
in one write and its answers are read as they come, where kazoo would wake up and poll anew for each. What is used of
kazoo's inside is all in this file.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionDropped,
    ConnectionLoss,
    NoAuthError,
    OperationTimeoutError,
    SASLException,
    SessionExpiredError,
    SessionMovedError,
    ZookeeperError,
)
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.connection import ConnectionHandler
from kazoo.protocol.serialization import CloseInstance, Connect, Create2, Delete, ReplyHeader, SetData
from kazoo.retry import KazooRetry

from leasehold.engines.zookeeper.address import Address
from leasehold.errors import ConfigError, LeaseholdError, Unavailable

# kazoo's own log says something of every try to connect: it is there for whoever sets its level. Never what is below
# INFO: there kazoo shows requests, passwords among them.
_log = logging.getLogger("leasehold.zookeeper.kazoo")
_log.setLevel(logging.ERROR)
_log.addFilter(lambda record: record.levelno >= logging.INFO)

_ONE: Final = struct.Struct("!i")
_TWO: Final = struct.Struct("!ii")

EPHEMERAL_SEQUENTIAL: Final = 3
CONTAINER: Final = 4

# How far apart heart-beats are, as a share of the session's timeout; nothing heard for twice that: another server.
_BEAT: Final = 1 / 4


_INHERITED: list[Keeper] = []  # of a parent, kept for ever: collected, their sockets would be closed with a warning


class Lost(Exception):
    """The connection broke with a request on its way: neither yes nor no. Never leaves the engine."""


class CreateContainer(Create2):  # type: ignore[misc]
    """A node that the server itself removes, without a race, some time after the last of its children is gone."""

    type = 19


class Reply:
    """The answer to one request. Set by the session's thread."""

    __slots__ = ("done", "error", "told", "value")

    def __init__(self, told: Callable[[Reply], None] | None = None) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.told = told

    def set(self, value: Any = None) -> None:
        self.value = value
        self._settle()

    def set_exception(self, error: Exception) -> None:
        if not self.done:  # kazoo says twice that a connection is closed
            self.error = error
            self._settle()

    def _settle(self) -> None:
        self.done = True
        if self.told is not None:
            self.told(self)

    def get(self, *expected: type[Exception]) -> Any:
        """The value; None for an error that was to be expected. Anything else is raised as what it means here (E9)."""
        if self.error is None or isinstance(self.error, expected):
            return self.value
        raise meaning(self.error) from self.error


def meaning(error: Exception) -> LeaseholdError | Lost:
    """The one mapping of what kazoo raises (E9)."""
    if isinstance(error, ConnectionLoss | SessionExpiredError | SessionMovedError | OperationTimeoutError):
        return Lost()
    if isinstance(error, NoAuthError):
        return ConfigError(
            "ZooKeeper does not permit this: the nodes below /lh1 belong to another user, see acl= and the credentials"
        )
    if isinstance(error, AuthFailedError | SASLException):
        return ConfigError("ZooKeeper refused the credentials of this URL")
    name = type(error).__name__.removesuffix("Error")
    if isinstance(error, ZookeeperError):
        return Unavailable(f"ZooKeeper answered {name}", engine="zookeeper")
    return Unavailable(f"ZooKeeper gave an answer that cannot be read ({name})", engine="zookeeper")


def is_write(request: Any) -> bool:
    return isinstance(request, Create2 | SetData | Delete)


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """No worker threads: callbacks run where they are made."""

    patience = 5.0  # seconds for a server to accept a connection, before the next one is tried

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(
        self, reading: Any, writing: Any, _: Any, timeout: float | None = None
    ) -> tuple[list[Any], list[Any], Any]:
        """One system call; kazoo's own makes and drops an epoll each time."""
        poll, by_number = select.poll(), {}
        for flag, sockets in ((select.POLLIN, reading), (select.POLLOUT, writing)):
            for each in sockets:
                poll.register(each, flag)
                by_number[each.fileno()] = each
        found = [by_number[number] for number, _ in poll.poll(None if timeout is None else max(0, timeout * 1000))]
        return [each for each in reading if each in found], [each for each in writing if each in found], []

    def create_connection(self, address: tuple[str, int], timeout: float, hostname: str = "", **tls: Any) -> Any:
        """As kazoo's own, but that nothing is left open when it fails."""
        sock = socket.create_connection(address, min(timeout, self.patience))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return secured(sock, hostname, **tls) if tls["use_ssl"] else sock
        except BaseException:
            sock.close()
            raise


def secured(sock: socket.socket, hostname: str, **tls: Any) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=tls["ca"])
    context.check_hostname = tls["check_hostname"]
    if not tls["verify_certs"]:
        context.verify_mode = ssl.CERT_NONE
    if tls["certfile"]:
        context.load_cert_chain(tls["certfile"], tls["keyfile"], tls["keyfile_password"])
    return context.wrap_socket(sock, server_hostname=hostname)


class Connection(ConnectionHandler):  # type: ignore[misc]
    """Tells its keeper when the session was confirmed or heard of, and ends without leaving a socket."""

    client: Keeper
    _ping_sent = 0.0
    _xid: int
    _arrived: bytearray | None = None  # what was read and not yet taken apart; None while connecting

    def _connect(self, *where: Any) -> tuple[float, float]:
        self._arrived = None
        try:
            _, connect_timeout = super()._connect(*where)
        except Exception as error:
            self.client.trouble = error
            raise
        self._arrived = bytearray()
        # kazoo sends a heart-beat after half of what it calls its read timeout, and gives up after the whole.
        return self.client.negotiated * 1000 * _BEAT * 2, connect_timeout

    def _invoke(self, timeout: float, request: Any, xid: Any = None) -> Any:
        sent = self.client.now()
        answer = super()._invoke(min(timeout, self.handler.patience), request, xid)
        if isinstance(request, Connect) and answer[0].time_out > 0:
            self.client.negotiated = answer[0].time_out / 1000
            self.client.trouble = None
            self.client.confirmed(sent, self.client.negotiated)
        return answer

    def _send_ping(self, timeout: float) -> None:
        self._ping_sent = self.client.now()
        super()._send_ping(timeout)

    def _send_request(self, read_timeout: float, connect_timeout: float) -> None:
        """All that is queued, in one write."""
        with suppress(OSError):
            self._read_sock.recv(4096)  # the wake-ups, of which there is one for each
        queue, frames = self.client._queue, bytearray()
        while queue:
            request, reply = queue.popleft()
            self._xid = self._xid % 2147483647 + 1
            body = _TWO.pack(self._xid, request.type) + request.serialize()
            frames += _ONE.pack(len(body)) + body
            self.client._pending.append((request, reply, self._xid))
        self._write(frames, connect_timeout)

    def _read_socket(self, timeout: float) -> Any:
        """All answers that have arrived."""
        waited, answer = self.ping_outstanding.is_set(), None
        self._fill()
        while answer is None and self._whole():
            answer = super()._read_socket(timeout)
        if waited and not self.ping_outstanding.is_set():
            self.client.touched(self._ping_sent)
        return answer

    def _fill(self) -> None:
        with self._socket_error_handling(), suppress(BlockingIOError, ssl.SSLWantReadError):
            while True:
                chunk = self._socket.recv(65_536)
                if not chunk:
                    raise ConnectionDropped("socket connection broken")
                self._arrived += chunk
                if len(chunk) < 65_536 and not getattr(self._socket, "pending", int)():
                    return

    def _whole(self) -> bool:
        """Whether a whole answer has arrived."""
        arrived = self._arrived or b""
        return len(arrived) >= 4 and len(arrived) >= 4 + _ONE.unpack_from(arrived)[0]

    def _read_header(self, timeout: float) -> Any:
        arrived = self._arrived
        if arrived is None:
            return super()._read_header(timeout)
        end = 4 + _ONE.unpack_from(arrived)[0]
        body = bytes(arrived[4:end])
        del arrived[:end]
        header, offset = ReplyHeader.deserialize(body, 0)
        return header, body, offset

    def zk_loop(self) -> None:
        try:
            super().zk_loop()
        except Exception as error:  # a refused SASL handshake, an unknown answer: the next call begins anew
            self.client.trouble = error
        finally:
            self.close()
            self.client.ended(self.client)


class Keeper(KazooClient):  # type: ignore[misc]
    """One session's connection. Callbacks come from its thread, and must not wait."""

    def __init__(
        self,
        address: Address,
        patience: float,
        now: Callable[[], float],
        confirmed: Callable[[float, float], None],
        touched: Callable[[float], None],
        changed: Callable[[str], None],
        ended: Callable[[Keeper], None],
    ) -> None:
        handler = Handler()
        handler.patience = max(0.2, min(patience, address.session / 3 / address.count))
        super().__init__(
            hosts=address.hosts,
            timeout=address.session,
            handler=handler,
            connection_retry=KazooRetry(
                max_tries=-1, delay=0.02, backoff=2, max_delay=1.0, sleep_func=handler.sleep_func
            ),
            command_retry=KazooRetry(max_tries=0, sleep_func=handler.sleep_func),
            logger=_log,
            **address.options,
        )
        self._connection = Connection(
            self, self._conn_retry.copy(), logger=_log, sasl_options=address.options.get("sasl_options")
        )
        self.negotiated = address.session
        self.trouble: Exception | None = None
        self.now, self.confirmed, self.touched, self.ended = now, confirmed, touched, ended
        self.add_listener(changed)

    @property
    def owner(self) -> int:
        """The session's number, which the server writes on every node of it."""
        return int(self._session_id or 0)

    @property
    def refused(self) -> bool:
        return isinstance(self.trouble, AuthFailedError | SASLException)

    def submit(self, requests: Sequence[Any], replies: Sequence[Reply]) -> None:
        """Have them sent together. A connection that is gone answers at once."""
        self._queue.extend(zip(requests, replies, strict=True))
        try:
            self._connection._write_sock.send(b"\0")
        except (OSError, AttributeError):
            for reply in replies:
                reply.set_exception(ConnectionClosedError())

    def unwatch(self, path: str, watcher: object) -> None:
        for table in (self._child_watchers, self._data_watchers):
            if path in table:
                table[path].discard(watcher)

    def leave(self) -> None:
        """End the session at the server, if that can be said; its thread then ends by itself. Never waits."""
        self._stopped.set()
        self._queue.append((CloseInstance, None))
        with suppress(OSError, AttributeError):
            self._connection._write_sock.send(b"\0")

    def sever(self) -> None:
        """The goodbye was not answered: its thread must end all the same."""
        with suppress(OSError, AttributeError):
            self._connection._socket.shutdown(2)

    def after_fork(self) -> None:
        """In a child: the parent's sockets become the null device, without a goodbye; its thread is not here."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (self._connection._socket, self._connection._read_sock, self._connection._write_sock):
            with suppress(OSError, AttributeError, ValueError):
                os.dup2(nothing, each.fileno(), inheritable=False)
        os.close(nothing)
        _INHERITED.append(self)
