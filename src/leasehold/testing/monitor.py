"""Judges a simulated server by what it answers.

The history checker knows only what holders believe; this monitor stands at the server. It keeps a model of its own,
made from the answers: which life was promised to whom (E1, E8), under which token (E2, E3), who came before whom (fair)
and who was heard of when (E7). How long anybody waits is for `patience.py` to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from leasehold.core.admission import Line
from leasehold.core.party import COOLING, HELD, PASSED, RESERVED, WAITING, Party
from leasehold.core.timing import BEAT
from leasehold.model import Alive, Busy, Claim, Grant
from leasehold.testing.network import Observer, Server

_ROUNDING: Final = 1e-6

_EMPTY: Final = Line(0.0)

Complain = Callable[[str, str], None]
Key = tuple[str, str]


@dataclass(slots=True)
class Promised:
    """What one grant was promised: `end` for its holder, `kept` for the name (delay, min_hold)."""

    claim: Claim
    since: float
    end: float
    kept: float
    over: bool = False


@dataclass(slots=True)
class Watched:
    """The model of one name."""

    promises: dict[int, Promised] = field(default_factory=dict)  # by token
    live: dict[int, Promised] = field(default_factory=dict)  # those that may still keep the name
    highest: int = 0
    tokens: set[int] = field(default_factory=set)
    tickets: dict[str, int] = field(default_factory=dict)  # by mark
    arrivals: dict[str, int] = field(default_factory=dict)  # by mark, in the order in which they joined the line
    served: dict[str, int] = field(default_factory=dict)  # by mark: its first token
    joined_at: dict[str, float] = field(default_factory=dict)  # by mark, true time
    beats: dict[str, float] = field(default_factory=dict)
    states: dict[str, int] = field(default_factory=dict)


class Monitor(Observer):
    """Sees every request and its answer, and the line after each of them."""

    def __init__(self, server: Server, complain: Complain) -> None:
        self.server = server
        self.passed_over = self.grants = 0
        self.settled: set[str] = set()  # marks the server has released, or said no to: a double may still land (E6)
        self._complain = complain
        self.names: dict[Key, Watched] = {}
        self._joined = 0

    # ------------------------------------------------------------- by the answers

    def answered(self, verb: str, args: tuple[Any, ...], answer: Any) -> None:
        now = self.server.process.now()
        if verb == "attempt":
            claim: Claim = args[0]
            key = (claim.namespace, claim.name)
            anew = key not in self.names or not self.names[key].states
            watched = self.names.setdefault(key, Watched())
            if isinstance(answer, Grant):
                self._granted(watched, claim, answer, now)
            elif isinstance(answer, Busy) and claim.queue:
                watched.beats[claim.mark] = now + BEAT
            else:
                self.settled.add(claim.mark)
            if anew:  # a new name sweeps two others
                self._look_everywhere(now)
            else:
                self._look(key, now)
        elif verb == "renew":
            for claim, reply in zip(args[0], answer, strict=True):
                if isinstance(reply, Alive):
                    self._renewed(claim, reply, now)
                self._look((claim.namespace, claim.name), now)
        elif verb == "release":
            self._released(args[0], now)
        elif verb == "break_":
            self._broken(args[:2], args[2], answer, now)
        else:
            self._look_everywhere(now)

    def _granted(self, watched: Watched, claim: Claim, grant: Grant, now: float) -> None:
        known = watched.promises.get(grant.token)
        if known is None:
            self.grants += 1
            watched.served.setdefault(claim.mark, grant.token)
            self._admitted(watched, claim, grant.token, now)
            known = watched.promises[grant.token] = watched.live[grant.token] = Promised(claim, now, now, now)
        elif known.claim.mark != claim.mark:
            self._complain("token", f"{claim.name}: token {grant.token} was given to two claims (E3)")
        elif known.over or known.end <= now:
            self._complain("lapse", f"{claim.name}: token {grant.token} was granted again after its end")
        known.end = max(known.end, now + grant.ttl)
        known.kept = known.end + claim.delay

    def _admitted(self, watched: Watched, claim: Claim, token: int, now: float) -> None:
        """A new grant beside what is still promised to others (E1, E2)."""
        for other_token, other in list(watched.live.items()):
            if other.kept <= now + _ROUNDING:
                del watched.live[other_token]
                continue
            if not other.over and other.end > now + _ROUNDING and other.claim.mark == claim.mark:
                self._complain("repeat", f"{claim.name}: one claim has tokens {other_token} and {token} (E2)")
            if (claim.kind, claim.limit) != (other.claim.kind, other.claim.limit):
                self._complain("kind", f"{claim.name}: {claim} was granted beside {other.claim} (E1)")
            elif claim.kind == "lock" and "exclusive" in (claim.mode, other.claim.mode):
                self._complain("exclusion", f"{claim.name}: token {token} was granted while {other_token} lived (E1)")
        if claim.kind == "semaphore" and len(watched.live) >= claim.limit:
            self._complain("limit", f"{claim.name}: {len(watched.live) + 1} permits of {claim.limit} (E1)")

    def _renewed(self, claim: Claim, reply: Alive, now: float) -> None:
        watched = self.names[claim.namespace, claim.name]
        if not claim.token:
            watched.beats[claim.mark] = now + BEAT
            return
        promised = watched.promises.get(claim.token)
        if promised is None or promised.over or promised.end <= now - _ROUNDING:
            self._complain("renew", f"{claim.name}: token {claim.token} was renewed after its end (E5)")
        elif promised.end > now + reply.ttl + _ROUNDING:
            self._complain("renew", f"{claim.name}: a renewal shortened the life of token {claim.token} (E8)")
        else:
            promised.end = now + reply.ttl
            promised.kept = promised.end + promised.claim.delay

    def _released(self, claim: Claim, now: float) -> None:
        key = (claim.namespace, claim.name)
        line = self.server.store.lines.get(key)
        if not claim.id and line and (party := line.parties.get(claim.mark)) and party.state == HELD:
            return  # the release of a stray: it gives up a place or a turn, and this is neither
        self.settled.add(claim.mark)
        if (watched := self.names.get(key)) is not None:
            watched.beats.pop(claim.mark, None)
            watched.arrivals.pop(claim.mark, None)
            for promised in watched.live.values():
                if promised.claim.mark == claim.mark and not promised.over and promised.end > now:
                    promised.over, promised.kept = True, max(now, promised.since + claim.min_hold)
        if line is not None:
            everyone = (*line.parties.values(), *line.occupiers.values())
            left = [party for party in everyone if party.mark == claim.mark and party.state != COOLING]
            if left:
                self._complain("release", f"{claim.name}: {claim.fingerprint} was released and is still there (E6)")
        self._look(key, now)

    def _broken(self, key: Key, token: int, answer: Any, now: float) -> None:
        watched = self.names.get(key)
        promised = watched.promises.get(token) if watched is not None else None
        if answer is True and promised is not None:
            live = not promised.over and promised.end > now
            promised.over, promised.kept = True, now + promised.claim.delay if live else now
        self._look(key, now)

    # --------------------------------------------------------------- by the line

    def _look_everywhere(self, now: float) -> None:
        for key in self.names:
            self._look(key, now)

    def _look(self, key: Key, now: float) -> None:
        """What changed in a line: who was reserved in whose stead (fair), who vanished (E7)."""
        watched = self.names.get(key)
        if watched is None:
            return
        line = self.server.store.lines.get(key) or _EMPTY
        for party in line.parties.values():
            # Another ticket: it lapsed, and came anew with the very request that found it so.
            anew = watched.tickets.get(party.mark, party.ticket) != party.ticket
            watched.tickets[party.mark] = party.ticket
            if party.state in (WAITING, PASSED) and (anew or party.mark not in watched.arrivals):
                self._joined += 1
                watched.arrivals[party.mark] = self._joined
                watched.joined_at[party.mark] = self.server.world.time
            if party.state == PASSED and watched.states.get(party.mark) != PASSED:
                self.passed_over += 1
        for token, party in line.occupiers.items():
            if token not in watched.tokens:
                self._issued(key, watched, line, token, party)
            if party.state == HELD:  # served: should it come again, it comes anew
                watched.arrivals.pop(party.mark, None)
        for mark, state in watched.states.items():
            if mark not in line.parties and state in (WAITING, PASSED, RESERVED):
                if watched.beats.pop(mark, now) > now + _ROUNDING:
                    self._complain("dropped", f"{key[1]}: {mark[:16]} lost its place though heard of in time (E7)")
                watched.arrivals.pop(mark, None)
        watched.states = {mark: party.state for mark, party in line.parties.items()}
        if not watched.states:
            watched.arrivals.clear()

    def _issued(self, key: Key, watched: Watched, line: Line, token: int, party: Party) -> None:
        if token <= watched.highest:
            self._complain("token", f"{key[1]}: token {token} was issued after {watched.highest} (E3)")
        watched.tokens.add(token)
        watched.highest = max(watched.highest, token)
        mine = watched.arrivals.get(party.mark, self._joined + 1)
        for _, waiter in line.waiters:
            if watched.arrivals.get(waiter.mark, mine) < mine:
                self._complain(
                    "order", f"{key[1]}: token {token} went past {waiter.mark[:16]}, who came earlier (fair)"
                )
