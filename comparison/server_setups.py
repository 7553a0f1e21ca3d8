"""The servers of an approach, new for every round, and how each of them fails over."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

from harness.servers.etcd import Cluster
from harness.servers.mysql import MariaDB
from harness.servers.postgresql import PostgreSQL
from harness.servers.process import poll
from harness.servers.redis import RedisServer
from harness.servers.zookeeper import Ensemble
from leasehold import Client
from leasehold.fences import sql_schema


class ServerSetup(NamedTuple):
    """`urls`: the servers. `prepare()` runs before the first holder acquires, if there is to be a failover.
    `fail_over()` returns the URLs to use from then on."""

    urls: list[str]
    account_db: str
    prepare: Callable[[], None] = lambda: None
    fail_over: Callable[[], list[str]] | None = None
    balance: Callable[[], int] | None = None  # of an account that is not in `account_db`


def create_account_db(account_db: str) -> str:
    with sqlite3.connect(account_db) as db:
        db.execute("create table account (v integer, version integer)")
        db.execute("insert into account values (0, 0)")
        db.execute("create table done (request text primary key)")
        db.execute(sql_schema("sqlite"))
    db.close()
    return account_db


def balance(setup: ServerSetup) -> int:
    if setup.balance is not None:
        return setup.balance()
    with sqlite3.connect(setup.account_db) as db:
        (value,) = db.execute("select v from account").fetchone()
    db.close()
    return int(value)


@contextmanager
def no_server(account_db: str) -> Iterator[ServerSetup]:
    yield ServerSetup([], create_account_db(account_db))


@contextmanager
def sqlite_file(account_db: str) -> Iterator[ServerSetup]:
    yield ServerSetup([f"sqlite://{account_db}-locks"], create_account_db(account_db))


@contextmanager
def redis_pair(account_db: str, options: str = "") -> Iterator[ServerSetup]:
    """The replication link breaks before the lock is acquired, and the primary dies after it acknowledged the lock."""
    primary = RedisServer().start()
    replica = RedisServer(primary=primary).start()
    poll(lambda: "state=online" in primary.info("replication").get("slave0", ""), 30, lambda: "the replica follows")

    def fail_over() -> list[str]:
        primary.kill()
        replica.ask("REPLICAOF", "NO", "ONE")
        return [f"redis://127.0.0.1:{replica.port}"]

    try:
        cut = lambda: replica.ask("REPLICAOF", "127.0.0.1", "1")  # noqa: E731
        yield ServerSetup([f"redis://127.0.0.1:{primary.port}{options}"], create_account_db(account_db), cut, fail_over)
    finally:
        primary.kill()
        replica.kill()


@contextmanager
def five_redis(account_db: str, *, as_one: bool = False) -> Iterator[ServerSetup]:
    """Two servers are down when the lock is acquired. They come back, and one that had granted it restarts without
    its data."""
    servers = [RedisServer().start() for _ in range(5)]
    urls = [f"redis://127.0.0.1:{server.port}" for server in servers]
    if as_one:
        urls = ["redlock://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)]

    def two_down() -> None:
        for server in servers[3:]:
            server.kill()

    def fail_over() -> list[str]:
        for server in servers[2:]:
            server.restart()
        return urls

    try:
        yield ServerSetup(urls, create_account_db(account_db), two_down, fail_over)
    finally:
        for server in servers:
            server.kill()


@contextmanager
def postgresql_pair(account_db: str, *, keeps_account: bool = False) -> Iterator[ServerSetup]:
    """The standby is not running when the lock is acquired. The primary dies, and the standby is promoted without
    the lock."""
    primary = PostgreSQL().start()
    primary.ask("create table account as select 0 as v")
    standby: list[PostgreSQL] = []

    def copy() -> None:
        with Client(primary.url()) as client, client.lock("account"):  # so that the standby knows an earlier lock
            pass
        standby.append(primary.standby())

    def fail_over() -> list[str]:
        primary.kill()
        standby[0].start()
        standby[0].promote()
        return [standby[0].url()]

    def balance() -> int:
        current = primary if primary.running else standby[0]
        return int(current.ask("select v from account")[0][0])

    try:
        yield ServerSetup(
            [primary.url()], create_account_db(account_db), copy, fail_over, balance if keeps_account else None
        )
    finally:
        for server in (primary, *standby):
            server.kill()


@contextmanager
def mariadb(account_db: str) -> Iterator[ServerSetup]:
    server = MariaDB().start()
    try:
        yield ServerSetup([f"mysql://root@127.0.0.1:{server.port}/test"], create_account_db(account_db))
    finally:
        server.kill()


@contextmanager
def three_etcd(account_db: str) -> Iterator[ServerSetup]:
    """The leader dies."""
    cluster = Cluster(3).start()

    def fail_over() -> list[str]:
        cluster.leader().kill()
        return [f"etcd://{cluster.hosts}"]

    try:
        yield ServerSetup([f"etcd://{cluster.hosts}"], create_account_db(account_db), fail_over=fail_over)
    finally:
        cluster.kill()


@contextmanager
def three_zookeeper(account_db: str) -> Iterator[ServerSetup]:
    """The leader dies."""
    ensemble = Ensemble().started
    urls = ["zookeeper://" + ",".join(f"127.0.0.1:{port}" for port in ensemble.ports)]

    def fail_over() -> list[str]:
        ensemble.leader().kill()
        return urls

    try:
        yield ServerSetup(urls, create_account_db(account_db), fail_over=fail_over)
    finally:
        ensemble.kill()


SETUPS: Final[dict[str, Callable[..., Any]]] = {
    "nothing": no_server,
    "file": sqlite_file,
    "redis": redis_pair,
    "five-redis": five_redis,
    "redlock": partial(five_redis, as_one=True),
    "mysql": mariadb,
    "postgresql": postgresql_pair,
    "postgresql-account": partial(postgresql_pair, keeps_account=True),
    "etcd": three_etcd,
    "zookeeper": three_zookeeper,
}
