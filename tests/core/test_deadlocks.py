"""Who is named, and who is not: the wait-for graph of locks, readers and permits. By cases, and then played out:
whoever the play leaves waiting for ever is stuck, and nobody else.
"""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.deadlocks import Deadlock, deadlocks, still_there
from leasehold.model import Holder, Holding

TOKENS = iter(range(1, 10**9))


def claim(owner: str, name: str, state: str = "held", *, mode="exclusive", limit: int = 0, age: float = 1.0) -> Holding:
    token = None if state in ("waiting", "passed over") else next(TOKENS)
    number = random.Random(f"{owner}{name}{state}").getrandbits(32)
    return Holding(
        namespace="",
        name=name,
        state=state,
        mode=mode,
        kind="semaphore" if limit else "lock",
        limit=limit or 1,
        fingerprint=f"{number:016x}",
        owner=owner,
        holder=Holder(owner),
        age=age,
        left=10.0,
        token=token,
    )


def waits(owner: str, name: str, **more) -> Holding:
    return claim(owner, name, "waiting", **more)


def found(*claims: Holding) -> list[list[tuple[str, str]]]:
    """Circles as (who, for what), each from its first in the alphabet."""
    circles = []
    for deadlock in deadlocks(sorted(claims, key=lambda one: one.name)):
        pairs = [(wait.waiter.holder.label, wait.name) for wait in deadlock.waits]
        first = pairs.index(min(pairs))
        circles.append(pairs[first:] + pairs[:first])
    return sorted(circles)


def test_two_that_wait_for_each_other() -> None:
    assert found(claim("p", "a"), claim("q", "b"), waits("p", "b"), waits("q", "a")) == [[("p", "b"), ("q", "a")]]


def test_a_line_is_no_circle() -> None:
    assert found(claim("p", "a"), waits("q", "a"), waits("r", "a"), claim("q", "b"), waits("s", "b")) == []


def test_who_only_waits_behind_a_circle_is_not_in_it() -> None:
    behind = [waits("r", "a"), claim("r", "c"), waits("s", "c")]
    two = [claim("p", "a"), claim("q", "b"), waits("p", "b"), waits("q", "a")]
    assert found(*two, *behind) == [[("p", "b"), ("q", "a")]]


def test_every_circle_is_named() -> None:
    claims = []
    for number in range(5):
        size = number + 2
        names = [f"{number}{place}" for place in range(size)]
        for place in range(size):
            claims += [claim(f"o{names[place]}", names[place]), waits(f"o{names[place]}", names[(place + 1) % size])]
    assert sorted(len(circle) for circle in found(*claims)) == [2, 3, 4, 5, 6]


def test_a_thread_that_waits_for_itself() -> None:
    assert found(claim("p", "a"), waits("p", "a")) == [[("p", "a")]]


def test_two_threads_of_one_process_are_two() -> None:
    # They share label, host and pid: only the owner tells them apart.
    assert found(claim("p1", "a"), claim("p2", "b"), waits("p1", "b"), waits("p3", "a")) == []


def test_a_permit_is_had_as_soon_as_one_of_its_holders_goes_on() -> None:
    half = [claim("p", "pool", limit=2), claim("q", "pool", limit=2), waits("r", "pool", limit=2)]
    assert found(*half, claim("r", "a"), waits("p", "a")) == [], "q goes on"
    both = found(*half, claim("r", "a"), waits("p", "a"), waits("q", "a"))
    assert both == [[("p", "a"), ("r", "pool")], [("q", "a"), ("r", "pool")]]
    cooling = claim("s", "pool", "cooling", limit=3)
    assert found(*half, cooling, claim("r", "a"), waits("p", "a"), waits("q", "a")) == [], "time alone frees a permit"


def test_a_permit_that_is_free_is_waited_for_by_nobody() -> None:
    """Whoever has the turn did not come for it: it sleeps, and needs no one to go on."""
    asleep = claim("r", "pool", "passed over", limit=2)
    assert found(claim("p", "pool", limit=2), asleep, claim("r", "a"), waits("p", "a")) == []


def test_a_writer_waits_for_every_reader() -> None:
    readers = [claim("p", "doc", mode="shared"), claim("q", "doc", mode="shared")]
    assert found(*readers, waits("r", "doc"), claim("r", "a"), waits("q", "a")) == [[("q", "a"), ("r", "doc")]]


def test_a_reader_that_only_the_line_keeps_out_waits_for_the_writer_before_it() -> None:
    line = [claim("p", "doc", mode="shared"), waits("w", "doc"), waits("r", "doc", mode="shared")]
    circle = [("p", "a"), ("r", "doc"), ("w", "doc")]
    assert found(*line, claim("r", "a"), waits("p", "a")) == [circle]
    (deadlock,) = deadlocks([claim("r", "a"), waits("p", "a"), *line])
    assert "stands in line before it" in str(deadlock)
    assert (
        found(claim("p", "doc", mode="shared"), waits("r", "doc", mode="shared"), claim("r", "a"), waits("p", "a"))
        == []
    )


def test_what_cools_is_waited_for_by_time_alone() -> None:
    assert found(claim("p", "a", "cooling"), waits("q", "a"), claim("q", "b"), waits("p", "b")) == []


def test_the_way_out_is_the_youngest_grant() -> None:
    claims = [claim("p", "a", age=50), waits("q", "a"), claim("q", "b", age=5), waits("p", "b", age=0.1)]
    (deadlock,) = deadlocks(claims)
    assert (deadlock.victim.name, deadlock.victim.holder.label) == ("b", "q")
    assert str(deadlock).count("waits for") == 2


def test_only_what_both_looks_show_is_there() -> None:
    a, b = claim("p", "a"), claim("q", "b")
    circle = [a, waits("q", "a"), b, waits("p", "b")]
    first = deadlocks(circle)
    assert still_there(first, deadlocks(circle)) == first
    assert still_there(first, []) == []
    again = [claim("p", "a"), waits("q", "a"), b, waits("p", "b")]  # released and taken anew between the looks
    assert still_there(first, deadlocks(again)) == []
    assert still_there([], deadlocks(circle)) == []


names = st.sampled_from("abcdef")


@given(
    st.permutations("abcdef"),
    st.lists(st.tuples(st.sampled_from("uvwxyz"), names), max_size=6, unique_by=lambda t: t[0]),
)
def test_of_plain_locks_every_circle_is_named_and_nothing_else(held, wanted) -> None:
    # Each owner holds one name and waits for at most one: the circles are those of a function, found by walking it.
    owner_of = dict(zip(held, "uvwxyz", strict=True))
    wants = dict(wanted)
    circles = set()
    for start in wants:
        path = [start]
        while path[-1] in wants and owner_of[wants[path[-1]]] not in path:
            path.append(owner_of[wants[path[-1]]])
        if path[-1] in wants and owner_of[wants[path[-1]]] == start:
            circles.add(frozenset(path))
    claims = [claim(owner, name) for name, owner in owner_of.items()] + [waits(*one) for one in wants.items()]
    said = deadlocks(sorted(claims, key=lambda one: one.name))
    assert {frozenset(wait.waiter.holder.label for wait in one.waits) for one in said} == circles
    assert len(said) == len(circles)
    assert all(_goes_round(one) for one in said)


def _goes_round(deadlock: Deadlock) -> bool:
    ring = [*deadlock.waits, deadlock.waits[0]]
    return all(one.holder.owner == two.waiter.owner for one, two in pairwise(ring))


# ------------------------------------------------------------- played out


LIMITS = {"a": 0, "b": 0, "c": 0, "p": 2, "q": 3}  # 0: a lock, with readers; else a semaphore
OWNERS = "stuvwxyz"

steps = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.sampled_from("abcpq"), st.sampled_from(["exclusive", "shared"])), max_size=30
)
released = st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from("abcpq")), max_size=4)


class Play:
    """Owners that go on until they wait; each name has its holders and its line."""

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[str, str]]] = {name: [] for name in LIMITS}
        self.line: dict[str, list[tuple[str, str]]] = {name: [] for name in LIMITS}

    def waiting(self) -> set[str]:
        return {owner for line in self.line.values() for owner, _ in line}

    def admits(self, name: str, mode: str) -> bool:
        holders = self.held[name]
        if LIMITS[name]:
            return len(holders) < LIMITS[name]
        return not holders or (mode == "shared" and all(other == "shared" for _, other in holders))

    def ask(self, owner: str, name: str, mode: str) -> None:
        mode = "exclusive" if LIMITS[name] else mode
        mine = any(one == owner for one, _ in self.held[name])
        if owner in self.waiting() or (mine and not LIMITS[name]):
            return
        fits = self.admits(name, mode) and not self.line[name]
        (self.held if fits else self.line)[name].append((owner, mode))

    def give_back(self, owner: str, name: str) -> None:
        """Without telling those in line: as if they did not hear it."""
        if owner not in self.waiting():
            self.held[name] = [one for one in self.held[name] if one[0] != owner]

    def stuck(self) -> set[str]:
        """Those who wait when nothing goes on any more."""
        while True:
            before = repr((self.held, self.line))
            for name, line in self.line.items():
                while line and self.admits(name, line[0][1]):
                    self.held[name].append(line.pop(0))
            waiting = self.waiting()
            self.held = {name: [one for one in held if one[0] in waiting] for name, held in self.held.items()}
            if repr((self.held, self.line)) == before:
                return waiting

    def shown(self) -> list[Holding]:
        found = []
        for name, limit in LIMITS.items():
            for parties, state in ((self.held[name], "held"), (self.line[name], "passed over")):
                found += [claim(owner, name, state, mode=mode, limit=limit) for owner, mode in parties]
        return found


@settings(max_examples=500, deadline=None)
@given(steps, released)
def test_who_is_named_is_stuck_and_where_anybody_is_stuck_a_circle_is_named(steps, released) -> None:
    play = Play()
    for step in steps:
        play.ask(*step)
    for one in released:
        play.give_back(*one)
    said = deadlocks(play.shown())
    named = {wait.waiter.owner for circle in said for wait in circle.waits}
    stuck = play.stuck()
    assert named <= stuck, "nobody is named who would go on"
    assert bool(named) == bool(stuck)
