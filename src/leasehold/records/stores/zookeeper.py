"""Records as nodes of ZooKeeper, changed by multi-operation transactions.

    /lh1/records/<bucket>/<key>            `keep`, version, data
    /lh1/records/<bucket>/<key>/<version>  empty: its path is what a transaction compares

ZooKeeper's own versions start again when a node is deleted and created again, so they cannot be compared (S1). The
empty node below a record is named after the record's random version: a transaction that replaces the record deletes
that node, and fails if it is gone.

Time is the leader's clock (S3). Each read begins with a write to `/lh1/records`: its reply has the leader's time, and
the read that follows on the same session sees everything that was written before (S2).

ZooKeeper does not expire nodes that have no session. So one new record in sixteen also checks up to 32 records of its
bucket, and deletes the expired ones: two for each new record, so about half of the records, at most, are expired ones.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from kazoo.exceptions import NodeExistsError, NoNodeError
from kazoo.protocol.serialization import Create, Delete, SetData

from leasehold.engines.zookeeper.attempt import create_root
from leasehold.engines.zookeeper.engine import ZookeeperEngine
from leasehold.engines.zookeeper.kazoo_adapter import Reply, ZookeeperConnectionLost, map_error
from leasehold.engines.zookeeper.nodes import ROOT
from leasehold.engines.zookeeper.requests import Create2, GetChildren, GetData, Transaction
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.records.store import Record
from leasehold.records.stores.engine_store import EngineStore, encode_record, parse_record

_BUCKETS: Final = 256  # a list of children must fit into a reply of one megabyte
_KEEP: Final = struct.Struct("!Q")  # in front of the record: milliseconds to keep it; 0: for ever
_MAX_DATA: Final = 1_000_000  # bytes; a server refuses requests of more than 1 MiB, unless jute.maxbuffer is raised
_SWEEP_PROBABILITY: Final = 1 / 16
_SWEEP_COUNT: Final = 32
_RETRY_DELAY: Final = 0.01  # seconds before a read is repeated after the connection was lost


class StoredRecord(NamedTuple):
    """A node, and whether its record had expired when it was read."""

    record: Record
    expired: bool

    @property
    def version(self) -> str:
        """As S1 compares it."""
        return "" if self.expired else self.record.version


class ZookeeperStore(EngineStore):
    engine_type = ZookeeperEngine

    async def read(self, key: str, seconds: float) -> Record | None:
        stored = await self._read(self._path(key), self._runtime.now() + seconds)
        return None if stored is None or stored.expired else stored.record

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        if len(record.data) > _MAX_DATA:
            raise ConfigError(
                f"ZooKeeper keeps records of at most {_MAX_DATA:,} bytes, and this one has {len(record.data):,}: "
                "store a reference to the data, or pass another store="
            )
        path, deadline = self._path(key), self._runtime.now() + seconds
        stored = await self._read(path, deadline)
        version = "" if stored is None else stored.version
        if version != expected_version:
            return version == record.version  # an earlier try was applied and its answer lost
        keep_ms = 0 if keep is None else max(1, round(keep * 1000))
        value = _KEEP.pack(keep_ms) + encode_record(record)
        try:
            written = await self._replace(path, stored, record.version, value, deadline)
        except ZookeeperConnectionLost as lost:
            text = "the connection to ZooKeeper was lost: the record may have been written"
            raise Unavailable(text, engine="zookeeper") from lost
        if written and stored is None and self._runtime.random() < _SWEEP_PROBABILITY:
            with suppress(LeaseholdError, ZookeeperConnectionLost):  # the record itself is written
                await self._sweep(path.rpartition("/")[0], deadline)
        return written

    async def _replace(
        self, path: str, stored: StoredRecord | None, version: str, value: bytes, deadline: float
    ) -> bool:
        """Replace the record that was read. False: another writer has changed it (S1)."""
        acl = self._session.url.acl
        version_node = Create(f"{path}/{version}", b"", acl, 0)
        if stored is None:
            operations: tuple[Any, ...] = (Create(path, value, acl, 0), version_node)
        else:
            operations = (Delete(f"{path}/{stored.record.version}", -1), version_node, SetData(path, value, -1))
        while True:
            (reply,) = await self._pipeline(deadline, Transaction(operations))
            if not (refused_by := reply.get()):
                return True
            (cause,) = refused_by
            if not isinstance(cause, NoNodeError | NodeExistsError):
                raise map_error(cause) from cause
            if stored is not None:
                await self._refuse_incomplete(path, stored.record.version, deadline)
                return False
            if isinstance(cause, NodeExistsError):
                return False
            await self._create_bucket(path.rpartition("/")[0], deadline)

    async def _refuse_incomplete(self, path: str, version: str, deadline: float) -> None:
        """Raise ConfigError if the record is still there, so that only the node of its version is missing: it could
        never be replaced, and a caller would try for ever."""
        found = await self._read(path, deadline)
        if found is not None and found.record.version == version:
            raise ConfigError(f"the ZooKeeper node {path} has no node of its version below it: remove it")

    async def _read(self, path: str, deadline: float) -> StoredRecord | None:
        """The newest record, even an expired one. Repeated if the connection is lost."""
        while True:
            try:
                clock, found = await self._pipeline(deadline, SetData(self._root, b"", -1), GetData(path, None))
            except ZookeeperConnectionLost as lost:
                left = deadline - self._runtime.now()
                if left <= 0:
                    raise Unavailable("the connection to ZooKeeper was lost", engine="zookeeper") from lost
                await self._runtime.sleep(min(_RETRY_DELAY, left))
                continue
            stat = clock.get(NoNodeError)  # None: there is no record at all yet
            return None if stat is None else _parse(found, stat.mtime)

    async def _create_bucket(self, bucket: str, deadline: float) -> None:
        acl = self._session.url.acl
        await create_root(self._session, self._runtime, deadline)
        for reply in await self._pipeline(deadline, Create2(self._root, b"", acl, 0), Create2(bucket, b"", acl, 0)):
            reply.get(NodeExistsError)

    async def _sweep(self, bucket: str, deadline: float) -> None:
        """Delete expired records among a few of this bucket."""
        (children,) = await self._pipeline(deadline, GetChildren(bucket, None))
        names = sorted(children.get(NoNodeError) or ())
        begin = int(self._runtime.random() * len(names))
        paths = [f"{bucket}/{name}" for name in (names[begin:] + names[:begin])[:_SWEEP_COUNT]]
        clock, *replies = await self._pipeline(
            deadline, SetData(self._root, b"", -1), *(GetData(path, None) for path in paths)
        )
        now = clock.get().mtime
        deletes = []
        for path, reply in zip(paths, replies, strict=True):
            with suppress(ConfigError):  # a node of another program stays
                stored = _parse(reply, now)
                if stored is not None and stored.expired:
                    deletes.append(Transaction((Delete(f"{path}/{stored.record.version}", -1), Delete(path, -1))))
        if deletes:  # one that another client has replaced meanwhile is not deleted: its version's node is gone
            await self._pipeline(deadline, *deletes)

    # -------------------------------------------------------------- requests

    @property
    def _session(self) -> Any:
        return self._engine().session

    @property
    def _root(self) -> str:
        return f"{self._session.url.chroot}{ROOT}/records"

    def _path(self, key: str) -> str:
        return f"{self._root}/{zlib.crc32(key.encode()) % _BUCKETS:02x}/{key}"

    async def _pipeline(self, deadline: float, *requests: Any) -> Sequence[Reply]:
        replies: Sequence[Reply] = await self._session.pipeline(self._runtime, requests, deadline)
        return replies


def _parse(reply: Reply, now_ms: int) -> StoredRecord | None:
    data, stat = reply.get(NoNodeError) or (b"", None)
    if stat is None:
        return None
    record = parse_record((data or b"")[_KEEP.size :])  # None: a node that another program created without data
    (keep_ms,) = _KEEP.unpack_from(data)
    return StoredRecord(record, bool(keep_ms) and stat.mtime + keep_ms <= now_ms)


open_on_engine = ZookeeperStore.open
