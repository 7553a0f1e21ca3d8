"""Records as keys of etcd: written by transactions that compare the key's revision, which never repeats.

A record with `keep` is attached to an etcd lease of its own, and etcd deletes both. etcd counts whole seconds, at least
about two, and starts again when its leader changes: a record may exist for longer than `keep`, never for less.
"""

from __future__ import annotations

from math import ceil

from leasehold.engines.etcd.engine import EtcdEngine
from leasehold.engines.etcd.messages import (
    EQUAL,
    LEASE_GRANT,
    LEASE_REVOKE,
    MOD,
    RANGE,
    TXN,
    Compare,
    KeyValue,
    LeaseGrantRequest,
    LeaseId,
    PutRequest,
    RangeRequest,
    RequestOp,
    TxnRequest,
)
from leasehold.engines.etcd.rpc import LeaseAlreadyExists, RpcClient
from leasehold.errors import Unavailable
from leasehold.records.store import Record
from leasehold.records.stores.engine_store import EngineStore, encode_record, parse_record


class EtcdStore(EngineStore):
    engine_type = EtcdEngine

    async def read(self, key: str, seconds: float) -> Record | None:
        engine, deadline = self._engine(), self._runtime.now() + seconds
        found = await _find(engine.rpc, _etcd_key(engine, key), deadline)
        return None if found is None else parse_record(found.value)

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        engine, deadline = self._engine(), self._runtime.now() + seconds
        rpc, etcd_key = engine.rpc, _etcd_key(engine, key)
        found = await _find(rpc, etcd_key, deadline) if expected_version else None
        version = parse_record(found.value).version if found else ""
        if version != expected_version:
            return version == record.version  # an earlier try was applied and its answer lost
        lease_id = 0 if keep is None else await _grant_lease(rpc, record, keep, deadline)
        txn = TxnRequest(
            (Compare(EQUAL, MOD, etcd_key, mod_revision=found.mod_revision if found else 0),),
            (RequestOp(put=PutRequest(etcd_key, encode_record(record), lease_id)),),
            (RequestOp(RangeRequest(etcd_key)),),
        )
        unconfirmed: list[str] = []
        reply = await rpc.call(TXN, txn, deadline, unconfirmed)
        if reply.succeeded:
            # Only the lease that the replaced write made: another program may have given the key one that keeps locks.
            _revoke_nowait(rpc, found.lease if found and found.lease == _lease_id(expected_version) else 0)
            return True
        current = reply.responses[0].range.kvs if reply.responses and reply.responses[0].range else ()
        if current and current[0].value.startswith(record.version.encode("ascii")):
            return True  # an earlier try of this call was applied
        if unconfirmed:
            raise Unavailable(
                f"another writer changed the record, perhaps after this one: {unconfirmed[0]}", engine="etcd"
            )
        _revoke_nowait(rpc, lease_id)
        return False


def _etcd_key(engine: EtcdEngine, key: str) -> bytes:
    return f"{engine.root}r/{key}".encode()


async def _find(rpc: RpcClient, etcd_key: bytes, deadline: float) -> KeyValue | None:
    reply = await rpc.call(RANGE, RangeRequest(etcd_key), deadline)
    return reply.kvs[0] if reply.kvs else None


async def _grant_lease(rpc: RpcClient, record: Record, keep: float, deadline: float) -> int:
    """A lease for this very record."""
    lease_id = _lease_id(record.version)
    try:
        await rpc.call(LEASE_GRANT, LeaseGrantRequest(ceil(keep), lease_id), deadline)
    except LeaseAlreadyExists:
        await rpc.keep_alive([lease_id], deadline)  # an earlier try created it: its life starts again
    return lease_id


def _lease_id(version: str) -> int:
    """It comes from the version, so that a repeated write leaves no lease behind."""
    return int(version[:16], 16) >> 1 or 1


def _revoke_nowait(rpc: RpcClient, lease_id: int) -> None:
    """Revoke a lease that has no key any more. If this is not sent, etcd ends it after its ttl."""
    if lease_id:
        rpc.send_nowait(LEASE_REVOKE, LeaseId(lease_id))


open_on_engine = EtcdStore.open
