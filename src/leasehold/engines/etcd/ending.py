"""The end of a claim: given up by its owner, or broken by an operator.

Its key is deleted if it is still the one that was created for it. Three things ask for more care: `min_hold` keeps the
key for a while without an owner, `delay` has to be told that this was a release, and who breaks a grant keeps its key
for the delay. What is not known to be over is ended by its leases, which nothing that is still on its way survives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.calls import Calls, NoRoom
from leasehold.engines.etcd.leases import LEAST
from leasehold.engines.etcd.line import Note, Seen
from leasehold.engines.etcd.shared import Party, Shared
from leasehold.engines.etcd.wire import KeyValue, Op, Put
from leasehold.model import Claim
from leasehold.runtime.base import Runtime


@dataclass(slots=True)
class Ending:
    """One release."""

    shared: Shared
    calls: Calls
    runtime: Runtime
    claim: Claim
    deadline: float

    async def run(self) -> bool:
        party = self.shared.parties.get(self.claim.mark)
        if party is None or not party.created or self.claim.delay or self.claim.min_hold or not self.claim.id:
            ended = await self._carefully(party)
        else:
            done = await self.calls.ask(wire.TXN, line.leave(party.spot, party.created), self.deadline)
            ended = bool(done.succeeded) and party.state == "held"
        if party is not None:
            await self._let_go(party)
        return ended

    async def _carefully(self, party: Party | None) -> bool:
        while (found := await self._find(party)) is not None:
            kv, seen = found
            if seen.note.state == "cooling" or self._anothers(seen):
                return False
            held = party.state == "held" if party is not None else seen.note.state != "waiting"
            if held and not self.claim.id:  # a turn told late: the grant may have been taken and handed on
                return False
            if held and (rest := self._rest(party)) > 0:
                if await cool(self.shared, self.calls, kv, seen.note._replace(delay=0.0), rest, self.deadline):
                    return True
            elif self.claim.delay and seen.note.state == "held":  # as one may hope to be that never was
                last = seen.note._replace(state="released" if held else "waiting")
                put = Op(put=Put(kv.key, last.to_bytes(), seen.lease))
                try:
                    await self.calls.ask(wire.TXN, line.change(kv, put), self.deadline)
                except NoRoom:  # without a word, then: the next in line waits the delay, and not the whole ttl
                    if await self._delete(kv):
                        return held
            elif await self._delete(kv):
                return held
        return False

    async def _delete(self, kv: KeyValue) -> bool:
        delete = line.change(kv, Op(delete=wire.Delete(kv.key)))
        return bool((await self.calls.ask(wire.TXN, delete, self.deadline)).succeeded)

    async def _find(self, party: Party | None) -> tuple[KeyValue, Seen] | None:
        """Its key; of a claim that another process took, by its mark."""
        root = self.shared.address.root
        prefix = line.prefix_of(root, self.claim)
        read = wire.Range(prefix, line.after(prefix)) if party is None else wire.Range(party.spot.key)
        for kv in (await self.calls.ask(wire.RANGE, read, self.deadline)).kvs:
            seen = line.seen(root, kv)
            if seen is not None and seen.note.mark == self.claim.mark:
                return kv, seen
        return None

    def _anothers(self, seen: Seen) -> bool:
        return bool(self.claim.token) and seen.note.state == "held" and seen.token != self.claim.token

    def _rest(self, party: Party | None) -> float:
        """What `min_hold` leaves. Who did not take it itself cannot know since when it was held: all of it, then."""
        if not self.claim.min_hold:
            return 0.0
        return self.claim.min_hold if party is None else party.since + self.claim.min_hold - self.runtime.now()

    async def _let_go(self, party: Party) -> None:
        """The key is gone. Its leases carry the next claim, unless something may yet be written on them."""
        for lease in {party.lease, party.next} - {None}:
            assert lease is not None
            if party.unsure:
                await self.shared.leases.revoke(self.calls, lease, self.deadline)
            else:
                self.shared.leases.give(self.calls, lease)
        if self.shared.parties.get(self.claim.mark) is party:
            self.shared.leave(self.claim)


async def cool(shared: Shared, calls: Calls, kv: KeyValue, note: Note, seconds: float, deadline: float) -> bool:
    """Take the owner from a key, and leave it in its place for so long. False: it was changed meanwhile."""
    lease = await shared.leases.make(calls, max(LEAST, math.ceil(seconds)), deadline)
    put = Op(put=Put(kv.key, note._replace(state="cooling").to_bytes(), lease.id))
    if (await calls.ask(wire.TXN, line.change(kv, put), deadline)).succeeded:
        return True
    shared.leases.doom(calls, lease)
    return False


async def break_grant(shared: Shared, calls: Calls, namespace: str, name: str, token: int, deadline: float) -> bool:
    """End the grant that has this token. Looked for again until nobody changed it in between."""
    root = shared.address.root
    begin = line.names(root, namespace, name, exact=True)
    while True:
        listed = await calls.ask(wire.RANGE, wire.Range(begin, line.after(begin)), deadline)
        for kv in listed.kvs:
            seen = line.seen(root, kv)
            if seen is None or seen.token != token or seen.note.state not in ("held", "cooling"):
                continue
            if seen.note.delay and seen.note.state == "cooling":
                return False  # it guards against a holder not yet told: a second break must not cut it short
            if not _holds(root, seen, listed.kvs):
                return False
            if seen.note.delay:
                if await cool(shared, calls, kv, seen.note, seen.note.delay, deadline):
                    return True
                break
            if (await calls.ask(wire.TXN, line.change(kv, Op(delete=wire.Delete(kv.key))), deadline)).succeeded:
                return True
            break
        else:
            return False


def _holds(root: str, it: Seen, kvs: tuple[KeyValue, ...]) -> bool:
    others = [seen for kv in kvs if (seen := line.seen(root, kv)) is not None and seen.created < it.created]
    return line.holds(it, others)
