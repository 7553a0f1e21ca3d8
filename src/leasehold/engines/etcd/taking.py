"""One attempt of one claim: stand in line or take the name, look whose turn it is, make a turn a grant.

Every step is one transaction of `line.py`, and every answer leads to a reply or to the next step. `Party` keeps what is
known from attempt to attempt. Before a key is written its leases are noted there, so that whatever ends this attempt,
the release that follows knows what to end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from leasehold.core.admission import described
from leasehold.engines.etcd import leases as lifetimes
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.calls import Calls, LeaseGone
from leasehold.engines.etcd.delays import Delays
from leasehold.engines.etcd.line import Look, Note, State
from leasehold.engines.etcd.shared import Party, Shared
from leasehold.errors import Mismatch
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import Runtime

_OURS: Final = ("waiting", "held")


@dataclass(slots=True)
class Taking:
    shared: Shared
    calls: Calls
    runtime: Runtime
    claim: Claim
    deadline: float
    party: Party = field(init=False)
    asked: float = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.runtime.now()  # lives are told from here (E8)
        self.party = self.shared.party(self.claim)

    async def run(self, told: bool) -> Grant | Busy:
        """`told`: its turn has probably come."""
        while True:
            reply: Grant | Busy | None
            if self.party.created and self.party.state == "held":
                reply = await self._still()
            elif self.party.created:
                reply = await self._turn(told)
            elif self.claim.queue:
                reply = await self._enter()
            else:
                reply = await self._grab()
            if reply is not None:
                return reply
            told = False

    # --------------------------------------------------------- to get in line

    async def _enter(self) -> Grant | Busy | None:
        """Hoping for the best, on a lease of the holder's ttl; where others wait already, on a waiter's."""
        party, base = self.party, await self._base()
        life = lifetimes.needed(self.claim)
        if party.lease is None:
            party.lease = await self._lease(lifetimes.IN_LINE if self.shared.crowded(self.claim) else life)
        hopeful = party.lease.asked == life
        value = self._note("held" if hopeful else "waiting", base)
        done = await self._write(line.enter(party.spot, value, party.lease.id, self.shared.base))
        if done is None:
            party.lease = None
            return None
        entered = line.entered(party.spot, done)
        if entered is None:
            await self._not_put(line.looked(party.spot, await self._ask(line.look(party.spot, 0))))
            return None
        before, party.created = entered.before, line.revision(done)
        if line.entitled(party.spot, len(before)) and not self._rests():
            return self._granted(base, party.created) if hopeful else await self._claim_turn(checked=True)
        party.place = max(0, entered.total - party.spot.limit)
        self._ask_for(entered.holders, party.created)
        if hopeful:
            return await self._settle()
        if not before:  # nothing but a delay is in its way
            return None
        self._follow(before, party.created)
        return Busy(None, party.place)

    async def _settle(self) -> Busy | None:
        """It has to wait: from now on its key lives as long as a waiter is heard of (E7), not as long as a holder."""
        party = self.party
        assert party.lease is not None
        if party.next is None:
            party.next = await self._lease(lifetimes.IN_LINE)
        done = await self._write(line.move(party.spot, party.created, self._note("waiting", 0), party.next.id))
        if done is None:
            party.next = None
            return None
        look = line.looked(party.spot, done)
        if not done.succeeded:
            self._lapsed()
            return None
        self._moved()
        return None if line.entitled(party.spot, len(look.before)) else self._waits(look)  # None: it left meanwhile

    async def _grab(self) -> Grant | Busy | None:
        """Now or not at all: nothing is left in line."""
        party, base, seen_at = self.party, await self._base(), 0
        while True:
            if party.lease is None:
                party.lease = await self._lease(lifetimes.needed(self.claim))
            value = self._note("held", base)
            done = await self._write(line.grab(party.spot, value, party.lease.id, self.shared.base, seen_at))
            if done is None:
                party.lease = None
                continue
            if line.was_put(done):
                party.created = line.revision(done)
                return self._granted(base, party.created)
            look = line.looked(party.spot, done)
            if await self._not_put(look):
                return None
            if not line.entitled(party.spot, len(look.before)):
                break
            seen_at = 0 if party.spot.alone else look.revision
        self._discard()
        if look.front is None:
            return Busy()  # a stranger's key, of which nothing can be said
        (life,) = await self.calls.ask_each(wire.LIFE, [wire.LeaseId(look.front.lease)], self.deadline)
        return self._busy(look, None, float(max(life.ttl, 0)))

    async def _not_put(self, look: Look) -> bool:
        """Why a key was not put: another base, another kind, or there it is. False: none of these."""
        party, front = self.party, look.front
        if look.base != self.shared.base:
            self.shared.base = look.base
            return True
        if look.own is not None and line.note_of(look.own.value).mark != self.claim.mark:
            self.shared.reseat(self.claim, party)
            return True
        if look.own is not None:  # an earlier try, the answer to which was lost (E2)
            party.created, party.state = look.own.create_revision, "waiting"
            if party.lease is None or party.lease.id != look.own.lease:
                party.lease = await self.shared.leases.adopt(self.calls, look.own.lease, self.deadline)
            return True
        if front is not None and (front.kind, front.limit) != (self.claim.kind, self.claim.limit):
            self._discard()
            wanted, found = described(self.claim.kind, self.claim.limit), described(front.kind, front.limit)
            raise Mismatch(self.claim.name, wanted=wanted, found=found)
        return False

    # ------------------------------------------------------------ in the line

    async def _turn(self, told: bool) -> Grant | Busy | None:
        party = self.party
        if told and party.spot.alone and not self._rests():
            return await self._claim_turn(checked=False)
        look = line.looked(party.spot, await self._ask(line.look(party.spot, party.created)))
        if not self._there(look):
            return None
        self._see(look)
        if not line.entitled(party.spot, len(look.before)) or not self._ours(look):
            return self._waits(look)
        if party.delays.left(self.runtime.now()) > 0:
            return await self._wait_out(look)
        return await self._claim_turn(checked=True)

    def _rests(self) -> bool:
        """Whether the name may have to rest for a delay, or nobody knows yet."""
        return self.party.delays.unknown or self.party.delays.left(self.runtime.now()) > 0

    async def _wait_out(self, look: Look) -> Busy | None:
        """Its turn has come, but for a delay. That is said in its note: whoever comes now, and did not see who it was
        that vanished, has it from there."""
        party, now = self.party, self.runtime.now()
        if party.delays.until > max(party.noted, now) and party.lease is not None:
            until = party.delays.until
            value = self._note("waiting", 0, until - now)
            done = await self._write(line.move(party.spot, party.created, value, party.lease.id))
            if done is None or not done.succeeded:
                return None
            party.noted = until
        return self._waits(look)

    def _see(self, look: Look) -> None:
        """The place first: what is heard of those who are gone wakes only the first in line."""
        place = line.place(self.party.spot, look.line)
        if place is not None:
            self.party.place = place
        self._ask_for(look.holders, look.revision)

    def _ask_for(self, holders: tuple[wire.KeyValue, ...], revision: int) -> None:
        """How those ended that are gone."""
        party = self.party
        ahead = line.ahead(party.spot, party.created, holders)
        for key, since in party.delays.see(ahead, revision, self.runtime.now()):
            self.shared.watcher.recall(self.claim.mark, key, since)

    async def _claim_turn(self, *, checked: bool) -> Grant | Busy | None:
        """A lease first, then the transaction: the life of the grant begins before the grant."""
        party, base = self.party, await self._base()
        if party.next is None:
            party.next = await self._lease(lifetimes.needed(self.claim))
        value = self._note("held", base)
        done = await self._write(
            line.claim_turn(party.spot, party.created, value, party.next.id, self.shared.base, checked)
        )
        if done is None:
            party.next = None
            return None
        if line.was_put(done):
            self._moved()
            return self._granted(base, line.revision(done))
        look = line.looked(party.spot, done)
        if look.base != self.shared.base:
            self.shared.base = look.base
            return None
        if not self._there(look):
            return None
        if not self._ours(look):
            return self._waits(look)
        if line.entitled(party.spot, len(look.before)):  # the one ahead left just then
            return None
        if not party.unsure:
            self.shared.leases.give(self.calls, party.next)
            party.next = None
        return self._waits(look)

    async def _still(self) -> Grant | None:
        """Asked again for what it holds: the same grant, with the life that is left (E2, E8)."""
        party = self.party
        look = line.looked(party.spot, await self._ask(line.look(party.spot, party.created)))
        if not self._there(look) or look.own is None or line.note_of(look.own.value).state != "held":
            self._lapsed()
            return None
        if party.lease is None or party.lease.id != look.own.lease:
            party.lease = await self.shared.leases.adopt(self.calls, look.own.lease, self.deadline)
        return None if party.lease is None else Grant(party.token, self._life())

    def _there(self, look: Look) -> bool:
        if look.own is not None and look.own.create_revision == self.party.created:
            return True
        self._lapsed()
        return False

    def _ours(self, look: Look) -> bool:
        """What was broken or released only cools there."""
        return look.own is not None and line.note_of(look.own.value).state in _OURS

    # ---------------------------------------------------------------- replies

    def _granted(self, base: int, revision: int) -> Grant:
        party = self.party
        party.state, party.base, party.since = "held", base, self.runtime.now()
        party.delays, party.noted = Delays(), 0.0
        watcher = self.shared.watcher
        watcher.unfollow(self.claim.mark)
        watcher.guard(self.claim.mark, party.spot.key, revision)
        return Grant(party.token, self._life())

    def _life(self) -> float:
        """Counted by the caller from before it asked. The delay is the engine's to keep, not the holder's to use."""
        lease = self.party.lease
        assert lease is not None
        return max(0.0, min(lease.until - self.asked, float(lease.ttl)) - self.claim.delay)

    def _waits(self, look: Look) -> Busy:
        party = self.party
        self._see(look)
        self._follow(look.before, look.revision)
        return self._busy(look, party.place, party.delays.left(self.runtime.now()) or None)

    def _busy(self, look: Look, place: int | None, left: float | None) -> Busy:
        front = look.front
        if front is None or front.created == self.party.created:
            return Busy(left, place)
        return Busy(left, place, front.token if front.note.base else None, front.note.holder)

    def _follow(self, before: tuple[wire.KeyValue, ...], revision: int) -> None:
        """Hear of the next change that matters: the nearest in the way is gone; of permits, the first in line hears of
        any that is given back, and one further back when the one ahead of it left or had its turn."""
        spot, watcher, mark = self.party.spot, self.shared.watcher, self.claim.mark
        if not before:
            return
        near = len(before) <= spot.limit
        if near and spot.limit > 1:
            watcher.follow(mark, spot.before, line.after(spot.before), revision, puts=False, near=True)
        else:
            watcher.follow(mark, before[0].key, b"", revision, puts=spot.limit > 1, near=near)

    # ------------------------------------------------------------------ steps

    def _note(self, state: State, base: int, rest: float = 0.0) -> bytes:
        claim, at = self.claim, round(self.runtime.wall(), 3)
        return Note(claim.mark, state, base, claim.delay, claim.holder, at, rest).to_bytes()

    async def _lease(self, seconds: int) -> lifetimes.Lease:
        return await self.shared.leases.take(self.calls, seconds, self.deadline)

    async def _base(self) -> int:
        if not self.shared.base:
            self.shared.base = await read_base(self.shared, self.calls, self.runtime, self.deadline)
        return self.shared.number(self.shared.base)

    async def _write(self, txn: wire.Txn) -> wire.TxnDone | None:
        """None: the lease named there is over. Until it is answered nobody can be sure what becomes of it."""
        party, doubts, before = self.party, list[str](), self.party.unsure
        party.unsure = True
        try:
            done = await ask(self.shared, self.calls, txn, self.deadline, doubts)
        except LeaseGone:
            party.unsure = before or bool(doubts)
            return None
        party.unsure = before or bool(doubts)
        return done

    async def _ask(self, txn: wire.Txn) -> wire.TxnDone:
        return await ask(self.shared, self.calls, txn, self.deadline)

    def _moved(self) -> None:
        """The key hangs on the next lease now."""
        party = self.party
        old, party.lease, party.next = party.lease, party.next, None
        if old is not None and old is not party.lease and not party.unsure:
            self.shared.leases.give(self.calls, old)
        elif old is not None and old is not party.lease:
            self.shared.leases.doom(self.calls, old)

    def _lapsed(self) -> None:
        """etcd has it no more: what is left of it must not come back."""
        party = self.party
        for lease in (party.lease, party.next):
            if lease is not None:
                self.shared.leases.doom(self.calls, lease)
        party.lease = party.next = None
        party.created, party.state, party.noted = 0, "waiting", 0.0  # what is known of delays stays true

    def _discard(self) -> None:
        """It was refused, and has nothing at etcd."""
        if self.party.lease is not None:
            give = self.shared.leases.doom if self.party.unsure else self.shared.leases.give
            give(self.calls, self.party.lease)
        self.shared.leave(self.claim)


async def ask(
    shared: Shared, calls: Calls, txn: wire.Txn, deadline: float, doubts: list[str] | None = None
) -> wire.TxnDone:
    """A transaction, and a look at whether time has gone back."""
    before = shared.revision()
    done = await calls.ask(wire.TXN, txn, deadline, doubts)
    shared.check(done.header, before)
    shared.sound()
    return done


async def read_base(shared: Shared, calls: Calls, runtime: Runtime, deadline: float) -> bytes:
    """What tokens begin at; made by whoever comes first, from its clock. Later nobody's clock matters."""
    key = line.base_key(shared.address.root)
    new = b"%d" % int(runtime.wall() * 1_000_000)
    absent = wire.Compare(wire.EQUAL, wire.CREATE, key)
    put, read = wire.Op(put=wire.Put(key, new)), wire.Op(wire.Range(key))
    done = await ask(shared, calls, wire.Txn((absent,), (put,), (read,)), deadline)
    if done.succeeded:
        return new
    found = done.responses[0].range if done.responses else None
    if found is None or not found.kvs:
        raise wire.Malformed("a base that is neither there nor absent")
    return found.kvs[0].value
