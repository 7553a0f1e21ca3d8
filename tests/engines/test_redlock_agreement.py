"""What the answers of the nodes mean together, without any node: the proof in agreement.py, tried at random."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.engines.redlock import agreement
from leasehold.engines.redlock.requests import Refused, Renewed
from leasehold.model import Alive, Gone

NODES, QUORUM = 5, 3


class Node:
    """The counter of one node, and who has it: no clock, so that nothing but the argument keeps tokens rising."""

    def __init__(self, chance: random.Random) -> None:
        self.counter, self.owner = chance.randrange(20), None

    def attempt(self, who: int, proposed: int) -> int | None:
        if self.owner is not None:
            return None
        self.owner = who
        self.counter = max(self.counter + 1, proposed)
        return self.counter

    def confirm(self, who: int, token: int, answered: int) -> bool:
        if self.owner != who or answered > token:
            return False
        self.counter = max(self.counter, token)
        return True


def run(seed: int, confirm: bool = True) -> list[tuple[int, int]]:
    """Claims come one after the other, each over nodes that happen to answer; what is left of one may stay for a while.
    Gives the tokens of those granted, in order."""
    chance = random.Random(seed)
    nodes, tokens = [Node(chance) for _ in range(NODES)], []
    for who in range(60):
        reached = chance.sample(range(NODES), chance.choice([3, 3, 4, 5]))
        proposed = chance.randrange(60)  # clients' clocks are anything
        answers = {n: found for n in reached if (found := nodes[n].attempt(who, proposed)) is not None}
        if len(answers) >= QUORUM:
            token, stands = agreement.token(answers, QUORUM, proposed)
            if not stands and confirm:
                still = [n for n in answers if chance.random() < 0.9]
                stands = sum(nodes[n].confirm(who, token, answers[n]) for n in still) >= QUORUM
            if stands or not confirm:
                tokens.append((who, token))
        for node in nodes:
            if node.owner == who or chance.random() < 0.8:
                node.owner = None  # released, or lapsed
    return tokens


def test_tokens_rise_whatever_clients_propose() -> None:
    granted = 0
    for seed in range(600):
        tokens = [token for _, token in run(seed)]
        assert tokens == sorted(set(tokens)), f"seed {seed}"
        granted += len(tokens)
    assert granted > 10_000


def test_without_the_second_round_they_would_not() -> None:
    """The test above can fail: the highest answer of one round is no token."""
    broken = [seed for seed in range(300) if (found := [t for _, t in run(seed, False)]) != sorted(set(found))]
    assert broken


@given(st.lists(st.integers(1, 50), min_size=3, max_size=5), st.integers(1, 50))
def test_the_token_is_an_answer_that_a_majority_can_confirm(answers, proposed) -> None:
    token, stands = agreement.token(dict(enumerate(answers)), QUORUM, proposed)
    assert token in answers
    assert sum(answer <= token for answer in answers) >= QUORUM
    assert stands == any(answers.count(each) >= QUORUM for each in answers)
    assert not stands or answers.count(token) >= QUORUM


def test_a_node_far_ahead_is_left_out_where_it_can_be() -> None:
    second, day = 1_000_000, 86_400_000_000
    assert agreement.token({0: 10, 1: 10, 2: 10, 3: 99}, QUORUM, 10) == (10, True)
    assert agreement.astray({0: 10, 1: 10, 2: 10, 3: 99, 4: 2 * second}, 10) == [3]
    assert agreement.token({0: 10, 1: 11, 2: 12, 3: 40 * day}, QUORUM, 10) == (12, False)
    assert agreement.token({0: 10, 1: 11, 2: 40 * day}, QUORUM, 10) == (40 * day, False)


def test_a_life_is_what_a_majority_holds() -> None:
    assert agreement.life([5.0, 1.0, 4.0, 3.0, 2.0], QUORUM) == 3.0
    assert agreement.life([5.0, 1.0, 4.0], QUORUM) == 1.0


@pytest.mark.parametrize(
    ("tickets", "nodes", "latest"),
    [([], 5, 0), ([7, 9], 5, 0), ([9, 7, 8], 5, 7), ([99, 3, 98, 4, 5], 5, 5), ([6, 6], 3, 6), ([99, 1], 3, 1)],
)
def test_a_minority_does_not_say_how_long_the_line_is(tickets, nodes, latest) -> None:
    assert agreement.latest(tickets, nodes) == latest


@pytest.mark.parametrize(
    ("taken", "refused", "decided"), [(3, 0, True), (0, 3, True), (2, 2, False), (2, 3, True), (0, 2, False)]
)
def test_when_the_others_cannot_change_it(taken, refused, decided) -> None:
    assert agreement.decided(taken, refused, NODES) is decided


def renewed(text: str) -> dict[int, Renewed]:
    """One letter for each node: y has it, n does not, l it lapsed there, . no answer."""
    known = {"y": Renewed(9.0, None, False), "n": Renewed(None, None, False), "l": Renewed(None, None, True)}
    return {number: known[letter] for number, letter in enumerate(text) if letter != "."}


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ("yyy..", Alive(9.0)),
        ("yyynn", Alive(9.0)),
        ("yy...", None),
        ("yynn.", None),
        ("nnn..", Gone("unknown")),
        ("yynln", Gone("lapsed")),
        (".....", None),
    ],
)
def test_a_lease_lives_or_is_gone_by_a_majority_alone(answers, verdict) -> None:
    assert agreement.held(renewed(answers), NODES) == verdict


def test_a_waiter_that_any_node_does_not_know_has_to_ask() -> None:
    there, away = Renewed(15.0, 2, False), Renewed(None, None, False)
    assert agreement.waits(dict.fromkeys(range(5), there), NODES) == Alive(15.0, 2)
    assert agreement.waits({**dict.fromkeys(range(4), there), 4: away}, NODES) == Alive(15.0, None)
    assert agreement.waits(dict.fromkeys(range(5), away), NODES) == Gone("unknown")
    assert agreement.waits(dict.fromkeys(range(2), there), NODES) is None


def test_what_is_in_the_way_ends_when_enough_of_it_does() -> None:
    def refused(left: float | None, token: int, place: int | None = None) -> Refused:
        return Refused(left, place, token, None, True, 0)

    assert agreement.busy(0, [refused(left, 7) for left in (1.0, 5.0, 2.0, 4.0, 3.0)], QUORUM).left == 3.0
    assert agreement.busy(2, [refused(9.0, 7)], QUORUM).left == 9.0
    assert agreement.busy(0, [refused(None, 0, place) for place in (3, 1, 2)], QUORUM) == (None, 3, None, None)
