"""Readers, writers and permits, played out: whoever the play leaves waiting for ever is stuck, and nobody else."""

from __future__ import annotations

from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.deadlocks import deadlocks
from leasehold.model import Holder, Holding

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
        tokens, found = count(1), []
        for name, limit in LIMITS.items():
            states = [(*one, "held") for one in self.held[name]] + [(*one, "passed over") for one in self.line[name]]
            for owner, mode, state in states:
                number = next(tokens)
                found.append(
                    Holding(
                        namespace="",
                        name=name,
                        state=state,
                        mode=mode,
                        kind="semaphore" if limit else "lock",
                        limit=limit or 1,
                        fingerprint=f"{number:016x}",
                        owner=owner,
                        holder=Holder(owner),
                        age=1.0,
                        left=10.0,
                        token=number if state == "held" else None,
                    )
                )
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
