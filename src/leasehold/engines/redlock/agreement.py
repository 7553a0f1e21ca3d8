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

from leasehold.engines.redlock.requests import Refused, Renewed, Taken
from leasehold.model import Alive, Busy, Gone, Holding, HoldingState

_DAY: Final = 86_400_000_000  # microseconds: a node that answers from further ahead is left out where it can be
_SECOND: Final = 1_000_000
_STATES: Final[tuple[HoldingState, ...]] = ("held", "cooling", "reserved", "waiting", "passed over")


def majority(nodes: int) -> int:
    return nodes // 2 + 1


def token(answers: Mapping[int, int], quorum: int, proposed: int) -> tuple[int, bool]:
    """From the tokens that a majority of nodes, or more, answered: the grant's, and whether it stands already. What a
    majority has is not raised: asked again, a claim keeps its token (E2)."""
    common, count = Counter(answers.values()).most_common(1)[0]
    if count >= quorum:
        return common, True
    ranked = sorted(answers.values())
    near = [each for each in ranked if each <= proposed + _DAY]
    return (near if len(near) >= quorum else ranked)[-1], False


def astray(answers: Mapping[int, int], token: int) -> list[int]:
    """Nodes that answered with another token than the one that stands, by clocks that are no worse than usual."""
    return [node for node, each in answers.items() if each != token and abs(each - token) < _SECOND]


def life(parts: Iterable[float], quorum: int) -> float:
    """How long a majority holds at least."""
    return sorted(parts, reverse=True)[quorum - 1]


def latest(tickets: Iterable[int], nodes: int) -> int:
    """The highest ticket in line, but for what a minority says alone: the clock there may be anything."""
    ranked, others = sorted(tickets, reverse=True), nodes - majority(nodes)
    return ranked[others] if len(ranked) > others else 0


def decided(taken: int, refused: int, nodes: int) -> bool:
    """Whether the nodes that have not answered could still change who has a majority."""
    quorum = majority(nodes)
    return taken >= quorum or refused > nodes - quorum


def split(taken: Mapping[int, Taken], refused: Mapping[int, Refused]) -> bool:
    """Whether perhaps nobody has a majority: several asked at once, and each got some."""
    return bool(taken) and len({each.token for each in refused.values()}) > 1


def outvoted(refused: Iterable[Refused], quorum: int) -> bool:
    """Whether somebody else has a majority by one token: what a minority offers then comes to nothing."""
    rivals = Counter(each.token for each in refused if each.holder is not None)
    return max(rivals.values(), default=0) >= quorum


def busy(given_back: int, refused: Sequence[Refused], quorum: int) -> Busy:
    """What stands in the way of a majority, and when enough of it ends."""
    lefts = sorted([0.0] * given_back + [each.left or 0.0 for each in refused])
    left = lefts[min(quorum, len(lefts)) - 1] if any(each.left is not None for each in refused) else None
    places = sorted([0] * given_back + [each.place for each in refused if each.place is not None])
    place = places[min(quorum, len(places)) - 1] if any(each.place is not None for each in refused) else None
    rivals = Counter(each.token for each in refused if each.holder is not None)
    if not rivals:
        return Busy(left, place)
    strongest = rivals.most_common(1)[0][0]
    return Busy(left, place, strongest, next(each.holder for each in refused if each.token == strongest))


def held(answers: Mapping[int, Renewed], nodes: int) -> Alive | Gone | None:
    """Of a renewal; None: cannot be told."""
    quorum = majority(nodes)
    lives = [each.life for each in answers.values() if each.life is not None]
    if len(lives) >= quorum:
        return Alive(life(lives, quorum))
    if len(answers) - len(lives) > nodes - quorum:
        return Gone("lapsed" if any(each.lapsed for each in answers.values()) else "unknown")
    return None


def waits(answers: Mapping[int, Renewed], nodes: int) -> Alive | Gone | None:
    """Of a claim in line: where a node does not know it, or gave it its turn, it has to ask again itself."""
    quorum = majority(nodes)
    known = [each for each in answers.values() if each.life is not None]
    if len(answers) < quorum:
        return None
    if not known:
        return Gone("unknown")
    places = [each.place for each in known if each.place is not None]
    if len(places) < len(answers):
        return Alive(max(each.life or 0.0 for each in known), None)
    return Alive(max(each.life or 0.0 for each in known), sorted(places)[quorum - 1])


def holdings(found: Sequence[Sequence[Holding]], nodes: int) -> list[Holding]:
    """One view of a name from those of the nodes. What holds at fewer nodes than a majority holds nothing: it is on its
    way to a grant, or left over from one, and is shown as reserved."""
    quorum = majority(nodes)
    views: dict[tuple[str, str], list[Holding]] = {}
    for view in found:
        for each in view:
            views.setdefault((each.fingerprint, each.owner), []).append(each)
    merged = [_merged(each, quorum) for each in views.values()]
    merged.sort(key=lambda each: (_STATES.index(each.state), -each.age))
    waiting = 0
    for number, each in enumerate(merged):
        if each.state == "waiting":
            merged[number] = replace(each, place=waiting)
            waiting += 1
    return merged


def _merged(views: list[Holding], quorum: int) -> Holding:
    states = Counter(each.state for each in views)
    if states["held"] >= quorum:
        state: HoldingState = "held"
    elif states["held"] + states["cooling"] >= quorum:
        state = "cooling"
    elif states["held"] or states["reserved"]:
        state = "reserved"
    else:
        state = states.most_common(1)[0][0]
    alike = [each for each in views if each.state == state] or views
    lefts = sorted((each.left for each in alike), reverse=True)
    tokens = Counter(each.token for each in alike if each.token is not None)
    return replace(
        alike[0],
        state=state,
        token=tokens.most_common(1)[0][0] if tokens and state in ("held", "reserved", "cooling") else None,
        left=lefts[min(quorum, len(lefts)) - 1],
        place=None,
    )
