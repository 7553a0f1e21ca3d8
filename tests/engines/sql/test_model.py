"""The state machine in stored procedures against the pure one (core/lock_state.py): the same verbs at the same times
give the same answers and notifications, on PostgreSQL and on MariaDB.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasehold.core.lock_state import LockState
from leasehold.core.queue_entry import Context, Notification
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing.conformance.rig import Absent
from tests.support.sql_model import SQL_MODELS

ID_HASHES = "abcdefgh"


def round_times(answer):
    """Round times (the model has float seconds, the server microseconds) and drop the position of a renewal."""
    if isinstance(answer, Busy):
        return answer._replace(left=None if answer.left is None else round(answer.left, 5))
    if isinstance(answer, Grant):
        return answer._replace(ttl=round(answer.ttl, 5))
    if isinstance(answer, Alive):
        return Alive(round(answer.ttl, 5))
    return answer


def claim(id_hash: str, **fields) -> Claim:
    fields = {"ttl": 10.0, "queue": True} | fields
    return Claim("ns", "name", f"secret {id_hash}", id_hash, Holder(f"holder {id_hash}", "h", 1, "p"), **fields)


id_hashes = st.sampled_from(ID_HASHES)
shapes = st.sampled_from([{}, {}, {"mode": "shared"}, {"delay": 2.0}, {"min_hold": 4.0}, {"min_hold": 4.0}])
semaphores = st.sampled_from([{"kind": "semaphore", "limit": 2, "mode": "exclusive"}])
limits = st.tuples(st.just("set_limit"), st.sampled_from([None, 1, 2, 3]))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), id_hashes, st.booleans(), shapes, st.sampled_from([1.0, 10.0])),
        st.tuples(st.just("attempt"), id_hashes, st.just(True), shapes, st.just(10.0)),
        st.tuples(st.just("renew"), id_hashes, st.booleans()),
        st.tuples(st.just("release"), id_hashes, st.booleans(), st.booleans()),
        st.tuples(st.just("break"), id_hashes),
        limits,
        st.tuples(st.just("decline"), id_hashes, id_hashes),
        st.tuples(st.just("decline"), id_hashes.map(lambda id_hash: (id_hash, id_hash))).map(lambda s: (s[0], *s[1])),
        st.tuples(st.just("look")),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 3.0, 5.0, 16.0])),
        st.tuples(st.just("unreachable"), id_hashes),
        st.tuples(st.just("hears"), id_hashes),
    ),
    max_size=40,
)


def attempt_step(id_hash: str, queue: bool = True, ttl: float = 10.0, **shape) -> tuple:
    return ("attempt", id_hash, queue, shape, ttl)


QUEUE_OF_THREE = (attempt_step("a"), attempt_step("b"), attempt_step("c"))
HISTORIES = {
    "a declined reservation goes to the next waiter": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), ("decline", "b", "c"), ("decline", "b", "b")),
        *(("decline", "b", "b"), attempt_step("b"), attempt_step("c"), ("decline", "c", "c"), attempt_step("b")),
    ),
    "a reservation that is not claimed expires, and its waiter returns": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, True),
            ("pass", 3.0),
            attempt_step("c"),
            attempt_step("b"),
            ("release", "c", True, True),
        ),
        *(attempt_step("b"), ("pass", 5.0), attempt_step("c")),
    ),
    "the head is notified again when its time comes sooner": (
        *(
            attempt_step("a", mode="shared"),
            attempt_step("b", mode="shared", ttl=1.0),
            attempt_step("c"),
            ("renew", "b", True),
        ),
        *(
            ("pass", 0.5),
            attempt_step("d", queue=False, mode="shared"),
            ("release", "a", True, True),
            ("pass", 3.0),
            ("look",),
        ),
    ),
    "the next attempt passes over a waiter that cannot be reached": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, True),
            ("unreachable", "b"),
            ("pass", 0.5),
            attempt_step("c"),
            ("hears", "b"),
            attempt_step("b"),
        ),
    ),
    "a longer hold after a shorter one": (
        *(
            attempt_step("a", ttl=1.0),
            attempt_step("b"),
            attempt_step("a", ttl=10.0),
            ("pass", 0.5),
            attempt_step("c"),
            ("pass", 0.5),
            ("look",),
        ),
    ),
    "a delay, a break, and a break once more": (
        *(
            attempt_step("a", delay=2.0),
            attempt_step("b"),
            ("break", "a"),
            ("pass", 0.5),
            ("break", "a"),
            attempt_step("b"),
            ("pass", 3.0),
        ),
        *(("look",), attempt_step("b")),
    ),
    "a delay after an expiry": (
        *(
            attempt_step("a", ttl=1.0, delay=2.0),
            attempt_step("b"),
            ("pass", 1.5),
            attempt_step("b"),
            attempt_step("c"),
            ("pass", 2.0),
            attempt_step("b"),
        ),
    ),
    "an early release cools": (
        attempt_step("a", min_hold=4.0),
        attempt_step("b"),
        ("release", "a", True, True),
        attempt_step("b"),
        ("pass", 5.0),
        attempt_step("b"),
    ),
    "the release of an unknown claim ends no grant, but a reservation": (
        *(
            *QUEUE_OF_THREE,
            ("release", "a", True, False),
            ("release", "a", True, True),
            ("release", "b", True, False),
            attempt_step("c"),
        ),
    ),
    "waiters not heard of are dropped": (
        *QUEUE_OF_THREE,
        ("pass", 5.0),
        ("renew", "c", False),
        ("pass", 16.0),
        attempt_step("c"),
        attempt_step("b"),
    ),
    "a reservation is claimed ahead of a dead head": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("renew", "a", True), ("pass", 9.0), ("renew", "a", True)),
        *(("renew", "b", False), ("renew", "d", False), ("pass", 5.0), ("release", "a", True, True), ("pass", 1.5)),
        *(attempt_step("b"), ("release", "b", True, True), attempt_step("d")),
    ),
    "a reservation is claimed for less than the head's re-check": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), attempt_step("b", ttl=0.5), ("pass", 0.75), ("look",)),
        attempt_step("c"),
    ),
    "a claim joins while a reservation's client is gone": (
        *(*QUEUE_OF_THREE, ("release", "a", True, True), ("unreachable", "b"), attempt_step("d"), attempt_step("c")),
        *(("hears", "b"), attempt_step("b"), ("release", "c", True, True), attempt_step("b")),
    ),
    "a claim joins while the head's client is gone": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), attempt_step("d"), ("release", "a", True, True), attempt_step("c")),
        attempt_step("d"),
    ),
    "a claim joins behind a dead head": (
        *(*QUEUE_OF_THREE, ("pass", 5.0), ("renew", "a", True), ("pass", 5.0), ("renew", "a", True)),
        *(("renew", "c", False), ("pass", 5.0), attempt_step("d"), ("release", "a", True, True), attempt_step("c")),
    ),
    "a claim joins when only passed-over ones are queued": (
        *(
            attempt_step("a"),
            attempt_step("b"),
            ("unreachable", "b"),
            attempt_step("c", queue=False),
            attempt_step("d"),
            attempt_step("e"),
        ),
        *(("hears", "b"), attempt_step("b"), ("release", "a", True, True), attempt_step("b"), attempt_step("d")),
    ),
    "a claim becomes the head behind a reservation": (
        *(attempt_step("a"), attempt_step("b"), ("release", "a", True, True), ("pass", 0.5), attempt_step("c")),
        *(attempt_step("b"), attempt_step("d"), ("release", "b", True, True), attempt_step("c"), attempt_step("b")),
    ),
    "the head's re-check comes sooner when another joins": (
        *(attempt_step("a"), attempt_step("b"), attempt_step("c"), ("release", "a", True, True), ("pass", 2.5)),
        *(attempt_step("d"), ("pass", 0.5), attempt_step("e"), attempt_step("c")),
    ),
    "the grant ends before the head's known re-check": (
        *(
            attempt_step("a"),
            attempt_step("b", ttl=1.0),
            attempt_step("c"),
            ("pass", 5.0),
            ("release", "a", True, True),
        ),
        *(attempt_step("b", ttl=0.5), attempt_step("d"), attempt_step("e", ttl=0.5)),
    ),
    "a release finds the first waiter dead": (
        *(*QUEUE_OF_THREE, ("renew", "a", True), ("pass", 5.0), ("renew", "a", True), ("renew", "c", False)),
        *(("pass", 9.0), ("renew", "a", True), ("pass", 1.0), ("release", "a", True, True), attempt_step("c")),
    ),
    "a release finds the first waiter's client gone": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), ("release", "a", True, True), attempt_step("c"), attempt_step("b")),
    ),
    "a release finds the second waiter dead": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("pass", 5.0), ("renew", "a", True), ("renew", "b", False)),
        *(("renew", "d", False), ("pass", 9.0), ("renew", "a", True), ("pass", 1.0), ("release", "a", True, True)),
        *(attempt_step("b"), ("release", "b", True, True), attempt_step("d")),
    ),
    "a release finds the second waiter's client gone": (
        *(*QUEUE_OF_THREE, attempt_step("d"), ("unreachable", "c"), ("release", "a", True, True), attempt_step("b")),
        *(("release", "b", True, True), attempt_step("d"), ("hears", "c"), attempt_step("c")),
    ),
    "a release finds one waiter, and another that was passed over": (
        *(*QUEUE_OF_THREE, ("unreachable", "b"), ("look",), ("release", "a", True, True), attempt_step("c")),
        *(("hears", "b"), ("release", "c", True, True), attempt_step("b")),
    ),
    "a held claim attempts again with a queue behind it": (
        *(*QUEUE_OF_THREE, attempt_step("a", ttl=1.0), attempt_step("a"), ("release", "a", True, True)),
        *(attempt_step("b"), attempt_step("b", ttl=1.0), ("release", "b", True, True), attempt_step("c")),
    ),
    "a claim joins while the grant cools": (
        *(attempt_step("a", min_hold=4.0), attempt_step("b"), ("release", "a", True, True), attempt_step("c")),
        *(("pass", 5.0), attempt_step("d"), attempt_step("b")),
    ),
    "a claim joins when the grant is over": (
        attempt_step("a", ttl=1.0),
        attempt_step("b"),
        ("pass", 1.0),
        attempt_step("c"),
    ),
    "a lock is refused where a semaphore is in use": (
        *(attempt_step(id_hash, kind="semaphore", limit=2) for id_hash in "abc"),
        *(attempt_step("d"), ("release", "a", True, True), attempt_step("d")),
    ),
    "readers go together, a writer alone": (
        *(
            attempt_step("a"),
            attempt_step("b", mode="shared"),
            attempt_step("c", mode="shared"),
            attempt_step("d"),
            attempt_step("e", mode="shared"),
        ),
        *(
            ("release", "a", True, True),
            attempt_step("b", mode="shared"),
            attempt_step("c", mode="shared"),
            attempt_step("e", mode="shared"),
        ),
        *(("release", "b", True, True), ("release", "c", True, True), attempt_step("d")),
    ),
}


@pytest.fixture(scope="module", params=["mysql", "postgresql"])
def db(request):
    model = SQL_MODELS[request.param]
    try:
        for session in model.open_session():
            yield model, session
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("name", HISTORIES)
def test_server_agrees_with_the_model_on_known_histories(db, name: str) -> None:
    model, session = db
    run_history(model(session), HISTORIES[name], "lock", None)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_server_agrees_with_the_model_on_random_histories(db, kind: str, data) -> None:
    run(db, kind, data)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_server_agrees_with_the_model_on_many_random_histories(db, kind: str, data) -> None:
    run(db, kind, data)


def run(db, kind: str, data) -> None:
    model, session = db
    run_history(model(session), data.draw(steps), kind, data)


def run_history(model, history, kind: str, data) -> None:
    tokens: dict[str, int] = {}
    for step in history:
        apply_step(model, step, tokens, kind, data)
        model.compare_inspect()
    apply_step(model, ("set_limit", None), tokens, kind, data)
    # Long after the last call, a sweep leaves no row.
    model.advance_clock(1000.0)
    model.sweep()
    assert model.row_count() == 0


def apply_step(model, step, tokens: dict[str, int], kind: str, data) -> None:
    verb, *args = step
    if verb == "pass":
        model.advance_clock(args[0])
    elif verb == "unreachable":
        model.set_reachable(f"client {args[0]}", False)
    elif verb == "hears":
        model.set_reachable(f"client {args[0]}", True)
    elif verb == "look":
        assert_agreement(model, model.sweep(), lambda lock_state, context: (None, lock_state.sweep(context)))
    elif verb == "attempt":
        id_hash, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        new_claim, client = claim(id_hash, queue=queue, ttl=ttl, **shape), f"client {id_hash}"
        answer = model.attempt(new_claim, client)
        assert_agreement(
            model,
            answer,
            lambda lock_state, context: lock_state.attempt(context, new_claim, client),
            new_claim.kind,
            new_claim.limit,
        )
        if isinstance(answer, Grant):
            tokens[id_hash] = answer.token
    elif verb == "renew":
        id_hash, held = args
        new_claim = claim(id_hash, token=tokens.get(id_hash, 7) if held else 0)
        answer = model.renew(new_claim)
        model.sweep()  # the server's renewal does not advance the queue; the model's does
        assert_agreement(model, answer, lambda lock_state, context: renew_in_model(lock_state, context, new_claim))
    elif verb == "set_limit":
        (limit,) = args
        assert_agreement(
            model, model.set_limit(limit), lambda lock_state, context: lock_state.set_limit(context, limit)
        )
    elif verb == "decline":
        id_hash, client = args[0], f"client {args[1]}"
        assert_agreement(
            model,
            model.decline(id_hash, client),
            lambda lock_state, context: lock_state.decline(context, id_hash, client),
        )
    elif verb == "release":
        id_hash, keep, held = args
        assert_agreement(
            model,
            model.release(id_hash, keep, held),
            lambda lock_state, context: lock_state.release(context, id_hash, keep, held),
        )
    else:
        token = tokens.get(args[0], 7)
        assert_agreement(model, model.break_(token), lambda lock_state, context: lock_state.break_(context, token))


def renew_in_model(lock_state: LockState, context: Context, new_claim: Claim):
    reply, notifications = lock_state.renew(context, new_claim)
    if isinstance(reply, Gone) and not new_claim.token:  # the server gives no reason why a queued claim is gone
        reply = Gone()
    return reply, notifications


def assert_agreement(model, answer, verb, kind="lock", limit=1) -> None:
    expected, notifications = model.run_model(verb, kind, limit)
    model.learn_tokens()
    assert round_times(answer) == round_times(expected)
    assert [round_notification(notification) for notification in model.take_notifications()] == [
        round_notification(notification) for notification in model.expected_notifications(notifications)
    ]


def round_notification(notification: Notification) -> Notification:
    return notification._replace(seconds=round(notification.seconds, 5))
