"""Nodes and data below ours that somebody else put there: not seen, or refused, never an obscure error."""

from __future__ import annotations

import pytest

from leasehold import Client


def test_foreign_nodes_in_a_line_are_not_seen(url, root, raw) -> None:
    with Client(url) as client:
        with client.lock("a"):
            for junk in ("junk", "l-x-zz-0000000000", "l-x--"):
                raw.create(f"{root}/lh1/:a/{junk}")
            raw.create(f"{root}/lh1/junk")
        with client.lock("a", wait=0):
            assert [seen.name for seen in client.inspect()] == ["a"]


@pytest.mark.parametrize("name", ["s0-x-ab-0000000000", f"s{'9' * 5000}-x-ab-0000000000", "s٣-x-ab-0000000000"])
def test_a_strangers_node_that_looks_like_one_of_ours(name, url, root, raw) -> None:
    with Client(url) as client:
        client.lock("a").call(lambda: None)
        raw.create(f"{root}/lh1/:a/{name}", makepath=True)
        with client.lock("a", wait=1) as lease:
            assert [seen.token for seen in client.inspect()] == [lease.token]


@pytest.mark.parametrize("key", [":%GG", ":%", ":%FF", ":%C3", "::", ":"])
def test_a_strangers_line_is_not_seen(key, url, root, raw) -> None:
    with Client(url) as client, client.lock("a"):
        raw.create(f"{root}/lh1/{key}")
        raw.create(f"{root}/lh1/{key}/l-x-ab-0000000000")
        assert [seen.name for seen in client.inspect()] == ["a"]


@pytest.mark.parametrize(
    "said",
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
def test_a_line_whose_slots_say_nonsense(said, url, root, raw) -> None:
    with Client(url) as client:
        client.semaphore("a", 2).call(lambda: None)
        path = f"{root}/lh1/:a"
        raw.create(f"{path}/kept", makepath=True)
        raw.set(path, said)
        with client.semaphore("a", 2, wait=0) as one:
            raw_again = raw.get(path)[0]
            with client.semaphore("a", 2, wait=0) as two:
                assert {one.slot, two.slot} == {0, 1}, raw_again
            client.inspect()


def test_slots_all_given_to_one_claim(url, root, raw, session_of) -> None:
    with Client(url) as client:
        one = client.semaphore("a", 2, ttl=60).acquire()
        mark = next(iter(session_of(client).mine))
        raw.set(f"{root}/lh1/:a", f'[["{mark}", 1], ["{mark}", 2]]'.encode())
        with client.semaphore("a", 2, wait=0):
            pass
        one.release()
