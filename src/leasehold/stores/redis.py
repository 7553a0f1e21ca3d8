"""Records as keys of one Redis server: `redis://`, `rediss://`, `redis+unix://`.

Redis removes by itself those whose time is over. A record is lost when Redis loses its last writes: in a crash without
`appendfsync always`, in a fail-over, by eviction. What was done is then done again.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from leasehold.config import EngineConfig
from leasehold.core.names import FORMAT
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime
from leasehold.store import Record

OPTIONS: Final = frozenset({"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})

_EDITION: Final = 32  # characters in front of the data
# KEYS: the record. ARGV: the edition it must have, empty for none; the new value; milliseconds, 0 for ever.
_WRITE: Final = """
if redis.call('getrange', KEYS[1], 0, 31) ~= ARGV[1] then return 0 end
if ARGV[3] == '0' then redis.call('set', KEYS[1], ARGV[2])
else redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3]) end
return 1
"""
_REFUSED: Final = (
    redis.AuthenticationError,
    redis.AuthorizationError if hasattr(redis, "AuthorizationError") else redis.AuthenticationError,
    redis.exceptions.NoPermissionError,
)


class RedisStore:
    def __init__(self, pool: redis.ConnectionPool, runtime: Runtime) -> None:
        self._pool, self._runtime = pool, runtime
        self._redis = redis.Redis(connection_pool=pool)

    async def read(self, key: str, seconds: float) -> Record | None:
        found = await self._runtime.call(self._ask, self._runtime.now() + seconds, "GET", _named(key))
        if not isinstance(found, bytes) or len(found) < _EDITION:
            return None
        return Record(found[:_EDITION].decode("ascii"), found[_EDITION:])

    async def write(self, key: str, record: Record, was: str, keep: float | None, seconds: float) -> bool:
        value = record.edition.encode("ascii") + record.data
        life = 0 if keep is None else max(1, round(keep * 1000))
        deadline = self._runtime.now() + seconds
        return await self._runtime.call(self._ask, deadline, "EVAL", _WRITE, 1, _named(key), was, value, life) == 1

    def close(self) -> None:
        self._redis.close()
        self._pool.disconnect()

    def _ask(self, deadline: float, *command: object) -> object:
        if self._runtime.now() >= deadline:  # it stood behind others, who found out the same
            raise Unavailable("the store did not answer in time", engine="redis")
        try:
            answer: object = self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            return answer
        except redis.RedisError as error:
            raise _meaning(error) from error


def _named(key: str) -> str:
    return f"{FORMAT}:record:{key}"


def _meaning(error: redis.RedisError) -> LeaseholdError:
    if isinstance(error, redis.exceptions.ClusterError):
        return ConfigError(
            "the store in Redis: this is a node of a cluster, which keeps no records; pass another store="
        )
    kind = ConfigError if isinstance(error, _REFUSED) else Unavailable
    return kind(f"the store in Redis: {error}")


def open(config: EngineConfig, runtime: Runtime) -> RedisStore:
    options = config.accept(**dict.fromkeys(OPTIONS, str))
    where = config.url.partition("?")[0] + (f"?{urlencode(options)}" if options else "")
    where = where.removeprefix("redis+") if config.scheme == "redis+unix" else where
    try:
        pool = redis.ConnectionPool.from_url(
            where,
            socket_timeout=config.call_timeout,
            socket_connect_timeout=config.call_timeout,
            retry=Retry(NoBackoff(), 0),  # a write whose answer was lost is resolved above, by its edition
        )
    except (ValueError, TypeError):  # their texts may hold a part of the password
        raise ConfigError(
            f"this {config.scheme}:// URL cannot be read: is the port a number, and the password percent-encoded?"
        ) from None
    return RedisStore(pool, runtime)
