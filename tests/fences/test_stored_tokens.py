"""Where the highest token is stored: if something else overwrote it, or could, the fence lets no write through."""

from __future__ import annotations

from typing import Any

import pytest

from leasehold import ConfigError, fences


def replace_metadata_token(number: Any, highest_token: str) -> None:
    stored = number.store.get(number.key)
    assert number.store.put(
        number.key,
        stored.body,
        {**stored.metadata, "lease-token": highest_token.encode().decode("latin-1")},
        stored.etag,
    )


@pytest.mark.parametrize("highest_token", ["garbage", "-1", "1e3", "", "\u0667", "0x9", "9" * 16])
@pytest.mark.parametrize("kind", ["redis", "zookeeper", "etcd", "object-in-metadata"])
def test_corrupt_highest_token_lets_no_write_through(kind, highest_token, resource):
    import redis

    number = resource(kind)
    number.write(9, 1)
    read_value = number.peek if kind != "object-in-metadata" else lambda: int(number.store.get(number.key).body)
    corrupt = {
        "redis": lambda: number.client.set(fences.redis.default_token_key(number.key), highest_token),
        "zookeeper": lambda: number.client.set(f"{number.path}.fence", highest_token.encode()),
        "etcd": lambda: number.tool("put", f"{number.key}.fence", "--", highest_token),
        "object-in-metadata": lambda: replace_metadata_token(number, highest_token),
    }
    corrupt[kind]()
    with pytest.raises((ConfigError, redis.ResponseError)):
        number.write(5, 2)
    assert read_value() == 1


@pytest.mark.parametrize("kind", ["redis", "zookeeper", "etcd"])
def test_fence_refuses_to_keep_highest_token_in_the_value_itself(kind, resource):
    number = resource(kind)
    constructors = {
        "redis": lambda: fences.RedisFence(number.client, "a", token_key="a"),
        "zookeeper": lambda: fences.ZooKeeperFence(number.client, "/a", token_path="/a"),
        "etcd": lambda: fences.EtcdFence("http://127.0.0.1", "/a", token_key="/a"),
    }
    with pytest.raises(ConfigError, match="itself"):
        constructors[kind]()


def test_object_with_invalid_fence_header_is_refused(resource):
    number = resource("object")
    stored = number.store.get(number.key)
    for head in (
        b"leasehold-fence and so on",
        b"leasehold-fence {}\n",
        b'leasehold-fence {"absent": 0, "highest_tokens": {"": "x"}}\n',
    ):
        assert number.store.put(number.key, head, {}, stored.etag)
        with pytest.raises(ConfigError, match="first line is not valid"):
            number.write(5, 1)
        stored = number.store.get(number.key)
        assert stored.body == head
