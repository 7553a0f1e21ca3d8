"""Nodes and data that other programs put below the engine's root are ignored or refused with a clear error."""

from __future__ import annotations

import pytest

from leasehold import Client


def test_foreign_nodes_in_a_queue_are_ignored(url, root, kazoo) -> None:
    with Client(url) as client:
        with client.lock("a"):
            for junk in ("junk", "l-x-zz-0000000000", "l-x--"):
                kazoo.create(f"{root}/lh1/:a/{junk}")
            kazoo.create(f"{root}/lh1/junk")
        with client.lock("a", wait=0):
            assert [holding.name for holding in client.inspect()] == ["a"]


@pytest.mark.parametrize("name", ["s0-x-ab-0000000000", f"s{'9' * 5000}-x-ab-0000000000", "s٣-x-ab-0000000000"])
def test_foreign_node_with_a_similar_name_is_ignored(name, url, root, kazoo) -> None:
    with Client(url) as client:
        client.lock("a").call(lambda: None)
        kazoo.create(f"{root}/lh1/:a/{name}", makepath=True)
        with client.lock("a", wait=1) as lease:
            assert [holding.token for holding in client.inspect()] == [lease.token]


@pytest.mark.parametrize("key", [":%GG", ":%", ":%FF", ":%C3", "::", ":"])
def test_foreign_queue_is_ignored(key, url, root, kazoo) -> None:
    with Client(url) as client, client.lock("a"):
        kazoo.create(f"{root}/lh1/{key}")
        kazoo.create(f"{root}/lh1/{key}/l-x-ab-0000000000")
        assert [holding.name for holding in client.inspect()] == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b'[["x", Infinity]]',
        b'[["x", 9223372036854775807], ["y", 9223372036854775807]]',
        b"[" * 100_000,
        b'[["x", NaN]]',
        b"null",
        b'{"a": 1}',
        b"\xff",
        b'[["x", "1' + b"0" * 5000 + b'"]]',
    ],
)
def test_malformed_slot_data_does_not_break_a_semaphore(data, url, root, kazoo) -> None:
    with Client(url) as client:
        client.semaphore("a", 2).call(lambda: None)
        path = f"{root}/lh1/:a"
        kazoo.create(f"{path}/kept", makepath=True)
        kazoo.set(path, data)
        with client.semaphore("a", 2, wait=0) as first:
            data_after = kazoo.get(path)[0]
            with client.semaphore("a", 2, wait=0) as second:
                assert {first.slot, second.slot} == {0, 1}, data_after
            client.inspect()


def test_slot_data_naming_one_claim_twice_is_tolerated(url, root, kazoo, session_of) -> None:
    with Client(url) as client:
        lease = client.semaphore("a", 2, ttl=60).acquire()
        id_hash = next(iter(session_of(client).own_nodes))
        kazoo.set(f"{root}/lh1/:a", f'[["{id_hash}", 1], ["{id_hash}", 2]]'.encode())
        with client.semaphore("a", 2, wait=0):
            pass
        lease.release()
