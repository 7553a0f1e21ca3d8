"""Cycles of owners that wait for each other, and chains of who waits for whom, in a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from leasehold.core.deadlocks import Deadlock
from leasehold.model import Holding
from leasehold.server.picture import LockView, Picture


class Link(NamedTuple):
    """A lock in a blocking chain, and its holder, who waits for the next lock of the chain."""

    lock: LockView
    holder: Holding


class Chain(NamedTuple):
    """Locks whose waiters wait for each other's holders. The holder of the last one waits for none, or the chain leads
    into a cycle."""

    links: tuple[Link, ...]

    @property
    def root(self) -> Link:
        """The lock that all others of the chain wait for."""
        return self.links[-1]

    @property
    def blocked(self) -> int:
        """How many waiters cannot continue before the root is released."""
        return sum(len(link.lock.queue) for link in self.links)


def find(picture: Picture) -> list[Deadlock]:
    """The cycles. Each has a `victim`: the grant to break."""
    return picture.snapshot.deadlocks


def chains(picture: Picture, limit: int = 20) -> list[Chain]:
    """Chains of two locks or more, each from its outer end, those that block the most waiters first."""
    holding = {holder.owner for lock in picture.locks if lock.queue for holder in lock.holders if holder.owner}
    awaited_by = {waiter.owner: lock for lock in picture.locks for waiter in lock.queue if waiter.owner in holding}
    steps = {
        lock.name: (holder, awaited_by[holder.owner])
        for lock in picture.locks
        if lock.queue
        for holder in lock.holders
        if holder.owner in awaited_by
    }
    inner = {lock.name for _, lock in steps.values()}
    found = [_follow(lock, steps) for lock in picture.locks if lock.name in steps and lock.name not in inner]
    return sorted(found, key=lambda chain: (-chain.blocked, chain.links[0].lock.name))[:limit]


def _follow(lock: LockView, steps: Mapping[str, tuple[Holding, LockView]]) -> Chain:
    links: list[Link] = []
    seen: set[str] = set()
    while lock.name in steps and lock.name not in seen:
        seen.add(lock.name)
        holder, awaited = steps[lock.name]
        links.append(Link(lock, holder))
        lock = awaited
    if lock.holders and lock.name not in seen:
        links.append(Link(lock, lock.holders[0]))
    return Chain(tuple(links))
