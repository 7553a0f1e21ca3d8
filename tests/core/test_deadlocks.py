"""The wait-for graph of locks, readers and permits: by cases, and against a simulation of owners that hold and wait.
The owners that the simulation leaves waiting for ever are stuck, and no others.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leasehold.core.deadlocks import Deadlock, deadlocks, giving_up_order, seen_in_both
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


def waiting_claim(owner: str, name: str, **fields) -> Holding:
    return claim(owner, name, "waiting", **fields)


def find_cycles(*claims: Holding) -> list[list[tuple[str, str]]]:
    """Cycles as (owner, name waited for), each starting at its smallest pair."""
    cycles = []
    for deadlock in deadlocks(sorted(claims, key=lambda holding: holding.name)):
        pairs = [(wait.waiter.holder.label, wait.name) for wait in deadlock.waits]
        first = pairs.index(min(pairs))
        cycles.append(pairs[first:] + pairs[:first])
    return sorted(cycles)


def test_two_owners_waiting_for_each_other_are_a_deadlock() -> None:
    assert find_cycles(claim("p", "a"), claim("q", "b"), waiting_claim("p", "b"), waiting_claim("q", "a")) == [
        [("p", "b"), ("q", "a")]
    ]


def test_owner_waiting_for_any_of_several_names_is_stuck_only_if_all_are() -> None:
    held = [claim("p", "a"), claim("q", "b"), claim("r", "c")]
    waits = [waiting_claim("p", "b"), waiting_claim("p", "c"), waiting_claim("q", "a")]  # p: any of b and c
    assert find_cycles(*held, *waits) == [], "r may release c"
    assert find_cycles(*held, *waits, waiting_claim("r", "a")) != []
    reserved = claim("p", "d", "reserved")
    assert find_cycles(*held, *waits, waiting_claim("r", "a"), reserved) == [], "p will claim d"
    free = [claim("s", "pool", limit=2), waiting_claim("p", "pool", limit=2)]
    assert find_cycles(*held, *waits, waiting_claim("r", "a"), *free) == [], "the pool has a free permit"


def test_queue_without_cycle_is_not_a_deadlock() -> None:
    assert (
        find_cycles(
            claim("p", "a"), waiting_claim("q", "a"), waiting_claim("r", "a"), claim("q", "b"), waiting_claim("s", "b")
        )
        == []
    )


def test_owner_waiting_behind_a_cycle_is_not_part_of_it() -> None:
    behind = [waiting_claim("r", "a"), claim("r", "c"), waiting_claim("s", "c")]
    cycle_claims = [claim("p", "a"), claim("q", "b"), waiting_claim("p", "b"), waiting_claim("q", "a")]
    assert find_cycles(*cycle_claims, *behind) == [[("p", "b"), ("q", "a")]]


def test_every_cycle_is_reported() -> None:
    claims = []
    for number in range(5):
        size = number + 2
        names = [f"{number}{position}" for position in range(size)]
        for position in range(size):
            claims += [
                claim(f"o{names[position]}", names[position]),
                waiting_claim(f"o{names[position]}", names[(position + 1) % size]),
            ]
    assert sorted(len(cycle) for cycle in find_cycles(*claims)) == [2, 3, 4, 5, 6]


def test_owner_waiting_for_itself_is_a_deadlock() -> None:
    assert find_cycles(claim("p", "a"), waiting_claim("p", "a")) == [[("p", "a")]]


def test_threads_of_one_process_are_distinct_owners() -> None:
    # They share label, host and pid, and differ only in the owner id.
    assert find_cycles(claim("p1", "a"), claim("p2", "b"), waiting_claim("p1", "b"), waiting_claim("p3", "a")) == []


def test_semaphore_waiter_is_stuck_only_if_all_holders_are() -> None:
    pool_claims = [claim("p", "pool", limit=2), claim("q", "pool", limit=2), waiting_claim("r", "pool", limit=2)]
    assert find_cycles(*pool_claims, claim("r", "a"), waiting_claim("p", "a")) == [], "q can continue"
    both = find_cycles(*pool_claims, claim("r", "a"), waiting_claim("p", "a"), waiting_claim("q", "a"))
    assert both == [[("p", "a"), ("r", "pool")], [("q", "a"), ("r", "pool")]]
    cooling = claim("s", "pool", "cooling", limit=3)
    assert (
        find_cycles(*pool_claims, cooling, claim("r", "a"), waiting_claim("p", "a"), waiting_claim("q", "a")) == []
    ), "a cooling permit becomes free with time"


def test_free_permit_blocks_no_waiter() -> None:
    """A waiter that was passed over has a free permit to claim, so it waits for no holder."""
    asleep = claim("r", "pool", "passed over", limit=2)
    assert find_cycles(claim("p", "pool", limit=2), asleep, claim("r", "a"), waiting_claim("p", "a")) == []


def test_writer_waits_for_every_reader() -> None:
    readers = [claim("p", "doc", mode="shared"), claim("q", "doc", mode="shared")]
    assert find_cycles(*readers, waiting_claim("r", "doc"), claim("r", "a"), waiting_claim("q", "a")) == [
        [("q", "a"), ("r", "doc")]
    ]


def test_queued_reader_waits_for_the_writer_ahead_of_it() -> None:
    queue = [claim("p", "doc", mode="shared"), waiting_claim("w", "doc"), waiting_claim("r", "doc", mode="shared")]
    cycle = [("p", "a"), ("r", "doc"), ("w", "doc")]
    assert find_cycles(*queue, claim("r", "a"), waiting_claim("p", "a")) == [cycle]
    (deadlock,) = deadlocks([claim("r", "a"), waiting_claim("p", "a"), *queue])
    assert "is queued ahead of it" in str(deadlock)
    assert (
        find_cycles(
            claim("p", "doc", mode="shared"),
            waiting_claim("r", "doc", mode="shared"),
            claim("r", "a"),
            waiting_claim("p", "a"),
        )
        == []
    )


def test_cooling_claim_is_not_part_of_a_deadlock() -> None:
    assert (
        find_cycles(claim("p", "a", "cooling"), waiting_claim("q", "a"), claim("q", "b"), waiting_claim("p", "b")) == []
    )


def test_deadlock_victim_is_the_youngest_grant() -> None:
    claims = [
        claim("p", "a", age=50),
        waiting_claim("q", "a"),
        claim("q", "b", age=5),
        waiting_claim("p", "b", age=0.1),
    ]
    (deadlock,) = deadlocks(claims)
    assert (deadlock.victim.name, deadlock.victim.holder.label) == ("b", "q")
    assert str(deadlock).count("waits for") == 2


def test_order_of_giving_up_does_not_depend_on_measured_ages() -> None:
    held = [claim("p", "a"), claim("q", "b")]
    orders = []
    for p_age, q_age in [(1.001, 1.002), (1.002, 1.001)]:  # of two inspections, whose ages are measured
        waits = [waiting_claim("q", "a", age=q_age), waiting_claim("p", "b", age=p_age)]
        (deadlock,) = deadlocks([held[0], waits[0], held[1], waits[1]])
        orders.append(giving_up_order(deadlock))
    assert orders[0] == orders[1]
    assert len(orders[0]) == 2


def test_deadlock_must_be_seen_in_both_inspections() -> None:
    a, b = claim("p", "a"), claim("q", "b")
    cycle = [a, waiting_claim("q", "a"), b, waiting_claim("p", "b")]
    first = deadlocks(cycle)
    assert seen_in_both(first, deadlocks(cycle)) == first
    assert seen_in_both(first, []) == []
    again = [
        claim("p", "a"),
        waiting_claim("q", "a"),
        b,
        waiting_claim("p", "b"),
    ]  # released and acquired again between the two inspections
    assert seen_in_both(first, deadlocks(again)) == []
    assert seen_in_both([], deadlocks(cycle)) == []


names = st.sampled_from("abcdef")


@given(
    st.permutations("abcdef"),
    st.lists(st.tuples(st.sampled_from("uvwxyz"), names), max_size=6, unique_by=lambda t: t[0]),
)
def test_cycles_of_exclusive_locks_are_reported_exactly(held, wanted) -> None:
    # Each owner holds one name and waits for at most one, so every cycle is found by following these waits.
    owner_of = dict(zip(held, "uvwxyz", strict=True))
    wants = dict(wanted)
    cycles = set()
    for start in wants:
        path = [start]
        while path[-1] in wants and owner_of[wants[path[-1]]] not in path:
            path.append(owner_of[wants[path[-1]]])
        if path[-1] in wants and owner_of[wants[path[-1]]] == start:
            cycles.add(frozenset(path))
    claims = [claim(owner, name) for name, owner in owner_of.items()] + [waiting_claim(*item) for item in wants.items()]
    reported = deadlocks(sorted(claims, key=lambda item: item.name))
    assert {frozenset(wait.waiter.holder.label for wait in item.waits) for item in reported} == cycles
    assert len(reported) == len(cycles)
    assert all(_is_cycle(item) for item in reported)


def _is_cycle(deadlock: Deadlock) -> bool:
    ring = [*deadlock.waits, deadlock.waits[0]]
    return all(wait.holder.owner == next_wait.waiter.owner for wait, next_wait in pairwise(ring))


# ------------------------------------------------------------- simulation


LIMITS = {"a": 0, "b": 0, "c": 0, "p": 2, "q": 3}  # 0: a lock, which may have readers; else the limit of a semaphore
OWNERS = "stuvwxyz"

steps = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.sampled_from("abcpq"), st.sampled_from(["exclusive", "shared"])), max_size=30
)
released = st.lists(st.tuples(st.sampled_from(OWNERS), st.sampled_from("abcpq")), max_size=4)


class LockSimulation:
    """Owners that continue until they wait; each name has its holders and its queue."""

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[str, str]]] = {name: [] for name in LIMITS}
        self.queues: dict[str, list[tuple[str, str]]] = {name: [] for name in LIMITS}

    def waiting_owners(self) -> set[str]:
        return {owner for queue in self.queues.values() for owner, _ in queue}

    def admits(self, name: str, mode: str) -> bool:
        holders = self.held[name]
        if LIMITS[name]:
            return len(holders) < LIMITS[name]
        return not holders or (mode == "shared" and all(other == "shared" for _, other in holders))

    def acquire(self, owner: str, name: str, mode: str) -> None:
        mode = "exclusive" if LIMITS[name] else mode
        holds_already = any(holder == owner for holder, _ in self.held[name])
        if owner in self.waiting_owners() or (holds_already and not LIMITS[name]):
            return
        fits = self.admits(name, mode) and not self.queues[name]
        (self.held if fits else self.queues)[name].append((owner, mode))

    def release(self, owner: str, name: str) -> None:
        """Release without notifying the waiters."""
        if owner not in self.waiting_owners():
            self.held[name] = [entry for entry in self.held[name] if entry[0] != owner]

    def stuck_owners(self) -> set[str]:
        """The owners that still wait when no owner can continue."""
        while True:
            before = repr((self.held, self.queues))
            for name, queue in self.queues.items():
                while queue and self.admits(name, queue[0][1]):
                    self.held[name].append(queue.pop(0))
            waiting = self.waiting_owners()
            self.held = {name: [entry for entry in held if entry[0] in waiting] for name, held in self.held.items()}
            if repr((self.held, self.queues)) == before:
                return waiting

    def holdings(self) -> list[Holding]:
        holdings = []
        for name, limit in LIMITS.items():
            for owners_and_modes, state in ((self.held[name], "held"), (self.queues[name], "passed over")):
                holdings += [claim(owner, name, state, mode=mode, limit=limit) for owner, mode in owners_and_modes]
        return holdings


@pytest.mark.parametrize("examples", [150, pytest.param(500, marks=pytest.mark.extended)])
def test_reported_owners_are_stuck_and_every_stuck_state_is_reported(examples) -> None:
    @settings(max_examples=examples)
    @given(steps, released)
    def check(steps, released) -> None:
        simulation = LockSimulation()
        for step in steps:
            simulation.acquire(*step)
        for release in released:
            simulation.release(*release)
        reported = deadlocks(simulation.holdings())
        named = {wait.waiter.owner for cycle in reported for wait in cycle.waits}
        stuck = simulation.stuck_owners()
        assert named <= stuck, "an owner that can continue was reported"
        assert bool(named) == bool(stuck)

    check()
