"""Records as keys of one Redis server: `redis://`, `rediss://`, `redis+unix://`.

Redis deletes expired records itself. A record is lost if Redis loses its last writes: in a crash without `appendfsync
always`, in a fail-over, by eviction. The work is then done again.
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
from leasehold.records.store import Record
from leasehold.runtime.base import Runtime

OPTIONS: Final = frozenset({"db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})

_VERSION_LENGTH: Final = 32  # characters in front of the data
# KEYS: the record. ARGV: the version it must have, empty for none; the new value; milliseconds to keep it, 0 for ever.
_WRITE: Final = """
if redis.call('getrange', KEYS[1], 0, 31) ~= ARGV[1] then return 0 end
if ARGV[3] == '0' then redis.call('set', KEYS[1], ARGV[2])
else redis.call('set', KEYS[1], ARGV[2], 'px', ARGV[3]) end
return 1
"""
_CONFIG_ERRORS: Final = (
    redis.AuthenticationError,
    redis.AuthorizationError if hasattr(redis, "AuthorizationError") else redis.AuthenticationError,
    redis.exceptions.NoPermissionError,
)


class RedisStore:
    def __init__(self, pool: redis.ConnectionPool, runtime: Runtime) -> None:
        self._pool, self._runtime = pool, runtime
        self._redis = redis.Redis(connection_pool=pool)

    async def read(self, key: str, seconds: float) -> Record | None:
        stored = await self._runtime.call(self._execute, self._runtime.now() + seconds, "GET", _redis_key(key))
        if not isinstance(stored, bytes) or len(stored) < _VERSION_LENGTH:
            return None
        return Record(stored[:_VERSION_LENGTH].decode("ascii"), stored[_VERSION_LENGTH:])

    async def write(self, key: str, record: Record, expected_version: str, keep: float | None, seconds: float) -> bool:
        value = record.version.encode("ascii") + record.data
        ttl_ms = 0 if keep is None else max(1, round(keep * 1000))
        deadline = self._runtime.now() + seconds
        return (
            await self._runtime.call(
                self._execute, deadline, "EVAL", _WRITE, 1, _redis_key(key), expected_version, value, ttl_ms
            )
            == 1
        )

    def close(self) -> None:
        self._redis.close()
        self._pool.disconnect()

    def _execute(self, deadline: float, *command: object) -> object:
        if self._runtime.now() >= deadline:  # the worker thread was busy with calls that got no answer
            raise Unavailable("the store did not answer in time", engine="redis")
        try:
            reply: object = self._redis.execute_command(*command)  # type: ignore[no-untyped-call]
            return reply
        except redis.RedisError as error:
            raise _map_error(error) from error


def _redis_key(key: str) -> str:
    return f"{FORMAT}:record:{key}"


def _map_error(error: redis.RedisError) -> LeaseholdError:
    if isinstance(error, redis.exceptions.ClusterError):
        return ConfigError(
            "Redis store: the server is a node of a cluster, where records cannot be kept; pass another store="
        )
    error_type = ConfigError if isinstance(error, _CONFIG_ERRORS) else Unavailable
    return error_type(f"Redis store: {error}")


def open(config: EngineConfig, runtime: Runtime) -> RedisStore:
    options = config.accept(**dict.fromkeys(OPTIONS, str))
    url = config.url.partition("?")[0] + (f"?{urlencode(options)}" if options else "")
    url = url.removeprefix("redis+") if config.scheme == "redis+unix" else url
    try:
        pool = redis.ConnectionPool.from_url(
            url,
            socket_timeout=config.call_timeout,
            socket_connect_timeout=config.call_timeout,
            retry=Retry(NoBackoff(), 0),  # `RecordAccess.swap` resolves lost answers by the record's version
        )
    except (ValueError, TypeError):  # their texts may hold a part of the password
        raise ConfigError(
            f"this {config.scheme}:// URL cannot be read: is the port a number, and the password percent-encoded?"
        ) from None
    return RedisStore(pool, runtime)
