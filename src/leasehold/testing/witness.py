"""Writes down what simulated programs believe to hold, and sees that nobody is left believing what is over.

What they believe is taken from the leases themselves, and ends at the earliest of: the start of their release, word of
their loss, and their own local deadline turned into true time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from leasehold.aio import AsyncLease
from leasehold.recipes.lease import LOST
from leasehold.runtime.simulated import Process, World
from leasehold.testing.history import History, Op

PROMPTLY: Final = 0.25  # a lease that ended by its clock is told so within this, unless its process is paused

Shape = Literal["lock", "read", "write", "semaphore"]
Style = Literal["with", "hand", "try"]
Complain = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What one operation asks for, and what it does with it."""

    name: str
    shape: Shape
    limit: int
    style: Style
    ttl: float
    wait: float | None
    work: float
    min_hold: float = 0.0
    max_hold: float | None = None
    delay: float = 0.0
    renews: bool = False


@dataclass(slots=True, eq=False)
class Belief:
    """A lease in somebody's hands."""

    who: str
    process: Process
    lease: AsyncLease
    told: bool = False
    short: bool = False  # handed out late, or shortened by hand: it may have ended before anybody could look

    def __str__(self) -> str:
        return f"{self.who} believed in {self.lease.name}"

    @property
    def trusted_until(self) -> float:
        """True time at which the lease's own clock ends it."""
        return self.process.true_time(self.lease._valid_until)


class Witness:
    """Writes the history, start before sending; and sees that nobody is left believing what is over."""

    def __init__(self, world: World, complain: Complain) -> None:
        self.history = History(lambda: world.time)
        self.lost = 0
        self.broken: set[int] = set()  # tokens an operator has broken
        self._world, self._complain = world, complain
        self._in_hand: dict[str, Belief] = {}
        self._all: list[Belief] = []

    def in_use(self, mark: str) -> bool:
        return mark in self._in_hand

    def asks(self, who: str, wish: Wish) -> Op:
        return self.history.invoke(
            who,
            "try" if wish.wait == 0 else "acquire",
            wish.name,
            mode="shared" if wish.shape == "read" else "exclusive",
            kind="semaphore" if wish.shape == "semaphore" else "lock",
            limit=wish.limit,
        )

    def believes(self, op: Op, who: str, process: Process, lease: AsyncLease) -> Belief:
        op.ok(token=lease.token, slot=lease.slot)
        if not lease.held:
            self._complain("late", f"{who} was handed a lease of {lease.name} that was over: {lease.lost_reason} (E8)")
        belief = Belief(who, process, lease, short=lease.remaining < lease.ttl / 2)
        self._in_hand[lease._claim.mark] = belief
        self._all.append(belief)
        if lease.token in self.broken:  # before its holder heard of the grant: word of it comes with the next renewal
            self.history.lost(who, lease.name, lease.token)
        lease.on_lost(lambda _: self._told(belief))
        return belief

    def _told(self, belief: Belief) -> None:
        if belief.process.dead or belief.told:
            return
        belief.told = True
        self.lost += 1
        now, end, lease = self._world.time, belief.trusted_until, belief.lease
        if lease.lost_reason is None:
            self._complain("untold", f"{belief.who} lost {lease.name} and was not told why")
        if now - max(end, belief.process.resumed_at) > PROMPTLY and not belief.short:
            self._complain("untold", f"{belief.who} was told {now - end:.3f} s late that {lease.name} is lost")
        self.history.lost(belief.who, lease.name, lease.token, at=min(now, end))

    def was_broken(self, token: int) -> None:
        """The server has carried out a break: what its holder believes from here on is nobody's promise."""
        self.broken.add(token)
        for belief in self._in_hand.values():
            if belief.lease.token == token and not belief.told:
                self.history.lost(belief.who, belief.lease.name, token)

    def heard_gone(self, process: Process, mark: str) -> None:
        """The engine's word that a lease is over has arrived: its holder must not go on believing."""
        if belief := self._in_hand.get(mark):
            self._soon(process, lambda: not belief.lease.held, "deaf", f"{belief} though the engine said it is gone")

    def _soon(self, process: Process, so: Callable[[], bool], rule: str, text: str) -> None:
        """It must be so before long; one that was paused meanwhile gets more time."""

        def look() -> None:
            if self._world.time - process.resumed_at < PROMPTLY:
                process.later(PROMPTLY, look)
            elif not so():
                self._complain(rule, text)

        process.later(PROMPTLY, look)

    def releases(self, belief: Belief) -> Op:
        self._overdue(belief)
        if belief.lease.lost_reason is not None:
            self._soon(belief.process, lambda: belief.told, "untold", f"{belief}, lost it, and got no word of that")
        return self.history.invoke(belief.who, "release", belief.lease.name, token=belief.lease.token)

    def lets_go(self, belief: Belief) -> None:
        self._in_hand.pop(belief.lease._claim.mark, None)

    def crashes(self, process: Process) -> None:
        """To be called before the process dies: from then on its people believe nothing."""
        for belief in [belief for belief in self._in_hand.values() if belief.process is process]:
            self._overdue(belief)
            self.lets_go(belief)
        for who in sorted({belief.who for belief in self._all if belief.process is process}):
            self.history.crashed(who)

    def ends(self) -> None:
        """After the run: close what its own clock closed, and silence finalisers of what died in the simulation."""
        for belief in self._all:
            if not belief.process.dead:
                self._overdue(belief)
            if belief.lease._ended is None:
                belief.lease._ended = LOST

    def _overdue(self, belief: Belief) -> None:
        if not belief.told and belief.trusted_until < self._world.time and belief.lease.lost_reason is not None:
            self.history.lost(belief.who, belief.lease.name, belief.lease.token, at=belief.trusted_until)
