"""The pure parts of the ZooKeeper engine: how long to trust a session, who holds, which slot, and the URL."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold import Client, ConfigError
from leasehold.config import EngineConfig
from leasehold.core.timing import BEAT, DRIFT
from leasehold.engines.zookeeper import nodes, slots
from leasehold.engines.zookeeper.address import located
from leasehold.engines.zookeeper.connection import BEAT as BEAT_SHARE
from leasehold.engines.zookeeper.connection import Silence
from leasehold.engines.zookeeper.nodes import Line
from leasehold.engines.zookeeper.trust import Trust
from leasehold.model import Claim, Holder

# ---------------------------------------------------------------- trust


SESSION = 7  # its number


def session(timeout: float = 40.0) -> Trust:
    trust = Trust()
    trust.connected(0.0, timeout, SESSION)
    return trust


def test_a_connect_is_proven_at_once():
    assert session().end(SESSION) == 40.0 * (1 - DRIFT)


def test_an_answer_alone_proves_nothing():
    trust = session()
    for now in range(1, 100):
        trust.answered(now - 0.1, now)
        trust.provable(now)
    assert trust.end(SESSION) == 40.0 * (1 - DRIFT), "a follower answers on when it is cut off from the leader"


def test_a_write_proves_what_was_answered_a_quarter_before_it():
    trust = session()
    trust.answered(5.0, 5.1)
    assert trust.provable(15.0) == 0.0, "the leader may not have heard of it when the write came by"
    assert trust.provable(15.2) == 5.0
    trust.answered(20.0, 20.1)
    assert trust.provable(30.0) == 5.0
    assert trust.provable(30.2) == 20.0
    trust.proved(20.0)
    assert trust.end(SESSION) == 20.0 + 40.0 * (1 - DRIFT)
    trust.proved(5.0)
    assert trust.end(SESSION) == 20.0 + 40.0 * (1 - DRIFT), "never back"


def test_another_server_proves_nothing_of_the_last_one():
    trust = session()
    trust.answered(50.0, 50.1)
    trust.connected(49.0, 40.0, SESSION)
    assert trust.provable(500.0) == 49.0


def test_a_session_taken_up_again_is_proven_by_the_next_write():
    trust = session()
    trust.connected(30.0, 40.0, SESSION)
    assert trust.end(SESSION) == 40.0 * (1 - DRIFT), "a leader that leads nobody any more confirms it as well"
    trust.proved(trust.provable(30.1))
    assert trust.end(SESSION) == 30.0 + 40.0 * (1 - DRIFT)


@given(
    tick=st.floats(0.1, 5.0),
    ticks=st.floats(2.0, 20.0),
    steps=st.lists(st.tuples(st.floats(0.001, 8.0), st.booleans()), min_size=1, max_size=40),
    phase=st.floats(0.0, 1.0),
)
def test_trust_never_outlasts_the_leaders_own_count(tick, ticks, steps, phase):
    """A follower tells the leader every half tick of what it has heard; it is cut off right after the last write."""
    timeout = tick * ticks
    trust = session(timeout)
    heard, leader_counts_from, now = 0.0, 0.0, 0.0
    next_report = tick / 2 * phase
    for pause, write in steps:
        now += pause
        while next_report <= now:
            if heard > leader_counts_from:
                leader_counts_from = next_report
            next_report += tick / 2
        proof = trust.provable(now)
        heard = now
        trust.answered(now, now)
        if write:
            trust.proved(proof)
            assert trust.end(SESSION) <= leader_counts_from + timeout + 1e-9


def test_in_steady_use_two_thirds_of_a_session_are_trusted():
    trust, now, renewed = session(), 0.0, 0.0
    for _ in range(500):
        now += 40.0 * BEAT_SHARE
        trust.answered(now, now + 0.01)
        if now - renewed > 40.0 * 0.65 / 3:  # a renewal at a third of the life
            proof = trust.provable(now)
            trust.proved(proof)
            renewed = now
            assert trust.end(SESSION) - now >= 40.0 * 0.65


def test_a_session_that_another_took_the_place_of_is_not_trusted():
    trust = session()
    trust.connected(50.0, 40.0, SESSION + 1)
    assert trust.end(SESSION) == float("-inf")
    assert trust.end(SESSION + 1) > 50.0


def test_silence_is_counted_from_the_first_thing_unanswered():
    now = [0.0]
    silence = Silence(lambda: now[0])
    silence.most = 2.0
    now[0] = 100.0
    assert not silence.is_set(), "nobody asked"
    for _ in range(5):
        silence.set()
        now[0] += 0.5
    assert silence.is_set(), "however much was asked since"
    silence.heard(pending=True)
    assert not silence.is_set(), "an answer, if not the last"
    now[0] += 2.1
    assert silence.is_set()
    silence.heard(pending=False)
    now[0] += 100.0
    assert not silence.is_set()


# ---------------------------------------------------------------- names and lines


def name(number: int, kind: str = "l", mode: str = "x") -> str:
    return f"{kind}-{mode}-{number:032x}-{number:010d}"


def test_a_line_is_ordered_by_number_and_sees_only_our_nodes():
    line = Line([name(7), name(3, mode="r"), "x", "l-x--1", "base", name(11)])
    assert [node.number for node in line.nodes] == [3, 7, 11]


def holders(*names: str) -> list[int]:
    return [node.number for node in Line(names).holders]


def test_who_holds():
    assert holders() == []
    assert holders(name(1), name(2)) == [1]
    assert holders(name(1, mode="r"), name(2, mode="r"), name(3), name(4, mode="r")) == [1, 2]
    assert holders(*(name(n, "s3") for n in range(5))) == [0, 1, 2]
    assert holders(name(1, "s3"), name(2), name(3, "s3")) == [1], "another kind in between is on its way out"
    assert holders(name(1), name(2, "s2")) == [1]


@given(st.lists(st.tuples(st.sampled_from(["l", "s2", "s3"]), st.sampled_from("xr")), max_size=8), st.data())
def test_what_comes_later_never_changes_who_holds(shapes, data):
    names = [name(n, kind, mode if kind == "l" else "x") for n, (kind, mode) in enumerate(shapes)]
    cut = data.draw(st.integers(0, len(names)))
    before, after = Line(names[:cut]), Line(names)
    assert [node.name for node in after.holders][:cut] == [node.name for node in before.holders]
    first = after.nodes[0].meant if names else ("lock", 1)
    if any(node.mode == "x" and node.kind == "l" for node in after.holders):
        assert len(after.holders) == 1
    if first[0] == "semaphore":
        assert len(after.holders) <= first[1]


def test_whom_a_waiter_watches():
    line = Line([name(1), name(2, mode="r"), name(3), name(4, mode="r"), name(5, mode="r"), name(6)])
    watched = [line.before(at).number for at in range(1, 6)]
    assert watched == [1, 2, 3, 3, 5]
    assert [line.place(at) for at in range(1, 6)] == [0, 1, 2, 3, 4]


def test_what_a_node_says():
    holder = Holder("web-3", "host", 7, "why")
    told = nodes.read(nodes.written(holder, 30.0, False))
    assert (told.ttl, told.waits, told.holder, told.life) == (30.0, False, holder, 30.0)
    assert nodes.read(nodes.written(holder, 300.0, True)).life == BEAT
    endless = b'{"ttl":1,"waits":0,"holder":["a","b",1e999,"c"]}'
    for junk in (b"", b"x", b"[]", b"{}", b'{"ttl":"x"}', b"\xff", b"[" * 100_000, endless):
        assert nodes.read(junk).life == float("inf"), "what cannot be read is not ended by us"


def test_a_base_that_is_no_number_is_a_config_error():
    assert nodes.base_of(b"17") == 17
    with pytest.raises(ConfigError):
        nodes.base_of(b"junk")


def test_the_secret_is_not_in_a_name():
    claim = Claim("ns", "job", "the secret", "ab" * 16, Holder("h"), 30.0)
    assert nodes.parse(f"{nodes.prefix(claim)}0000000012") == (12, f"l-x-{'ab' * 16}-0000000012", "l", "x", "ab" * 16)
    assert nodes.prefix(claim._replace(mode="shared")).startswith("l-r-")
    assert nodes.prefix(claim._replace(kind="semaphore", limit=9)).startswith("s9-x-")


# ---------------------------------------------------------------- slots


@settings(max_examples=400)
@given(st.integers(1, 4), st.randoms(use_true_random=False))
def test_slots_are_never_shared_and_their_tokens_rise(limit, chance):
    """Claims come, look in any order, and go; whoever may hold chooses, at once or late."""
    data, line, number = b"", [], 0
    chosen: dict[int, int] = {}
    last: dict[int, int] = {}
    for _ in range(60):
        act = chance.choice(["come", "choose", "choose", "go"])
        if act == "come":
            number += 1
            line.append(number)
        elif act == "go" and line:
            gone = chance.choice(line)
            line.remove(gone)
            chosen.pop(gone, None)
        elif act == "choose" and line[:limit]:
            who = chance.choice(line[:limit])
            slot, new = slots.choose(data, Line(name(n, f"s{limit}") for n in line), f"{who:032x}", who, limit)
            assert 0 <= slot < limit
            if who in chosen:
                assert (slot, new) == (chosen[who], None)
                continue
            assert slot not in chosen.values()
            assert last.get(slot, 0) < who
            data, chosen[who], last[slot] = new, slot, who


def test_a_large_limit_costs_nothing_until_it_is_used():
    line = Line([name(1, "s1000000")])
    slot, data = slots.choose(b"", line, f"{1:032x}", 1, 1_000_000)
    assert slot == 0
    assert len(data) < 100
    assert slots.read(b"junk") == slots.read(b"[1]") == []


# ---------------------------------------------------------------- the URL


def at(url: str):
    return located(EngineConfig.parse(url, 5.0))


def test_where_an_ensemble_is():
    there = at("zookeeper://h1:2181,h2:2182,h3/app/locks")
    assert (there.hosts, there.chroot, there.count) == ("h1:2181,h2:2182,h3", "/app/locks", 3)
    assert (there.session, there.acl[0].perms, there.options) == (40.0, 31, {})
    assert at("zookeeper://").hosts == "localhost"
    assert at("zookeeper://[::1]:2181/").chroot == ""
    assert at("zk://h?session=12.5").session == 12.5


def test_who_we_are():
    ours = at("zookeeper://web:p%40ss%2Fw%3Ard@h1,h2/app")
    assert ours.options == {"auth_data": [("digest", "web:p@ss/w:rd")]}
    assert (ours.hosts, ours.chroot) == ("h1,h2", "/app")
    assert (ours.acl[0].id.scheme, ours.acl[0].perms) == ("auth", 31), "node and parent belong to whoever made them"
    assert "p@ss" not in repr(ours)
    both = at("zookeeper://h?acl=digest:web:hash:cdrw,world:anyone:r").acl
    assert [(each.id.scheme, each.id.id, each.perms) for each in both] == [
        ("digest", "web:hash", 15),
        ("world", "anyone", 1),
    ]


def test_tls_and_sasl_are_passed_through():
    tls = at("zookeeper://h?tls=yes&ca=/ca.pem&cert=/c.pem&key=/k.pem&key_password=x").options
    assert tls == {
        "use_ssl": True,
        "verify_certs": True,
        "check_hostname": True,
        "ca": "/ca.pem",
        "certfile": "/c.pem",
        "keyfile": "/k.pem",
        "keyfile_password": "x",
    }
    open_ = at("zookeeper://h?tls=yes&verify=no").options
    assert not open_["verify_certs"]
    assert not open_["check_hostname"]


def test_sasl_needs_its_package(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "puresasl", object())
    sasl = at("zookeeper://web:secret@h?sasl=DIGEST-MD5").options["sasl_options"]
    assert sasl == {"mechanism": "DIGEST-MD5", "service": "zookeeper", "username": "web", "password": "secret"}
    assert at("zookeeper://h?sasl=GSSAPI&sasl_service=zk").options["sasl_options"]["service"] == "zk"
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigError, match=r"pip install"):
        at("zookeeper://h?sasl=GSSAPI")


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
def test_a_bad_url_is_refused_when_the_client_is_made(url):
    with pytest.raises(ConfigError) as caught:
        Client(url)
    assert "://h" not in str(caught.value)


def test_no_password_is_shown_or_needed_to_make_a_client():
    client = Client("zookeeper://web:hunter2@127.0.0.1:1/app", call_timeout=0.2)
    with pytest.raises(Exception, match=r"127\.0\.0\.1:1") as caught:
        client.ping()
    shown = f"{client!r} {caught.value!r} {caught.value.__cause__!r} {client._desk.config!r}"
    assert "hunter2" not in shown
    assert "hunter2" not in str(pickle.loads(pickle.dumps(caught.value)))
    client.close()
