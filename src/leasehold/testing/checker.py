"""The quick judge: did anybody hold, beside or after another, what the contract forbids?

Everything is read off intervals in O(n log n), so that long runs of many clients are judged in a moment. What hangs on
the order of overlapping calls (a failed try, say) is left to the exact search in `search.py`.

What holders *certainly believed* is compared, never what the engine believed, so network time is never held against a
lock. Of two holds that meet in one instant the one ends before the other starts: they do not overlap.
"""

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, islice
from typing import Literal

from leasehold.testing.history import NEVER, TAKING, Call, History, Hold, Ledger

Rule = Literal[
    "exclusion", "limit", "slot", "kind", "token", "repeat", "depth", "release", "renew", "order", "refusal", "update"
]
Sort = tuple[str, str | int]  # what may share a name: all shared, or all permits of one limit


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise: the rule, the name, when it showed, and for people who did what."""

    rule: Rule
    name: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.name!r} at {self.at:.6f}: {self.text}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge found. `unknown` only comes from a search that used up its budget."""

    result: Literal["valid", "invalid", "unknown"]
    violations: tuple[Violation, ...] = ()
    visited: int = 0  # states, by a search

    def __str__(self) -> str:
        return "\n".join([self.result, *map(str, self.violations)])


def check(history: History, *, fencing: bool = True) -> Verdict:
    """Judge a whole history, all names at once. Without `fencing` tokens need not rise (E3), only exclude."""
    ledger = history.ledger()
    found = [*_depths(ledger), *_releases(ledger), *_renewals(ledger), *_repeats(ledger)]
    for holds in _by_name(ledger.holds):
        believed = sorted((hold for hold in holds if hold.believed), key=_entering)
        found += _crowds(believed)
        if fencing:
            found += [*_reused(holds), *_fallen(believed)]
    if fencing:
        found += _overtaken(ledger)
    found.sort(key=lambda violation: violation.at)
    return Verdict("invalid" if found else "valid", tuple(found))


def who(hold: Hold) -> str:
    """A hold for people: who, what, which token, when."""
    what = hold.mode if hold.kind == "lock" else f"permit of {hold.limit}"
    token = "no token" if hold.token is None else f"token {hold.token}"
    slot = "" if hold.slot is None else f", slot {hold.slot}"
    end = "on" if hold.end == math.inf else f"to {hold.end:.6f}"
    return f"{hold.process} ({what}, {token}{slot}, {hold.start:.6f} {end})"


def what(call: Call) -> str:
    """A call for people."""
    end = "open" if call.ended is None else f"{call.ended.at:.6f}"
    token = "" if call.token is None else f", token {call.token}"
    return f"{call.began.process}'s {call.began.action} ({call.began.at:.6f} to {end}{token})"


def _by_name(holds: Sequence[Hold]) -> Iterable[list[Hold]]:
    names: defaultdict[str, list[Hold]] = defaultdict(list)
    for hold in holds:
        names[hold.name].append(hold)
    return names.values()


def _entering(hold: Hold) -> tuple[float, bool]:
    # A hold of no length lies before those that start at its instant; the sort is stable, so the rest is grant order.
    return hold.start, hold.start < hold.end


def _alone(hold: Hold) -> bool:
    return hold.kind == "lock" and hold.mode == "exclusive"


def _sort(hold: Hold) -> Sort:
    return (hold.kind, hold.mode) if hold.kind == "lock" else (hold.kind, hold.limit)


def _crowds(holds: Sequence[Hold]) -> Iterator[Violation]:
    """E1 by a sweep over the starts: each newcomer is compared with those still holding."""
    present: defaultdict[Sort, dict[int, Hold]] = defaultdict(dict)
    slots: dict[int, Hold] = {}  # the last holder of each
    ends: list[tuple[float, int]] = []
    for place, hold in enumerate(holds):
        while ends and ends[0][0] <= hold.start:
            gone = heappop(ends)[1]
            del present[_sort(holds[gone])][gone]
        for rule, others in _clashes(hold, present, slots):
            text = f"{who(hold)} began while held by {', '.join(map(who, others))}"
            yield Violation(rule, hold.name, hold.start, text)
        if hold.start < hold.end:
            present[_sort(hold)][place] = hold
            heappush(ends, (hold.end, place))
            if hold.slot is not None:
                slots[hold.slot] = hold


def _clashes(
    hold: Hold, present: defaultdict[Sort, dict[int, Hold]], slots: dict[int, Hold]
) -> Iterator[tuple[Rule, list[Hold]]]:
    mine = _sort(hold)
    for sort, others in present.items():
        if others and (sort != mine or _alone(hold)):
            other = next(iter(others.values()))
            yield "exclusion" if hold.kind == other.kind == "lock" else "kind", [other]
    if hold.kind == "semaphore":
        if len(present[mine]) >= hold.limit:
            yield "limit", list(islice(present[mine].values(), 5))
        if hold.slot in slots and hold.start < slots[hold.slot].end:
            yield "slot", [slots[hold.slot]]


def _reused(holds: Sequence[Hold]) -> Iterator[Violation]:
    """A token names one grant for ever (E3); a claim asked again may see its own once more (E2), until released."""
    owners: dict[int, Hold] = {}
    for hold in holds:
        if hold.token is None:
            continue
        other = owners.setdefault(hold.token, hold)
        own = hold.claim is not None and hold.claim == other.claim and other.gone > hold.calls[0].opened
        if other is not hold and not own:
            yield Violation("token", hold.name, hold.start, f"token given twice: to {who(other)} and to {who(hold)}")


def _fallen(holds: Sequence[Hold]) -> Iterator[Violation]:
    """Where holds cannot overlap, by E1 or by slot, their order is that of the grants, so tokens rise along it (E3)."""
    every: Hold | None = None  # the highest token so far; of exclusive holds; of each slot
    exclusive: Hold | None = None
    slots: dict[int, Hold] = {}
    for hold in holds:
        slot = hold.slot if hold.kind == "semaphore" else None
        before = every if _alone(hold) else exclusive
        if slot is not None and slot in slots:
            before = _higher(before, slots[slot])
        if before is not None and _falls(before, hold) and before.end <= hold.start:
            yield Violation("token", hold.name, hold.start, f"token fell: {who(hold)} came after {who(before)}")
        every = _higher(every, hold)
        exclusive = _higher(exclusive, hold) if _alone(hold) else exclusive
        if slot is not None:
            slots[slot] = _higher(slots.get(slot), hold)


def _falls(before: Hold, hold: Hold) -> bool:
    # Equal tokens are judged by `_reused`.
    return before.token is not None and hold.token is not None and hold.token < before.token


def _higher(one: Hold | None, other: Hold) -> Hold:
    return other if one is None or one.token is None or (other.token or 0) > one.token else one


def _overtaken(ledger: Ledger) -> Iterator[Violation]:
    """A grant asked for after another had been answered has the higher token (E3), whatever may be held together."""
    asked: dict[tuple[str, str | int], int] = {}  # a claim may have been granted by an earlier attempt, unheard (E2)
    for call in ledger.calls:
        if call.began.action in TAKING and call.began.claim is not None:
            asked.setdefault((call.began.name, call.began.claim), call.opened)
    events: list[tuple[int, int]] = []
    for place, hold in enumerate(ledger.holds):
        first = hold.calls[0]
        events.append((asked.get((hold.name, hold.claim or ""), first.opened), place))
        events.append((first.closed, place))
    highest: dict[str, Hold] = {}  # by name, among those answered
    bar: dict[int, Hold | None] = {}  # by hold, the highest when it was asked for
    for _, place in sorted(events):
        hold = ledger.holds[place]
        if place not in bar:
            bar[place] = highest.get(hold.name)
            continue
        before = bar[place]
        if before is not None and _falls(before, hold):
            yield Violation(
                "token", hold.name, hold.start, f"token fell: {who(hold)} was asked for after {who(before)}"
            )
        highest[hold.name] = _higher(highest.get(hold.name), hold)


def _repeats(ledger: Ledger) -> Iterator[Violation]:
    """A claim answered twice has one token (E2), unless it was released, lost or broken between."""
    last: dict[tuple[str, str], Hold] = {}
    for hold in ledger.holds:
        if hold.claim is None:
            continue
        before = last.get((hold.name, hold.claim))
        last[hold.name, hold.claim] = hold
        if before is not None and before.token != hold.token and before.end > hold.start:
            text = f"one claim was given two tokens: {who(before)} and {who(hold)}"
            yield Violation("repeat", hold.name, hold.start, text)


def _depths(ledger: Ledger) -> Iterator[Violation]:
    for call in ledger.calls:
        depth = ledger.depths.get(call.began.op)
        if call.ended is not None and call.ended.depth is not None and depth not in (None, call.ended.depth):
            text = f"{what(call)} led to depth {call.ended.depth}, by the calls before it to {depth}"
            yield Violation("depth", call.began.name, call.ended.at, text)


def _releases(ledger: Ledger) -> Iterator[Violation]:
    """Only a holder's release is confirmed; one whose grant was never heard of may be a holder."""
    unheard = _takings(call for call in ledger.calls if call.unknown)
    used: Counter[tuple[str, str]] = Counter()
    for call in ledger.strays:
        if call.began.action == "release" and call.yes and call.ended is not None:
            key = call.began.process, call.began.name
            if used[key] < len(unheard[key]) and unheard[key][used[key]].opened < call.closed:
                used[key] += 1  # one grant explains one release
            else:
                text = f"{what(call)} was confirmed without a grant to release"
                yield Violation("release", call.began.name, call.ended.at, text)


def _renewals(ledger: Ledger) -> Iterator[Violation]:
    """Renewed is what is held, or (E7) stands in line; never what was released or lost."""
    for call in ledger.calls:
        if call.began.action == "renew" and call.yes and call.began.op in ledger.hold_of:
            hold = ledger.holds[ledger.hold_of[call.began.op]]
            if call.opened > hold.gone or call.began.at > hold.lost:
                after = "release" if call.opened > hold.gone else "loss"
                text = f"{what(call)} was confirmed after the {after}: {who(hold)}"
                yield Violation("renew", hold.name, call.began.at, text)
    takings = _takings(ledger.calls)
    last = {key: list(accumulate((_until(call) for call in calls), max)) for key, calls in takings.items()}
    for call in ledger.strays:
        if call.began.action == "renew" and call.yes:
            key = call.began.process, call.began.name
            before = bisect_left(takings[key], call.closed, key=lambda one: one.opened)
            if not before or last[key][before - 1] < call.opened:
                text = f"{what(call)} was confirmed without a grant"
                yield Violation("renew", call.began.name, call.began.at, text)


def _until(call: Call) -> int:
    return NEVER if call.unknown else call.closed


def _takings(calls: Iterable[Call]) -> defaultdict[tuple[str, str], list[Call]]:
    takings: defaultdict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if call.began.action in TAKING:
            takings[call.began.process, call.began.name].append(call)
    return takings
