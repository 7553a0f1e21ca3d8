"""Who may hold a name, given the claims upon it: the state machine that every party-table engine implements.

A `Line` is all there is about one live name. Its verbs are told the time, issue tokens through the counter they are
given, and return what to tell whom; they read no clock and send nothing. The memory engine is this module behind a
guard, and the tests of the SQL and Redis engines run it beside the real thing as the model.

    waiting ──> reserved ──> held ──> (released)          a reservation is a grant the waiter has yet to claim:
       ^            │          └────> cooling ──> (over)   its ttl must start at a request whose sending it timed
       └─ passed ───┘ not claimed in time, or not to be told: keeps its ticket, comes back at its old place

Safety, in four lines. A new occupier is only admitted by `_fits`, after `_settle` has ended what is over (E1). Every
token comes from the one counter, which only rises (E3). A repeated attempt finds its party by mark (E2). `until` of a
grant only moves forward, and only while it lies ahead (E8), so whoever trusts an earlier answer is never overtaken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

from leasehold.core.names import owner
from leasehold.core.party import COOLING, HELD, PASSED, RESERVED, STATES, WAITING, Moment, Party, Word
from leasehold.core.timing import BEAT, NEVER, PROBE, RESERVATION
from leasehold.errors import Mismatch
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Kind, Mode

_new = tuple.__new__  # of a named tuple, where each grant passes: a third of what matching its arguments costs
Answer: TypeAlias = "tuple[Grant | Busy, list[Word]]"


class Line:
    """Everything about one live name; `idle` once nothing is left of it."""

    __slots__ = ("_next_end", "_scan_at", "_told", "kind", "limit", "occupiers", "parties", "tickets", "waiters")

    def __init__(self, now: float, kind: Kind = "lock", limit: int = 1) -> None:
        self.kind: Kind = kind
        self.limit = limit
        self.parties: dict[str, Party] = {}  # by mark: everything that has an owner
        self.occupiers: dict[int, Party] = {}  # by token: reserved, held, cooling
        self.waiters: list[tuple[int, Party]] = []  # by ticket; passed-over parties are not among them
        self.tickets = 0
        self._next_end = NEVER  # no occupier ends before this
        self._scan_at = now + BEAT
        self._told: tuple[str, float] = ("", 0.0)  # which head knows when to look again, and when

    @property
    def idle(self) -> bool:
        return not self.parties and not self.occupiers

    # ------------------------------------------------------------------ verbs

    def attempt(self, at: Moment, claim: Claim, client: str) -> Answer:
        words: list[Word] = []
        if at.now >= self._next_end or at.now >= self._scan_at:
            self._settle(at.now)
        if claim.kind != self.kind or claim.limit != self.limit:
            self._change_kind(at.now, claim)
        party = self.parties.get(claim.mark)
        if party is None:
            if self.waiters:
                self._advance(at, words)
            if not self.waiters and (not self.occupiers or self._fits(claim.mode)):
                party = self._join(at.now, claim, client)
                self._occupy(at, party, HELD, at.now + claim.ttl)
                return _new(Grant, (party.token, claim.ttl, party.slot)), words
            if not claim.queue:
                return self._busy(at.now, None), words
            party = self._join(at.now, claim, client)
        if party.state == PASSED:
            party.state = WAITING
            insort(self.waiters, (party.ticket, party))
        party.beat, party.client = at.now + BEAT, client
        if party.state == WAITING:
            self._advance(at, words, asking=party)
        if party.state not in (RESERVED, HELD):
            return self._busy(at.now, party), words
        return self._claim(at, party, claim, words), words

    def renew(self, at: Moment, claim: Claim) -> tuple[Alive | Gone, list[Word]]:
        words: list[Word] = []
        party = self.parties.get(claim.mark)
        lapsed = party is not None and party.state == HELD and party.until <= at.now
        self._settle(at.now)
        self._advance(at, words)
        party = self.parties.get(claim.mark)
        if party is None:
            return Gone("lapsed" if lapsed else "unknown"), words
        if not claim.token:  # queued: the heart-beat alone. It lengthens no reservation and puts nobody back in line
            party.beat = at.now + BEAT
            return Alive(BEAT, self._place(party) if party.state == WAITING else None), words
        if party.state != HELD or party.token != claim.token:
            return Gone("unknown"), words
        return Alive(self._extend(at.now, party, claim.ttl)), words

    def release(self, at: Moment, mark: str, min_hold: float, held: bool = True) -> tuple[bool, list[Word]]:
        """`held=False`: give up a place or a turn only. A turn may be told late, to a client that no longer knows the
        claim because the grant was taken meanwhile and handed on: that grant is not its to end.
        """
        words: list[Word] = []
        if at.now >= self._next_end or at.now >= self._scan_at:
            self._settle(at.now)
        party = self.parties.get(mark)
        if party is not None and party.state == HELD and not held:
            party = None
        if party is not None:
            # A clock that went back must not keep it for longer than that.
            if min_hold and party.state == HELD and (kept := min(party.since, at.now) + min_hold) > at.now:
                self._cool(party, kept, delay=0.0)
            else:
                self._remove(party)
        if self.waiters:
            self._advance(at, words)
        return party is not None and party.token > 0, words

    def break_(self, at: Moment, token: int) -> tuple[bool, list[Word]]:
        words: list[Word] = []
        self._settle(at.now)
        party = self.occupiers.get(token)
        broken = party is not None and (party.state == HELD or (party.state == COOLING and not party.delay))
        if party is not None and broken:
            # What cools for a delay guards against a holder not yet told: a repeated break must not cut it short.
            if party.state == HELD:
                words.append(Word(party.client, "lost", party.mark))
            if party.state == HELD and party.delay:
                self._cool(party, at.now + party.delay, party.delay)
            else:
                self._remove(party)
        self._advance(at, words)
        return broken, words

    def unheard(self, at: Moment, mark: str) -> tuple[bool, list[Word]]:
        """A turn that could not be told, for engines that tell after they have decided: passed over at once."""
        words: list[Word] = []
        self._settle(at.now)
        party = self.parties.get(mark)
        missed = party is not None and party.state == RESERVED and not at.reachable(party.client)
        if party is not None and missed:
            self._pass_over(party)
        self._advance(at, words)
        return missed, words

    def look(self, at: Moment) -> list[Word]:
        """End what is over and wake whoever may go, though nobody asked: what a sweep does."""
        words: list[Word] = []
        self.tidy(at.now)
        self._advance(at, words)
        return words

    def tidy(self, now: float) -> None:
        """End what is over, and give nothing to anybody: for whoever only looks on."""
        self._settle(now)
        self._scan(now)

    def mend(self, at: Moment) -> list[Word]:
        """Make the books agree again after a verb was torn in two: by Ctrl-C, or for want of memory or stack.

        Each party's own state is the truth, for it changes in one step; where it stands follows. What the torn verb
        was about to do has not happened, and its caller gives the claim up. Words that may not have gone out are
        said again: twice does no harm.
        """
        everyone = [*self.parties.values(), *self.occupiers.values()]
        self.occupiers = {p.token: p for p in everyone if p.token and p.state in (RESERVED, HELD, COOLING)}
        self.parties = {p.mark: p for p in everyone if p.state != COOLING}
        self.waiters = sorted((p.ticket, p) for p in self.parties.values() if p.state == WAITING)
        self._next_end, self._told = 0.0, ("", 0.0)
        reserved = [Word(p.client, "go", p.mark) for p in self.parties.values() if p.state == RESERVED]
        return reserved + self.look(at)

    def holdings(self, namespace: str, name: str, now: float) -> Iterator[Holding]:
        """Holders by token, then the line by ticket, passed-over waiters at the place they would come back to."""
        everyone = {id(party): party for party in (*self.parties.values(), *self.occupiers.values())}
        for party in sorted(everyone.values(), key=lambda p: (p.token == 0, p.token, p.ticket)):
            occupies = party.state in (RESERVED, HELD, COOLING)
            yield Holding(
                namespace=namespace,
                name=name,
                state=STATES[party.state],
                mode=party.mode,
                kind=self.kind,
                limit=self.limit,
                fingerprint=party.mark[:16],
                holder=party.holder,
                age=now - party.since,
                left=max(0.0, (party.until if occupies else party.beat) - now),
                token=party.token or None,
                slot=party.slot,
                place=None if occupies else self._place(party),
                owner=owner(party.mark),
            )

    # -------------------------------------------------------------- decisions

    def _fits(self, mode: Mode) -> bool:
        if not self.occupiers:
            return True
        if self.kind == "semaphore":
            return len(self.occupiers) < self.limit
        return mode == "shared" and all(party.mode == "shared" for party in self.occupiers.values())

    def _change_kind(self, now: float, claim: Claim) -> None:
        self._scan(now)  # the dead do not fix a kind
        if not self.idle:
            raise Mismatch(
                claim.name, wanted=described(claim.kind, claim.limit), found=described(self.kind, self.limit)
            )
        self.kind, self.limit = claim.kind, claim.limit

    def _settle(self, now: float) -> None:
        """End every occupation that is over by now. Nothing is decided before this has run."""
        if now >= self._scan_at:
            self._scan(now)
        if now < self._next_end:
            return
        for party in [party for party in self.occupiers.values() if party.until <= now]:
            if party.state == HELD and party.until + party.delay > now:
                self._cool(party, party.until + party.delay, party.delay)
            elif party.state == RESERVED and party.beat > now:
                self._pass_over(party)
            else:
                self._remove(party)
        self._next_end = min((party.until for party in self.occupiers.values()), default=NEVER)

    def _scan(self, now: float) -> None:
        """Drop the places of those not heard of. Rare: a dead head is also met in `_advance`."""
        self._scan_at = now + BEAT
        for party in [p for p in self.parties.values() if p.state in (WAITING, PASSED) and p.beat <= now]:
            self._remove(party)

    def _advance(self, at: Moment, words: list[Word], asking: Party | None = None) -> None:
        """Reserve for the head of the line while it fits; then see that the new head knows when to look again."""
        while (head := self._head()) is not None:
            if head is not asking and head.beat <= at.now:
                self._remove(head)
            elif head is not asking and not at.reachable(head.client):
                self._pass_over(head)
            elif self._fits(head.mode):
                self._occupy(at, head, RESERVED, at.now + RESERVATION)
                if head is not asking:  # its own answer tells it
                    words.append(Word(head.client, "go", head.mark))
            elif silent := self._silent(at, asking):
                for party in silent:
                    self._pass_over(party)
            else:
                self._next_end = min(party.until for party in self.occupiers.values())
                look_at = self._look_at(at.now)
                if head is asking:  # told by its own answer
                    self._told = (head.mark, look_at)
                elif self._told[0] != head.mark or look_at < self._told[1]:
                    words.append(Word(head.client, "head", head.mark, look_at - at.now))
                    self._told = (head.mark, look_at)
                return

    def _look_at(self, now: float) -> float:
        """When the head of the line has to look: at the first end, or soon if somebody given a turn may have died."""
        soonest = min(party.until for party in self.occupiers.values())
        reserved = any(party.state == RESERVED for party in self.occupiers.values())
        return min(soonest, now + PROBE) if reserved else soonest

    def _silent(self, at: Moment, asking: Party | None) -> list[Party]:
        """Those who died after they were given their turn: they will not claim it. One that asks lives."""
        reserved = [p for p in self.occupiers.values() if p.state == RESERVED and p is not asking]
        return [party for party in reserved if not at.reachable(party.client)]

    def _head(self) -> Party | None:
        """First in line. A line kept in a table brings it in from there."""
        return self.waiters[0][1] if self.waiters else None

    # ----------------------------------------------------------- transitions

    def _join(self, now: float, claim: Claim, client: str) -> Party:
        """A new party, not yet in line: as one passed over, it takes its place by what comes next."""
        self.tickets += 1
        party = Party(claim.mark, client, claim.holder, claim.mode, claim.delay, self.tickets, now, now + BEAT)
        self.parties[claim.mark] = party
        return party

    def _claim(self, at: Moment, party: Party, claim: Claim, words: list[Word]) -> Grant:
        """A reserved or held party asks again: the same token, and at least the life it asks for (E2, E8)."""
        if party.state == RESERVED:
            party.state, party.since, party.until = HELD, at.now, at.now
        party.delay = claim.delay
        life = self._extend(at.now, party, claim.ttl)
        self._next_end = min(self._next_end, party.until)
        self._advance(at, words)
        return Grant(party.token, life, party.slot)

    def _extend(self, now: float, party: Party, ttl: float) -> float:
        """Move the end forward, never back: the life left, not a rounding error away from the ttl asked for."""
        if now + ttl < party.until:
            return party.until - now
        party.until = now + ttl
        return ttl

    def _occupy(self, at: Moment, party: Party, state: int, until: float) -> None:
        token = at.issue()
        slot = self._free_slot() if self.kind == "semaphore" else None
        self._leave_line(party)
        party.state, party.until, party.since, party.token, party.slot = state, until, at.now, token, slot
        self.occupiers[token] = party
        if until < self._next_end:
            self._next_end = until

    def _free_slot(self) -> int:
        taken = {party.slot for party in self.occupiers.values()}
        return next(slot for slot in range(self.limit) if slot not in taken)

    def _cool(self, party: Party, until: float, delay: float) -> None:
        """Take the owner from what it held; the place stays taken until then."""
        self.parties.pop(party.mark, None)
        party.state, party.until, party.delay = COOLING, until, delay
        self._next_end = min(self._next_end, until)

    def _pass_over(self, party: Party) -> None:
        self._leave_line(party)
        self.occupiers.pop(party.token, None)
        party.state, party.token, party.slot = PASSED, 0, None

    def _remove(self, party: Party) -> None:
        if self.parties.get(party.mark) is party:
            del self.parties[party.mark]
        self._leave_line(party)
        self.occupiers.pop(party.token, None)

    def _leave_line(self, party: Party) -> None:
        if party.state == WAITING:
            place = self._place(party)
            if place < len(self.waiters) and self.waiters[place][1] is party:
                del self.waiters[place]

    # --------------------------------------------------------------- answers

    def _busy(self, now: float, party: Party | None) -> Busy:
        place = None if party is None else self._place(party)
        front = min(self.occupiers.values(), key=lambda p: p.until, default=None)
        if front is None:
            return Busy(None, place)
        ends = self._look_at(now) if place == 0 else front.until
        return Busy(max(0.0, ends - now), place, front.token, front.holder)

    def _place(self, party: Party) -> int:
        return bisect_left(self.waiters, party.ticket, key=lambda entry: entry[0])


def described(kind: Kind, limit: int) -> str:
    return "lock" if kind == "lock" else f"semaphore of {limit}"
