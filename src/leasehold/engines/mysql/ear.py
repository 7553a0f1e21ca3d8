"""Wake-ups by KILL QUERY: a session of ours sleeps in `lh_listen_v1`, and whoever has news ends its sleep.

What the news are is in the tables: a turn is a reserved row with our address, and the head of a line finds there when
to look again. So nothing is written to tell, and nothing read is taken away; what was passed on before is left out.

The address names two user locks, by its hash. One, of the session that sleeps, says whose sleep is to be ended: nobody
else's statement can be hit, whatever was written in a row before a restart. The other is the proof of life. It belongs
to a second session, which asks nothing: of one that sleeps the server finds out only after seconds that its client is
gone.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, TypeAlias
from weakref import ReferenceType, ref

from leasehold.book import Book
from leasehold.engines.mysql import reach, schema
from leasehold.engines.mysql.meaning import ENGINE, MyFailed
from leasehold.engines.mysql.url import Options
from leasehold.engines.mysql.wire import MySession, packet
from leasehold.engines.sql import ear
from leasehold.engines.sql.wire import Lost, Server, Session
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_SLEEP: Final = 5  # seconds; then the next one begins
_LATE: Final = 20.0  # seconds that the server may be late with its word, before it is given up

_Known: TypeAlias = "frozenset[tuple[str | None, ...]]"


class Ear(ear.Ear):
    def __init__(self, options: Options, book: Book, runtime: Runtime) -> None:
        super().__init__(book, runtime, ENGINE, listens=options.listen and options.procedures)
        self._options = options
        self._listen_call = f"call {schema.quoted(options.database)}.lh_listen_v1".encode()

    async def _open(self, runtime: Runtime, deadline: float) -> MySession:
        return await reach.opened(self._options.target, runtime, deadline, 0.0)

    def _unfit(self, server: Server, met: Server | None) -> str:
        if not server.direct:
            return "a proxy stands between, which hands calls to other sessions; pass listen=no"
        if met is not None and server.place != met.place:
            return "calls are sent to another server"
        return ""

    async def _attach(self, session: Session, address: str, runtime: Runtime, deadline: float) -> ear.Hearing:
        assert isinstance(session, MySession)
        life = self._beside = await self._open(runtime, deadline)
        if why := self._unfit(life.server, session.server):
            raise Unavailable(why, engine=ENGINE)
        life.last_words = packet(b"kill %d" % session.number, ())
        await _keep(life, "life", address, deadline)
        await _keep(session, "ear", address, deadline)
        session.sleeps = True
        call, me = self._listen_call, ref(self)

        async def hearing(runtime: Runtime, book: ReferenceType[Book]) -> None:
            session.move(runtime)
            known: _Known = frozenset()
            while (mine := me()) is not None and mine._lives():
                del mine
                known = await _sleep(session, call, address, runtime, book, known)

        return hearing


async def _keep(session: MySession, kind: str, address: str, deadline: float) -> None:
    name = f"lh.{kind}.{sha256(address.encode()).hexdigest()[:40]}"
    if await session.ask(f"select get_lock('{name}', 0)".encode(), (), deadline) != [("1",)]:
        raise Unavailable("MySQL gave no user lock", engine=ENGINE)


async def _sleep(
    session: MySession, call: bytes, address: str, runtime: Runtime, book: ReferenceType[Book], known: _Known
) -> _Known:
    """One sleep: pass on what is new, and wait for more. Gives what is known now."""
    deadline = runtime.now() + _SLEEP + _LATE
    found: set[tuple[str | None, ...]] = set()
    try:
        await session.begin(call, (address, _SLEEP), deadline)
        more = True
        while more:
            rows, more = await session.result(deadline)
            for word, mark, number, after, namespace, name in rows or ():
                found.add((word, mark, number))
                if (word, mark, number) not in known and (mine := book()) is not None:
                    ear.deliver(mine, word, mark, int(after or 0) / 1_000_000, namespace, name)
                mine = None  # a client that nobody has any more must be able to go while we sleep
    except MyFailed as error:
        if not error.interrupted:
            raise ConnectionAbortedError(str(error)) from error
        if not found:  # perhaps before it could look
            return known
    except (Lost, Unavailable) as error:
        raise ConnectionAbortedError(str(error)) from error
    return frozenset(found)
