"""Who waits for whom across names, and where that goes round in a circle.

The nodes are owners: threads and tasks, told apart by what their claims' marks end with. One waits for

- a lock: everybody who holds it in a way that keeps this claim out; a reader that only the line keeps out waits for
  the writers before it. All of them have to go on before it can;
- a permit of a semaphore: all who hold one, but it is enough that one of them goes on.

So an owner is stuck if nobody ever goes on whom it needs. That is found by taking away, again and again, everybody who
can go on; what is left waits for each other, or for somebody who does. Time alone ends what is cooling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from leasehold.model import Holding


class Wait(NamedTuple):
    """One claim in line, and one that has to end before it can be granted."""

    waiter: Holding
    holder: Holding  # of the same name; a waiter itself where only the order of the line is in the way

    @property
    def name(self) -> str:
        """What is waited for."""
        return self.waiter.name


@dataclass(frozen=True, slots=True)
class Deadlock:
    """A circle of waits: each is for what the next one's owner holds, the last for what the first one's does."""

    waits: tuple[Wait, ...]

    @property
    def victim(self) -> Holding:
        """The way out that costs least work: the youngest grant of the circle, to be broken by name and token."""
        grants = [wait.holder for wait in self.waits if wait.holder.state == "held"] or [self.waits[0].holder]
        return min(grants, key=lambda holding: holding.age)

    def __str__(self) -> str:
        parts = [
            f"{_owner_label(waiter)} waits for {holder.name}, {_describe_holder(holder)}"
            for waiter, holder in self.waits
        ]
        return "; ".join(parts)


class Need(NamedTuple):
    """What one claim in line waits for."""

    waiter: Holding
    holders: list[Holding]
    one_is_enough: bool


def deadlocks(holdings: Iterable[Holding]) -> list[Deadlock]:
    """Every circle among these claims: for each owner in one, the shortest. Nobody is named who only waits behind."""
    needs = [
        need for _, claims in groupby(holdings, key=_full_name) for need in _needs(list(claims)) if need.waiter.owner
    ]
    stuck = _stuck_owners(needs)
    waits: dict[str, dict[str, Wait]] = {}
    for waiter, holders, _ in needs:
        if waiter.owner in stuck:
            for holder in holders:
                if holder.owner in stuck:
                    waits.setdefault(waiter.owner, {}).setdefault(holder.owner, Wait(waiter, holder))
    found: dict[frozenset[Wait], Deadlock] = {}
    for owner in sorted(waits):
        cycle = _shortest_cycle(owner, waits)
        if cycle:
            found.setdefault(frozenset(cycle), Deadlock(cycle))
    return list(found.values())


def seen_in_both(before: Sequence[Deadlock], after: Sequence[Deadlock]) -> list[Deadlock]:
    """Those of a second look that the first one saw, claim by claim.

    A look is not one moment on every engine. But a claim that stands in line in both looks stood there all the time
    between, and so does a grant with one token: all waits of such a circle were there at one moment.
    """
    known = {_identity(wait) for deadlock in before for wait in deadlock.waits}
    return [deadlock for deadlock in after if known.issuperset(map(_identity, deadlock.waits))]


def _needs(claims: list[Holding]) -> Iterable[Need]:
    """What the waiters of one name need."""
    holders = [holding for holding in claims if holding.state in ("held", "reserved")]
    cooling = any(holding.state == "cooling" for holding in claims)
    waiters = [holding for holding in claims if holding.state in ("waiting", "passed over")]
    for position, waiter in enumerate(waiters):
        if waiter.kind == "semaphore":
            if len(holders) >= waiter.limit and not cooling:  # else a permit is free, and somebody only has to look
                yield Need(waiter, holders, one_is_enough=True)
        elif waiter.mode == "exclusive":
            yield Need(waiter, holders, one_is_enough=False)
        else:
            writers = [holder for holder in holders if holder.mode == "exclusive"]
            yield Need(waiter, writers or [w for w in waiters[:position] if w.mode == "exclusive"], one_is_enough=False)


def _stuck_owners(needs: Sequence[Need]) -> set[str]:
    stuck = {need.waiter.owner for need in needs}
    while True:
        still_stuck = {
            need.waiter.owner for need in needs if need.waiter.owner in stuck and _cannot_proceed(need, stuck)
        }
        if still_stuck == stuck:
            return stuck
        stuck = still_stuck


def _cannot_proceed(need: Need, stuck: set[str]) -> bool:
    blocked = [holder.owner in stuck for holder in need.holders]
    return all(blocked) if need.one_is_enough else any(blocked)


def _shortest_cycle(start: str, waits: Mapping[str, Mapping[str, Wait]]) -> tuple[Wait, ...]:
    """The shortest way from an owner back to itself; empty: there is none."""
    reached_from: dict[str, str] = {}
    todo = deque([start])
    while todo:
        owner = todo.popleft()
        for other in waits.get(owner, {}):
            if other == start:
                path = [owner]
                while path[-1] != start:
                    path.append(reached_from[path[-1]])
                path = [*reversed(path), start]
                return tuple(waits[source][target] for source, target in pairwise(path))
            if other not in reached_from:
                reached_from[other] = owner
                todo.append(other)
    return ()


def _full_name(holding: Holding) -> tuple[str, str]:
    return holding.namespace, holding.name


def _identity(wait: Wait) -> tuple[object, ...]:
    return wait.name, wait.waiter.fingerprint, wait.holder.fingerprint, wait.holder.token


def _owner_label(holding: Holding) -> str:
    return f"{holding.holder.label} [{holding.owner}]"


def _describe_holder(holding: Holding) -> str:
    if holding.token is None:
        return f"for which {_owner_label(holding)} stands in line before it"
    return f"held by {_owner_label(holding)} (token {holding.token})"
