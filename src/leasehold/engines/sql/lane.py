"""One twin's connection: opened when first needed, one call at a time, opened anew after whatever closed it.

The schema is made on the first call that finds it missing. No call pays for that otherwise: there is nothing to ask
before, for a procedure that is there under its versioned name does what this version of Leasehold expects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from leasehold.engines.sql.gate import Gate, Place
from leasehold.engines.sql.wire import Again, Failed, Lost, Missing, Row, Server, Session, Tail, Value
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

_TICK: Final = 0.001  # seconds: servers are told in whole milliseconds how long they may wait for a lock
_AGAIN: Final = 0.2  # seconds between tries to connect, of somebody in line
_MOST_TAILS: Final = 4  # connections that were given up, and the server not yet done with


class Lane(ABC):
    """Subclasses know one server: how a session begins, what a verb is called, and how the schema is made."""

    def __init__(self, runtime: Runtime, engine: str, server: str) -> None:
        self._runtime, self._engine, self._called = runtime, engine, server
        self._gate = Gate(runtime, engine)
        self._session: Session | None = None
        self._limbo: dict[str, Session] = {}  # by mark: the connection on which its attempt is still on its way
        self._tails: list[Tail] = []  # of connections that were given up, until the server is done with them
        self.server: Server | None = None  # as last met
        self._closed = False

    @abstractmethod
    async def _open(self, deadline: float) -> Session: ...

    @abstractmethod
    def _statement(self, verb: str) -> bytes: ...

    @abstractmethod
    async def _make(self, session: Session, deadline: float) -> None:
        """The schema is missing, or it is another version's."""

    @abstractmethod
    def _unmade(self, why: object) -> ConfigError: ...

    async def call(self, verb: str, values: Sequence[Value], deadline: float, claim: Claim | None = None) -> list[Row]:
        """One verb, one trip: its rows, as text. Raises nothing but what Leasehold raises (E9). `claim`: whose attempt
        this is; one in line may be kept waiting for a connection until the deadline, others are told at once."""
        return await self._ask(self._statement(verb), values, deadline, claim)

    def reply(self, row: Row) -> Row:
        """The columns of an attempt's answer."""
        return row

    async def ping(self, deadline: float) -> None:
        await self._ask(b"select 1", (), deadline)

    def take_back(self, mark: str, values: Sequence[Value]) -> None:
        """Release a claim behind its attempt, if that is still on its way on a connection of ours. Never waits."""
        session = self._limbo.pop(mark, None)
        if session is not None:
            self._see_off(session.regret(self._statement("release"), values))

    async def meet(self, deadline: float) -> Server:
        """Who is on the other side now, as far as that can be known; connects if need be."""
        place = self._gate.place()
        try:
            await self._gate.enter(place, deadline)
            await self._ready(deadline)
        except Unavailable:
            if self.server is None:
                raise
        finally:
            self._leave(place)
        assert self.server is not None
        return self.server

    def close(self) -> None:
        """No call is cut short: whoever is in one closes what it used."""
        self._closed = True
        if self._gate.idle:
            session, self._session = self._session, None
            if session is not None:
                session.close()
            while self._tails:
                self._tails.pop().close()

    def _leave(self, place: Place, claim: Claim | None = None) -> None:
        if self._closed and claim is not None and self._session is not None and self._gate.has(place):
            self._limbo[claim.mark], self._session = self._session, None  # its client is gone: it will be taken back
        self._gate.leave(place)
        if self._closed:
            self.close()

    def after_fork(self) -> None:
        for each in self._let_go():
            each.abandon()
        self._gate.after_fork()

    def _let_go(self) -> list[Session]:
        found = [each for each in (self._session, *self._limbo.values()) if each is not None]
        self._session = None
        self._limbo.clear()
        for tail in self._tails:
            tail.close()
        self._tails = []
        return found

    async def _ask(
        self, statement: bytes, values: Sequence[Value], deadline: float, claim: Claim | None = None
    ) -> list[Row]:
        place = self._gate.place()
        before: Lost | None = None
        try:
            await self._gate.enter(place, deadline)
            while True:
                try:
                    session = await self._ready(deadline, claim.until if claim is not None and claim.queue else 0.0)
                    return await self._asked(session, statement, values, deadline)
                except Again as again:
                    if self._runtime.now() + _TICK >= deadline:
                        raise Unavailable(f"{self._called}: {again}", engine=self._engine) from again
                except Lost as lost:
                    # Whoever stands in line outlasts a restart: asked again, an attempt gives the same answer (E2).
                    if claim is None or not claim.queue or self._runtime.now() >= deadline:
                        raise self._lost(lost) from lost
                    before = lost
        except BaseException as error:
            self._set_adrift(claim.mark if claim is not None else "")
            if before is not None and isinstance(error, ConfigError):  # what was lost before may have been done
                raise Unavailable(f"{self._lost(before)}; and since then: {error}", engine=self._engine) from error
            raise
        finally:
            self._leave(place, claim)

    async def _asked(self, session: Session, statement: bytes, values: Sequence[Value], deadline: float) -> list[Row]:
        try:
            return await session.ask(statement, values, deadline)
        except Failed as error:
            meaning = error.meaning()
            if not isinstance(meaning, Missing):
                raise meaning from error
        await self._make(session, deadline)
        try:
            return await session.ask(statement, values, deadline)
        except Failed as error:
            meaning = error.meaning()
            raise (self._unmade(error) if isinstance(meaning, Missing) else meaning) from error

    def _lost(self, lost: Lost) -> Unavailable:
        return Unavailable(f"{self._called}: the connection was lost: {lost}", engine=self._engine)

    def _set_adrift(self, mark: str) -> None:
        """The answer was not waited for: its connection is of no more use, but to take the call back by."""
        session = self._session
        if session is None or not session.adrift:
            return
        self._session = None
        for each in self._limbo.values():  # nobody took these back, and nobody will: whoever gives up does so at once
            self._see_off(each.leave())
        self._limbo.clear()
        if mark:
            self._limbo[mark] = session
        else:
            self._see_off(session.leave())

    def _see_off(self, tail: Tail | None) -> None:
        if tail is not None and not self._closed:
            self._tails.append(tail)

    async def _room(self, session: Session, deadline: float) -> Session:
        """Wait until the server is done with what was given up there: the impatient must not use up its connections."""
        try:
            while True:
                for tail in [tail for tail in self._tails if tail.gone()]:
                    self._tails.remove(tail)
                there = [tail for tail in self._tails if tail.place == session.server.place]
                if len(there) < _MOST_TAILS:
                    return session
                left = deadline - self._runtime.now()
                if left <= 0:
                    ended = f"{self._called} has not ended {len(there)} earlier calls that were given up"
                    raise Unavailable(ended, engine=self._engine)
                await self._runtime.ready(there[0].descriptor, min(left, _AGAIN))
        except BaseException:
            session.close()
            raise

    async def _ready(self, deadline: float, patient: float = 0.0) -> Session:
        """`patient`: whoever stands in line outlasts a restart or a fail-over, if that is over by then and by the
        deadline."""
        if self._closed:
            raise ConfigError("this client is closed: make a new one")
        if self._session is not None and self._session.usable():
            return self._session
        if self._session is not None:
            self._session.close()
            self._session = None
        while self._session is None:
            try:
                self._session = await self._room(await self._open(deadline), deadline)
            except Unavailable:
                if self._runtime.now() + _AGAIN >= min(deadline, patient):
                    raise
                await self._runtime.sleep(_AGAIN * (0.5 + self._runtime.fraction() / 2))
        self.server = self._session.server
        return self._session
