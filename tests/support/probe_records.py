"""What tests read and change inside records and their stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from leasehold.records.cron import CronTicks
from leasehold.records.stores import zookeeper
from leasehold.records.stores.engine_store import EngineStore
from leasehold.records.stores.memory import MemoryStore
from leasehold.records.stores.sql import SqlStore
from leasehold.records.stores.zookeeper import ZookeeperStore
from leasehold.runtime.base import Mutex, Runtime, run_sync
from tests.support.probe import Place

BUCKETS = Place(zookeeper, "_BUCKETS")  # nodes among which the records are divided

# Steps of the store on ZooKeeper that tests watch, or during which they do harm.
PIPELINE = Place(ZookeeperStore, "_pipeline")  # sends requests together
READ = Place(ZookeeperStore, "_read")
ROOT = Place(ZookeeperStore, "_root")  # the node below which all records are


def runtime_of(store: EngineStore | MemoryStore | SqlStore) -> Runtime:
    return store._runtime


def engine_of(store: EngineStore) -> Any:
    """The engine whose connection the store uses."""
    return store._engine()


def node_path(store: ZookeeperStore, key: str) -> str:
    """The node that has the record, or would have it."""
    return store._path(key)


def sweep(store: ZookeeperStore, bucket: str, deadline: float) -> None:
    run_sync(store._sweep(bucket, deadline))


def kept_records(store: MemoryStore) -> int:
    """How many records the store has, expired ones too."""
    return len(store._records)


def mutex(store: MemoryStore) -> Mutex:
    return store._mutex


def process_id(store: MemoryStore) -> int:
    """That of the process that the store takes itself to be in."""
    return store._pid


def tick_times(ticks: CronTicks, after: int) -> Iterator[int]:
    """The times of a cron expression."""
    return ticks._times(after)
