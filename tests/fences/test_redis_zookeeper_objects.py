"""Behaviour specific to Redis, ZooKeeper and object stores."""

from __future__ import annotations

import socket

import pytest
import redis.crc
from kazoo.exceptions import BadVersionError, NoNodeError

from leasehold import ConfigError, StaleToken, Unavailable, fences
from leasehold.fences.redis import default_token_key

# ---------------------------------------------------------------------------- Redis


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


# ------------------------------------------------------------------------- ZooKeeper


def test_zookeeper_multi_changes_nothing_when_it_fails(resource):
    number = resource("zookeeper")
    client, path = number.client, number.path

    def move(transaction):
        transaction.create(f"{path}-a", b"1")
        transaction.set_data(path, b"7")

    assert number.fence.multi(5, move)[0] == f"{path}-a"
    with pytest.raises(StaleToken):
        number.fence.multi(4, lambda transaction: transaction.delete(path))
    with pytest.raises(NoNodeError):
        number.fence.multi(6, lambda transaction: transaction.delete(f"{path}-none"))
    with pytest.raises(BadVersionError):
        number.fence.multi(6, lambda transaction: transaction.set_data(path, b"8", 99))
    number.write(5, 9)  # the failed multi did not raise the highest token
    assert client.get(path)[0] == b"9"


def test_zookeeper_first_write_creates_the_node(resource):
    number = resource("zookeeper")
    fence = fences.ZooKeeperFence(number.client, f"/new/{number.spec['run']}/node")
    with pytest.raises(NoNodeError):
        fence.read(5)
    with pytest.raises(StaleToken):
        fence.write(4, b"")
    fence.write(5, "text")
    assert fence.read(6) == b"text"
    for bad in ("a", "/", "/a/"):
        with pytest.raises(ConfigError):
            fences.ZooKeeperFence(number.client, bad)


def test_zookeeper_multi_is_refused_when_newer_token_came_before_it(resource):
    """The multi checks the version of the token node that was compared."""
    number = resource("zookeeper")
    number.write(5, 1)
    newer_writes = []

    def build(transaction):
        if not newer_writes:
            newer_writes.append(fences.ZooKeeperFence(number.client, number.path).write(9, b"2"))
        transaction.set_data(number.path, b"3")

    with pytest.raises(StaleToken):
        number.fence.multi(6, build)
    assert number.peek() == 2


# ------------------------------------------------------------------------------ etcd


def test_etcd_txn_writes_several_keys_or_none(resource):
    number = resource("etcd")
    fence, key = number.fence, number.key
    assert len(fence.txn(5, fence.put(f"{key}-a", "1"), fence.put(key, b"7"))) == 2
    with pytest.raises(StaleToken):
        fence.txn(4, fence.delete(key), fence.put(f"{key}-a", "2"))
    assert number.tool("get", "--print-value-only", "--prefix", key).split() == ["7", "1", "0000000000000005"]
    fence.txn(5, fence.delete(f"{key}-a"))
    assert fence.read(6) == b"7"


def test_etcd_fence_with_missing_key_or_unreachable_members(resource):
    number = resource("etcd")
    endpoint = f"http://127.0.0.1:{number.spec['etcd']}"
    fence = fences.EtcdFence(endpoint, f"/new/{number.spec['run']}")
    assert fence.read(5) is None
    with pytest.raises(StaleToken):
        fence.write(4, "too old: a read of nothing is a read")
    fence.write(5, "")
    assert fence.read(5) == b""
    with pytest.raises(Unavailable, match="cannot connect to any etcd member"):
        fences.EtcdFence("http://127.0.0.1:1", "a").claim(5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it may still apply the request: no other is tried
        endpoints = [f"http://127.0.0.1:{silent.getsockname()[1]}", endpoint]
        with pytest.raises(Unavailable, match="did not answer"):
            fences.EtcdFence(endpoints, "a", timeout=0.2).claim(5)
    for bad in ("127.0.0.1:2379", [], "etcd://a"):
        with pytest.raises(ConfigError):
            fences.EtcdFence(bad, "a")
    with pytest.raises(ConfigError, match="etcd refused"):
        fence.txn(5, {"request_put": {"key": "not base64!"}})


# --------------------------------------------------------------------------- objects


def test_object_fence_on_missing_object(resource):
    number = resource("object")
    for in_metadata, etags in ((False, "hash"), (True, "version")):
        store = fences.HTTPObjects(f"http://127.0.0.1:{number.spec['objects']}/{etags}")
        fence = fences.ObjectFence(store, f"new ö/{number.spec['run']}", in_metadata=in_metadata)
        assert fence.peek() is None
        with pytest.raises(FileNotFoundError):
            fence.read(5)
        with pytest.raises(StaleToken):
            fence.write(4, "too old: a read of nothing is a read")
        assert fence.peek() is None
        fence.write(5, "")
        assert fence.peek() == fence.read(6) == b""
        fence.write(6, b"\x00\n\xff")
        fence.write(6, b"\x00\n\xff")
        assert fence.read(7) == b"\x00\n\xff"


def test_object_write_keeps_other_metadata(resource):
    for kind in ("object", "object-in-metadata"):
        number = resource(kind)
        number.write(5, 1)
        stored = number.store.get(number.key)
        assert stored is not None
        assert stored.metadata["colour"] == "blue"


def test_object_fence_refuses_metadata_token_with_content_etag(resource):
    """If the ETag does not change with the metadata, an older If-Match still matches. Hence the default."""
    number = resource("object")
    fence = fences.ObjectFence(number.store, number.key, in_metadata=True)
    before = number.store.get(number.key)
    with pytest.raises(ConfigError, match="needs in_metadata=False"):
        fence.claim(9)
    # What this guards against: a write with token 5 that is compared before 9 is claimed and applied after it.
    assert before is not None
    assert number.store.put(number.key, b"stale", {"lease-token": "5"}, before.etag) is not None


def test_object_write_is_refused_when_newer_token_came_before_put(resource):
    number = resource("object")
    number.write(5, 1)
    store, real_put = number.store, number.store.put
    other = fences.ObjectFence(fences.HTTPObjects(store._url), number.key)

    def put(*args):
        store.put = real_put
        other.write(9, "2")
        return real_put(*args)

    store.put = put
    with pytest.raises(StaleToken):
        number.write(6, 3)
    assert number.peek() == 2


def test_object_store_with_endless_conflicts_is_unavailable():
    class ConflictingStore:
        def get(self, key):
            return None

        def put(self, key, body, metadata, match):
            return None

    with pytest.raises(Unavailable, match="changed by other clients during each"):
        fences.ObjectFence(ConflictingStore(), "a").write(5, "x")
    with pytest.raises(ConfigError):
        fences.HTTPObjects("ftp://a")
