"""Claims, answers and notifications as JSON: what one end writes the other reads, and nothing else is accepted."""

import json
from contextlib import suppress
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.core.names import hash_id
from leasehold.engines.remote import wire
from leasehold.engines.remote.parsing import MAX_BODY
from leasehold.errors import (
    AccessDenied,
    ConfigError,
    LeaseholdError,
    Mismatch,
    NotSent,
    Unavailable,
    Unsupported,
)
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Traits

NOW = 100.0
ID = "0123abcd." + "s" * 32
TRAITS = Traits(survives="restart", max_limit=1, ttl_step=1.0, fair=False)
HOLDING = Holding(
    "shop", "orders/1", "held", "exclusive", "lock", 1, "f" * 16, Holder("web-1", "h", 7, "why"), 1.5, 2.5, 41, None
)

seconds = st.floats(0, 86_400)
labels = st.text(st.characters(categories=["L", "N", "P"]), max_size=40)
claims = st.builds(
    Claim,
    labels,
    labels.filter(bool),
    st.just(ID),
    st.just(hash_id(ID)),
    st.builds(Holder, labels, labels, st.integers(0, 2**31), labels),
    st.floats(0.01, 86_400),
    st.sampled_from(["exclusive", "shared"]),
    st.sampled_from(["lock", "semaphore"]),
    st.integers(1, 2**31 - 1),
    seconds,
    seconds,
    st.booleans(),
    st.integers(0, 2**53),
    st.just(inf),
    st.none(),
    st.just(False),  # `process_bound` is never sent
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def over_the_wire(value):
    return wire.decode(wire.encode(value))


@given(claims)
def test_claim_sent_is_the_claim_received(claim):
    assert wire.claim_from_json(over_the_wire(wire.claim_to_json(claim, NOW)), NOW) == claim


def test_claim_without_id_sends_its_hash():
    claim = Claim("", "n", "", hash_id(ID), Holder("stray"), 15.0)
    assert wire.claim_from_json(wire.claim_to_json(claim, NOW), NOW) == claim


def test_claim_with_id_does_not_send_its_hash():
    assert "id_hash" not in wire.claim_to_json(Claim("", "n", ID, hash_id(ID), Holder("h"), 1.0), NOW)


def test_wait_deadline_is_sent_as_seconds_left():
    claim = Claim("", "n", ID, hash_id(ID), Holder("h"), 1.0, wait_deadline=NOW + 4)
    sent = wire.claim_to_json(claim, NOW)
    assert sent["wait_left"] == 4.0
    assert wire.claim_from_json(sent, 7.0).wait_deadline == 11.0


GOOD_CLAIM = {"id": ID, "name": "n", "ttl": 1.0, "holder": ["h", "", 1, ""]}


@pytest.mark.parametrize(
    "change",
    [
        {"id": "short"},
        {"id": "x" * 129},
        {"id": "white space in this id"},
        {"id": 7},
        {"id": "", "id_hash": "Z" * 32},
        {"id": None},
        {"name": ""},
        {"name": "n" * 256},
        {"name": "\ud800"},
        {"name": 7},
        {"namespace": None},
        {"ttl": 0},
        {"ttl": "1"},
        {"ttl": float("nan")},
        {"ttl": inf},
        {"ttl": True},
        {"ttl": None},
        {"holder": ["h", "", 1]},
        {"holder": ["h", "", -1, ""]},
        {"holder": ["\x1b[2J", "", 1, ""]},
        {"holder": ["h" * 256, "", 1, ""]},
        {"mode": "both"},
        {"kind": []},
        {"limit": 0},
        {"limit": 1.0},
        {"ttl": 86_401},
        {"ttl": 1e14},
        {"delay": 86_401},
        {"delay": -1},
        {"min_hold": 86_401},
        {"min_hold": "long"},
        {"queue": 1},
        {"token": -1},
        {"token": 2**63},
        {"wait_left": -1},
    ],
    ids=str,
)
def test_claim_that_makes_no_sense_is_refused(change):
    assert wire.claim_from_json(GOOD_CLAIM, NOW).id == ID
    with pytest.raises(ConfigError) as error:
        wire.claim_from_json({**GOOD_CLAIM, **change}, NOW)
    assert "this id" not in str(error.value)


@pytest.mark.parametrize("answer", [Grant(41, 2.5, 3), Grant(41, 2.5, None)], ids=str)
def test_grant_sent_is_the_grant_received(answer):
    assert wire.attempt_from_json(over_the_wire(wire.answer_to_json(answer))) == answer


@pytest.mark.parametrize(
    "busy", [Busy(), Busy(1.5, 0, 41, Holder("h", "x", 1, "p")), Busy(None, 3)], ids=["empty", "full", "queued"]
)
def test_busy_sent_is_the_busy_received(busy):
    answer = wire.answer_to_json(busy)
    assert wire.attempt_from_json(over_the_wire(answer)) == wire.BusyAnswer(busy, False)
    assert wire.attempt_from_json(over_the_wire({**answer, "heard": True})).can_wake


def test_times_below_zero_and_infinite_ones_are_sent_bounded():
    assert wire.attempt_from_json(wire.answer_to_json(Grant(1, -0.001))).ttl == 0.0
    assert wire.attempt_from_json(wire.answer_to_json(Busy(inf))).busy.left == 1e14


@pytest.mark.parametrize("pid", [-1, 2**63, -(2**64)])
def test_pid_that_no_server_may_send_is_left_out(pid):
    """Clients of the engine can write any number, and one such claim made the server's whole list unreadable."""
    busy = Busy(1.5, 0, 41, Holder("h", "x", pid, "p"))
    assert wire.attempt_from_json(over_the_wire(wire.answer_to_json(busy))).busy.holder == Holder("h", "x", 0, "p")


def test_renewal_answers_arrive_in_order_with_their_problems():
    sent = [Alive(2.0, None), Alive(15.0, 3), Gone("broken"), Unavailable("silent")]
    received = wire.renewed_from_json(
        over_the_wire({"renewed": [wire.answer_to_json(each) for each in sent]}), 4, "http"
    )
    assert received[:3] == sent[:3]
    assert isinstance(received[3], Unavailable)
    with pytest.raises(wire.Malformed):
        wire.renewed_from_json({"renewed": [{"gone": "expired"}]}, 2, "http")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Mismatch("n", wanted="lock", found="semaphore of 3"), 409),
        (Unsupported("no slots", engine="redlock", missing=("slots",)), 422),
        (AccessDenied("not allowed"), 403),
        (ConfigError("a bad name"), 422),
        (NotSent("the breaker is open"), 503),
        (Unavailable("silent"), 503),
        (Unavailable("one of three", no_majority=True), 503),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_sent_is_the_error_received(error, status):
    problem = over_the_wire(wire.problem_to_json(error))
    received = wire.error_from_problem(problem, "http")
    assert type(received) is type(error)
    assert str(received) == str(error)
    assert problem["status"] == status
    assert problem.get("done", True) is not isinstance(error, NotSent)
    if isinstance(error, Unavailable):
        assert received.no_majority == error.no_majority
    if isinstance(error, Unsupported):
        assert received.engine == "http"
        assert received.missing == error.missing


def test_holding_and_traits_sent_are_those_received():
    assert wire.holding_from_json(over_the_wire(wire.holding_to_json(HOLDING))) == HOLDING
    assert wire.traits_from_json(over_the_wire(wire.traits_to_json(TRAITS))) == TRAITS


@pytest.mark.parametrize("member", wire.traits_to_json(TRAITS))
def test_traits_with_a_bad_member_are_refused(member):
    with pytest.raises(wire.Malformed):
        wire.traits_from_json({**wire.traits_to_json(TRAITS), member: "x"})


def test_notifications_sent_are_those_received_and_unknown_are_ignored():
    sent = [wire.Hello(TRAITS), wire.Wakeup("shop", "orders/1", hash_id(ID)), wire.Lost(hash_id(ID)), wire.Moved()]
    made = [wire.notification_to_json(each) for each in sent]
    assert wire.notifications_from_json(over_the_wire([*made, {"news": 1}])) == sent


READERS = [
    wire.attempt_from_json,
    lambda value: wire.renewed_from_json(value, 1, "http"),
    wire.flag_from_json,
    wire.page_from_json,
    wire.cursor_from_json,
    wire.traits_answer_from_json,
    wire.notifications_from_json,
    lambda value: wire.error_from_problem(value, "http"),
    lambda value: wire.claim_from_json(value, NOW),
]
WORDS = [
    "grant",
    "busy",
    "heard",
    "renewed",
    "value",
    "problem",
    "type",
    "wakeup",
    "hello",
    "lost",
    "gone",
    "alive",
    "id",
]


@pytest.mark.parametrize("read", READERS)
@given(json_values | st.dictionaries(st.sampled_from(WORDS), json_values, max_size=4))
def test_reader_given_any_json_raises_nothing_but_malformed(read, value):
    with suppress(LeaseholdError):
        read(value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5_000, b'"\\ud8'])
def test_text_that_is_not_json_is_malformed(data):
    with pytest.raises(wire.Malformed):
        wire.decode(data)


def test_problem_of_a_server_is_shown_on_one_bounded_line():
    text = str(wire.error_from_problem({"type": "x/draining", "detail": "a\nb\x1b[2J" + "x" * 10_000}, "http"))
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) <= 200


@pytest.mark.parametrize(("sent", "found"), [(2.5, 2.5), (3600, 60.0), (1e14, 60.0)])
def test_server_makes_no_caller_pause_for_more_than_a_minute(sent, found):
    """One forged answer made a waiter without an end of its `wait` sleep for ever."""
    problem = {"type": "x/overloaded", "done": False, "retry_after": sent}
    assert wire.error_from_problem(problem, "http").retry_in == found


def test_text_without_an_encoding_is_replaced():
    assert json.loads(wire.encode({"host": "ä\ud83d"})) == {"host": "ä?"}


def test_largest_renewal_fits_into_a_request():
    """A server accepts 1 MiB."""
    claim = Claim("ä" * 127, "€" * 85, "x" * wire.MAX_ID, "", Holder("h" * 200, "h" * 200, 1, "p" * 200), 1.0)
    sent = [wire.claim_to_json(claim._replace(token=2**53, queue=True), NOW, with_holder=False)] * 500
    assert len(wire.encode([{"do": "renew", "claims": sent}])) < 1 << 20


@pytest.mark.parametrize("value", ["{}", "[]", '{"":{}}', "1.5", '"ab"', "0"])
@pytest.mark.parametrize("size", [100_000, 8_000_000])
def test_text_with_very_many_values_is_not_read(monkeypatch, value, size):
    """8 MB of `{"":{}},` took 260 MiB of memory."""
    monkeypatch.setattr(wire.json, "loads", lambda _: pytest.fail("the values were made"))
    with pytest.raises(wire.Malformed, match="too many values"):
        wire.decode(f"[{','.join([value] * (size // (len(value) + 1)))}]".encode())


def test_longest_list_of_the_shortest_holdings_is_read():
    shortest = Holding("", "a", "held", "shared", "lock", 1, "", Holder("", "", 0, ""), 0.0, 0.0, 1)
    given = wire.encode(wire.holding_to_json(shortest))
    text = b'[{"value":[' + b",".join([given] * (MAX_BODY // (len(given) + 1) - 1)) + b"]}]"
    assert len(wire.decode(text)[0]["value"]) > 7_000


def test_names_with_brackets_and_commas_can_be_listed():
    named = Holding("shop", "{user:1},[a,b]", "held", "exclusive", "lock", 1, "f" * 16, HOLDING.holder, 0.0, 0.0, 1)
    text = wire.encode([{"value": [wire.holding_to_json(named)] * 5_000}])
    assert wire.page_from_json(wire.decode(text)[0])[0][-1].name == named.name


def test_largest_usual_answers_are_read():
    renewed = [{"alive": [29.97, None]}] * wire.MAX_CALLS
    assert wire.decode(wire.encode([{"renewed": renewed}]))[0]["renewed"] == renewed
    busy = [{"busy": [None, 3, 41, ["l", "h", 1, "p"]], "heard": True}] * wire.MAX_CALLS
    assert wire.decode(wire.encode(busy)) == busy
