"""The verbs of the engines on SQL servers: one stored procedure each, called in one trip and committed by itself.

What differs between servers is a `Lane`, which carries a call and its rows, and an `Ear`, which hears wake-ups. The
decisions are the server's own: what a verb reads, decides and writes there is one transaction, and nothing is compared
here that was read before. So the safety argument is in each server's SQL: its `verbs.sql` says what a verb does under
the lock of its bucket's row, its `line.sql` is the state machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final

from leasehold.book import Book, turn
from leasehold.core.admission import described
from leasehold.core.names import bucket
from leasehold.core.timing import BEAT, BEAT_EVERY
from leasehold.engines.sql.ear import Ear
from leasehold.engines.sql.lane import Lane
from leasehold.engines.sql.rows import holdings, key, micros, seconds
from leasehold.errors import ConfigError, LeaseholdError, Mismatch, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holder, Holding, Traits
from leasehold.runtime.base import Runtime

_GRANTED: Final = "1"
_MISMATCH: Final = "2"

SWEEP_EVERY: Final = 8  # attempts: what lapsed and nobody asks about leaves nothing
_SWEEP_LINES_EVERY: Final = 64  # ... and lines whose waiters have all died
_BATCH: Final = 100  # claims in one call: others get in between
_TO_GIVE_UP: Final = 5.0  # seconds the server may try to take back what nobody waits for
_LONGEST: Final = 2**31 - 1  # milliseconds a server can count to
_FOR_THE_EAR: Final = 0.5  # of a call's time: what is left must do for the call itself
_POLL: Final = 0.2  # a client that cannot be told looks about so often at the head of the line


class SqlEngine:
    """`best`: what its server promises as it should be set up."""

    name: ClassVar[str]

    def __init__(self, runtime: Runtime, book: Book, lane: Lane, ear: Ear, best: Traits) -> None:
        self._runtime, self._book, self._lane, self._ear, self._best = runtime, book, lane, ear, best
        self._attempts = 0
        self._refused: set[str] = set()  # marks of attempts that were never carried out
        book.twins.add(self)

    @property
    def traits(self) -> Traits:
        """Durability is the server's setting, known after the first call; wake-ups may have turned out impossible."""
        server, best, push = self._lane.server, self._best, not self._ear.deaf
        durable = server is None or server.durable
        if durable and push is best.push:
            return best
        return replace(best, push=push, told=push and best.told, survives="restart" if durable else "nothing")

    async def _address(self, waits: bool, deadline: float) -> str:
        """Where this client can be told, after seeing that it can; empty: it cannot, and looks by itself."""
        self._ear.follow(self._lane.server)
        if self._ear.address or not (waits or self._best.told):  # who does not wait may still be told of a break
            return self._ear.address
        met = await self._lane.meet(deadline)
        now = self._runtime.now()
        return await self._ear.ready(self._runtime, now + (deadline - now) * _FOR_THE_EAR, met)

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        asked_before = claim.mark in self._book.waiting
        if claim.queue:
            self._book.shelf["contended"] = True
            self._book.enter(claim, self._runtime)  # before asking (E4)
        try:
            address = await self._address(claim.queue, deadline)
            values = (*key(claim), address, *claim.holder, claim.mode, claim.kind, claim.limit, micros(claim.ttl))
            more = (micros(claim.delay), claim.queue, self._sweeps(), self._patience(deadline))
            (row,) = await self._lane.call("attempt", (*values, *more), deadline, claim)
        except (ConfigError, Unavailable) as error:
            undone = isinstance(error, ConfigError) or self._lane.server is None  # refused, or no server was ever met
            if undone and not asked_before:  # else it stands in line, or was given its turn, since it asked first
                self._refused.add(claim.mark)
            raise
        return _reply(claim, self._lane.reply(row))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            if not self.traits.push:  # only the head looks often; whoever is further back is in no hurry
                pause = min(_POLL * (1 + (busy.place or 0)), BEAT_EVERY) * (0.5 + self._runtime.fraction())
                seconds = min(seconds, pause)
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: dict[int, Alive | Gone | Unavailable] = {}
        held = [number for number, claim in enumerate(claims) if claim.token]
        queued = [number for number, claim in enumerate(claims) if not claim.token]
        for numbers, renew in ((held, self._renew), (queued, self._beat)):
            for start in range(0, len(numbers), _BATCH):
                batch = numbers[start : start + _BATCH]
                try:
                    found: Sequence[Alive | Gone | Unavailable] = await renew([claims[n] for n in batch], deadline)
                except LeaseholdError as error:
                    silence = error if isinstance(error, Unavailable) else Unavailable(str(error), engine=self.name)
                    found = [silence] * len(batch)
                replies.update(zip(batch, found, strict=True))
        return [replies[number] for number in range(len(claims))]

    async def _renew(self, claims: list[Claim], deadline: float) -> list[Alive | Gone]:
        columns = [[c.namespace for c in claims], [c.name for c in claims], [c.mark for c in claims]]
        numbers = [[c.token for c in claims], [micros(c.ttl) for c in claims]]
        rows = await self._lane.call("renew", (*columns, *numbers, self._patience(deadline)), deadline)
        replies: list[Alive | Gone] = [Gone()] * len(claims)
        for number, life, lapsed in rows:
            reply = Gone("lapsed") if lapsed == "t" else Gone()
            replies[int(number or 0) - 1] = reply if life is None else Alive(seconds(life))
        return replies

    async def _beat(self, claims: list[Claim], deadline: float) -> list[Alive | Gone]:
        buckets = [bucket(c.name) for c in claims]
        columns = ([c.namespace for c in claims], buckets, [c.name for c in claims], [c.mark for c in claims])
        rows = await self._lane.call("beat", (*columns, self._patience(deadline)), deadline)
        replies: list[Alive | Gone] = [Gone()] * len(claims)
        for number, found, behind in rows:
            if found == "t":
                replies[int(number or 0) - 1] = Alive(BEAT, 1 if behind == "t" else None)  # or further back
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        try:
            rows = await self._lane.call("release", self._giving_up(claim, deadline), deadline)
            return not rows or rows[0][0] == "t"
        except ConfigError as error:  # the server was fit for use when the claim was granted: it may be so again
            raise Unavailable(str(error), engine=self.name) from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        values = (namespace, bucket(name), name, token, self._patience(deadline))
        return (await self._lane.call("break", values, deadline))[0][0] == "t"

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return holdings(namespace, await self._lane.call("inspect", (namespace, prefix, exact), deadline))

    async def ping(self, deadline: float) -> None:
        await self._lane.ping(deadline)
        await self._address(False, deadline)

    def forget(self, claim: Claim) -> None:
        self._book.leave(claim.mark)
        if claim.mark in self._refused:  # nothing was ever written
            self._refused.discard(claim.mark)
            return
        self._book.owe(claim)  # first: torn between, it is still owed
        self._lane.take_back(claim.mark, self._giving_up(claim, self._runtime.now() + _TO_GIVE_UP))

    def _giving_up(self, claim: Claim, deadline: float) -> tuple[Any, ...]:
        return (*key(claim), micros(claim.min_hold), bool(claim.id), self._patience(deadline))

    def after_fork(self) -> None:
        self._lane.after_fork()
        self._ear.after_fork()

    async def close(self) -> None:
        self._lane.close()
        if self._book.last(self):
            self._ear.close()

    def _sweeps(self) -> int:
        self._attempts += 1
        if self._attempts % SWEEP_EVERY:
            return 0
        return 1 if self._attempts % _SWEEP_LINES_EVERY else 2

    def _patience(self, deadline: float) -> int:
        """Milliseconds the server may wait for another's lock."""
        return min(max(1, int((deadline - self._runtime.now()) * 1000)), _LONGEST)


def _reply(claim: Claim, row: tuple[str | None, ...]) -> Grant | Busy:
    if row[0] == _GRANTED:
        _, token, life, slot, *_ = row
        assert token is not None
        return Grant(int(token), seconds(life or 0), None if slot is None else int(slot))
    answer, token, life, _, place, label, host, pid, purpose, kind, most = row
    if answer == _MISMATCH:
        found = described("semaphore" if kind == "semaphore" else "lock", int(most or 1))
        raise Mismatch(claim.name, wanted=described(claim.kind, claim.limit), found=found)
    holder = None if label is None else Holder(label, host or "", int(pid or 0), purpose or "")
    left = None if life is None else seconds(life)
    return Busy(left, None if place is None else int(place), None if token is None else int(token), holder)
