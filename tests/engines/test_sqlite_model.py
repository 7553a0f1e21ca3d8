"""The line on rows beside the pure line: the same verbs at the same times give the same answers and wake-ups.

`RowLine` brings in only what a verb needs, so what this shows is that it never needs more than it brings in; and that a
name nobody else wants needs no line (`idle.py`).
"""

from __future__ import annotations

import sqlite3
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.admission import Line
from leasehold.core.party import Counter, Moment, Word
from leasehold.core.timing import BEAT
from leasehold.engines.sqlite import place
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.idle import given_back, taken
from leasehold.engines.sqlite.rows import RowLine, holdings, overdue
from leasehold.errors import Mismatch
from leasehold.model import Claim, Holder

MARKS = "abcdefgh"


@dataclass
class World:
    """One clock, one set of clients that can be told, and the same name kept in two ways."""

    now: float = 1000.0
    deaf: set[str] = field(default_factory=set)
    counter: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.host = Host("machine", "boot", "", lambda: self.now, lambda: 0.0)
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        place.move_in(self.db, ":memory:", self.host)
        self.line: Line | None = None

    def pure(self, verb, kind="lock", limit=1):
        at = Moment(self.now, lambda: self.counter.next(0), lambda client: client not in self.deaf)
        line = self.line or Line(self.now, kind, limit)
        line.occupiers = dict(sorted(line.occupiers.items()))  # of two that end together, rows show the older
        queued = any(party.beat and not party.token for party in line.parties.values())
        try:
            answer = verb(line, at)
        except Mismatch as error:
            return str(error)
        if not queued:  # on rows, lapsed places are looked for from the first waiter on
            line._scan_at = self.now + BEAT
        self.line = None if line.idle else line
        return answer

    def rows(self, verb, mark="", kind="lock", limit=1, idle=lambda *_: None):
        """As the engine does: first as if nobody else wanted the name, and where somebody does, by the line."""
        self.db.execute("begin immediate")
        try:
            if answer := idle(self.db, self.host):
                self.db.execute("commit")
                return answer, []
            line = RowLine(self.db, self.host, "ns", "name", mark, kind, limit)
            answer = verb(line, line.moment(self.host.wall, lambda client: client not in self.deaf))
            line.save()
        except Mismatch as error:
            self.db.execute("rollback")
            return str(error)
        self.db.execute("commit")
        return answer

    def shown(self):
        """What a look at the name shows, the same from both, nothing changed."""
        found = list(holdings(self.db, self.host, "ns", "name", True))
        line = deepcopy(self.line) or Line(self.now)
        line.tidy(self.now)
        assert found == list(line.holdings("ns", "name", self.now))

    def size(self) -> int:
        tables = ("lh_grant", "lh_waiter", "lh_line")
        return sum(self.db.execute(f"select count(*) from {table}").fetchone()[0] for table in tables)


def claim(mark: str, **more) -> Claim:
    more = {"ttl": 10.0, "queue": True} | more
    return Claim("ns", "name", f"secret {mark}", mark, Holder(f"holder {mark}", "h", 1, "p"), **more)


marks = st.sampled_from(MARKS)
shapes = st.sampled_from(
    [
        {},
        {},
        {"mode": "shared"},
        {"delay": 2.0},
        {"min_hold": 4.0},
    ]
)
semaphores = st.sampled_from([{"kind": "semaphore", "limit": 2, "mode": "exclusive"}])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("attempt"), marks, st.booleans(), shapes, st.sampled_from([1.0, 10.0])),
        st.tuples(st.just("attempt"), marks, st.just(True), shapes, st.just(10.0)),
        st.tuples(st.just("renew"), marks, st.booleans()),
        st.tuples(st.just("release"), marks, st.sampled_from([0.0, 4.0])),
        st.tuples(st.just("break"), marks),
        st.tuples(st.just("look")),
        st.tuples(st.just("unheard"), marks),
        st.tuples(st.just("pass"), st.sampled_from([0.0, 0.5, 3.0, 5.0, 16.0])),
        st.tuples(st.just("deaf"), marks),
        st.tuples(st.just("hears"), marks),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["lock", "semaphore", "either"])
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_rows_and_the_pure_line_agree(kind: str, data) -> None:
    world = World()
    tokens: dict[str, int] = {}
    for step in data.draw(steps):
        both(world, step, tokens, kind, data)
        world.shown()
    # Nobody asks any more: a look long after finds nothing, and leaves nothing.
    world.now += 1000.0
    world.rows(lambda line, at: line.look(at))
    assert world.size() == 0


def both(world: World, step, tokens: dict[str, int], kind: str, data) -> None:
    what, *args = step
    if what == "pass":
        world.now += args[0]
    elif what == "deaf":
        world.deaf.add(f"client {args[0]}")
    elif what == "hears":
        world.deaf.discard(f"client {args[0]}")
    elif what == "look":
        assert world.rows(lambda line, at: line.look(at)) == world.pure(lambda line, at: line.look(at))
    elif what == "unheard":
        (mark,) = args
        got = world.rows(lambda line, at: line.unheard(at, mark), mark)
        assert got == world.pure(lambda line, at: line.unheard(at, mark))
    elif what == "attempt":
        mark, queue, shape, ttl = args
        if kind == "semaphore" or (kind == "either" and data.draw(st.booleans())):
            shape = data.draw(semaphores)
        one = claim(mark, queue=queue, ttl=ttl, **shape)

        def idle(db, host):
            return None if queue else taken(db, host, one, f"client {mark}")

        got = world.rows(lambda line, at: line.attempt(at, one, f"client {mark}"), mark, one.kind, one.limit, idle)
        assert got == world.pure(lambda line, at: line.attempt(at, one, f"client {mark}"), one.kind, one.limit)
        if not isinstance(got, str) and getattr(got[0], "token", None) and hasattr(got[0], "ttl"):
            tokens[mark] = got[0].token
    elif what == "renew":
        mark, held = args
        one = claim(mark, token=tokens.get(mark, 7) if held else 0)
        assert world.rows(lambda line, at: line.renew(at, one), mark) == world.pure(
            lambda line, at: line.renew(at, one)
        )
    elif what == "release":
        mark, least = args
        one = claim(mark, min_hold=least)
        idle = partial(given_back, claim=one)
        got = world.rows(lambda line, at: line.release(at, mark, least), mark, idle=idle)
        assert got == world.pure(lambda line, at: line.release(at, mark, least))
    else:
        token = tokens.get(args[0], 7)
        got = world.rows(lambda line, at: line.break_(at, token))
        assert got == world.pure(lambda line, at: line.break_(at, token))


def test_a_name_with_somebody_passed_over_is_not_idle() -> None:
    """Nothing occupies it; but whoever was passed over comes back to a semaphore."""
    world = World(deaf={"client b"})
    for mark in "ab":
        one = claim(mark, kind="semaphore")
        world.rows(lambda line, at, one=one: line.attempt(at, one, f"client {one.mark}"), mark, "semaphore")
    world.rows(lambda line, at: line.release(at, "a", 0.0), "a")
    assert world.size() == 2
    assert taken(world.db, world.host, claim("c", queue=False), "client c") is None


def test_what_has_lapsed_is_not_given_back() -> None:
    world, one = World(), claim("a", queue=False, ttl=1.0)
    assert taken(world.db, world.host, one, "client a")
    world.now += 1.0
    assert not given_back(world.db, world.host, one)


def test_a_thousand_waiters_cost_a_verb_no_more_rows_than_two() -> None:
    world = World()
    fetched = []
    for number in range(1000):
        world.rows(lambda line, at, n=number: line.attempt(at, claim(f"m{n:04}"), "c"), f"m{number:04}")
    world.db.set_trace_callback(fetched.append)
    answer, words = world.rows(lambda line, at: line.release(at, "m0000", 0.0), "m0000")
    world.db.set_trace_callback(None)
    assert answer
    assert words[0] == Word("c", "go", "m0001")
    assert words[1].kind == "head"
    assert words[1].mark == "m0002"
    assert len(fetched) < 20


def test_what_lapsed_and_nobody_asks_about_is_found() -> None:
    world = World()
    for number in range(20):
        line = RowLine(world.db, world.host, "ns", f"n{number:02}")
        line.attempt(line.moment(world.host.wall, lambda _: True), claim("a", ttl=10.0 if number % 2 else 99.0), "c")
        line.save()
    world.now += 20.0
    found, after = [], ("", "")
    while True:
        over, after = overdue(world.db, world.now, after, 8)
        found += over
        if after == ("", ""):
            break
    assert found == [("ns", f"n{number:02}") for number in range(1, 20, 2)]
