"""The data of a ZooKeeper node, over the caller's kazoo client: the version is ZooKeeper's own, counted from 1.

If a node is deleted and created again, its version starts over, and a write that was decided long before may then be
accepted. So do not delete nodes that are used this way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    SessionExpiredError,
)

from leasehold.config import check_seconds
from leasehold.errors import ConfigError, Conflict, Unavailable
from leasehold.records.value import BaseValue, Versioned
from leasehold.versioned.base import AsyncValue, Value

T = TypeVar("T")

_CONNECTION_ERRORS: Final = (ConnectionClosedError, ConnectionLoss, OperationTimeoutError, SessionExpiredError)


class _ZooKeeperBackend:
    def __init__(self, client: Any, path: str, timeout: float) -> None:
        if not isinstance(path, str) or not path.startswith("/") or path.endswith("/"):
            raise ConfigError(f"{path!r} is not the path of a node, such as /a/b")
        check_seconds("timeout", timeout, allow_zero=False)
        self.name, self._client, self._timeout = path, client, timeout

    def read(self) -> Versioned:
        self._call(self._client.sync_async, "/")  # the connected server may lag behind
        try:
            data, stat = self._call(self._client.get_async, self.name)
        except NoNodeError:
            return Versioned(None, 0)
        return Versioned(data, stat.version + 1)

    def write(self, value: bytes, version: int) -> Versioned:
        try:
            if version:
                stat = self._call(self._client.set_async, self.name, value, version - 1)
                return Versioned(value, stat.version + 1)
            self._call(self._client.create_async, self.name, value, makepath=True)
        except (BadVersionError, NodeExistsError, NoNodeError) as error:
            raise Conflict(self.name) from error
        return Versioned(value, 1)

    def _call(self, method: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        try:
            return method(*args, **kwargs).get(timeout=self._timeout)
        except (self._client.handler.timeout_exception, *_CONNECTION_ERRORS) as error:
            text = f"{self.name}: no answer from ZooKeeper; a write may have been applied: {type(error).__name__}"
            raise Unavailable(text, engine="zookeeper") from error


class _ZooKeeperValue(BaseValue):
    def __init__(self, client: Any, path: str, *, timeout: float = 5.0) -> None:
        """`client`: a started `kazoo.client.KazooClient`. `timeout`: seconds for each request."""
        super().__init__(_ZooKeeperBackend(client, path, timeout))


class ZooKeeperNode(_ZooKeeperValue, Value):
    """The data of one ZooKeeper node, changed by compare-and-set. The first write creates the node."""


class AsyncZooKeeperNode(_ZooKeeperValue, AsyncValue):
    """The asyncio twin of `ZooKeeperNode`."""
