"""What the answers of all nodes mean together: who has a majority, and by which token. Pure.

Exclusion (E1). A node gives its part of a name to one claim at a time, by its own clock, and a grant needs the parts
of a majority. Any two majorities share a node; so, while the clocks of the nodes run alike and no node forgets, two
claims never have one each. The holder counts its lease from before the first request left, less drift
(`recipes/acquiring.py`).

Tokens (E3). Each node has a counter of its own, so one node's token proves nothing about the others. A client proposes
a number, rising and near its clock; a node that gives its part sets its counter to the highest of counter + 1, its
clock and the proposal, and answers that. The token T of the grant is the highest answer among a majority. If a
majority answered T itself, it stands. If not, a second round has nodes that still hold for the claim raise their
counters to T, and stands if a majority did.

Call node n *confirmed* for a grant A when, at some instant while A's claim held n, its answer there was at most T_A
and its counter at least T_A. A grant has a majority of confirmed nodes: in one round those that answered T_A, in two
those that said yes to the second. Take two grants A and B. They share a confirmed node n. On n their holdings do not
overlap; say A's came first. The holding of B on n began after A was confirmed there, when the counter was at least T_A
already; so n answered B with counter + 1 or more, hence T_B > T_A. If B was asked for after A was granted, A's holding
on n is the first one. So tokens rise, and none is given twice. Nobody's clock plays a part, whatever clients propose:
but counters must not fall. A node that lost its data starts again from its clock, and only that then keeps its tokens
rising.

An answer higher than T does not confirm: counted, it would let T_B stay below what n had promised to exceed. So a node
whose clock runs far ahead is left out, and costs no second round; it joins at the next renewal (`renewing.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from leasehold.engines.redlock.protocol import NodeBusy, NodeGrant, NodeRenewal
from leasehold.model import Alive, Busy, Gone, Holding, HoldingState

_DAY: Final = 86_400_000_000  # microseconds: a node that answers from further ahead is left out where it can be
_SECOND: Final = 1_000_000
_STATE_ORDER: Final[tuple[HoldingState, ...]] = ("held", "cooling", "reserved", "waiting", "passed over")


def majority(node_count: int) -> int:
    return node_count // 2 + 1


def agree_token(answers: Mapping[int, int], quorum: int, proposed: int) -> tuple[int, bool]:
    """From the tokens that a majority of nodes, or more, answered: the grant's, and whether it stands already. What a
    majority has is not raised: asked again, a claim keeps its token (E2)."""
    common, count = Counter(answers.values()).most_common(1)[0]
    if count >= quorum:
        return common, True
    ranked = sorted(answers.values())
    near = [answer for answer in ranked if answer <= proposed + _DAY]
    return (near if len(near) >= quorum else ranked)[-1], False


def mismatched_nodes(answers: Mapping[int, int], token: int) -> list[int]:
    """Nodes that answered with another token than the one that stands, by clocks that are no worse than usual."""
    return [node for node, answer in answers.items() if answer != token and abs(answer - token) < _SECOND]


def majority_life(lives: Iterable[float], quorum: int) -> float:
    """How long a majority holds at least."""
    return sorted(lives, reverse=True)[quorum - 1]


def highest_ticket(tickets: Iterable[int], node_count: int) -> int:
    """The highest ticket in line, but for what a minority says alone: the clock there may be anything."""
    ranked, minority = sorted(tickets, reverse=True), node_count - majority(node_count)
    return ranked[minority] if len(ranked) > minority else 0


def is_decided(taken: int, refused: int, node_count: int) -> bool:
    """Whether the nodes that have not answered could still change who has a majority."""
    quorum = majority(node_count)
    return taken >= quorum or refused > node_count - quorum


def is_split_vote(taken: Mapping[int, NodeGrant], refused: Mapping[int, NodeBusy]) -> bool:
    """Whether perhaps nobody has a majority: several asked at once, and each got some."""
    return bool(taken) and len({refusal.token for refusal in refused.values()}) > 1


def is_outvoted(refused: Iterable[NodeBusy], quorum: int) -> bool:
    """Whether somebody else has a majority by one token: what a minority offers then comes to nothing."""
    rivals = Counter(refusal.token for refusal in refused if refusal.holder is not None)
    return max(rivals.values(), default=0) >= quorum


def merge_busy(released: int, refused: Sequence[NodeBusy], quorum: int) -> Busy:
    """What stands in the way of a majority, and when enough of it ends."""
    lefts = sorted([0.0] * released + [refusal.left or 0.0 for refusal in refused])
    left = lefts[min(quorum, len(lefts)) - 1] if any(refusal.left is not None for refusal in refused) else None
    positions = sorted([0] * released + [refusal.position for refusal in refused if refusal.position is not None])
    position = (
        positions[min(quorum, len(positions)) - 1] if any(refusal.position is not None for refusal in refused) else None
    )
    rivals = Counter(refusal.token for refusal in refused if refusal.holder is not None)
    if not rivals:
        return Busy(left, position)
    strongest = rivals.most_common(1)[0][0]
    return Busy(left, position, strongest, next(refusal.holder for refusal in refused if refusal.token == strongest))


def judge_held(answers: Mapping[int, NodeRenewal], node_count: int) -> Alive | Gone | None:
    """Of a renewal; None: cannot be told."""
    quorum = majority(node_count)
    lives = [renewal.life for renewal in answers.values() if renewal.life is not None]
    if len(lives) >= quorum:
        return Alive(majority_life(lives, quorum))
    if len(answers) - len(lives) > node_count - quorum:
        return Gone("expired" if any(renewal.expired for renewal in answers.values()) else "unknown")
    return None


def judge_waiting(answers: Mapping[int, NodeRenewal], node_count: int) -> Alive | Gone | None:
    """Of a claim in line: where a node does not know it, or gave it its turn, it has to ask again itself."""
    quorum = majority(node_count)
    known = [renewal for renewal in answers.values() if renewal.life is not None]
    if len(answers) < quorum:
        return None
    if not known:
        return Gone("unknown")
    positions = [renewal.position for renewal in known if renewal.position is not None]
    if len(positions) < len(answers):
        return Alive(max(renewal.life or 0.0 for renewal in known), None)
    return Alive(max(renewal.life or 0.0 for renewal in known), sorted(positions)[quorum - 1])


def merge_holdings(node_views: Sequence[Sequence[Holding]], node_count: int) -> list[Holding]:
    """One view of a name from those of the nodes. What holds at fewer nodes than a majority holds nothing: it is on its
    way to a grant, or left over from one, and is shown as reserved."""
    quorum = majority(node_count)
    views: dict[tuple[str, str], list[Holding]] = {}
    for view in node_views:
        for each in view:
            views.setdefault((each.fingerprint, each.owner), []).append(each)
    merged = [_merge_views(each, quorum) for each in views.values()]
    merged.sort(key=lambda each: (_STATE_ORDER.index(each.state), -each.age))
    waiting = 0
    for index, each in enumerate(merged):
        if each.state == "waiting":
            merged[index] = replace(each, position=waiting)
            waiting += 1
    return merged


def _merge_views(views: list[Holding], quorum: int) -> Holding:
    states = Counter(view.state for view in views)
    if states["held"] >= quorum:
        state: HoldingState = "held"
    elif states["held"] + states["cooling"] >= quorum:
        state = "cooling"
    elif states["held"] or states["reserved"]:
        state = "reserved"
    else:
        state = states.most_common(1)[0][0]
    same_state = [view for view in views if view.state == state] or views
    lefts = sorted((view.left for view in same_state), reverse=True)
    tokens = Counter(view.token for view in same_state if view.token is not None)
    return replace(
        same_state[0],
        state=state,
        token=tokens.most_common(1)[0][0] if tokens and state in ("held", "reserved", "cooling") else None,
        left=lefts[min(quorum, len(lefts)) - 1],
        position=None,
    )
