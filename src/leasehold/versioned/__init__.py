"""Values that change by compare-and-set, for short work that seldom meets: no lock is held, nothing lapses.

    stock = leasehold.versioned.EtcdKey("http://127.0.0.1:2379", "/stock/teapot")
    stock.update(lambda left: str(int(left or 5) - 1))     # read, decide, write if nobody else did; else again

Each has the same verbs: `read()` gives value and version, `write(value, version)` raises `Conflict` unless that is the
newest still, `update(fn)` does both until it succeeds, a bounded number of times. Loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leasehold.recipes.versioned import Versioned

if TYPE_CHECKING:
    from leasehold.versioned.etcd import AsyncEtcdKey, EtcdKey
    from leasehold.versioned.zookeeper import AsyncZooKeeperNode, ZooKeeperNode

_HOMES = {
    "AsyncEtcdKey": "etcd",
    "AsyncZooKeeperNode": "zookeeper",
    "EtcdKey": "etcd",
    "ZooKeeperNode": "zookeeper",
}

__all__ = ["AsyncEtcdKey", "AsyncZooKeeperNode", "EtcdKey", "Versioned", "ZooKeeperNode"]


def __getattr__(name: str) -> object:
    if home := _HOMES.get(name):
        return getattr(import_module(f"leasehold.versioned.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
