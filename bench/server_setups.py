"""A new engine of each kind on this machine, for the tables that measure all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final

from harness.servers.etcd import Cluster
from harness.servers.folders import scratch
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from harness.servers.process import free_ports
from harness.servers.redis import RedisServer
from harness.servers.zookeeper import Zookeeper


@contextmanager
def memory() -> Iterator[str]:
    yield "memory://bench"


@contextmanager
def sqlite() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"sqlite://{folder}/locks.db"


@contextmanager
def redis() -> Iterator[str]:
    server = RedisServer().start()
    try:
        yield f"redis://127.0.0.1:{server.port}"
    finally:
        server.stop()


@contextmanager
def postgresql() -> Iterator[str]:
    server = PostgreSQL().start()
    try:
        yield server.url()
    finally:
        server.stop()


@contextmanager
def mysql() -> Iterator[str]:
    server = MariaDB().start()
    try:
        yield f"mysql://root@127.0.0.1:{server.port}/leasehold"
    finally:
        server.stop()


@contextmanager
def etcd() -> Iterator[str]:
    member = Cluster(1).start().members[0]
    try:
        yield f"etcd://127.0.0.1:{member.port}"
    finally:
        member.stop()


@contextmanager
def zookeeper() -> Iterator[str]:
    server = Zookeeper(scratch(), free_ports(1)[0]).start()
    try:
        yield f"zookeeper://127.0.0.1:{server.port}"
    finally:
        server.stop()


SETUPS: Final[dict[str, Callable[[], AbstractContextManager[str]]]] = {
    place.__name__: place for place in (memory, sqlite, redis, postgresql, mysql, etcd, zookeeper)
}
