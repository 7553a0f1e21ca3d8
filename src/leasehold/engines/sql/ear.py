"""Wake-ups: one session per client that hears them, read by a thread of its own.

A client's address, 16 hex digits made anew for every session, is what others tell it by. It keeps a lock of the
server's, named by a hash of that, as its proof of life: the server frees it the moment the session ends, and whoever is
about to give a turn looks at it first. So one whose process died is passed over at once, not after its turn is over.

Where nobody can be told (something between that hands our calls to other sessions, or no connection to be had) the
client has no address. It asks again by itself: often at the head of the line, seldom further back.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeAlias
from weakref import ReferenceType, ref

from leasehold.book import Book, every
from leasehold.core.timing import BEAT
from leasehold.engines.sql.gate import Gate
from leasehold.engines.sql.wire import Failed, Lost, Server, Session
from leasehold.errors import LeaseholdError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime

_AGAIN: Final = 5.0  # seconds until a session that could not be had is asked for again

Hearing: TypeAlias = "Callable[[Runtime, ReferenceType[Book]], Coroutine[Any, Any, None]]"


class Ear(ABC):
    """A client's way to be told. Shared by both twins. Subclasses know one server."""

    def __init__(self, book: Book, runtime: Runtime, engine: str, listens: bool) -> None:
        self._book, self._runtime, self._engine = ref(book), runtime, engine
        self._log = logging.getLogger(f"leasehold.{engine}")
        self._gate = Gate(runtime, engine)
        self._guard = runtime.guard()
        self._session: Session | None = None
        self._beside: Session | None = None  # one that `_attach` may need as well
        self._retry_at = 0.0
        self._listens = listens
        self.deaf = not listens
        self.address = ""  # empty: cannot be told anything
        self._place = ""  # of the server it is listened to at

    @abstractmethod
    async def _open(self, runtime: Runtime, deadline: float) -> Session:
        """The session that will hear."""

    @abstractmethod
    async def _attach(self, session: Session, address: str, runtime: Runtime, deadline: float) -> Hearing:
        """Have it be told what is said to an address. Gives what a thread is to do until the session ends, and then
        raises OSError."""

    @abstractmethod
    def _unfit(self, server: Server, met: Server | None) -> str:
        """Why what is said there would not reach us; empty: it does."""

    async def ready(self, runtime: Runtime, deadline: float, met: Server | None) -> str:
        """This client's address, after seeing that it is listened to; empty if it has to look by itself."""
        if self.address or not self._listens or runtime.now() < self._retry_at:
            return self.address
        place = self._gate.place()
        try:
            await self._gate.enter(place, deadline)
            if not self.address and runtime.now() >= self._retry_at:
                await self._listen(runtime, deadline, met)
        finally:
            self._gate.leave(place)
        return self.address

    async def _listen(self, runtime: Runtime, deadline: float, met: Server | None) -> None:
        self._retry_at = max(runtime.now() + _AGAIN, deadline)  # meanwhile others do without
        address = runtime.entropy(8).hex()
        try:
            session = await self._open(runtime, deadline)
        except LeaseholdError as error:
            self._deaf(str(error))
            return
        try:
            if why := self._unfit(session.server, met):
                self._deaf(why)
                session.close()
                return
            hearing = await self._attach(session, address, runtime, deadline)
            runtime.aside(_listener(session, hearing, ref(self), self._book), "leasehold-ear")
            self._place = session.server.place
            self._session, self.address, self.deaf, self._retry_at = session, address, False, 0.0
            self._stir()  # those who came meanwhile stand in line without an address
        except (LeaseholdError, Failed, Lost, RuntimeError) as error:  # RuntimeError: no thread to be had
            session.close()
            self._let_go()
            self._deaf(str(error))
        except BaseException:
            session.close()
            self._let_go()
            raise

    def _deaf(self, why: str) -> None:
        if not self.deaf:
            self._log.warning("no wake-ups for this client, it has to look by itself: %s", why)
        self.deaf = True

    def follow(self, met: Server | None) -> None:
        """See whether we still listen where calls are sent: not after a fail-over, nor without a proof of life."""
        session = self._session
        if session is not None and (not self._lives() or (met is not None and met.place != self._place)):
            self.lost(session)
            session.shut()

    def _lives(self) -> bool:
        with self._guard:  # several threads may look
            return self._beside is None or self._beside.usable()

    def lost(self, session: Session) -> None:
        """The session has ended. Whoever waits may have missed its turn: all ask again, and are listened to again."""
        if self._session is session:
            self._session, self.address, self._retry_at = None, "", 0.0
            self._let_go()
            self._stir()

    def _stir(self) -> None:
        """Have all who wait ask again."""
        if (book := self._book()) is not None:
            for mark, _ in every(book.waiting):
                book.deliver("head", mark, 0.0, None)

    def _let_go(self) -> None:
        with self._guard:
            beside, self._beside = self._beside, None
            if beside is not None:
                beside.close()

    def close(self) -> None:
        session, self._session, self.address = self._session, None, ""
        self._let_go()
        if session is not None:
            session.shut()

    def after_fork(self) -> None:
        for each in (self._session, self._beside):
            if each is not None:
                each.abandon()
        self._session = self._beside = None
        self.address, self._retry_at = "", 0.0
        self._gate.after_fork()
        self._guard = self._runtime.guard()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def _listener(
    session: Session, hearing: Hearing, ear: ReferenceType[Ear], book: ReferenceType[Book]
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Reads the session until it ends. Holds the client weakly: one that nobody has any more must be able to go."""

    async def listen(runtime: Runtime) -> None:
        try:
            with suppress(OSError):
                await hearing(runtime, book)
        finally:  # whatever ended it: a client that believes it is listened to would never look by itself
            if (mine := ear()) is not None:
                mine.lost(session)
            session.close()

    return listen


def deliver(book: Book, word: object, mark: object, seconds: float, namespace: object, name: object) -> None:
    """Pass on what was said, if it is something we would say."""
    if not (isinstance(mark, str) and isinstance(namespace, str) and isinstance(name, str)):
        return
    if word == "go" or word == "head" or word == "lost":
        book.deliver(word, mark, seconds, Claim(namespace, name, "", mark, Holder("stray"), BEAT))
