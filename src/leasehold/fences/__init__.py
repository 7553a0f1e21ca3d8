"""Fences: checks at the protected resource that refuse requests from stale holders.

    fence = leasehold.fences.File("report.csv")
    with client.lock("report") as lease:
        fence.write(lease, "...")    # StaleToken if a newer lease was here

A fence guards one resource. All fences have the same methods: `claim(lease)`, `read(lease, ...)`, `write(lease, ...)`.
Instead of the lease you can pass its token or `leasehold.current_lease()`. The rules are in `rules.py`; the other
modules implement them for one kind of resource each, and are loaded on first use. No fence needs more than the client
library you already use.

rules.py          what all fences share
in_process.py     an object in this process
file.py           a file; token_file.py: the highest tokens in a file
sql/              SQL databases over DB-API
sqlalchemy.py     the same for SQLAlchemy
redis.py  etcd.py  zookeeper.py     values, keys and nodes; etcd_http.py: etcd's JSON gateway
object_store.py   objects in a store with conditional writes
urllib_client.py  requests of the fences that use HTTP
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold.fences.rules import HasToken, LeaseLike, TokenInfo, on_event

if TYPE_CHECKING:
    from leasehold.fences.etcd import EtcdFence, EtcdLockFence
    from leasehold.fences.file import File
    from leasehold.fences.in_process import Local
    from leasehold.fences.object_store import AsyncObjectFence, HTTPObjects, ObjectFence, StoredObject
    from leasehold.fences.redis import AsyncRedisFence, RedisFence
    from leasehold.fences.sql.column import AsyncSQLColumn, SQLColumn
    from leasehold.fences.sql.dialect import sql_schema
    from leasehold.fences.sql.row import AsyncSQLFence, SQLFence
    from leasehold.fences.sqlalchemy import (
        AlchemyColumn,
        AlchemyFence,
        AsyncAlchemyColumn,
        AsyncAlchemyFence,
        fence_table,
    )
    from leasehold.fences.zookeeper import ZooKeeperFence, ZooKeeperLockFence
    from leasehold.http.fence_client import HTTPFence, LeaseAuth, headers, raise_for_stale
    from leasehold.http.fence_middleware import ASGIFence, FileTokens, MemoryTokens, WSGIFence

_MODULES = {
    "ASGIFence": "leasehold.http.fence_middleware",
    "AlchemyColumn": "leasehold.fences.sqlalchemy",
    "AlchemyFence": "leasehold.fences.sqlalchemy",
    "AsyncAlchemyColumn": "leasehold.fences.sqlalchemy",
    "AsyncAlchemyFence": "leasehold.fences.sqlalchemy",
    "AsyncObjectFence": "leasehold.fences.object_store",
    "AsyncRedisFence": "leasehold.fences.redis",
    "AsyncSQLColumn": "leasehold.fences.sql.column",
    "AsyncSQLFence": "leasehold.fences.sql.row",
    "EtcdFence": "leasehold.fences.etcd",
    "EtcdLockFence": "leasehold.fences.etcd",
    "File": "leasehold.fences.file",
    "FileTokens": "leasehold.http.fence_middleware",
    "HTTPFence": "leasehold.http.fence_client",
    "HTTPObjects": "leasehold.fences.object_store",
    "LeaseAuth": "leasehold.http.fence_client",
    "Local": "leasehold.fences.in_process",
    "MemoryTokens": "leasehold.http.fence_middleware",
    "ObjectFence": "leasehold.fences.object_store",
    "RedisFence": "leasehold.fences.redis",
    "SQLColumn": "leasehold.fences.sql.column",
    "SQLFence": "leasehold.fences.sql.row",
    "StoredObject": "leasehold.fences.object_store",
    "WSGIFence": "leasehold.http.fence_middleware",
    "ZooKeeperFence": "leasehold.fences.zookeeper",
    "ZooKeeperLockFence": "leasehold.fences.zookeeper",
    "fence_table": "leasehold.fences.sqlalchemy",
    "headers": "leasehold.http.fence_client",
    "raise_for_stale": "leasehold.http.fence_client",
    "sql_schema": "leasehold.fences.sql.dialect",
}

__all__ = [
    "ASGIFence",
    "AlchemyColumn",
    "AlchemyFence",
    "AsyncAlchemyColumn",
    "AsyncAlchemyFence",
    "AsyncObjectFence",
    "AsyncRedisFence",
    "AsyncSQLColumn",
    "AsyncSQLFence",
    "EtcdFence",
    "EtcdLockFence",
    "File",
    "FileTokens",
    "HTTPFence",
    "HTTPObjects",
    "HasToken",
    "LeaseAuth",
    "LeaseLike",
    "Local",
    "MemoryTokens",
    "ObjectFence",
    "RedisFence",
    "SQLColumn",
    "SQLFence",
    "StoredObject",
    "TokenInfo",
    "WSGIFence",
    "ZooKeeperFence",
    "ZooKeeperLockFence",
    "fence_table",
    "headers",
    "on_event",
    "raise_for_stale",
    "sql_schema",
]


def __getattr__(name: str) -> object:
    if module := _MODULES.get(name):
        return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
