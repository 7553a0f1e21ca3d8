"""Wake-ups: one session per client that listens, read by a thread of its own.

Its address, 16 hex digits made anew for every session, names a channel of NOTIFY and, by its hash, an advisory lock:
notes bring the marks of claims, and all may see the numbers of locks. The lock is the proof of life: PostgreSQL frees
it the moment the session ends, and whoever is about to give a turn tries it first (`lh_reachable_v1`). So one whose
process died is passed over at once, not after its turn has gone by.

Where nobody can listen (a pooler that hands each transaction to another session, or no connection to be had) the client
has no address. It asks again by itself: often at the head of the line, seldom further back.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final
from weakref import ReferenceType, WeakSet, ref

from leasehold.book import Book, every
from leasehold.core.timing import BEAT
from leasehold.engines.postgresql import reach
from leasehold.engines.postgresql.meaning import Failed, Lost
from leasehold.engines.postgresql.url import Target
from leasehold.engines.postgresql.wire import Server, Session
from leasehold.engines.sql.gate import Gate
from leasehold.errors import LeaseholdError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime

_log = logging.getLogger("leasehold.postgresql")

_AGAIN: Final = 5.0  # seconds until a session that could not be had is asked for again
_LONG: Final = 3600.0
_LISTEN: Final = (
    "listen lh_{address}; "
    "select pg_advisory_lock(('x' || left(encode(sha256('{address}'), 'hex'), 16))::bit(64)::bigint)"
)


class Ear:
    """A client's way to be told. Shared by both twins."""

    def __init__(self, target: Target | None, book: Book, runtime: Runtime, engine: str) -> None:
        self._target, self._book, self._runtime = target, ref(book), runtime
        self._gate = Gate(runtime, engine)
        self._session: Session | None = None
        self._retry_at = 0.0
        self.deaf = target is None
        self.address = ""  # empty: cannot be told anything
        self._place = ""  # of the server it is listened to at
        self.twins: WeakSet[object] = WeakSet()

    async def ready(self, runtime: Runtime, deadline: float, met: Server | None) -> str:
        """This client's address, after seeing that it is listened to; empty if it has to look by itself."""
        if self.address or self._target is None or runtime.now() < self._retry_at:
            return self.address
        place = self._gate.place()
        try:
            await self._gate.enter(place, deadline)
            if not self.address and runtime.now() >= self._retry_at:
                await self._listen(self._target, runtime, deadline, met)
        finally:
            self._gate.leave(place)
        return self.address

    async def _listen(self, target: Target, runtime: Runtime, deadline: float, met: Server | None) -> None:
        self._retry_at = max(runtime.now() + _AGAIN, deadline)  # meanwhile others do without
        address = runtime.entropy(8).hex()
        try:
            session = await reach.opened(target, runtime, deadline, 0.0)
        except LeaseholdError as error:
            self._deaf(str(error))
            return
        try:
            if not session.server.direct:
                self._deaf("a pooler stands between; pass listen_url=, a URL straight to the server, or listen=no")
                session.close()
            elif met is not None and session.server.place != met.place:
                self._deaf("listen_url leads to another server, or to another database of it")
                session.close()
            else:
                await session.run(_LISTEN.format(address=address), deadline)
                session.tap()
                runtime.aside(_listener(session, ref(self), self._book), "leasehold-ear")
                self._place = session.server.place
                self._session, self.address, self.deaf, self._retry_at = session, address, False, 0.0
        except (LeaseholdError, Failed, Lost, RuntimeError) as error:  # RuntimeError: no thread to be had
            session.close()
            self._deaf(str(error))
        except BaseException:
            session.close()
            raise

    def _deaf(self, why: str) -> None:
        if not self.deaf:
            _log.warning("no wake-ups for this client, it has to look by itself: %s", why)
        self.deaf = True

    def follow(self, met: Server | None) -> None:
        """Calls have moved to another server, as after a fail-over: nobody speaks to us any more where we listen."""
        session = self._session
        if session is not None and met is not None and met.place != self._place:
            self.lost(session)
            session.shut()

    def lost(self, session: Session) -> None:
        """The session has ended. Whoever waits may have missed its turn: all ask again, and are listened to again."""
        if self._session is session:
            self._session, self.address, self._retry_at = None, "", 0.0
            if (book := self._book()) is not None:
                for mark, _ in every(book.waiting):
                    book.deliver("head", mark, 0.0, None)

    def close(self) -> None:
        session, self._session, self.address = self._session, None, ""
        if session is not None:
            session.shut()

    def after_fork(self) -> None:
        session, self._session, self.address = self._session, None, ""
        self._retry_at = 0.0
        if session is not None:
            session.abandon()
        self._gate.after_fork()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def _listener(
    session: Session, ear: ReferenceType[Ear], book: ReferenceType[Book]
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Reads the session until it ends. Holds the client weakly: one that nobody has any more must be able to go."""

    async def listen(runtime: Runtime) -> None:
        try:
            with suppress(OSError):
                while True:
                    for note in session.notes():
                        if (known := book()) is not None:
                            _deliver(known, note)
                        del known
                    await runtime.ready(session.descriptor, _LONG)
        finally:  # whatever ended it: a client that believes it is listened to would never look by itself
            if (mine := ear()) is not None:
                mine.lost(session)
            session.close()

    return listen


def _deliver(book: Book, note: bytes) -> None:
    try:
        word, mark, after, namespace, name = json.loads(note)
        seconds = after / 1_000_000
    except (ValueError, TypeError, OverflowError, RecursionError):
        return  # not ours
    if word in ("go", "head", "lost") and all(isinstance(each, str) for each in (mark, namespace, name)):
        book.deliver(word, mark, seconds, Claim(namespace, name, "", mark, Holder("stray"), BEAT))
