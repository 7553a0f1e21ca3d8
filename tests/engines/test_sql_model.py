"""The state machine in stored procedures beside the pure one: the same verbs at the same times give the same answers,
and the same words are said, on PostgreSQL and on MariaDB.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasehold.core.admission import Line
from leasehold.core.party import Moment, Word
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder
from leasehold.testing.rig import Absent

MARKS = "abcdefgh"


def near(answer):
    """Without what floating seconds and whole microseconds make of the same time, and without a place in a renewal."""
    if isinstance(answer, Busy):
        return answer._replace(left=None if answer.left is None else round(answer.left, 5))
    if isinstance(answer, Grant):
        return answer._replace(ttl=round(answer.ttl, 5))
    if isinstance(answer, Alive):
        return Alive(round(answer.ttl, 5))
    return answer


def claim(mark: str, **more) -> Claim:
    more = {"ttl": 10.0, "queue": True} | more
    return Claim("ns", "name", f"secret {mark}", mark, Holder(f"holder {mark}", "h", 1, "p"), **more)


marks = st.sampled_from(MARKS)
shapes = st.sampled_from([{}, {}, {"mode": "shared"}, {"delay": 2.0}])
semaphores = st.sampled_from([{"kind": "semaphore", "limit": 2, "mode": "exclusive"}])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), marks, st.booleans(), shapes, st.sampled_from([1.0, 10.0])),
        st.tuples(st.just("attempt"), marks, st.just(True), shapes, st.just(10.0)),
        st.tuples(st.just("renew"), marks, st.booleans()),
        st.tuples(st.just("release"), marks, st.sampled_from([0.0, 4.0]), st.booleans()),
        st.tuples(st.just("break"), marks),
        st.tuples(st.just("look")),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 3.0, 5.0, 16.0])),
        st.tuples(st.just("deaf"), marks),
        st.tuples(st.just("hears"), marks),
    ),
    max_size=40,
)


def take(mark: str, queue: bool = True, ttl: float = 10.0, **shape) -> tuple:
    return ("attempt", mark, queue, shape, ttl)


LINE = (take("a"), take("b"), take("c"))
HISTORIES = {
    "a turn nobody takes lapses, and its owner comes back": (
        *(*LINE, ("release", "a", 0.0, True), ("pass", 3.0), take("c"), take("b"), ("release", "c", 0.0, True)),
        *(take("b"), ("pass", 5.0), take("c")),
    ),
    "the head is told again when its time comes sooner": (
        *(take("a", mode="shared"), take("b", mode="shared", ttl=1.0), take("c"), ("renew", "b", True)),
        *(("pass", 0.5), take("d", queue=False, mode="shared"), ("release", "a", 0.0, True), ("pass", 3.0), ("look",)),
    ),
    "the next in line looks whether somebody given a turn is there": (
        *(*LINE, ("release", "a", 0.0, True), ("deaf", "b"), ("pass", 0.5), take("c"), ("hears", "b"), take("b")),
    ),
    "a longer hold after a shorter one": (
        *(take("a", ttl=1.0), take("b"), take("a", ttl=10.0), ("pass", 0.5), take("c"), ("pass", 0.5), ("look",)),
    ),
    "a delay, a break, and a break once more": (
        *(take("a", delay=2.0), take("b"), ("break", "a"), ("pass", 0.5), ("break", "a"), take("b"), ("pass", 3.0)),
        *(("look",), take("b")),
    ),
    "a delay after a lapse": (
        *(take("a", ttl=1.0, delay=2.0), take("b"), ("pass", 1.5), take("b"), take("c"), ("pass", 2.0), take("b")),
    ),
    "an early release cools": (take("a"), take("b"), ("release", "a", 4.0, True), take("b"), ("pass", 5.0), take("b")),
    "a stray release ends no grant, but a turn": (
        *(*LINE, ("release", "a", 0.0, False), ("release", "a", 0.0, True), ("release", "b", 0.0, False), take("c")),
    ),
    "waiters not heard of are dropped": (
        *LINE,
        ("pass", 5.0),
        ("renew", "c", False),
        ("pass", 16.0),
        take("c"),
        take("b"),
    ),
    "readers go together, a writer alone": (
        *(take("a"), take("b", mode="shared"), take("c", mode="shared"), take("d"), take("e", mode="shared")),
        *(("release", "a", 0.0, True), take("b", mode="shared"), take("c", mode="shared"), take("e", mode="shared")),
        *(("release", "b", 0.0, True), ("release", "c", 0.0, True), take("d")),
    ),
}


@pytest.fixture(scope="module", params=["mysql", "postgresql"])
def db(request, beside):
    world = beside("sql_worlds").WORLDS[request.param]
    try:
        for session in world.opened():
            yield world, session
    except Absent as absent:
        pytest.skip(str(absent))


@pytest.mark.parametrize("name", HISTORIES)
def test_the_server_and_the_pure_line_agree_on(db, name: str) -> None:
    world, session = db
    follow(world(session), HISTORIES[name], "lock", None)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_server_and_the_pure_line_agree(db, kind: str, data) -> None:
    run(db, kind, data)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_server_and_the_pure_line_agree_at_length(db, kind: str, data) -> None:
    run(db, kind, data)


def run(db, kind: str, data) -> None:
    world, session = db
    follow(world(session), data.draw(steps), kind, data)


def follow(world, history, kind: str, data) -> None:
    tokens: dict[str, int] = {}
    for step in history:
        both(world, step, tokens, kind, data)
        world.shown()
    # Nobody asks any more: a look long after finds nothing, and leaves nothing.
    world.pass_time(1000.0)
    world.look()
    assert world.size() == 0


def both(world, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        world.pass_time(args[0])
    elif what == "deaf":
        world.hears(f"client {args[0]}", False)
    elif what == "hears":
        world.hears(f"client {args[0]}", True)
    elif what == "look":
        agree(world, world.look(), lambda line, at: (None, line.look(at)))
    elif what == "attempt":
        mark, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        one, client = claim(mark, queue=queue, ttl=ttl, **shape), f"client {mark}"
        answer = world.attempt(one, client)
        agree(world, answer, lambda line, at: line.attempt(at, one, client), one.kind, one.limit)
        if isinstance(answer, Grant):
            tokens[mark] = answer.token
    elif what == "renew":
        mark, held = args
        one = claim(mark, token=tokens.get(mark, 7) if held else 0)
        answer = world.renew(one)
        world.look()  # a renewal there touches nothing else
        agree(world, answer, lambda line, at: renewed(line, at, one))
    elif what == "release":
        mark, least, held = args
        agree(world, world.release(mark, least, held), lambda line, at: line.release(at, mark, least, held))
    else:
        token = tokens.get(args[0], 7)
        agree(world, world.break_(token), lambda line, at: line.break_(at, token))


def renewed(line: Line, at: Moment, one: Claim):
    reply, words = line.renew(at, one)
    if isinstance(reply, Gone) and not one.token:  # of a place in line nobody asks why it is gone
        reply = Gone()
    return reply, words


def agree(world, answer, verb, kind="lock", limit=1) -> None:
    expected, words = world.pure(verb, kind, limit)
    world.learn()
    assert near(answer) == near(expected)
    assert [near_word(word) for word in world.words()] == [near_word(word) for word in world.spoken(words)]


def near_word(word: Word) -> Word:
    return word._replace(seconds=round(word.seconds, 5))
