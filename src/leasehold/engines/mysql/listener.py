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

from leasehold.engines.mysql import connect, schema
from leasehold.engines.mysql.errors import ENGINE, MyServerError
from leasehold.engines.mysql.session import MySession, packet
from leasehold.engines.mysql.url import MyOptions
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql import listener
from leasehold.engines.sql.session import DatabaseServer, SqlConnectionLost, SqlSession
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_LISTEN_SECONDS: Final = 5  # seconds; then the next one begins
_LATE_SLACK: Final = 20.0  # seconds that the server may be late with its word, before it is given up

_Seen: TypeAlias = "frozenset[tuple[str | None, ...]]"


class MyListener(listener.SqlListener):
    def __init__(self, options: MyOptions, registry: ClaimRegistry, runtime: Runtime) -> None:
        super().__init__(registry, runtime, ENGINE, enabled=options.listen and options.procedures)
        self._options = options
        self._listen_call = f"call {schema.quote_identifier(options.database)}.lh_listen_v1".encode()

    async def _open(self, runtime: Runtime, deadline: float) -> MySession:
        return await connect.open_session(self._options.target, runtime, deadline, 0.0)

    def _unusable_reason(self, server: DatabaseServer, call_server: DatabaseServer | None) -> str:
        if not server.direct:
            return "a proxy stands between, which hands calls to other sessions; pass listen=no"
        if call_server is not None and server.identity != call_server.identity:
            return "calls are sent to another server"
        return ""

    async def _start_listening(
        self, session: SqlSession, address: str, runtime: Runtime, deadline: float
    ) -> listener.ListenLoop:
        assert isinstance(session, MySession)
        liveness_session = self._liveness_session = await self._open(runtime, deadline)
        if why := self._unusable_reason(liveness_session.server, session.server):
            raise Unavailable(why, engine=ENGINE)
        liveness_session.closing_packet = packet(b"kill %d" % session.connection_id, ())
        await _take_user_lock(liveness_session, "life", address, deadline)
        await _take_user_lock(session, "listener", address, deadline)
        session.expects_interrupt = True
        statement, self_ref = self._listen_call, ref(self)

        async def listen_loop(runtime: Runtime, registry: ReferenceType[ClaimRegistry]) -> None:
            session.set_runtime(runtime)
            seen: _Seen = frozenset()
            while (strong_ref := self_ref()) is not None and strong_ref._is_liveness_session_alive():
                del strong_ref
                seen = await _listen_once(session, statement, address, runtime, registry, seen)

        return listen_loop


async def _take_user_lock(session: MySession, kind: str, address: str, deadline: float) -> None:
    name = f"lh.{kind}.{sha256(address.encode()).hexdigest()[:40]}"
    if await session.execute(f"select get_lock('{name}', 0)".encode(), (), deadline) != [("1",)]:
        raise Unavailable("MySQL gave no user lock", engine=ENGINE)


async def _listen_once(
    session: MySession,
    statement: bytes,
    address: str,
    runtime: Runtime,
    registry: ReferenceType[ClaimRegistry],
    seen: _Seen,
) -> _Seen:
    """One sleep: pass on what is new, and wait for more. Gives what is known now."""
    deadline = runtime.now() + _LISTEN_SECONDS + _LATE_SLACK
    found: set[tuple[str | None, ...]] = set()
    try:
        await session.send(statement, (address, _LISTEN_SECONDS), deadline)
        has_more = True
        while has_more:
            rows, has_more = await session.next_result(deadline)
            for kind, id_hash, number, after_us, namespace, name in rows or ():
                found.add((kind, id_hash, number))
                if (kind, id_hash, number) not in seen and (strong_ref := registry()) is not None:
                    listener.deliver_notification(
                        strong_ref, kind, id_hash, int(after_us or 0) / 1_000_000, namespace, name
                    )
                strong_ref = None  # a client that nobody has any more must be able to go while we sleep
    except MyServerError as error:
        if not error.interrupted:
            raise ConnectionAbortedError(str(error)) from error
        if not found:  # perhaps before it could look
            return seen
    except (SqlConnectionLost, Unavailable) as error:
        raise ConnectionAbortedError(str(error)) from error
    return frozenset(found)
