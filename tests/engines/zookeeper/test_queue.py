"""Who holds a name, given the nodes of its queue; the slots of a semaphore; nodes of other programs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold import Client
from leasehold.core.timing import WAITER_TTL
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.nodes import NodeQueue
from leasehold.model import Claim, Holder


def node_name(number: int, kind: str = "l", mode: str = "x") -> str:
    return f"{kind}-{mode}-{number:032x}-{number:010d}"


def test_queue_is_ordered_by_sequence_and_skips_foreign_nodes():
    queue = NodeQueue([node_name(7), node_name(3, mode="r"), "x", "l-x--1", "base", node_name(11)])
    assert [queue.node(index).sequence for index in range(len(queue.names))] == [3, 7, 11]


def test_node_is_found_by_its_name_and_no_other_name_is():
    names = [node_name(number) for number in (7, 3, 11)]
    queue = NodeQueue(names)
    assert [queue.index(name) for name in names] == [1, 0, 2]
    assert [queue.index(name) for name in (node_name(5), node_name(12), node_name(7, mode="r"), "base", "")] == [
        None
    ] * 5


def test_claim_is_found_by_its_whole_id_hash_alone():
    queue = NodeQueue([node_name(number) for number in (7, 3, 11)])
    assert [node.sequence for node in queue.by_id_hash(f"{3:032x}")] == [3]
    assert queue.by_id_hash(f"{3:032x}"[:-1]) == []


def test_joining_a_long_queue_parses_few_of_its_names(monkeypatch):
    """A claim of ten thousand that join or leave one by one reads the names of all the others."""
    parsed = []
    monkeypatch.setattr(nodes, "parse_name", lambda name, parse=nodes.parse_name: parsed.append(name) or parse(name))
    queue = NodeQueue([node_name(number) for number in range(1_000)])
    assert (queue.index(node_name(999)), queue.position(999), queue.mismatches(999)) == (999, 998, False)
    assert queue.predecessor(999).sequence == 998
    assert len(parsed) < 10


def holder_sequences(*names: str) -> list[int]:
    return [node.sequence for node in NodeQueue(names).holders]


def test_holders_follow_from_order_kind_and_mode():
    assert holder_sequences() == []
    assert holder_sequences(node_name(1), node_name(2)) == [1]
    assert holder_sequences(node_name(1, mode="r"), node_name(2, mode="r"), node_name(3), node_name(4, mode="r")) == [
        1,
        2,
    ]
    assert holder_sequences(*(node_name(n, "s3") for n in range(5))) == [0, 1, 2]
    assert holder_sequences(node_name(1, "s3"), node_name(2), node_name(3, "s3")) == [1], (
        "a claim of another kind in between will be withdrawn"
    )
    assert holder_sequences(node_name(1), node_name(2, "s2")) == [1]
    assert holder_sequences(node_name(1, "s2"), node_name(2, "s20")) == [1]


@given(st.lists(st.tuples(st.sampled_from(["l", "s2", "s3"]), st.sampled_from("xr")), max_size=8), st.data())
def test_later_nodes_never_change_the_holders(shapes, data):
    names = [node_name(n, kind, mode if kind == "l" else "x") for n, (kind, mode) in enumerate(shapes)]
    cut = data.draw(st.integers(0, len(names)))
    before, after = NodeQueue(names[:cut]), NodeQueue(names)
    assert [node.name for node in after.holders][:cut] == [node.name for node in before.holders]
    first = after.node(0).kind_and_limit if names else ("lock", 1)
    if any(node.mode == "x" and node.kind == "l" for node in after.holders):
        assert len(after.holders) == 1
    if first[0] == "semaphore":
        assert len(after.holders) <= first[1]


def test_waiter_watches_the_nearest_conflicting_node():
    queue = NodeQueue(
        [
            node_name(1),
            node_name(2, mode="r"),
            node_name(3),
            node_name(4, mode="r"),
            node_name(5, mode="r"),
            node_name(6),
        ]
    )
    watched = [queue.predecessor(index).sequence for index in range(1, 6)]
    assert watched == [1, 2, 3, 3, 5]
    assert [queue.position(index) for index in range(1, 6)] == [0, 1, 2, 3, 4]


def test_node_data_survives_a_round_trip_and_junk_is_tolerated():
    holder = Holder("web-3", "host", 7, "why")
    content = nodes.parse_data(nodes.encode_data(holder, 30.0, False))
    assert (content.ttl, content.waits, content.holder, content.life) == (30.0, False, holder, 30.0)
    assert nodes.parse_data(nodes.encode_data(holder, 300.0, True)).life == WAITER_TTL
    endless = b'{"ttl":1,"waits":0,"holder":["a","b",1e999,"c"]}'
    for junk in (b"", b"x", b"[]", b"{}", b'{"ttl":"x"}', b"\xff", b"[" * 100_000, endless):
        assert nodes.parse_data(junk).life == float("inf"), "an unreadable node must not expire"


def test_node_name_does_not_contain_the_claim_id():
    claim = Claim("ns", "job", "the secret", "ab" * 16, Holder("h"), 30.0)
    assert nodes.parse_name(f"{nodes.name_prefix(claim)}0000000012") == (
        12,
        f"l-x-{'ab' * 16}-0000000012",
        "l",
        "x",
        "ab" * 16,
    )
    assert nodes.name_prefix(claim._replace(mode="shared")).startswith("l-r-")
    assert nodes.name_prefix(claim._replace(kind="semaphore", limit=9)).startswith("s9-x-")


@settings(max_examples=400)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_slots_are_never_shared_and_their_tokens_rise(limit, rng):
    """Claims come and go. A claim that may hold chooses its slot, at once or late, in any order."""
    data, queue, number = b"", [], 0
    chosen: dict[int, int] = {}
    last: dict[int, int] = {}
    for _ in range(60):
        action = rng.choice(["come", "choose", "choose", "go"])
        if action == "come":
            number += 1
            queue.append(number)
        elif action == "go" and queue:
            gone = rng.choice(queue)
            queue.remove(gone)
            chosen.pop(gone, None)
        elif action == "choose" and queue[:limit]:
            chooser = rng.choice(queue[:limit])
            slot, new = slots.choose(
                data, NodeQueue(node_name(n, f"s{limit}") for n in queue), f"{chooser:032x}", chooser, limit
            )
            assert 0 <= slot < limit
            if chooser in chosen:
                assert (slot, new) == (chosen[chooser], None)
                continue
            assert slot not in chosen.values()
            assert last.get(slot, 0) < chooser
            data, chosen[chooser], last[slot] = new, slot, chooser


def test_large_limit_stores_no_slots_until_they_are_used():
    queue = NodeQueue([node_name(1, "s1000000")])
    slot, data = slots.choose(b"", queue, f"{1:032x}", 1, 1_000_000)
    assert slot == 0
    assert len(data) < 100
    assert slots.parse_slots(b"junk") == slots.parse_slots(b"[1]") == []


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
        with client.lock("a", wait=20) as lease:
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
