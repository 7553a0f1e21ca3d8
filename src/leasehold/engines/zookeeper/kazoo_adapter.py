"""kazoo without what a lock cannot use: its retries, callback threads, long timeouts and blocking shutdown.

One thread per session remains. It writes requests, reads replies, and runs our callbacks, which only record and signal.
Requests are put into kazoo's own queue directly: its public methods would add result objects and thread switches. Only
this file and connection.py use kazoo's private attributes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    ConnectionClosedError,
    ConnectionLoss,
    NoAuthError,
    OperationTimeoutError,
    SASLException,
    SessionExpiredError,
    SessionMovedError,
    ZookeeperError,
)
from kazoo.protocol.serialization import CloseInstance, Delete, SetData
from kazoo.retry import KazooRetry

from leasehold.core.texts import server_text
from leasehold.engines.zookeeper.connection import KazooConnection, KazooHandler
from leasehold.engines.zookeeper.requests import MAX_CHILDREN, Create2, TooManyChildren
from leasehold.engines.zookeeper.url import ZookeeperUrl
from leasehold.errors import AccessDenied, ConfigError, LeaseholdError, ListingTooLong, Unavailable


def _drop_requests(record: logging.LogRecord) -> bool:
    """kazoo logs requests, with passwords, below INFO and in tracebacks. Keep only the text of an unexpected error."""
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        record.msg, record.args = (
            "unexpected error on the connection to ZooKeeper; reconnecting: %s: %s",
            (
                type(error).__name__,
                server_text(error),
            ),
        )
        record.exc_info = record.exc_text = None
    return record.levelno >= logging.INFO


# kazoo logs every connection attempt: set this logger's level to see it.
_log = logging.getLogger("leasehold.zookeeper.kazoo")
_log.setLevel(logging.ERROR)
_log.addFilter(_drop_requests)

EPHEMERAL_SEQUENTIAL: Final = 3
CONTAINER: Final = 4

_CONNECT_SHARE: Final = 1 / 3  # of the session timeout, in which each server is tried once

# Adapters of the parent process, kept for ever: if they were collected, their sockets would be closed with a warning.
_INHERITED_ADAPTERS: list[KazooAdapter] = []


class ZookeeperConnectionLost(Exception):
    """The connection was lost with a request in flight: its outcome is unknown. Never leaves the engine."""


class CreateContainer(Create2):
    """A container node: the server deletes it, without a race, some time after its last child is gone."""

    type = 19


class Reply:
    """The reply to one request. The session's thread sets it."""

    __slots__ = ("done", "error", "on_done", "value")

    def __init__(self, on_done: Callable[[Reply], None] | None = None) -> None:
        self.done = False
        self.value: Any = None
        self.error: Exception | None = None
        self.on_done = on_done

    def set(self, value: Any = None) -> None:
        self.value = value
        self._finish()

    def set_exception(self, error: Exception) -> None:
        if not self.done:  # kazoo reports a closed connection twice
            # The frames of its traceback hold the reply and refer to this object: a refused reply of megabytes would
            # stay until the next garbage collection.
            self.error = error.with_traceback(None)
            self._finish()

    def _finish(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)

    def get(self, *expected: type[Exception]) -> Any:
        """The value, or None for an expected error. Any other error is mapped and raised (E9)."""
        if self.error is None or isinstance(self.error, expected):
            return self.value
        raise map_error(self.error) from self.error


def map_error(error: Exception) -> LeaseholdError | ZookeeperConnectionLost:
    """The one mapping of kazoo's errors (E9)."""
    if isinstance(error, ConnectionLoss | SessionExpiredError | SessionMovedError | OperationTimeoutError):
        return ZookeeperConnectionLost()
    if isinstance(error, NoAuthError):
        return AccessDenied(
            "ZooKeeper does not permit this: nodes below /lh1 belong to another user; check acl= and the credentials"
        )
    if isinstance(error, AuthFailedError | SASLException):
        return ConfigError("ZooKeeper refused the credentials of this URL")
    if isinstance(error, TooManyChildren):
        return ListingTooLong(
            f"more than {MAX_CHILDREN:,} names, or waiters of one name, are in use: a client reads no more",
            engine="zookeeper",
        )
    name = type(error).__name__.removesuffix("Error")
    if isinstance(error, ZookeeperError):
        return Unavailable(f"ZooKeeper reported the error {name}", engine="zookeeper")
    return Unavailable(f"ZooKeeper sent an invalid reply ({name})", engine="zookeeper")


def is_write(request: Any) -> bool:
    return isinstance(request, Create2 | SetData | Delete)


class KazooAdapter(KazooClient):  # type: ignore[misc]
    """The connection of one session. Callbacks run on its thread and must not block."""

    def __init__(
        self,
        url: ZookeeperUrl,
        call_timeout: float,
        now: Callable[[], float],
        on_session_confirmed: Callable[[float, float, int], None],
        on_heartbeat: Callable[[float], None],
        on_sent: Callable[[], None],
        on_state_change: Callable[[str], None],
        on_refused: Callable[[], None],
        on_ended: Callable[[KazooAdapter], None],
    ) -> None:
        handler, options = KazooHandler(), url.session_options()
        super().__init__(
            hosts=url.hosts,
            timeout=url.session_timeout,
            handler=handler,
            connection_retry=KazooRetry(
                max_tries=-1, delay=0.02, backoff=2, max_delay=0.5, sleep_func=handler.sleep_func
            ),
            command_retry=KazooRetry(max_tries=0, sleep_func=handler.sleep_func),
            logger=_log,
            **options,
        )
        self._call_timeout = call_timeout
        self.negotiated_timeout = url.session_timeout
        self.last_error: Exception | None = None
        self.round = 0  # the current round of connects, in which each server is tried once
        self.refused_round = 0  # the last round in which every server refused
        self.refusal = ""  # why
        self.no_quorum_round = -1  # the last round in which a server said that it does not belong to a quorum
        self._on_refused = on_refused
        self.now, self.on_session_confirmed, self.on_heartbeat, self.on_sent, self.on_ended = (
            now,
            on_session_confirmed,
            on_heartbeat,
            on_sent,
            on_ended,
        )
        self._connection = KazooConnection(
            self, self._conn_retry.copy(), logger=_log, sasl_options=options.get("sasl_options")
        )
        self.add_listener(on_state_change)

    def open(self) -> None:
        """Start the thread. Raises OSError or RuntimeError if the system has no descriptor or thread left."""
        try:
            self.start_async()
        except BaseException:
            self._connection.close()
            raise

    def connect_timeout(self, servers: int) -> float:
        """The timeout for each of `servers`, so that all can be tried before a lease ends."""
        return max(0.2, min(self._call_timeout, self.negotiated_timeout * _CONNECT_SHARE / max(1, servers)))

    @property
    def session_id(self) -> int:
        """The session's id, which the server stores as `ephemeralOwner` of every node of the session."""
        return int(self._session_id or 0)

    @property
    def credentials_refused(self) -> bool:
        return isinstance(self.last_error, AuthFailedError | SASLException)

    def on_all_refused(self, why: str) -> None:
        self.refused_round, self.refusal = self.round, why
        self._on_refused()

    @property
    def lacks_quorum(self) -> bool:
        """Whether a server said so in this round of connects or in the last one."""
        return self.no_quorum_round >= self.round - 1

    def submit(self, requests: Sequence[Any], replies: Sequence[Reply]) -> None:
        """Send the requests together. If the connection is closed, every reply fails at once."""
        self._queue.extend(zip(requests, replies, strict=True))
        try:
            self._connection._write_sock.send(b"\0")
        except (OSError, AttributeError):
            for reply in replies:
                reply.set_exception(ConnectionClosedError())

    def unwatch(self, path: str, watcher: object) -> None:
        for table in (self._child_watchers, self._data_watchers):
            table.get(path, set()).discard(watcher)  # must not add a key: kazoo's thread may be iterating over it

    def close_session(self) -> None:
        """Ask the server, if connected, to end the session; the thread then ends. Never waits."""
        self._stopped.set()
        self._queue.append((CloseInstance, None))
        with suppress(OSError, AttributeError):
            self._connection._write_sock.send(b"\0")

    def shutdown_socket(self) -> None:
        """Make the thread end even if the server did not answer `close_session`."""
        with suppress(OSError, AttributeError):
            self._connection._socket.shutdown(2)

    def after_fork(self) -> None:
        """In a forked child, where the thread does not exist: replace the parent's sockets by the null device, and send
        nothing."""
        null_device = os.open(os.devnull, os.O_RDWR)
        for sock in (self._connection._socket, self._connection._read_sock, self._connection._write_sock):
            with suppress(OSError, AttributeError, ValueError):
                os.dup2(null_device, sock.fileno(), inheritable=False)
        os.close(null_device)
        _INHERITED_ADAPTERS.append(self)
