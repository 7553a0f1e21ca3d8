"""Rigs of real servers: how the conformance suite starts each engine and injects faults. Importing this registers them.

sqlite.py  redis.py  redlock.py  etcd.py  zookeeper.py  postgresql.py  mysql.py     one engine each
redis_ha.py  Sentinel and Cluster
sql.py       what PostgreSQL and MySQL share
remote.py    lock servers over several engines
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar, cast

from leasehold.testing.conformance.rig import RIGS, Rig

R = TypeVar("R", bound=Rig)

RIGS.update(
    {
        "mysql": "harness.rigs.mysql:MysqlRig",
        "mysql-plain": "harness.rigs.mysql:NoProceduresRig",
        "postgresql": "harness.rigs.postgresql:PostgresqlRig",
        "postgresql-pooled": "harness.rigs.postgresql:PooledRig",
        "sqlite": "harness.rigs.sqlite:SqliteRig",
        "etcd": "harness.rigs.etcd:EtcdRig",
        "etcd-cluster": "harness.rigs.etcd:EtcdClusterRig",
        "zookeeper": "harness.rigs.zookeeper:ZookeeperRig",
        "zookeeper-ensemble": "harness.rigs.zookeeper:ZookeeperEnsembleRig",
        "redis": "harness.rigs.redis:RedisRig",
        "valkey": "harness.rigs.redis:ValkeyRig",
        "redis-aof": "harness.rigs.redis:RedisAofRig",
        "redis-replica": "harness.rigs.redis:RedisReplicaRig",
        "redis-sentinel": "harness.rigs.redis_ha:RedisSentinelRig",
        "redis-cluster": "harness.rigs.redis_ha:RedisClusterRig",
        "redlock": "harness.rigs.redlock:RedlockRig",
        "redlock-aof": "harness.rigs.redlock:RedlockAofRig",
        "http-memory": "harness.rigs.remote:HttpMemoryRig",
        "http-sqlite": "harness.rigs.remote:HttpSqliteRig",
        "http-workers": "harness.rigs.remote:HttpWorkersRig",
        "http-redis": "harness.rigs.remote:HttpRedisRig",
        "http-redis-pair": "harness.rigs.remote:HttpRedisPairRig",
        "http-postgresql": "harness.rigs.remote:HttpPostgresqlRig",
        "http-etcd": "harness.rigs.remote:HttpEtcdRig",
    }
)


@cache
def with_own_server(rig: type[R]) -> type[R]:
    """The same rig on a server of this process, which a test may pause, kill and restart."""
    return cast("type[R]", type(rig.__name__, (rig,), {"own_server": True}))
