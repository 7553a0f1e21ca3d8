"""The fast checker: did a client hold a name at a time or with a token that the contract forbids?

It compares intervals in O(n log n), so that long runs of many clients are checked quickly. Questions that depend on the
order of overlapping calls, such as a failed try, are left to the exact search in `linearizable.py`.

It compares the times in which holders *certainly trusted* their leases, never the engine's state, so network delays are
never counted against a lock. If one hold ends at the instant another starts, they do not overlap.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import Literal

from harness.checkers.history import ACQUIRE_ACTIONS, NEVER, Call, History, HistoryAnalysis, Hold

Rule = Literal[
    "exclusion", "limit", "slot", "kind", "token", "repeat", "depth", "release", "renew", "order", "refusal", "update"
]
HoldGroup = tuple[str, str | int]  # holds that may coexist: all shared, or all permits of one limit


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: the rule, the name, when it was broken, and a text that says who did what."""

    rule: Rule
    name: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.name!r} at {self.at:.6f}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a checker. `unknown`: a search used up its budget."""

    result: Literal["valid", "invalid", "unknown"]
    violations: tuple[Violation, ...] = ()
    visited: int = 0  # states that a search visited

    def __str__(self) -> str:
        return "\n".join([self.result, *map(str, self.violations)])


def check(history: History, *, fencing: bool = True) -> Verdict:
    """Check a whole history, all names. Without `fencing`, tokens need not rise (E3); only exclusion is checked."""
    analysis = history.analyze()
    found = [
        *_wrong_depths(analysis),
        *_unfounded_releases(analysis),
        *_unfounded_renewals(analysis),
        *_changed_tokens(analysis),
    ]
    for holds in _by_name(analysis.holds):
        believed = sorted((hold for hold in holds if hold.believed), key=_start_order)
        found += _overlaps(believed)
        if fencing:
            found += [*_reused_tokens(holds), *_falling_tokens(believed)]
    if fencing:
        found += _overtaken_grants(analysis)
    found.sort(key=lambda violation: violation.at)
    return Verdict("invalid" if found else "valid", tuple(found))


def describe_hold(hold: Hold) -> str:
    """A hold as text: process, kind, token, time."""
    kind = hold.mode if hold.kind == "lock" else f"permit of {hold.limit}"
    token = "no token" if hold.token is None else f"token {hold.token}"
    slot = "" if hold.slot is None else f", slot {hold.slot}"
    end = "on" if hold.end == math.inf else f"to {hold.end:.6f}"
    return f"{hold.process} ({kind}, {token}{slot}, {hold.start:.6f} {end})"


def describe_call(call: Call) -> str:
    """A call as text: process, action, time, token."""
    end = "open" if call.ended is None else f"{call.ended.at:.6f}"
    token = "" if call.token is None else f", token {call.token}"
    return f"{call.began.process}'s {call.began.action} ({call.began.at:.6f} to {end}{token})"


def _by_name(holds: Sequence[Hold]) -> Iterable[list[Hold]]:
    names: defaultdict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        names[hold.name].append(hold)
    return names.values()


def _start_order(hold: Hold) -> tuple[float, bool]:
    # A hold of no length comes before those that start at the same time; a stable sort keeps the others in grant order.
    return hold.start, hold.start < hold.end


def _is_exclusive(hold: Hold) -> bool:
    return hold.kind == "lock" and hold.mode == "exclusive"


def _group(hold: Hold) -> HoldGroup:
    return (hold.kind, hold.mode) if hold.kind == "lock" else (hold.kind, hold.limit)


def _overlaps(holds: Sequence[Hold]) -> Iterator[Violation]:
    """E1, by a sweep over the starts: each new hold is compared with those that have not ended."""
    present: defaultdict[HoldGroup, dict[int, Hold]] = defaultdict(dict)
    slots: dict[int, Hold] = {}  # the last hold of each slot
    ends: list[tuple[float, int]] = []
    for index, hold in enumerate(holds):
        while ends and ends[0][0] <= hold.start:
            ended_index = heappop(ends)[1]
            del present[_group(holds[ended_index])][ended_index]
        for rule, others in _conflicts(hold, present, slots):
            text = f"{describe_hold(hold)} began while held by {', '.join(map(describe_hold, others))}"
            yield Violation(rule, hold.name, hold.start, text)
        if hold.start < hold.end:
            present[_group(hold)][index] = hold
            heappush(ends, (hold.end, index))
            if hold.slot is not None:
                slots[hold.slot] = hold


def _conflicts(
    hold: Hold, present: defaultdict[HoldGroup, dict[int, Hold]], slots: dict[int, Hold]
) -> Iterator[tuple[Rule, list[Hold]]]:
    own_group = _group(hold)
    for group, others in present.items():
        if others and (group != own_group or _is_exclusive(hold)):
            other = next(iter(others.values()))
            yield "exclusion" if hold.kind == other.kind == "lock" else "kind", [other]
    if hold.kind == "semaphore":
        if len(present[own_group]) >= hold.limit:
            yield "limit", list(islice(present[own_group].values(), 5))
        if hold.slot in slots and hold.start < slots[hold.slot].end:
            yield "slot", [slots[hold.slot]]


def _reused_tokens(holds: Sequence[Hold]) -> Iterator[Violation]:
    """A token belongs to one grant for ever (E3). A repeated claim may get its own token again (E2), until released."""
    owners: dict[int, Hold] = {}
    for hold in holds:
        if hold.token is None:
            continue
        other = owners.setdefault(hold.token, hold)
        own = hold.claim is not None and hold.claim == other.claim and other.released_index > hold.calls[0].start_index
        if other is not hold and not own:
            yield Violation(
                "token",
                hold.name,
                hold.start,
                f"one token was granted twice: to {describe_hold(other)} and to {describe_hold(hold)}",
            )


def _falling_tokens(holds: Sequence[Hold]) -> Iterator[Violation]:
    """Holds that cannot overlap, by E1 or by slot, are in the order of their grants, so their tokens must rise (E3)."""
    # The hold with the highest token: of all, of exclusive holds, of each slot.
    highest: Hold | None = None
    exclusive: Hold | None = None
    slots: dict[int, Hold] = {}
    for hold in holds:
        slot = hold.slot if hold.kind == "semaphore" else None
        before = highest if _is_exclusive(hold) else exclusive
        if slot is not None and slot in slots:
            before = _with_higher_token(before, slots[slot])
        if before is not None and _has_lower_token(before, hold) and before.end <= hold.start:
            yield Violation(
                "token",
                hold.name,
                hold.start,
                f"token decreased: {describe_hold(hold)} came after {describe_hold(before)}",
            )
        highest = _with_higher_token(highest, hold)
        exclusive = _with_higher_token(exclusive, hold) if _is_exclusive(hold) else exclusive
        if slot is not None:
            slots[slot] = _with_higher_token(slots.get(slot), hold)


def _has_lower_token(before: Hold, hold: Hold) -> bool:
    # `_reused_tokens` checks equal tokens.
    return before.token is not None and hold.token is not None and hold.token < before.token


def _with_higher_token(first: Hold | None, other: Hold) -> Hold:
    return other if first is None or first.token is None or (other.token or 0) > first.token else first


def _overtaken_grants(analysis: HistoryAnalysis) -> Iterator[Violation]:
    """A grant requested after another had been answered must have the higher token (E3), even if both may coexist."""
    asked: dict[tuple[str, str | int], int] = {}  # an earlier attempt with a lost answer may have been granted (E2)
    for call in analysis.calls:
        if call.began.action in ACQUIRE_ACTIONS and call.began.claim is not None:
            asked.setdefault((call.began.name, call.began.claim), call.start_index)
    events: list[tuple[int, int]] = []
    for index, hold in enumerate(analysis.holds):
        first = hold.calls[0]
        events.append((asked.get((hold.name, hold.claim or ""), first.start_index), index))
        events.append((first.end_index, index))
    highest: dict[str, Hold] = {}  # by name, among the answered grants
    highest_when_asked: dict[int, Hold | None] = {}  # by hold, the highest when it was requested
    for _, index in sorted(events):
        hold = analysis.holds[index]
        if index not in highest_when_asked:
            highest_when_asked[index] = highest.get(hold.name)
            continue
        before = highest_when_asked[index]
        if before is not None and _has_lower_token(before, hold):
            yield Violation(
                "token",
                hold.name,
                hold.start,
                f"token decreased: {describe_hold(hold)} was requested after {describe_hold(before)}",
            )
        highest[hold.name] = _with_higher_token(highest.get(hold.name), hold)


def _changed_tokens(analysis: HistoryAnalysis) -> Iterator[Violation]:
    """A claim granted twice has one token (E2), unless it was released, lost or broken in between."""
    last: dict[tuple[str, str], Hold] = {}
    for hold in analysis.holds:
        if hold.claim is None:
            continue
        before = last.get((hold.name, hold.claim))
        last[hold.name, hold.claim] = hold
        if before is not None and before.token != hold.token and before.end > hold.start:
            text = f"one claim got two tokens: {describe_hold(before)} and {describe_hold(hold)}"
            yield Violation("repeat", hold.name, hold.start, text)


def _wrong_depths(analysis: HistoryAnalysis) -> Iterator[Violation]:
    for call in analysis.calls:
        depth = analysis.depths.get(call.began.op)
        if call.ended is not None and call.ended.depth is not None and depth not in (None, call.ended.depth):
            text = f"{describe_call(call)} returned depth {call.ended.depth} instead of {depth}"
            yield Violation("depth", call.began.name, call.ended.at, text)


def _unfounded_releases(analysis: HistoryAnalysis) -> Iterator[Violation]:
    """Only a holder's release may be confirmed. A process whose acquire got no answer may be a holder."""
    unheard = _acquires_by_process(call for call in analysis.calls if call.unknown)
    used: Counter[tuple[str, str]] = Counter()
    for call in analysis.unmatched:
        if call.began.action == "release" and call.succeeded and call.ended is not None:
            key = call.began.process, call.began.name
            if used[key] < len(unheard[key]) and unheard[key][used[key]].start_index < call.end_index:
                used[key] += 1  # one grant explains one release
            else:
                text = f"{describe_call(call)} was confirmed, but there was no grant to release"
                yield Violation("release", call.began.name, call.ended.at, text)


def _unfounded_renewals(analysis: HistoryAnalysis) -> Iterator[Violation]:
    """A renewal is confirmed only for a claim that is held or queued (E7), never after a release or loss."""
    for call in analysis.calls:
        if call.began.action == "renew" and call.succeeded and call.began.op in analysis.hold_index:
            hold = analysis.holds[analysis.hold_index[call.began.op]]
            if call.start_index > hold.released_index or call.began.at > hold.lost:
                after = "release" if call.start_index > hold.released_index else "loss"
                text = f"{describe_call(call)} was confirmed after the {after}: {describe_hold(hold)}"
                yield Violation("renew", hold.name, call.began.at, text)
    acquires = _acquires_by_process(analysis.calls)
    last = {key: list(accumulate((_end_or_never(call) for call in calls), max)) for key, calls in acquires.items()}
    for call in analysis.unmatched:
        if call.began.action == "renew" and call.succeeded:
            key = call.began.process, call.began.name
            before = bisect_left(acquires[key], call.end_index, key=lambda acquire: acquire.start_index)
            if not before or last[key][before - 1] < call.start_index:
                text = f"{describe_call(call)} was confirmed, but there was no grant"
                yield Violation("renew", call.began.name, call.began.at, text)


def _end_or_never(call: Call) -> int:
    return NEVER if call.unknown else call.end_index


def _acquires_by_process(calls: Iterable[Call]) -> defaultdict[tuple[str, str], list[Call]]:
    acquires: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if call.began.action in ACQUIRE_ACTIONS:
            acquires[call.began.process, call.began.name].append(call)
    return acquires
