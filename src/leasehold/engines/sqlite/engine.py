"""The verbs of the SQLite engine: each is one immediate transaction, tried again until its deadline while another
process is inside its own. SQLite's own waiting is off: it knows no deadline, and no jitter.

Atomicity: everything a verb reads, decides and writes happens under SQLite's one write lock, at one reading of the
clock taken inside it. What is to be told is sent after COMMIT.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, TypeVar

from leasehold.book import Book, turn
from leasehold.config import EngineConfig
from leasehold.core.admission import Line
from leasehold.core.party import Moment, Word
from leasehold.core.timing import backoff
from leasehold.engines.sql import TRAITS
from leasehold.engines.sqlite.file import File, Occupied
from leasehold.engines.sqlite.host import Host
from leasehold.engines.sqlite.idle import given_back, taken
from leasehold.engines.sqlite.mail import Mail
from leasehold.engines.sqlite.place import located
from leasehold.engines.sqlite.rows import RowLine, holdings, overdue
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding
from leasehold.runtime.base import Runtime

T = TypeVar("T")
Told: TypeAlias = "list[tuple[str, str, Word]]"  # namespace, name, and what to tell
Verb: TypeAlias = "Callable[[Line, Moment], tuple[T, list[Word]]]"

_RETRY: Final = 0.0003  # about one transaction
_LONGEST_RETRY: Final = 0.01
_BATCH: Final = 50  # renewals in one transaction: others get in between
_SWEEP_EVERY: Final = 8  # attempts, and then this many names: what lapsed and nobody asks about leaves nothing
_DEAF: Final = 0.2  # a client without a mailbox looks about so often


class Flight:
    """An attempt on its way. Under asyncio it runs on, on the worker's thread, though its caller was cancelled."""

    __slots__ = ("abandoned", "sync")

    def __init__(self, sync: bool) -> None:
        self.abandoned = False
        self.sync = sync


class Granted(Exception):
    """A grant in a transaction that a power cut may undo: begin again, and wait for the disk. Never leaves the engine.
    A place in line needs no such care, or a thousand waiters would wait for the disk every few seconds."""


class SqliteEngine:
    def __init__(self, runtime: Runtime, book: Book, file: File, mail: Mail) -> None:
        self._runtime, self._book, self._file, self._mail = runtime, book, file, mail
        self._host = file.host
        book.twins.add(self)
        self._attempts = 0
        self._swept = ("", "")
        # Verbs that found the file occupied. Together they ask as often as one alone would: fifty threads of each of
        # twenty processes, each asking at its own pace, kept a busy machine from doing anything else.
        self._retrying: set[object] = set()
        self._refused: set[str] = set()  # marks of attempts that the file was not fit for
        self.traits = TRAITS if file.durable else replace(TRAITS, survives="nothing")

    @property
    def listening(self) -> bool:
        return "contended" in self._book.shelf

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        likely = True
        if claim.queue:
            known = self._book.waiting.get(claim.mark)
            likely = known is not None and known.go
            self._book.shelf["contended"] = True
            self._book.enter(claim, self._runtime)  # before asking (E4)
        flight = Flight(sync=likely or not self._file.durable)
        try:
            return await self._until(deadline, self._attempt, claim, flight)
        except BaseException as error:
            flight.abandoned = True
            if isinstance(error, ConfigError):
                self._refused.add(claim.mark)
            raise

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        if waiter := self._book.waiting.get(claim.mark):
            if not self._mail.address:
                seconds = min(seconds, _DEAF * (0.5 + self._runtime.fraction()))
            await turn(self._runtime, waiter, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies: list[Alive | Gone | Unavailable] = []
        while len(replies) < len(claims):
            batch = claims[len(replies) : len(replies) + _BATCH]
            try:
                replies += await self._until(deadline, self._renew, batch)
            except LeaseholdError as error:
                silence = error if isinstance(error, Unavailable) else Unavailable(str(error), engine="sqlite")
                replies += [silence] * len(batch)
        return replies

    async def release(self, claim: Claim, deadline: float) -> bool:
        self._book.leave(claim.mark)
        try:
            return await self._until(deadline, self._release, claim)
        except ConfigError as error:  # the file was fit for use when the claim was granted: it may be so again
            raise Unavailable(str(error), engine="sqlite") from error

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        return await self._until(deadline, self._break, namespace, name, token)

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        def look(db: sqlite3.Connection) -> list[Holding]:
            return list(holdings(db, self._host, namespace, prefix, exact))

        return await self._until(deadline, self._file.once, look, False)

    async def ping(self, deadline: float) -> None:
        def look(db: sqlite3.Connection) -> None:
            db.execute("select token from lh_meta").fetchone()

        await self._until(deadline, self._file.once, look)  # as a verb would: behind whoever is inside a transaction

    def forget(self, claim: Claim) -> None:
        self._book.leave(claim.mark)
        if claim.mark in self._refused:  # nothing was ever written
            self._refused.discard(claim.mark)
        elif self._runtime.blocking:
            try:
                self._release(claim)
            except (Occupied, LeaseholdError):
                self._book.owe(claim)
        else:  # a loop must not wait for a disk; the watchdog's thread may
            self._book.owe(claim)

    def after_fork(self) -> None:
        self._file.after_fork()
        self._mail.after_fork()

    async def close(self) -> None:
        await self._runtime.call(self._file.close)
        if self._book.last(self):
            self._mail.close()

    # ------------------------------------------------- the same, on a thread

    async def _until(self, deadline: float, verb: Callable[..., T], *args: object) -> T:
        """The verb's answer, however often it takes; the last try begins before the deadline."""
        tries, me = 0, object()
        try:
            while True:
                try:
                    return await self._runtime.call(verb, *args)
                except Occupied:
                    left = deadline - self._runtime.now()
                    if left <= 0:
                        break
                tries += 1
                self._retrying.add(me)
                pause = backoff(min(tries, 6), _RETRY, _LONGEST_RETRY, 0.5 + self._runtime.fraction() / 2)
                await self._runtime.sleep(min(pause * len(self._retrying), left))
        finally:
            self._retrying.discard(me)
        raise Unavailable(
            f"{self._file.path} stayed locked by other processes until the deadline; "
            "one of them may be stopped inside a transaction",
            engine="sqlite",
        )

    def _attempt(self, claim: Claim, flight: Flight) -> Grant | Busy:
        address = self._mail.address
        if claim.queue or not address:
            self._file.open()
            address = self._mail.ready(self._runtime)
        told: Told = []

        def decide(db: sqlite3.Connection) -> Grant | Busy:
            if flight.abandoned:
                raise Unavailable("given up meanwhile", engine="sqlite")
            free = None if claim.queue else taken(db, self._host, claim, address)
            reply = free or self._in_line(db, told, claim, address, flight)
            self._attempts += 1
            if not self._attempts % _SWEEP_EVERY:
                self._sweep(db, told)
            return reply

        try:
            reply = self._file.once(decide, sync=flight.sync)
        except Granted:
            flight.sync = True
            reply = self._file.once(decide)
        self._tell(told)
        if flight.abandoned:  # its release may have been carried out before it
            self._release(claim)
        return reply

    def _in_line(self, db: sqlite3.Connection, told: Told, claim: Claim, address: str, flight: Flight) -> Grant | Busy:
        line = RowLine(db, self._host, claim.namespace, claim.name, claim.mark, claim.kind, claim.limit)
        reply, words = line.attempt(line.moment(self._host.wall, self._mail.reachable), claim, address)
        if not flight.sync and isinstance(reply, Grant):
            raise Granted
        line.save()
        told.extend((claim.namespace, claim.name, word) for word in words)
        return reply

    def _renew(self, claims: Sequence[Claim]) -> list[Alive | Gone]:
        if self._mail.address and any(not claim.token for claim in claims):
            self._mail.ready(self._runtime)
        told: Told = []

        def decide(db: sqlite3.Connection) -> list[Alive | Gone]:
            return [
                self._on_line(db, told, (each.namespace, each.name, each.mark), partial(Line.renew, claim=each))
                for each in claims
            ]

        replies = self._file.once(decide, sync=any(claim.token for claim in claims))
        self._tell(told)
        return replies

    def _release(self, claim: Claim) -> bool:
        told: Told = []

        def decide(db: sqlite3.Connection) -> bool:
            if given_back(db, self._host, claim):
                return True
            verb = partial(Line.release, mark=claim.mark, min_hold=claim.min_hold, held=bool(claim.id))
            return self._on_line(db, told, (claim.namespace, claim.name, claim.mark), verb)

        ended = self._file.once(decide)
        self._tell(told)
        return ended

    def _break(self, namespace: str, name: str, token: int) -> bool:
        told: Told = []
        verb = partial(Line.break_, token=token)
        broken = self._file.once(lambda db: self._on_line(db, told, (namespace, name, ""), verb))
        self._tell(told)
        return broken

    def _on_line(self, db: sqlite3.Connection, told: Told, whose: tuple[str, str, str], verb: Verb[T]) -> T:
        """Run one verb on the line of one name, as (a part of) one transaction."""
        namespace, name, mark = whose
        line = RowLine(db, self._host, namespace, name, mark)
        answer, words = verb(line, line.moment(self._host.wall, self._mail.reachable))
        line.save()
        if words:
            told.extend((namespace, name, word) for word in words)
        return answer

    def _sweep(self, db: sqlite3.Connection, told: Told) -> None:
        over, self._swept = overdue(db, self._host.clock(), self._swept, _SWEEP_EVERY)
        for namespace, name in over:
            self._on_line(db, told, (namespace, name, ""), lambda line, at: (None, line.look(at)))

    def _tell(self, told: Told) -> None:
        while told:
            namespace, name, word = told.pop(0)
            if not word.client or self._mail.send(namespace, name, word) or word.kind != "go":
                continue
            # It died since it was given its turn, a moment ago. If this cannot be said now, the turn ends in 3 s.
            with suppress(Occupied, LeaseholdError):
                verb = partial(Line.unheard, mark=word.mark)
                self._file.once(partial(self._on_line, told=told, whose=(namespace, name, word.mark), verb=verb))


def opened(config: EngineConfig, runtime: Runtime, book: Book, host: Host) -> SqliteEngine:
    """An engine on this host's clock; tests bring hosts of their own."""
    options = config.accept(durable=_yes)
    mail = book.shelf.get("sqlite")
    if not isinstance(mail, Mail):  # the first of the twins; the path is resolved once, wherever the process goes
        mail = book.shelf["sqlite"] = Mail(located(config.target), runtime, book)
    return SqliteEngine(runtime, book, File(mail.file, options.get("durable", True), host, runtime), mail)


def open(config: EngineConfig, runtime: Runtime, book: Book) -> SqliteEngine:
    """`sqlite:///path?durable=yes`; with `durable=no`, what a power cut loses of the last moments is accepted."""
    return opened(config, runtime, book, Host.here())


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"yes or no, not {text!r}")
    return text == "yes"
