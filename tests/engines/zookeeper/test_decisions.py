"""The pure parts of the ZooKeeper engine: session expiry, holders of a queue, slots, and the URL."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold import Client, ConfigError
from leasehold.config import EngineConfig
from leasehold.core.timing import DRIFT, WAITER_TTL
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.connection import HEARTBEAT_SHARE, SilenceTimer
from leasehold.engines.zookeeper.nodes import NodeQueue
from leasehold.engines.zookeeper.session_expiry import SessionExpiry
from leasehold.engines.zookeeper.url import parse_url
from leasehold.model import Claim, Holder

# ------------------------------------------------------- session expiry


SESSION_ID = 7


def connected_expiry(timeout: float = 40.0) -> SessionExpiry:
    expiry = SessionExpiry()
    expiry.on_connected(0.0, timeout, SESSION_ID)
    return expiry


def test_connect_confirms_the_session_at_once():
    assert connected_expiry().expires_at(SESSION_ID) == 40.0 * (1 - DRIFT)


def test_answer_alone_confirms_nothing():
    expiry = connected_expiry()
    for now in range(1, 100):
        expiry.on_answered(now - 0.1, now)
        expiry.provable_heartbeat(now)
    assert expiry.expires_at(SESSION_ID) == 40.0 * (1 - DRIFT), (
        "a follower that is cut off from the leader still answers"
    )


def test_write_confirms_heartbeats_answered_a_quarter_session_earlier():
    expiry = connected_expiry()
    expiry.on_answered(5.0, 5.1)
    assert expiry.provable_heartbeat(15.0) == 0.0, "the leader may not know of the heartbeat when it executes the write"
    assert expiry.provable_heartbeat(15.2) == 5.0
    expiry.on_answered(20.0, 20.1)
    assert expiry.provable_heartbeat(30.0) == 5.0
    assert expiry.provable_heartbeat(30.2) == 20.0
    expiry.confirm(20.0)
    assert expiry.expires_at(SESSION_ID) == 20.0 + 40.0 * (1 - DRIFT)
    expiry.confirm(5.0)
    assert expiry.expires_at(SESSION_ID) == 20.0 + 40.0 * (1 - DRIFT), "an older heartbeat moved the expiry back"


def test_reconnect_to_another_server_discards_earlier_heartbeats():
    expiry = connected_expiry()
    expiry.on_answered(50.0, 50.1)
    expiry.on_connected(49.0, 40.0, SESSION_ID)
    assert expiry.provable_heartbeat(500.0) == 49.0


def test_resumed_session_is_confirmed_by_the_next_write():
    expiry = connected_expiry()
    expiry.on_connected(30.0, 40.0, SESSION_ID)
    assert expiry.expires_at(SESSION_ID) == 40.0 * (1 - DRIFT), "a deposed leader confirms the session too"
    expiry.confirm(expiry.provable_heartbeat(30.1))
    assert expiry.expires_at(SESSION_ID) == 30.0 + 40.0 * (1 - DRIFT)


@given(
    tick=st.floats(0.1, 5.0),
    ticks=st.floats(2.0, 20.0),
    steps=st.lists(st.tuples(st.floats(0.001, 8.0), st.booleans()), min_size=1, max_size=40),
    phase=st.floats(0.0, 1.0),
)
def test_session_expiry_is_never_later_than_the_leaders(tick, ticks, steps, phase):
    """A follower reports heartbeats to the leader every half tick, and is cut off right after the last write."""
    timeout = tick * ticks
    expiry = connected_expiry(timeout)
    heartbeat_at, leader_counts_from, now = 0.0, 0.0, 0.0
    next_report = tick / 2 * phase
    for pause, write in steps:
        now += pause
        while next_report <= now:
            if heartbeat_at > leader_counts_from:
                leader_counts_from = next_report
            next_report += tick / 2
        provable_at = expiry.provable_heartbeat(now)
        heartbeat_at = now
        expiry.on_answered(now, now)
        if write:
            expiry.confirm(provable_at)
            assert expiry.expires_at(SESSION_ID) <= leader_counts_from + timeout + 1e-9


def test_session_in_steady_use_is_trusted_for_two_thirds():
    expiry, now, renewed = connected_expiry(), 0.0, 0.0
    for _ in range(500):
        now += 40.0 * HEARTBEAT_SHARE
        expiry.on_answered(now, now + 0.01)
        if now - renewed > 40.0 * 0.65 / 3:  # a renewal at a third of the ttl
            provable_at = expiry.provable_heartbeat(now)
            expiry.confirm(provable_at)
            renewed = now
            assert expiry.expires_at(SESSION_ID) - now >= 40.0 * 0.65


def test_replaced_session_is_not_trusted():
    expiry = connected_expiry()
    expiry.on_connected(50.0, 40.0, SESSION_ID + 1)
    assert expiry.expires_at(SESSION_ID) == float("-inf")
    assert expiry.expires_at(SESSION_ID + 1) > 50.0


def test_silence_is_measured_from_the_first_unanswered_request():
    now = [0.0]
    silence = SilenceTimer(lambda: now[0])
    silence.max_silence = 2.0
    now[0] = 100.0
    assert not silence.is_set(), "no request was sent"
    for _ in range(5):
        silence.set()
        now[0] += 0.5
    assert silence.is_set(), "later requests restarted the timer"
    silence.on_reply(pending=True)
    assert not silence.is_set(), "an answer came, although requests are pending"
    now[0] += 2.1
    assert silence.is_set()
    silence.on_reply(pending=False)
    now[0] += 100.0
    assert not silence.is_set()


# ---------------------------------------------------------- node names and queues


def node_name(number: int, kind: str = "l", mode: str = "x") -> str:
    return f"{kind}-{mode}-{number:032x}-{number:010d}"


def test_queue_is_ordered_by_sequence_and_skips_foreign_nodes():
    queue = NodeQueue([node_name(7), node_name(3, mode="r"), "x", "l-x--1", "base", node_name(11)])
    assert [node.sequence for node in queue.nodes] == [3, 7, 11]


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


@given(st.lists(st.tuples(st.sampled_from(["l", "s2", "s3"]), st.sampled_from("xr")), max_size=8), st.data())
def test_later_nodes_never_change_the_holders(shapes, data):
    names = [node_name(n, kind, mode if kind == "l" else "x") for n, (kind, mode) in enumerate(shapes)]
    cut = data.draw(st.integers(0, len(names)))
    before, after = NodeQueue(names[:cut]), NodeQueue(names)
    assert [node.name for node in after.holders][:cut] == [node.name for node in before.holders]
    first = after.nodes[0].kind_and_limit if names else ("lock", 1)
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


def test_base_that_is_not_a_number_is_a_config_error():
    assert nodes.parse_base(b"17") == 17
    with pytest.raises(ConfigError):
        nodes.parse_base(b"junk")


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


# ---------------------------------------------------------------- slots


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


# ---------------------------------------------------------------- the URL


def parse(url: str):
    return parse_url(EngineConfig.parse(url, 5.0))


def test_url_is_parsed_into_hosts_chroot_and_session():
    location = parse("zookeeper://h1:2181,h2:2182,h3/app/locks")
    assert (location.hosts, location.chroot, location.servers) == (
        "h1:2181,h2:2182,h3",
        "/app/locks",
        "h1:2181,h2:2182,h3:2181",
    )
    assert (location.session_timeout, location.acl[0].perms, location.options) == (40.0, 31, {})
    assert parse("zookeeper://").hosts == "localhost"
    assert parse("zookeeper://[::1]:2181/").chroot == ""
    assert parse("zk://h?session=12.5").session_timeout == 12.5


def test_url_credentials_become_auth_data_and_acl():
    location = parse("zookeeper://web:p%40ss%2Fw%3Ard@h1,h2/app")
    assert location.options == {"auth_data": [("digest", "web:p@ss/w:rd")]}
    assert (location.hosts, location.chroot) == ("h1,h2", "/app")
    assert (location.acl[0].id.scheme, location.acl[0].perms) == ("auth", 31), (
        "nodes and parents belong to the user that created them"
    )
    assert "p@ss" not in repr(location)
    acl = parse("zookeeper://h?acl=digest:web:hash:cdrw,world:anyone:r").acl
    assert [(each.id.scheme, each.id.id, each.perms) for each in acl] == [
        ("digest", "web:hash", 15),
        ("world", "anyone", 1),
    ]


def test_tls_options_are_passed_to_kazoo():
    tls = parse("zookeeper://h?tls=yes&ca=/ca.pem&cert=/c.pem&key=/k.pem&key_password=x").options
    assert tls == {
        "use_ssl": True,
        "verify_certs": True,
        "check_hostname": True,
        "ca": "/ca.pem",
        "certfile": "/c.pem",
        "keyfile": "/k.pem",
        "keyfile_password": "x",
    }
    unverified = parse("zookeeper://h?tls=yes&verify=no").options
    assert not unverified["verify_certs"]
    assert not unverified["check_hostname"]


def test_sasl_without_its_package_is_a_config_error(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "puresasl", object())
    sasl = parse("zookeeper://web:secret@h?sasl=DIGEST-MD5").options["sasl_options"]
    assert sasl == {"mechanism": "DIGEST-MD5", "service": "zookeeper", "username": "web", "password": "secret"}
    assert parse("zookeeper://h?sasl=GSSAPI&sasl_service=zk").options["sasl_options"]["service"] == "zk"
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigError, match=r"pip install"):
        parse("zookeeper://h?sasl=GSSAPI")


@pytest.mark.parametrize(
    "url",
    [
        "zookeeper://h:port",
        "zookeeper://h:99999999",
        "zookeeper://,",
        "zookeeper://h1,,h2",
        "zookeeper://web@h",
        "zookeeper://:p@h",
        "zookeeper://h/a//b",
        "zookeeper://h/../b",
        "zookeeper://h?session=0",
        "zookeeper://h?session=soon",
        "zookeeper://h?session=nan",
        "zookeeper://h?session=3000000",
        "zookeeper://h?tls=true",
        "zookeeper://h?ca=/x",
        "zookeeper://h?verify=no",
        "zookeeper://h?tls=yes&cert=/x",
        "zookeeper://h?acl=world:anyone",
        "zookeeper://h?acl=world:anyone:rx",
        "zookeeper://h?acl=world:anyone:r",
        "zookeeper://h?acl=world:anyone:crwa",
        "zookeeper://h?acl=",
        "zookeeper://h?sasl_service=zk",
        "zookeeper://h?timeout=3",
        "zookeeper://h?session=1&session=2",
    ],
)
def test_invalid_url_is_refused_when_the_client_is_built(url):
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "://h" not in str(caught.value)


def test_password_appears_in_no_error_and_no_repr():
    client = Client("zookeeper://web:hunter2@127.0.0.1:1/app", call_timeout=0.2)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1") as caught:
        client.ping()
    output = f"{client!r} {caught.value!r} {caught.value.__cause__!r} {client._core.config!r}"
    assert "hunter2" not in output
    assert "hunter2" not in str(pickle.loads(pickle.dumps(caught.value)))
    client.close()
