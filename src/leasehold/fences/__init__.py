"""The resource's half of the bargain: fences refuse what comes from a holder of the past.

    fence = leasehold.fences.File("report.csv")
    with client.lock("report") as lease:
        fence.write(lease, "...")    # StaleToken if a newer lease was here

Each fence stands at one resource and has the same verbs: `claim(lease)`, `read(lease, ...)`, `write(lease, ...)`. In
place of the lease its token will do, or `leasehold.current_lease()`. The rules are in `rules.py`; the modules beside it
are one for each kind of resource, loaded on first use. None needs more than the client library you already use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold.fences.rules import Bearer, Pass, Shown

if TYPE_CHECKING:
    from leasehold.fences.alchemy import AlchemyColumn, AlchemyFence, AsyncAlchemyColumn, AsyncAlchemyFence, fence_table
    from leasehold.fences.calling import HTTPFence, LeaseAuth, headers, raise_for_stale
    from leasehold.fences.etcd import EtcdFence, EtcdLockFence
    from leasehold.fences.file import File
    from leasehold.fences.local import Local
    from leasehold.fences.objects import AsyncObjectFence, HTTPObjects, ObjectFence, Stored
    from leasehold.fences.redis import AsyncRedisFence, RedisFence
    from leasehold.fences.serving import ASGIFence, FileMarks, Marks, WSGIFence
    from leasehold.fences.sql.column import AsyncSQLColumn, SQLColumn
    from leasehold.fences.sql.dialect import sql_schema
    from leasehold.fences.sql.row import AsyncSQLFence, SQLFence
    from leasehold.fences.zookeeper import ZooKeeperFence, ZooKeeperLockFence

_HOMES = {
    "ASGIFence": "serving",
    "AlchemyColumn": "alchemy",
    "AlchemyFence": "alchemy",
    "AsyncAlchemyColumn": "alchemy",
    "AsyncAlchemyFence": "alchemy",
    "AsyncObjectFence": "objects",
    "AsyncRedisFence": "redis",
    "AsyncSQLColumn": "sql.column",
    "AsyncSQLFence": "sql.row",
    "EtcdFence": "etcd",
    "EtcdLockFence": "etcd",
    "File": "file",
    "FileMarks": "serving",
    "HTTPFence": "calling",
    "HTTPObjects": "objects",
    "LeaseAuth": "calling",
    "Local": "local",
    "Marks": "serving",
    "ObjectFence": "objects",
    "RedisFence": "redis",
    "SQLColumn": "sql.column",
    "SQLFence": "sql.row",
    "Stored": "objects",
    "WSGIFence": "serving",
    "ZooKeeperFence": "zookeeper",
    "ZooKeeperLockFence": "zookeeper",
    "fence_table": "alchemy",
    "headers": "calling",
    "raise_for_stale": "calling",
    "sql_schema": "sql.dialect",
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
    "Bearer",
    "EtcdFence",
    "EtcdLockFence",
    "File",
    "FileMarks",
    "HTTPFence",
    "HTTPObjects",
    "LeaseAuth",
    "Local",
    "Marks",
    "ObjectFence",
    "Pass",
    "RedisFence",
    "SQLColumn",
    "SQLFence",
    "Shown",
    "Stored",
    "WSGIFence",
    "ZooKeeperFence",
    "ZooKeeperLockFence",
    "fence_table",
    "headers",
    "raise_for_stale",
    "sql_schema",
]


def __getattr__(name: str) -> object:
    if home := _HOMES.get(name):
        return getattr(import_module(f"leasehold.fences.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
