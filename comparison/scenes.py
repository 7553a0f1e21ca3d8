"""The servers under an approach, fresh for every round, and how each of them fails over."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from leasehold import Client
from leasehold.fences import sql_schema
from leasehold.testing.servers.etcd import Cluster
from leasehold.testing.servers.mysql import MariaDB
from leasehold.testing.servers.postgresql import PostgreSQL
from leasehold.testing.servers.process import poll
from leasehold.testing.servers.redis import RedisServer
from leasehold.testing.servers.zookeeper import Ensemble


class Scene(NamedTuple):
    """`where`: URLs of the servers. `ready()`: before the first holder comes, if there is to be a fail-over.
    `fail_over()`: gives where others go from then on."""

    where: list[str]
    ledger: str
    ready: Callable[[], None] = lambda: None
    fail_over: Callable[[], list[str]] | None = None
    balance: Callable[[], int] | None = None  # of an account that is not in the ledger


def opened(ledger: str) -> str:
    with sqlite3.connect(ledger) as made:
        made.execute("create table account (v integer)")
        made.execute("insert into account values (0)")
        made.execute(sql_schema("sqlite"))
    made.close()
    return ledger


def balance(scene: Scene) -> int:
    if scene.balance is not None:
        return scene.balance()
    with sqlite3.connect(scene.ledger) as made:
        (value,) = made.execute("select v from account").fetchone()
    made.close()
    return int(value)


@contextmanager
def nothing(ledger: str) -> Iterator[Scene]:
    yield Scene([], opened(ledger))


@contextmanager
def a_file(ledger: str) -> Iterator[Scene]:
    yield Scene([f"sqlite://{ledger}-locks"], opened(ledger))


@contextmanager
def redis_pair(ledger: str, options: str = "") -> Iterator[Scene]:
    """The link breaks before the lock is taken, and the primary dies after it was acknowledged."""
    primary = RedisServer().start()
    replica = RedisServer(primary=primary).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica follows")

    def fail_over() -> list[str]:
        primary.kill()
        replica.ask("REPLICAOF", "NO", "ONE")
        return [f"redis://127.0.0.1:{replica.port}"]

    try:
        cut = lambda: replica.ask("REPLICAOF", "127.0.0.1", "1")  # noqa: E731
        yield Scene([f"redis://127.0.0.1:{primary.port}{options}"], opened(ledger), cut, fail_over)
    finally:
        primary.kill()
        replica.kill()


@contextmanager
def five_redis(ledger: str, *, as_one: bool = False) -> Iterator[Scene]:
    """Two are down when the lock is taken; they come back, and one that had it comes back without its data."""
    servers = [RedisServer().start() for _ in range(5)]
    where = [f"redis://127.0.0.1:{server.port}" for server in servers]
    if as_one:
        where = ["redlock://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)]

    def two_down() -> None:
        for server in servers[3:]:
            server.kill()

    def fail_over() -> list[str]:
        for server in servers[2:]:
            server.restart()
        return where

    try:
        yield Scene(where, opened(ledger), two_down, fail_over)
    finally:
        for server in servers:
            server.kill()


@contextmanager
def postgresql_pair(ledger: str, *, keeps_account: bool = False) -> Iterator[Scene]:
    """The standby is not there when the lock is taken; the primary dies, and the standby is promoted without it."""
    primary = PostgreSQL().start()
    primary.ask("create table account as select 0 as v")
    standby: list[PostgreSQL] = []

    def copy() -> None:
        with Client(primary.url()) as client, client.lock("account"):  # it knows of locks before this one
            pass
        standby.append(primary.standby())

    def fail_over() -> list[str]:
        primary.kill()
        standby[0].start()
        standby[0].promote()
        return [standby[0].url()]

    def balance() -> int:
        where = primary if primary.running else standby[0]
        return int(where.ask("select v from account")[0][0])

    try:
        yield Scene([primary.url()], opened(ledger), copy, fail_over, balance if keeps_account else None)
    finally:
        for server in (primary, *standby):
            server.kill()


@contextmanager
def mariadb(ledger: str) -> Iterator[Scene]:
    server = MariaDB().start()
    try:
        yield Scene([f"mysql://root@127.0.0.1:{server.port}/test"], opened(ledger))
    finally:
        server.kill()


@contextmanager
def three_etcd(ledger: str) -> Iterator[Scene]:
    """The leader dies."""
    cluster = Cluster(3).start()

    def fail_over() -> list[str]:
        cluster.leader().kill()
        return [f"etcd://{cluster.hosts}"]

    try:
        yield Scene([f"etcd://{cluster.hosts}"], opened(ledger), fail_over=fail_over)
    finally:
        cluster.kill()


@contextmanager
def three_zookeeper(ledger: str) -> Iterator[Scene]:
    """The leader dies."""
    ensemble = Ensemble().started
    where = ["zookeeper://" + ",".join(f"127.0.0.1:{port}" for port in ensemble.ports)]

    def fail_over() -> list[str]:
        ensemble.leader().kill()
        return where

    try:
        yield Scene(where, opened(ledger), fail_over=fail_over)
    finally:
        ensemble.kill()


SCENES: Final[dict[str, Callable[..., Any]]] = {
    "nothing": nothing,
    "file": a_file,
    "redis": redis_pair,
    "five-redis": five_redis,
    "redlock": partial(five_redis, as_one=True),
    "mysql": mariadb,
    "postgresql": postgresql_pair,
    "postgresql-account": partial(postgresql_pair, keeps_account=True),
    "etcd": three_etcd,
    "zookeeper": three_zookeeper,
}
