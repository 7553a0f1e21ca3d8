"""What the nodes' answers mean together, without any server: the proof in quorum.py, tried with random answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leasehold.engines.redlock import quorum
from leasehold.engines.redlock.protocol import NodeBusy, NodeGrant, NodeRenewal
from leasehold.model import Alive, Gone, Holder

NODES, QUORUM = 5, 3


class Node:
    """The counter and the vote of one node. Without a clock, so that only the protocol keeps tokens rising."""

    def __init__(self, rng: random.Random) -> None:
        self.counter, self.owner = rng.randrange(20), None

    def attempt(self, claim_number: int, proposed: int) -> int | None:
        if self.owner is not None:
            return None
        self.owner = claim_number
        self.counter = max(self.counter + 1, proposed)
        return self.counter

    def confirm(self, claim_number: int, token: int, answered: int) -> bool:
        if self.owner != claim_number or answered > token:
            return False
        self.counter = max(self.counter, token)
        return True


def simulate_grants(seed: int, confirm: bool = True) -> list[tuple[int, int]]:
    """Claims arrive one after the other. Random nodes answer each, and some votes outlive their claim for a while.
    Returns claim number and token of each grant, in order."""
    rng = random.Random(seed)
    nodes, tokens = [Node(rng) for _ in range(NODES)], []
    for claim_number in range(60):
        reachable = rng.sample(range(NODES), rng.choice([3, 3, 4, 5]))
        proposed = rng.randrange(60)  # clients' clocks are arbitrary
        answers = {n: answer for n in reachable if (answer := nodes[n].attempt(claim_number, proposed)) is not None}
        if len(answers) >= QUORUM:
            token, is_agreed = quorum.agree_token(answers, QUORUM, proposed)
            if not is_agreed and confirm:
                confirming = [n for n in answers if rng.random() < 0.9]
                is_agreed = sum(nodes[n].confirm(claim_number, token, answers[n]) for n in confirming) >= QUORUM
            if is_agreed or not confirm:
                tokens.append((claim_number, token))
        for node in nodes:
            if node.owner == claim_number or rng.random() < 0.8:
                node.owner = None  # released or expired
    return tokens


def test_tokens_rise_whatever_clients_propose() -> None:
    granted = 0
    for seed in range(600):
        tokens = [token for _, token in simulate_grants(seed)]
        assert tokens == sorted(set(tokens)), f"seed {seed}"
        granted += len(tokens)
    assert granted > 10_000


def test_tokens_do_not_rise_without_the_second_round() -> None:
    """Shows that the test above can fail: the highest answer of one round is not a safe token."""
    broken = [
        seed for seed in range(300) if (tokens := [t for _, t in simulate_grants(seed, False)]) != sorted(set(tokens))
    ]
    assert broken


@given(st.lists(st.integers(1, 50), min_size=3, max_size=5), st.integers(1, 50))
def test_token_is_an_answer_a_majority_can_confirm(answers, proposed) -> None:
    token, is_agreed = quorum.agree_token(dict(enumerate(answers)), QUORUM, proposed)
    assert token in answers
    assert sum(answer <= token for answer in answers) >= QUORUM
    assert is_agreed == any(answers.count(answer) >= QUORUM for answer in answers)
    assert not is_agreed or answers.count(token) >= QUORUM


def test_node_with_a_far_higher_token_is_left_out_if_possible() -> None:
    second, day = 1_000_000, 86_400_000_000
    assert quorum.agree_token({0: 10, 1: 10, 2: 10, 3: 99}, QUORUM, 10) == (10, True)
    assert quorum.mismatched_nodes({0: 10, 1: 10, 2: 10, 3: 99, 4: 2 * second}, 10) == [3]
    assert quorum.agree_token({0: 10, 1: 11, 2: 12, 3: 40 * day}, QUORUM, 10) == (12, False)
    assert quorum.agree_token({0: 10, 1: 11, 2: 40 * day}, QUORUM, 10) == (40 * day, False)


def test_lease_life_is_what_a_majority_still_holds() -> None:
    assert quorum.majority_life([5.0, 1.0, 4.0, 3.0, 2.0], QUORUM) == 3.0
    assert quorum.majority_life([5.0, 1.0, 4.0], QUORUM) == 1.0


@pytest.mark.parametrize(
    ("tickets", "nodes", "highest_ticket"),
    [([], 5, 0), ([7, 9], 5, 0), ([9, 7, 8], 5, 7), ([99, 3, 98, 4, 5], 5, 5), ([6, 6], 3, 6), ([99, 1], 3, 1)],
)
def test_minority_does_not_set_the_highest_ticket(tickets, nodes, highest_ticket) -> None:
    assert quorum.highest_ticket(tickets, nodes) == highest_ticket


@pytest.mark.parametrize(
    ("taken", "refused", "decided"), [(3, 0, True), (0, 3, True), (2, 2, False), (2, 3, True), (0, 2, False)]
)
def test_vote_is_decided_when_remaining_nodes_cannot_change_it(taken, refused, decided) -> None:
    assert quorum.is_decided(taken, refused, NODES) is decided


def parse_votes(text: str) -> quorum.Round:
    """One letter for each node: y votes for the claim, a and b for others, . did not answer."""
    answers: dict[int, NodeGrant | NodeBusy] = {}
    for node, letter in enumerate(text):
        if letter == "y":
            answers[node] = NodeGrant(7, 9.0)
        elif letter != ".":
            answers[node] = NodeBusy(9.0, None, ord(letter), Holder(letter), True, 0)
    silent = {node: TimeoutError() for node, letter in enumerate(text) if letter == "."}
    return quorum.Round.of(answers, silent, len(text))


@pytest.mark.parametrize(
    ("votes", "verdict"),
    [
        ("yyy..", "won"),
        ("yyyaa", "won"),
        ("yyyyy", "won"),
        ("yyaab", "lost"),
        ("yya..", "lost"),
        ("aaa..", "lost"),
        ("yy...", "undecided"),
        ("ya...", "undecided"),
        (".....", "undecided"),
        ("yy.", "won"),
        ("ya.", "lost"),
        ("yyaa", "lost"),
    ],
)
def test_round_is_won_only_by_a_majority_of_all_nodes(votes, verdict) -> None:
    votes = parse_votes(votes)
    assert [each for each in ("won", "lost", "undecided") if getattr(votes, each)] == [verdict]


@pytest.mark.parametrize(
    ("votes", "split", "outvoted"),
    [("yyabb", True, False), ("yyaa.", False, False), ("aabb.", False, False), ("yaaab", True, True)],
)
def test_split_vote_is_told_apart_from_a_rival_with_a_majority(votes, split, outvoted) -> None:
    assert (parse_votes(votes).is_split_vote, parse_votes(votes).is_outvoted) == (split, outvoted)


def parse_renewals(text: str) -> dict[int, NodeRenewal]:
    """One letter for each node: y holds the claim, n does not, l let it expire, . did not answer."""
    known = {
        "y": NodeRenewal(9.0, None, False),
        "n": NodeRenewal(None, None, False),
        "l": NodeRenewal(None, None, True),
    }
    return {number: known[letter] for number, letter in enumerate(text) if letter != "."}


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        ("yyy..", Alive(9.0)),
        ("yyynn", Alive(9.0)),
        ("yy...", None),
        ("yynn.", None),
        ("nnn..", Gone("unknown")),
        ("yynln", Gone("expired")),
        (".....", None),
    ],
)
def test_majority_decides_whether_a_lease_is_alive_or_gone(answers, verdict) -> None:
    assert quorum.judge_held(parse_renewals(answers), NODES) == verdict


def test_waiter_unknown_to_any_node_must_attempt_again() -> None:
    known, unknown = NodeRenewal(15.0, 2, False), NodeRenewal(None, None, False)
    assert quorum.judge_waiting(dict.fromkeys(range(5), known), NODES) == Alive(15.0, 2)
    assert quorum.judge_waiting({**dict.fromkeys(range(4), known), 4: unknown}, NODES) == Alive(15.0, None)
    assert quorum.judge_waiting(dict.fromkeys(range(5), unknown), NODES) == Gone("unknown")
    assert quorum.judge_waiting(dict.fromkeys(range(2), known), NODES) is None


def test_busy_merges_time_left_and_position_of_a_majority() -> None:
    def refused(left: float | None, token: int, position: int | None = None) -> NodeBusy:
        return NodeBusy(left, position, token, None, True, 0)

    assert quorum.merge_busy(0, [refused(left, 7) for left in (1.0, 5.0, 2.0, 4.0, 3.0)], QUORUM).left == 3.0
    assert quorum.merge_busy(2, [refused(9.0, 7)], QUORUM).left == 9.0
    assert quorum.merge_busy(0, [refused(None, 0, position) for position in (3, 1, 2)], QUORUM) == (None, 3, None, None)
