"""The verbs of the etcd engine. What decides is in line.py, one attempt in taking.py; here are the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.engines.etcd import line, wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls
from leasehold.engines.etcd.ending import Ending, break_grant
from leasehold.engines.etcd.leases import LEAST
from leasehold.engines.etcd.renewing import Renewing
from leasehold.engines.etcd.shared import Shared
from leasehold.engines.etcd.showing import holdings
from leasehold.engines.etcd.taking import Taking, read_base
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.runtime.base import Runtime

TRAITS: Final = Traits(
    liveness="ttl",
    clock="engine",
    fencing=True,
    fair=True,
    push=True,
    shared=True,
    max_limit=None,
    slots=False,
    outlives=True,
    told=True,
    min_ttl=float(LEAST),
    ttl_step=1.0,
    survives="restart",
)

_BATCH: Final = 100  # keys read in one transaction; etcd allows 128 operations
_CLOSING: Final = 2.0


class EtcdEngine:
    listening = True  # a watch needs no preparation: every claim that may wait stands in line at once

    def __init__(self, runtime: Runtime, book: Book, shared: Shared) -> None:
        self._runtime, self._book, self._shared = runtime, book, shared
        self._calls = Calls(shared.address, runtime, shared.login)
        book.twins.add(self)

    @property
    def traits(self) -> Traits:
        shared = self._shared
        members, known = shared.members, len(shared.address.endpoints)
        safe = members >= 3 and known > (members - 1) // 2  # some member this client knows of is always left
        if (shared.leases.least, safe) == (LEAST, False):
            return TRAITS
        return replace(TRAITS, min_ttl=float(shared.leases.least), survives="minority" if safe else "restart")

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        waiter = self._book.waiting.get(claim.mark)
        told = waiter is not None and waiter.go
        self._shared.sound()
        taking = Taking(self._shared, self._calls, self._runtime, claim, deadline)
        if claim.queue:
            self._book.enter(claim, self._runtime)  # before asking (E4), and after it is known here that it will be
        try:
            return await taking.run(told)
        except wire.Malformed as error:
            raise _unreadable(error) from error
        except ConfigError:  # refused: nothing was written, and nothing is to be given up
            party = self._shared.parties.get(claim.mark)
            if party is not None and not party.created and not party.unsure:
                self._shared.leave(claim)
            raise

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: list[Alive | Gone | Unavailable] = []
        for begin in range(0, len(claims), _BATCH):
            batch = claims[begin : begin + _BATCH]
            try:
                replies += await Renewing(self._shared, self._calls, self._runtime, batch, deadline).run()
            except LeaseholdError as error:
                silence = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="etcd")
                replies += [silence] * len(batch)
            except wire.Malformed as error:
                replies += [_unreadable(error)] * len(batch)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        try:
            return await Ending(self._shared, self._calls, self._runtime, claim, deadline).run()
        except ConfigError as error:  # it was permitted when the claim was granted, and may be so again
            raise Unavailable(str(error), engine="etcd") from error
        except wire.Malformed as error:
            raise _unreadable(error) from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        try:
            return await break_grant(self._shared, self._calls, namespace, name, token, deadline)
        except wire.Malformed as error:
            raise _unreadable(error) from error

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return await holdings(self._shared, self._calls, namespace, prefix, exact, self._runtime.wall(), deadline)

    async def ping(self, deadline: float) -> None:
        try:
            self._shared.base = await read_base(self._shared, self._calls, self._runtime, deadline)
            listed = await self._calls.ask(wire.MEMBERS, wire.Nothing(), deadline)
        except wire.Malformed as error:
            raise _unreadable(error) from error
        self._shared.members = max(1, len(listed.members))

    async def rebase(self, floor: int, deadline: float) -> int:
        """Have every new token exceed `floor`, and all that were given by the clock: after data were restored from a
        snapshot. Gives the number that tokens now begin after."""
        key = line.base_key(self._shared.address.root)
        while True:
            (found,) = (await self._calls.ask(wire.RANGE, wire.Range(key), deadline)).kvs or (wire.KeyValue(key),)
            old = int(found.value) if found.value.isdigit() else 0
            new = max(int(self._runtime.wall() * 1_000_000), floor, old + 1)
            self._shared.number(b"%d" % new)
            same = wire.Compare(wire.EQUAL, wire.MOD, key, mod_revision=found.mod_revision)
            txn = wire.Txn((same,), (wire.Op(put=wire.Put(key, b"%d" % new)),))
            if (await self._calls.ask(wire.TXN, txn, deadline)).succeeded:
                return new

    def forget(self, claim: Claim) -> None:
        self._book.leave(claim.mark)
        party = self._shared.parties.get(claim.mark)  # None: nothing was ever sent for it, or all of it is answered
        if party is not None and party.blank:
            self._shared.leave(claim)
        elif party is not None:
            self._book.owe(claim)

    def after_fork(self) -> None:
        self._calls.drop()
        self._shared.after_fork()

    async def close(self) -> None:
        if self._book.last(self):
            self._shared.watcher.close()
            await self._shared.leases.close(self._calls, self._runtime.now() + _CLOSING)
        self._calls.close()


def _unreadable(error: wire.Malformed) -> Unavailable:
    return Unavailable(f"etcd's answer cannot be read: {error}", engine="etcd")


def open(config: EngineConfig, runtime: Runtime, book: Book) -> EtcdEngine:
    """`etcd://[user:password@]host:port,host:port/prefix`; `etcds://` with `ca=`, `cert=` and `key=` for TLS."""
    shared = book.shelf.get("etcd")
    if not isinstance(shared, Shared):  # the first of the twins
        shared = book.shelf["etcd"] = Shared(address(config), runtime, book)
    return EtcdEngine(runtime, book, shared)
