"""Redis, ZooKeeper and object stores: what only they have."""

from __future__ import annotations

import socket

import pytest
import redis.crc
from kazoo.exceptions import BadVersionError, NoNodeError

from leasehold import ConfigError, StaleToken, Unavailable, fences
from leasehold.fences.redis import mark_key

# ---------------------------------------------------------------------------- Redis


def test_any_commands_in_one_step(resource):
    number = resource("redis")
    fence, client, run = number.fence, number.client, number.spec["run"]
    assert fence.call(5, "HINCRBY", f"h{run}", "teapot", 3) == 3
    answers = fence.calls(5, ("HINCRBY", f"h{run}", "teapot", -1), ("HGET", f"h{run}", "teapot"), ("GET", f"no{run}"))
    assert answers == [2, b"2", None]
    fence.write(5, b"\x00\xff", "PX", 60_000)
    assert fence.read(5) == b"\x00\xff"
    assert client.pttl(number.key) > 0
    assert client.pttl(mark_key(number.key)) == -1  # a mark never lapses
    with pytest.raises(StaleToken):
        fence.calls(4, ("HSET", f"h{run}", "teapot", 99), ("SET", number.key, "x"))
    assert client.hget(f"h{run}", "teapot") == b"2"
    fence.claim(9)
    with pytest.raises(StaleToken):
        fence.read(8)


def test_a_command_that_fails_is_an_error_of_redis(resource):
    number = resource("redis")
    number.write(5, 1)
    with pytest.raises(redis.ResponseError):
        number.fence.call(5, "LPUSH", number.key, "x")
    number.client.set(mark_key(number.key), "garbage")  # fails closed
    with pytest.raises(redis.ResponseError):
        number.write(9, 2)
    assert number.peek() == 1


@pytest.mark.parametrize("key", ["a", "stock:teapot", "{shop}:teapot", "a{b}c{d}", "x{", "{", "ä"])
def test_mark_and_value_are_in_one_slot(key):
    assert redis.crc.key_slot(key.encode()) == redis.crc.key_slot(mark_key(key).encode())
    assert mark_key(key) != key


def test_a_key_that_makes_no_tag_needs_a_mark_of_its_own(resource):
    client = resource("redis").client
    for key in ("a}b", "{}a", "x}{"):
        with pytest.raises(ConfigError, match="mark="):
            fences.RedisFence(client, key)
        fences.RedisFence(client, key, mark="own").claim(2**50)


# ------------------------------------------------------------------------- ZooKeeper


def test_any_nodes_in_one_multi(resource):
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
    number.write(5, 9)  # a multi that failed raised no mark
    assert client.get(path)[0] == b"9"


def test_a_node_is_made_by_its_first_write(resource):
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


def test_a_token_that_came_between_look_and_multi_is_seen(resource):
    """The multi names the version of the mark that was compared."""
    number = resource("zookeeper")
    number.write(5, 1)
    came = []

    def build(transaction):
        if not came:
            came.append(fences.ZooKeeperFence(number.client, number.path).write(9, b"2"))
        transaction.set_data(number.path, b"3")

    with pytest.raises(StaleToken):
        number.fence.multi(6, build)
    assert number.peek() == 2


# ------------------------------------------------------------------------------ etcd


def test_any_keys_in_one_transaction(resource):
    number = resource("etcd")
    fence, key = number.fence, number.key
    assert len(fence.txn(5, fence.put(f"{key}-a", "1"), fence.put(key, b"7"))) == 2
    with pytest.raises(StaleToken):
        fence.txn(4, fence.delete(key), fence.put(f"{key}-a", "2"))
    assert number.tool("get", "--print-value-only", "--prefix", key).split() == ["7", "1", "0000000000000005"]
    fence.txn(5, fence.delete(f"{key}-a"))
    assert fence.read(6) == b"7"


def test_a_key_that_is_not_there_and_members_that_are_not(resource):
    number = resource("etcd")
    endpoint = f"http://127.0.0.1:{number.spec['etcd']}"
    fence = fences.EtcdFence(endpoint, f"/new/{number.spec['run']}")
    assert fence.read(5) is None
    with pytest.raises(StaleToken):
        fence.write(4, "too old: a read of nothing is a read")
    fence.write(5, "")
    assert fence.read(5) == b""
    with pytest.raises(Unavailable, match="no member of etcd can be reached"):
        fences.EtcdFence("http://127.0.0.1:1", "a").claim(5)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # asked, it might still do it: nobody else is
        both = [f"http://127.0.0.1:{silent.getsockname()[1]}", endpoint]
        with pytest.raises(Unavailable, match="did not say"):
            fences.EtcdFence(both, "a", timeout=0.2).claim(5)
    for bad in ("127.0.0.1:2379", [], "etcd://a"):
        with pytest.raises(ConfigError):
            fences.EtcdFence(bad, "a")
    with pytest.raises(ConfigError, match="etcd refused"):
        fence.txn(5, {"request_put": {"key": "not base64!"}})


# --------------------------------------------------------------------------- objects


def test_an_object_that_is_not_there(resource):
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


def test_metadata_of_others_stays(resource):
    for kind in ("object", "object-in-metadata"):
        number = resource(kind)
        number.write(5, 1)
        stored = number.store.get(number.key)
        assert stored is not None
        assert stored.metadata["colour"] == "blue"


def test_a_mark_in_metadata_under_an_etag_of_the_content_is_found_out(resource):
    """Where the ETag does not change with the metadata, an older If-Match would still fit: hence the default."""
    number = resource("object")
    fence = fences.ObjectFence(number.store, number.key, in_metadata=True)
    before = number.store.get(number.key)
    with pytest.raises(ConfigError, match="leave out in_metadata"):
        fence.claim(9)
    # This is what it guards against: a write of token 5, compared before the claim of 9, and let through after it.
    assert before is not None
    assert number.store.put(number.key, b"stale", {"lease-token": "5"}, before.etag) is not None


def test_a_token_that_came_between_get_and_put_is_seen(resource):
    number = resource("object")
    number.write(5, 1)
    store, real = number.store, number.store.put
    other = fences.ObjectFence(fences.HTTPObjects(store._url), number.key)

    def put(*words):
        store.put = real
        other.write(9, "2")
        return real(*words)

    store.put = put
    with pytest.raises(StaleToken):
        number.write(6, 3)
    assert number.peek() == 2


def test_a_store_that_never_agrees_is_unavailable():
    class Stubborn:
        def get(self, key):
            return None

        def put(self, key, body, metadata, match):
            return None

    with pytest.raises(Unavailable, match="changed under each"):
        fences.ObjectFence(Stubborn(), "a").write(5, "x")
    with pytest.raises(ConfigError):
        fences.HTTPObjects("ftp://a")
