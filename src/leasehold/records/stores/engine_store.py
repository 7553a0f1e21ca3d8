"""Stores on the connections of an engine: Redis, etcd, ZooKeeper.

The engine takes care of deadlines, event loops, forks and closing. A store of the client's own URL uses the engine of
the client; a store of another URL has a client of its own, which takes no locks.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

from leasehold.client.base import BaseClient
from leasehold.client.core import ClientCore
from leasehold.records.store import VERSION_LENGTH, Record, check_record


class EngineStore:
    engine_type: ClassVar[type[Any]]

    def __init__(self, core: ClientCore, own_client: BaseClient | None = None) -> None:
        """`own_client`: the client of `core`, if it is the store's own."""
        self._core, self._own_client = core, own_client
        self._runtime = core.runtime

    @classmethod
    def open(cls, client: BaseClient, url: str | None) -> EngineStore:
        """The store of this URL; None: of the client's own. Raises `ConfigError` if the URL is not valid."""
        core = client._core
        if url is None and isinstance(core.engine_unless_closed(), cls.engine_type):
            return cls(core)
        own_client = client._new_client(core.config.url if url is None else url)
        return cls(own_client._core, own_client)

    def _engine(self) -> Any:
        return self._core.engine()

    def close(self) -> Awaitable[None] | None:
        return None if self._own_client is None else self._own_client._close()


def encode_record(record: Record) -> bytes:
    """The version and the data, in one value."""
    return record.version.encode("ascii") + record.data


def parse_record(value: object) -> Record:
    if not isinstance(value, bytes):  # a server may send anything
        return check_record(None, None)
    return check_record(value[:VERSION_LENGTH].decode("latin-1"), value[VERSION_LENGTH:])
