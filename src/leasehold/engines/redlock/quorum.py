"""What the nodes' answers mean together: which claim has a majority, and with which token. Pure decisions.

Exclusion (E1). A node votes for one claim at a time, until its own clock ends the vote. A grant needs the votes of a
majority, and any two majorities share a node. So two claims never have a majority each, while the clocks of the nodes
run at the same rate and no node loses its data. The holder counts its lease from before the first request left, minus
drift (`client/acquire.py`).

Tokens (E3). Each node has a counter of its own, so one node's token proves nothing about the others. A client proposes
a number, which rises and is near its clock. A node that votes for the claim sets its counter to the highest of
counter + 1, its clock and the proposal, and answers with that number. The token T of the grant is the highest answer
among a majority. If a majority answered T itself, T is confirmed. If not, a second round makes the nodes that still
vote for the claim raise their counters to T, and T is confirmed if a majority did.

Call node n *confirmed* for a grant A if, at some instant while n voted for A's claim, its answer to it was at most T_A
and its counter at least T_A. A grant has a majority of confirmed nodes: after one round those that answered T_A, after
two those that agreed in the second. Take two grants A and B. They share a confirmed node n. The votes of n for A and B
do not overlap; say that A's came first. The vote of n for B began after A was confirmed there, when the counter was
already at least T_A. So n answered B with counter + 1 or more, hence T_B > T_A. If B was requested after A was granted,
A's vote on n is the first one. So tokens rise, and no token is given twice. This depends on no clock and on no
client's proposal, but counters must not fall. A node that lost its data restarts from its clock, and then only the
clock keeps its tokens rising.

An answer higher than T does not confirm: if it counted, T_B could stay below a number that n had promised to exceed. So
a node whose clock is far ahead is left out and costs no second round; it joins at the next renewal (`renew.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from leasehold.engines.redlock.protocol import NodeBusy, NodeGrant, NodeRenewal
from leasehold.model import Alive, Busy, Gone, Holding, HoldingState

_DAY: Final = 86_400_000_000  # microseconds: a node whose answer is further ahead is left out if possible
_SECOND: Final = 1_000_000
_STATE_ORDER: Final[tuple[HoldingState, ...]] = ("held", "cooling", "reserved", "waiting", "passed over")


def majority(node_count: int) -> int:
    return node_count // 2 + 1


def agree_token(answers: Mapping[int, int], quorum: int, proposed: int) -> tuple[int, bool]:
    """From the tokens that at least a majority of nodes answered: the grant's token, and whether it is confirmed. A
    token that a majority has is not raised: a repeated attempt keeps its token (E2)."""
    common, count = Counter(answers.values()).most_common(1)[0]
    if count >= quorum:
        return common, True
    ranked = sorted(answers.values())
    near = [answer for answer in ranked if answer <= proposed + _DAY]
    return (near if len(near) >= quorum else ranked)[-1], False


def mismatched_nodes(answers: Mapping[int, int], token: int) -> list[int]:
    """Nodes that answered with another token than the confirmed one, but whose clocks are not far off."""
    return [node for node, answer in answers.items() if answer != token and abs(answer - token) < _SECOND]


def majority_life(lives: Iterable[float], quorum: int) -> float:
    """How long a majority keeps its votes at least."""
    return sorted(lives, reverse=True)[quorum - 1]


def highest_ticket(tickets: Iterable[int], node_count: int) -> int:
    """The highest queued ticket, without those that only a minority reports: their clocks may be wrong."""
    ranked, minority = sorted(tickets, reverse=True), node_count - majority(node_count)
    return ranked[minority] if len(ranked) > minority else 0


def is_decided(taken: int, refused: int, node_count: int) -> bool:
    """Whether the missing answers can no longer change the result."""
    quorum = majority(node_count)
    return taken >= quorum or refused > node_count - quorum


class Round(NamedTuple):
    """The nodes' answers to one attempt, by node index. Exactly one of `won`, `undecided` and `lost` is true."""

    node_count: int
    taken: Mapping[int, NodeGrant]  # these nodes vote for the claim
    refused: Mapping[int, NodeBusy]  # these vote for another claim
    silent: Mapping[int, Exception]  # these gave no valid answer, and may vote for it or not

    @classmethod
    def of(cls, answers: Mapping[int, NodeGrant | NodeBusy], silent: Mapping[int, Exception], node_count: int) -> Round:
        taken = {node: answer for node, answer in answers.items() if isinstance(answer, NodeGrant)}
        refused = {node: answer for node, answer in answers.items() if isinstance(answer, NodeBusy)}
        return cls(node_count, taken, refused, silent)

    @property
    def won(self) -> bool:
        return len(self.taken) >= majority(self.node_count)

    @property
    def undecided(self) -> bool:
        """Too few nodes answered for any result."""
        return len(self.taken) + len(self.refused) < majority(self.node_count)

    @property
    def lost(self) -> bool:
        return not self.won and not self.undecided

    @property
    def tokens(self) -> dict[int, int]:
        return {node: grant.token for node, grant in self.taken.items()}

    @property
    def is_split_vote(self) -> bool:
        """Whether perhaps no claim has a majority: several attempted at once, and each got some votes."""
        return bool(self.taken) and len({refusal.token for refusal in self.refused.values()}) > 1

    @property
    def is_outvoted(self) -> bool:
        """Whether another claim has a majority with one token: the reservation of a minority is then of no use."""
        rivals = Counter(refusal.token for refusal in self.refused.values() if refusal.holder is not None)
        return max(rivals.values(), default=0) >= majority(self.node_count)


def merge_busy(released: int, refused: Sequence[NodeBusy], quorum: int) -> Busy:
    """What blocks a majority, and when enough of it ends."""
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
    """The result of renewing a grant; None: too few answers to decide."""
    quorum = majority(node_count)
    lives = [renewal.life for renewal in answers.values() if renewal.life is not None]
    if len(lives) >= quorum:
        return Alive(majority_life(lives, quorum))
    if len(answers) - len(lives) > node_count - quorum:
        return Gone("expired" if any(renewal.expired for renewal in answers.values()) else "unknown")
    return None


def judge_waiting(answers: Mapping[int, NodeRenewal], node_count: int) -> Alive | Gone | None:
    """The result for a queued claim. `Alive.position` is None if some node does not know the claim or has reserved the
    name for it: its caller has to attempt again. None: too few answers to decide."""
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
    """One view of a name from those of the nodes. A claim held on fewer nodes than a majority holds nothing: it is
    being granted, or left over from a grant, and is shown as reserved."""
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
            merged[index] = each._replace(position=waiting)
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
    return same_state[0]._replace(
        state=state,
        token=tokens.most_common(1)[0][0] if tokens and state in ("held", "reserved", "cooling") else None,
        left=lefts[min(quorum, len(lefts)) - 1],
        position=None,
    )
