"""Wake-ups by LISTEN: the address names a channel of NOTIFY and, by its hash, an advisory lock (`lh_reachable_v1`).

Notes bring the marks of claims, and all may see the numbers of locks: so these are a hash.
"""

from __future__ import annotations

import json
from typing import Final
from weakref import ReferenceType

from leasehold.book import Book
from leasehold.engines.postgresql import reach
from leasehold.engines.postgresql.meaning import ENGINE
from leasehold.engines.postgresql.url import Target
from leasehold.engines.postgresql.wire import PgSession
from leasehold.engines.sql import ear
from leasehold.engines.sql.wire import Server, Session
from leasehold.runtime.base import Runtime

_LONG: Final = 3600.0
_LISTEN: Final = (
    "listen lh_{address}; "
    "select pg_advisory_lock(('x' || left(encode(sha256('{address}'), 'hex'), 16))::bit(64)::bigint)"
)


class Ear(ear.Ear):
    def __init__(self, target: Target | None, book: Book, runtime: Runtime) -> None:
        super().__init__(book, runtime, ENGINE, listens=target is not None)
        self._target = target

    async def _open(self, runtime: Runtime, deadline: float) -> PgSession:
        assert self._target is not None
        return await reach.opened(self._target, runtime, deadline, 0.0)

    def _unfit(self, server: Server, met: Server | None) -> str:
        if not server.direct:
            return "a pooler stands between; pass listen_url=, a URL straight to the server, or listen=no"
        if met is not None and server.place != met.place:
            return "listen_url leads to another server, or to another database of it"
        return ""

    async def _attach(self, session: Session, address: str, runtime: Runtime, deadline: float) -> ear.Hearing:
        assert isinstance(session, PgSession)
        await session.run(_LISTEN.format(address=address), deadline)
        session.tap()

        async def hearing(runtime: Runtime, book: ReferenceType[Book]) -> None:
            while True:
                for note in session.notes():
                    if (known := book()) is not None:
                        _deliver(known, note)
                    del known
                await runtime.ready(session.descriptor, _LONG)

        return hearing


def _deliver(book: Book, note: bytes) -> None:
    try:
        word, mark, after, namespace, name = json.loads(note)
        seconds = after / 1_000_000
    except (ValueError, TypeError, OverflowError, RecursionError):
        return  # not ours
    ear.deliver(book, word, mark, seconds, namespace, name)
