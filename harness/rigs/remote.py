"""The rigs of the remote engine: real `leasehold serve` processes over real engines, and a proxy for each client.

`restart` kills the lock servers only: what they keep must not matter. `pause` stops the process that decides: the lock
server for memory and SQLite, which live in it, and the engine's own server otherwise. So every process has servers of
its own.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from functools import cache
from typing import ClassVar
from urllib.parse import quote

from harness.rigs import etcd, postgresql
from harness.rigs.etcd import EtcdRig
from harness.rigs.redis import AOF_ALWAYS, namespace_keys
from harness.servers.folders import scratch
from harness.servers.lock_server import LockServer
from harness.servers.machine import ProxiedMachine, hosts
from harness.servers.process import Server
from harness.servers.proxy import Proxy
from harness.servers.redis import RedisServer
from leasehold.testing.conformance.rig import ClientPath, Rig


class RemoteRig(Rig):
    """One lock server, or several. Subclasses say which engine is behind them."""

    scheme = "http"
    ttl: ClassVar[float] = 2.0
    short_call: ClassVar[float] = 0.5
    can_cut = can_pause = can_kill = can_restart = True

    def __init__(self) -> None:
        super().__init__()
        self.servers = self.lock_servers()

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        raise NotImplementedError

    def client_path(self) -> ClientPath:
        proxies = [Proxy(server.port) for server in self.servers]
        return ProxiedMachine(f"http://{hosts(proxies)}", proxies)

    def paused(self) -> Sequence[Server]:
        """The processes without which nothing is decided."""
        return self.servers

    def pause(self) -> None:
        for server in self.paused():
            server.pause()

    def resume(self) -> None:
        for server in self.paused():
            server.resume()

    def restart(self) -> None:
        for server in self.servers:
            server.restart()


class HttpMemoryRig(RemoteRig):
    can_restart = False  # its grants live in the server

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return over_memory()


class HttpRedisRig(RemoteRig):
    main_rig: ClassVar[type[Rig] | None] = HttpMemoryRig
    can_count = True

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return pair_over_redis()[:1]

    def paused(self) -> Sequence[Server]:
        return [redis_behind()]

    def residue(self, namespace: str) -> int:
        return len(namespace_keys(redis_behind(), namespace))


class HttpRedisPairRig(HttpRedisRig):
    """Two servers over one Redis: each client keeps to one of them, half of the clients to each."""

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return pair_over_redis()


class HttpSqliteRig(RemoteRig):
    main_rig = HttpMemoryRig
    can_count = True

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return over_sqlite()

    def residue(self, namespace: str) -> int:
        db = sqlite3.connect(sqlite_path())
        try:
            tables = ("lh_grant", "lh_waiter", "lh_queue")
            query = " union all ".join(f"select count(*) from {table} where namespace = ?" for table in tables)  # noqa: S608
            return sum(count for (count,) in db.execute(query, (namespace,) * len(tables)))
        finally:
            db.close()


class HttpWorkersRig(HttpRedisRig):
    """Several workers of one server: the stream and the calls of a client may meet different ones."""

    main_rig = HttpRedisRig

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return workers_over_redis()


class HttpPostgresqlRig(RemoteRig):
    main_rig = HttpMemoryRig

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return over_postgresql()

    def paused(self) -> Sequence[Server]:
        return [postgresql.server.own()]


class _OwnEtcdRig(EtcdRig):
    own_server = True


class HttpEtcdRig(RemoteRig):
    """Two servers. etcd has no reservations, so a waiter without a stream leaves the queue when its turn comes, and
    does not keep its position as the cases with `kill` expect."""

    main_rig = HttpMemoryRig
    can_count = True
    can_kill = False

    @classmethod
    def lock_servers(cls) -> Sequence[LockServer]:
        return pair_over_etcd()

    def paused(self) -> Sequence[Server]:
        return etcd.single_member_cluster.own().members

    def residue(self, namespace: str) -> int:
        return _OwnEtcdRig().residue(namespace)


@cache
def over_memory() -> Sequence[LockServer]:
    return [LockServer("memory://").start()]


@cache
def redis_behind() -> RedisServer:
    return RedisServer(*AOF_ALWAYS).start()


@cache
def pair_over_redis() -> Sequence[LockServer]:
    return [LockServer(f"redis://127.0.0.1:{redis_behind().port}").start() for _ in range(2)]


@cache
def workers_over_redis() -> Sequence[LockServer]:
    return [LockServer(f"redis://127.0.0.1:{redis_behind().port}", "--workers", "2").start()]


@cache
def sqlite_path() -> str:
    return os.path.join(scratch(), "locks.db")


@cache
def over_sqlite() -> Sequence[LockServer]:
    return [LockServer(f"sqlite://{sqlite_path()}").start()]


@cache
def over_postgresql() -> Sequence[LockServer]:
    return [LockServer(f"{postgresql.server.own().url()}?schema={quote('lock server')}").start()]


@cache
def pair_over_etcd() -> Sequence[LockServer]:
    return [LockServer(f"etcd://{etcd.single_member_cluster.own().hosts}").start() for _ in range(2)]
