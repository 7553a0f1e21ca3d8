"""A batch of renewals: leases first, then the keys.

What is said of a key is true after its lease was renewed. The lease alone says nothing: it lives on when its key was
broken, and with it alone both sides would believe to hold the name for good (E5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from leasehold.core.timing import BEAT
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.calls import Calls, LeaseGone
from leasehold.engines.etcd.leases import Lease, needed
from leasehold.engines.etcd.line import Seen
from leasehold.engines.etcd.shared import Party, Shared
from leasehold.engines.etcd.taking import ask
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Alive, Claim, Gone
from leasehold.runtime.base import Runtime

Reply: TypeAlias = Alive | Gone | Unavailable


@dataclass(slots=True)
class Renewing:
    shared: Shared
    calls: Calls
    runtime: Runtime
    claims: Sequence[Claim]
    deadline: float
    asked: float = field(init=False)
    living: dict[int, Lease] = field(init=False, default_factory=dict)
    overdue: set[int] = field(init=False, default_factory=set)

    async def run(self) -> list[Reply]:
        self.asked = self.runtime.now()
        parties = [self.shared.parties.get(claim.mark) for claim in self.claims]
        if all(map(_is_asked_for, self.claims, parties)):
            return [_asking() for _ in parties]  # most need not wait at all: not even a connection is made for them
        known = {party.lease.id: party.lease for party in parties if party is not None and party.lease is not None}
        await self._spare_overdue(known)
        if known:
            alive = await self.shared.leases.keep(self.calls, list(known.values()), self.deadline)
            self.living = {number: lease for number, lease in known.items() if number in alive}
        try:
            found = await self._read(parties)
        except ConfigError:
            if not self.shared.fallen:
                raise
            return [Gone("unknown")] * len(self.claims)  # data of another time: no grant of ours is among them
        return [
            await self._reply(claim, party, seen)
            for claim, party, seen in zip(self.claims, parties, found, strict=True)
        ]

    async def _spare_overdue(self, known: dict[int, Lease]) -> None:
        """Leases of grants that are over, and keep the name for their delay: to renew them would go on for ever."""
        delayed = {
            party.lease.id: claim.delay
            for claim in self.claims
            if claim.delay and claim.token and (party := self.shared.parties.get(claim.mark)) and party.lease
        }
        await self._find_overdue(delayed)
        for number in self.overdue:
            known.pop(number, None)

    async def _find_overdue(self, delayed: dict[int, float]) -> None:
        """etcd says it to the second: what is not over for certain is renewed."""
        lives = await self.calls.ask_each(wire.LIFE, [wire.LeaseId(number) for number in delayed], self.deadline)
        for (number, delay), life in zip(delayed.items(), lives, strict=True):
            if life.ttl + 1 <= delay:
                self.overdue.add(number)

    async def _read(self, parties: Sequence[Party | None]) -> list[Seen | None]:
        """The key of each claim; of one that was taken by another process, its name's whole line."""
        root = self.shared.address.root
        reads = []
        for claim, party in zip(self.claims, parties, strict=True):
            prefix = line.prefix_of(root, claim)
            reads.append(wire.Range(prefix, line.after(prefix)) if party is None else wire.Range(party.spot.key))
        txn = wire.Txn((), tuple(wire.Op(read) for read in reads))
        done = await ask(self.shared, self.calls, txn, self.deadline)
        if len(done.responses) != len(reads):
            raise wire.Malformed("not an answer for each key")
        found: list[Seen | None] = []
        for claim, read, op in zip(self.claims, reads, done.responses, strict=True):
            if op.range is None or not all(kv.key.startswith(read.key) for kv in op.range.kvs):
                raise wire.Malformed("not the keys that were asked for")
            every = [seen for kv in op.range.kvs if (seen := line.seen(root, kv)) is not None]
            found.append(next((seen for seen in every if seen.note.mark == claim.mark), None))
        return found

    async def _reply(self, claim: Claim, party: Party | None, seen: Seen | None) -> Reply:
        if not claim.token:
            if seen is None and _is_asked_for(claim, party):
                return _asking()
            if seen is None or seen.note.state == "cooling":
                return Gone("lapsed")
            return Alive(BEAT, None if party is None else party.place)
        gone = self._gone(claim, party, seen)
        if gone is not None:
            self._forget(claim, party)
            return gone
        assert seen is not None
        return await self._alive(claim, party, seen)

    def _gone(self, claim: Claim, party: Party | None, seen: Seen | None) -> Gone | None:
        if seen is None:
            if party is None or party.lease is None:
                return Gone("unknown")
            return Gone("broken" if party.lease.id in self.living else "lapsed")
        if seen.note.state == "cooling":
            return Gone("broken")
        if seen.note.state != "held" or seen.token != claim.token:
            return Gone("unknown")
        return Gone("lapsed") if seen.lease in self.overdue else None

    async def _alive(self, claim: Claim, party: Party | None, seen: Seen) -> Reply:
        lease = self.living.get(seen.lease)
        if lease is None:  # made by another process, or by the other twin a moment ago
            if claim.delay:
                await self._find_overdue({seen.lease: claim.delay})
            if seen.lease in self.overdue:
                return Gone("lapsed")
            lease = await self.shared.leases.adopt(self.calls, seen.lease, self.deadline)
            if lease is None:
                return Gone("lapsed")
        if needed(claim) > lease.ttl:
            longer = await self._lengthened(claim, party, seen)
            if longer is None:
                return Unavailable("it was changed at this very moment", engine="etcd")
            lease = longer
        return Alive(max(0.0, min(lease.until - self.asked, float(lease.ttl)) - claim.delay))

    async def _lengthened(self, claim: Claim, party: Party | None, seen: Seen) -> Lease | None:
        """A lease has its ttl for life: a longer one takes over. A shorter never does (E8)."""
        while True:
            lease = await self.shared.leases.take(self.calls, needed(claim), self.deadline)
            try:
                done = await ask(self.shared, self.calls, line.hang(seen, lease.id), self.deadline)
                break
            except LeaseGone:  # somebody revoked it in the pool
                continue
        if not done.succeeded:
            self.shared.leases.give(self.calls, lease)
            return None
        if party is not None:
            old, party.lease = party.lease, lease
            if old is not None and not party.unsure:
                self.shared.leases.give(self.calls, old)
        return lease

    def _forget(self, claim: Claim, party: Party | None) -> None:
        """etcd has no such grant any more. What is left of its lease keeps nothing, but for a delay that still runs."""
        if party is None or party.token != claim.token or self.shared.parties.get(claim.mark) is not party:
            return  # it was an older grant that was asked for
        for lease in (party.lease, party.next):
            if lease is not None and lease.id not in self.overdue:
                self.shared.leases.doom(self.calls, lease)
        self.shared.leave(claim)


def _is_asked_for(claim: Claim, party: Party | None) -> bool:
    """For the first time, and just now: nothing of it is known to stand at etcd."""
    return not claim.token and party is not None and not party.created


def _asking() -> Unavailable:
    return Unavailable("it is being asked for at this moment", engine="etcd")
