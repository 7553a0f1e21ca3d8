"""kazoo, with what a lock cannot use taken off: its retries, its callback threads, its patience, its goodbyes.

One thread per session remains: it writes requests, reads answers, and runs our callbacks, which only note and signal.
Requests go to kazoo's own queue, below its convenience calls: those add results and hops of their own. What is used of
kazoo's inside is all in this file and in connection.py.
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
from kazoo.protocol.serialization import CloseInstance, Create2, Delete, SetData
from kazoo.retry import KazooRetry

from leasehold.engines.zookeeper.address import Address
from leasehold.engines.zookeeper.connection import Connection, Handler
from leasehold.errors import ConfigError, LeaseholdError, Unavailable

# kazoo's own log says something of every try to connect: it is there for whoever sets its level. Never what is below
# INFO: there kazoo shows requests, passwords among them.
_log = logging.getLogger("leasehold.zookeeper.kazoo")
_log.setLevel(logging.ERROR)
_log.addFilter(lambda record: record.levelno >= logging.INFO)

EPHEMERAL_SEQUENTIAL: Final = 3
CONTAINER: Final = 4

_PATIENCE: Final = 1 / 3  # of the session's timeout: to try each server once

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


class Keeper(KazooClient):  # type: ignore[misc]
    """One session's connection. Callbacks come from its thread, and must not wait."""

    def __init__(
        self,
        address: Address,
        patience: float,
        now: Callable[[], float],
        confirmed: Callable[[float, float, int], None],
        touched: Callable[[float], None],
        passed: Callable[[], None],
        changed: Callable[[str], None],
        ended: Callable[[Keeper], None],
    ) -> None:
        handler = Handler()
        super().__init__(
            hosts=address.hosts,
            timeout=address.session,
            handler=handler,
            connection_retry=KazooRetry(
                max_tries=-1, delay=0.02, backoff=2, max_delay=0.5, sleep_func=handler.sleep_func
            ),
            command_retry=KazooRetry(max_tries=0, sleep_func=handler.sleep_func),
            logger=_log,
            **address.options,
        )
        self._patience = patience
        self.negotiated = address.session
        self.trouble: Exception | None = None
        self.now, self.confirmed, self.touched, self.passed, self.ended = now, confirmed, touched, passed, ended
        self._connection = Connection(
            self, self._conn_retry.copy(), logger=_log, sasl_options=address.options.get("sasl_options")
        )
        self.add_listener(changed)

    def open(self) -> None:
        """Start its thread. Raises what the system does when it has no descriptor or thread left."""
        try:
            self.start_async()
        except BaseException:
            self._connection.close()
            raise

    def patience(self, servers: int) -> float:
        """For each of so many, so that all can be tried while a lease lasts."""
        return max(0.2, min(self._patience, self.negotiated * _PATIENCE / max(1, servers)))

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
            table.get(path, set()).discard(watcher)  # never an entry more: its thread may be going through them

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
