"""Values that change by compare-and-set, for short work with rare conflicts: no lock is held, nothing expires.

    stock = leasehold.versioned.EtcdKey("http://127.0.0.1:2379", "/stock/teapot")
    stock.update(lambda left: str(int(left or 5) - 1))     # read, decide, write if unchanged; else again

All have the same methods: `read()` returns value and version, `write(value, version)` raises `Conflict` unless that
version is still the newest, `update(fn)` does both until it succeeds, a bounded number of times. Loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold.records.value import Versioned

if TYPE_CHECKING:
    from leasehold.versioned.etcd import AsyncEtcdKey, EtcdKey
    from leasehold.versioned.zookeeper import AsyncZooKeeperNode, ZooKeeperNode

_MODULES = {
    "AsyncEtcdKey": "etcd",
    "AsyncZooKeeperNode": "zookeeper",
    "EtcdKey": "etcd",
    "ZooKeeperNode": "zookeeper",
}

__all__ = ["AsyncEtcdKey", "AsyncZooKeeperNode", "EtcdKey", "Versioned", "ZooKeeperNode"]


def __getattr__(name: str) -> object:
    if module := _MODULES.get(name):
        return getattr(import_module(f"leasehold.versioned.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
