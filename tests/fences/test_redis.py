"""Behaviour specific to Redis."""

from __future__ import annotations

import pytest
import redis.crc

from leasehold import ConfigError, StaleToken, fences
from leasehold.fences.redis import default_token_key


def test_redis_fence_runs_several_commands_atomically(resource):
    number = resource("redis")
    fence, client, run = number.fence, number.client, number.spec["run"]
    assert fence.call(5, "HINCRBY", f"h{run}", "teapot", 3) == 3
    replies = fence.calls(5, ("HINCRBY", f"h{run}", "teapot", -1), ("HGET", f"h{run}", "teapot"), ("GET", f"no{run}"))
    assert replies == [2, b"2", None]
    fence.write(5, b"\x00\xff", "PX", 60_000)
    assert fence.read(5) == b"\x00\xff"
    assert client.pttl(number.key) > 0
    assert client.pttl(default_token_key(number.key)) == -1  # the highest token never expires
    with pytest.raises(StaleToken):
        fence.calls(4, ("HSET", f"h{run}", "teapot", 99), ("SET", number.key, "x"))
    assert client.hget(f"h{run}", "teapot") == b"2"
    fence.claim(9)
    with pytest.raises(StaleToken):
        fence.read(8)


def test_redis_fence_raises_response_error_of_failed_command(resource):
    number = resource("redis")
    number.write(5, 1)
    with pytest.raises(redis.ResponseError):
        number.fence.call(5, "LPUSH", number.key, "x")
    number.client.set(default_token_key(number.key), "garbage")  # an unreadable token refuses every write
    with pytest.raises(redis.ResponseError):
        number.write(9, 2)
    assert number.peek() == 1


@pytest.mark.parametrize("key", ["a", "stock:teapot", "{shop}:teapot", "a{b}c{d}", "x{", "{", "ä"])
def test_redis_token_key_is_in_the_hash_slot_of_the_value(key):
    assert redis.crc.key_slot(key.encode()) == redis.crc.key_slot(default_token_key(key).encode())
    assert default_token_key(key) != key


def test_redis_key_without_usable_hash_tag_requires_a_token_key(resource):
    client = resource("redis").client
    for key in ("a}b", "{}a", "x}{"):
        with pytest.raises(ConfigError, match="token_key="):
            fences.RedisFence(client, key)
        fences.RedisFence(client, key, token_key="own").claim(2**50)


def test_redis_fence_refuses_a_pipeline_as_client(resource):
    """A pipeline does not execute: iterating over its reply would never end."""
    number = resource("redis")
    pipeline = number.client.pipeline()
    with pytest.raises(ConfigError, match="pipeline"):
        fences.RedisFence(pipeline, number.key).write(5, "1")
    pipeline.reset()
    assert number.peek() == 0
