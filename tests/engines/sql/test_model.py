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
from tests.support.lock_histories import HISTORIES
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
