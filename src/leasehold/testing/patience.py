"""Asks a few times a second whether somebody waits for what is free, or is kept in line by a client that forgot it.

A waiter for whom there is room must not stay a waiter. How long is too long depends on what goes wrong: where no
message is lost and the head of the line is well, a fraction of a second; else everybody asks unprompted every few
seconds (E4), and each of those ahead may first let a reservation lapse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from leasehold.core.admission import Line
from leasehold.core.party import HELD, PASSED, RESERVED, WAITING, Party
from leasehold.core.timing import BEAT_EVERY, RESERVATION
from leasehold.model import Claim
from leasehold.testing.monitor import Complain, Monitor, Watched
from leasehold.testing.network import NetworkLink

LOOK_EVERY: Final = 0.25
PROMPT: Final = 0.3


class Patience:
    """`prompt`: no message is lost or late here and the server never stops, so hand-offs have no excuse."""

    def __init__(self, monitor: Monitor, complain: Complain, *, prompt: bool) -> None:
        self._monitor, self._server = monitor, monitor.server
        self._prompt, self._complain = prompt, complain
        self._stuck: dict[tuple[str, str, int], float] = {}  # name, mark, how many ahead: since when, in true time
        self._owed_until: dict[str, float] = {}  # by mark, on its client's clock

    def look(self, in_use: Callable[[str], bool]) -> None:
        """To be called every LOOK_EVERY seconds. `in_use`: the mark of a lease that somebody has not yet let go of."""
        now = self._server.process.now()
        links = {link.client: link for link in self._server.links if link.client is not None}
        before, self._stuck = self._stuck, {}
        for (_, name), line in self._server.store.lines.items():
            watched = self._monitor.names["", name]
            self._first_well(name, watched, line, links, now, before)
            for party in line.parties.values():
                # One that was granted before is a double that landed when the grant was over: only time ends it (E6).
                double = watched.served.get(party.mark, party.token) != party.token
                if (link := links.get(party.client)) is not None and not double:
                    self._ghost(name, party, link, now, in_use)

    def _first_well(
        self,
        name: str,
        watched: Watched,
        line: Line,
        links: dict[str, NetworkLink],
        now: float,
        before: dict[tuple[str, str, int], float],
    ) -> None:
        """The line is strict: only the first waiter that is well can be expected to get anywhere."""
        ahead = 0
        for party in sorted(line.parties.values(), key=lambda party: party.ticket):
            waits = party.state in (WAITING, PASSED) or (party.state == RESERVED and party.until > now)
            if not waits or party.beat <= now:
                continue
            link, aside = links.get(party.client), party.state == PASSED  # it stands aside, in nobody's way
            if link is None or not self._well(link):
                ahead += not aside
                continue
            free_since = _free_since(line, party, now)
            if free_since is not None:
                key = (name, party.mark, ahead)
                since = self._stuck[key] = before.get(key, self._server.world.time)
                # Whoever was paused may have heard that much later how long to wait.
                upset = max(0.0, link.process.resumed_at - watched.joined_at[party.mark])
                slow = BEAT_EVERY + PROMPT + (RESERVATION + 0.5) * ahead + (0 if self._prompt else BEAT_EVERY)
                if self._prompt and not ahead and not aside:
                    self._too_long(name, party, now - free_since, min(PROMPT + upset, slow))
                self._too_long(name, party, self._server.world.time - since, slow)
            if not aside:
                return

    def _too_long(self, name: str, party: Party, waited: float, bound: float) -> None:
        if waited > bound:
            self._complain("stuck", f"{name}: {party.mark[:16]} waits for what is free for {waited:.2f} s (E4)")

    def _well(self, link: NetworkLink) -> bool:
        if link.closed or link.process.dead or link.process.paused or not self._server.up:
            return False
        recently = self._server.world.time - link.process.resumed_at < LOOK_EVERY
        return not recently and not self._server.process.paused and link.process not in self._server.cut_off

    def _ghost(self, name: str, party: Party, link: NetworkLink, now: float, in_use: Callable[[str], bool]) -> None:
        """A claim its live client has no memory of, and which the server was never asked to let go (E6, owed)."""
        mark, occupies = party.mark, party.state in (RESERVED, HELD)
        if owed := link.book.owed.get(mark):
            self._owed_until[mark] = owed.until
        if link.process.now() >= self._owed_until.get(mark, float("inf")):
            return  # repeated in vain until it should have lapsed; but then the attempt itself came late
        known = link.book.knows(mark) or mark in self._monitor.settled or in_use(mark)
        if known or link.closed or link.process.dead or (party.until if occupies else party.beat) <= now:
            return
        for other in self._server.links:
            if other.process is link.process and any(_speaks_of(call.args, mark) for call in other.open.values()):
                return
        self._complain("ghost", f"{name}: {mark[:16]} is held or waits, and its client has forgotten it (E6)")


def _free_since(line: Line, party: Party, now: float) -> float | None:
    """Since when there is room for this one; None: there is none. Every verb leaves a head for whom there is no room,
    so room comes from what has ended since: of a lock the last that was in the way, of a semaphore any."""
    if party.state == RESERVED:
        return party.since
    ends = [other.until + (other.delay if other.state == HELD else 0.0) for other in line.occupiers.values()]
    over = [end for end in ends if end <= now]
    if line.kind == "semaphore":
        return min(over, default=now) if len(ends) - len(over) < line.limit else None
    exclusive = (party.mode == "exclusive" or other.mode == "exclusive" for other in line.occupiers.values())
    if any(end > now for end, blocks in zip(ends, exclusive, strict=True) if blocks):
        return None
    return max(over, default=now)


def _speaks_of(args: tuple[Any, ...], mark: str) -> bool:
    return any(isinstance(arg, Claim) and arg.mark == mark for arg in args)
