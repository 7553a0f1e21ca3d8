"""Finds deadlocks across names: cycles of owners that wait for each other.

The nodes of the graph are owners: threads and tasks, identified by the last eight digits of their claims' id hashes. A
waiter's owner waits for

- a lock: the owners of all holders that conflict with its claim. A reader that only the queue keeps out waits for the
  writers ahead of it. All of them must proceed before it can;
- a permit of a semaphore: the owners of all permits. It is enough if one of them proceeds.

An owner with several queued claims waits for any one of them (`any_of`). It is enough if one of the claims is granted.

An owner is stuck if the owners it needs never proceed. To find the stuck owners, the search repeatedly removes every
owner that can proceed. The owners that remain wait for each other, or for an owner in a cycle. A cooling name has no
owner: it becomes free after some time.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from leasehold.model import Holding


class Wait(NamedTuple):
    """A queued claim, and a claim that must end before the queued one can be granted."""

    waiter: Holding
    holder: Holding  # of the same name; itself a waiter if only the order of the queue blocks

    @property
    def name(self) -> str:
        """The name that the waiter waits for."""
        return self.waiter.name


class Deadlock(NamedTuple):
    """A cycle of waits: each needs what the owner of the next wait holds, the last what the first one's owner holds."""

    waits: tuple[Wait, ...]

    @property
    def victim(self) -> Holding:
        """The youngest grant of the cycle: breaking it, by name and token, loses the least work."""
        grants = [wait.holder for wait in self.waits if wait.holder.state == "held"] or [self.waits[0].holder]
        return min(grants, key=lambda holding: holding.age)

    def __str__(self) -> str:
        parts = [
            f"{_owner_label(waiter)} waits for {holder.name}, {_describe_holder(holder)}"
            for waiter, holder in self.waits
        ]
        return "; ".join(parts)


class Need(NamedTuple):
    """The holders that one queued claim waits for."""

    waiter: Holding
    holders: list[Holding]
    one_is_enough: bool


def deadlocks(holdings: Iterable[Holding]) -> list[Deadlock]:
    """The cycles among these claims: for each owner in a cycle, the shortest. Leaves out owners that only wait for a
    cycle."""
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
    """The deadlocks of a second `inspect` whose waits were all in the first one.

    On some engines the answer of `inspect` is not a snapshot of one moment. But a claim that is queued in both answers
    was queued all the time between them, and a grant with the same token was held all that time. So all waits of such a
    cycle existed at one moment.
    """
    known = {_identity(wait) for deadlock in before for wait in deadlock.waits}
    return [deadlock for deadlock in after if known.issuperset(map(_identity, deadlock.waits))]


def identity(deadlock: Deadlock) -> frozenset[object]:
    """The same for a cycle of the same claims, in any process."""
    return frozenset(map(_identity, deadlock.waits))


def giving_up_order(deadlock: Deadlock) -> list[str]:
    """The fingerprints of the cycle's waiters, in the order in which they should give up.

    It is the same in every process and every inspection: fingerprints do not change while a claim waits. Ages do not
    decide: each inspection measures them again, so two waits of nearly the same age change places, and then both give
    up.
    """
    return sorted(wait.waiter.fingerprint for wait in deadlock.waits)


def _needs(claims: list[Holding]) -> Iterable[Need]:
    """The needs of the waiters of one name."""
    holders = [holding for holding in claims if holding.state in ("held", "reserved")]
    cooling = any(holding.state == "cooling" for holding in claims)
    waiters = [holding for holding in claims if holding.state in ("waiting", "passed over")]
    for reserved in holders:
        if reserved.state == "reserved":  # its owner will claim it, even if it also waits for other names
            yield Need(reserved, [], one_is_enough=False)
    for position, waiter in enumerate(waiters):
        if waiter.kind == "semaphore":
            full = len(holders) >= waiter.limit and not cooling  # else a permit is or will become free
            yield Need(waiter, holders if full else [], one_is_enough=full)
        elif waiter.mode == "exclusive":
            yield Need(waiter, holders, one_is_enough=False)
        else:
            writers = [holder for holder in holders if holder.mode == "exclusive"]
            yield Need(waiter, writers or [w for w in waiters[:position] if w.mode == "exclusive"], one_is_enough=False)


def _stuck_owners(needs: Sequence[Need]) -> set[str]:
    stuck = {need.waiter.owner for need in needs}
    while True:
        proceeding = {need.waiter.owner for need in needs if not _cannot_proceed(need, stuck)}
        if stuck.isdisjoint(proceeding):
            return stuck
        stuck -= proceeding


def _cannot_proceed(need: Need, stuck: set[str]) -> bool:
    blocked = [holder.owner in stuck for holder in need.holders]
    return all(blocked) if need.one_is_enough else any(blocked)


def _shortest_cycle(start: str, waits: Mapping[str, Mapping[str, Wait]]) -> tuple[Wait, ...]:
    """The shortest cycle through this owner, or empty if it is in none."""
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
        return f"for which {_owner_label(holding)} is queued ahead of it"
    return f"held by {_owner_label(holding)} (token {holding.token})"
