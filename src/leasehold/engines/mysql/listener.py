"""Wake-ups by KILL QUERY: a session sleeps in `lh_listen_v1`, and the client that notifies it ends the sleep.

Notifications carry no data; the listener reads the tables. A reservation is a reserved row with this client's address,
and the head of a queue finds its time to re-check there. Reading removes nothing, so the listener leaves out what it
has already passed on.

The hash of the address names two user locks. The sleeping session holds one: it says which session to kill, so no other
session's statement is ever hit, even if a row was written before a restart. The other lock is the proof of life. A
second, idle session holds it, because the server notices only after seconds that the client of a sleeping session is
gone.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final, TypeAlias
from weakref import ReferenceType, ref

from leasehold.engines.mysql import connect, schema
from leasehold.engines.mysql.errors import ENGINE, SERVER, MyServerError
from leasehold.engines.mysql.session import MySession, packet
from leasehold.engines.mysql.url import MyOptions
from leasehold.engines.registry import ClaimRegistry
from leasehold.engines.sql import listener
from leasehold.engines.sql.codec import seconds
from leasehold.engines.sql.session import Decoding, SqlConnectionLost, SqlSession
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_LISTEN_SECONDS: Final = 5  # seconds of one sleep
_LATE_SLACK: Final = 20.0  # seconds that a reply may be late before the session counts as lost
_DECODING: Final = Decoding(SERVER, ENGINE)

_Seen: TypeAlias = "frozenset[tuple[str | None, ...]]"


class MyListener(listener.SqlListener):
    _not_direct = "a proxy in between hands calls to other sessions; pass listen=no"
    _other_server = "a proxy in between sends calls to another server; pass listen=no"

    def __init__(self, options: MyOptions, registry: ClaimRegistry, runtime: Runtime) -> None:
        super().__init__(registry, runtime, ENGINE, enabled=options.listen and options.procedures)
        self._options = options
        self._listen_call = f"call {schema.quote_identifier(options.database)}.lh_listen_v1".encode()

    async def _open(self, runtime: Runtime, deadline: float) -> MySession:
        return await connect.open_session(self._options.target, runtime, deadline, 0.0)

    async def _start_listening(
        self, session: SqlSession, address: str, runtime: Runtime, deadline: float
    ) -> listener.ListenLoop:
        assert isinstance(session, MySession)  # noqa: S101  # for the type checker
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
        raise Unavailable("MySQL granted no user lock (GET_LOCK)", engine=ENGINE)


async def _listen_once(
    session: MySession,
    statement: bytes,
    address: str,
    runtime: Runtime,
    registry: ReferenceType[ClaimRegistry],
    seen: _Seen,
) -> _Seen:
    """One sleep: pass on what is not in `seen`, then wait for more. Returns what has been seen now."""
    deadline = runtime.now() + _LISTEN_SECONDS + _LATE_SLACK
    found: set[tuple[str | None, ...]] = set()
    try:
        await session.send(statement, (address, _LISTEN_SECONDS), deadline)
        has_more = True
        while has_more:
            rows, has_more = await session.next_result(deadline)
            with _DECODING:
                for kind, id_hash, number, after_us, namespace, name in rows or ():
                    found.add((kind, id_hash, number))
                    if (kind, id_hash, number) not in seen and (strong_ref := registry()) is not None:
                        listener.deliver_notification(
                            strong_ref, kind, id_hash, seconds(after_us or 0), namespace, name
                        )
                    strong_ref = None  # so that an unused client can be garbage-collected during the sleep
    except MyServerError as error:
        if not error.interrupted:
            raise ConnectionAbortedError(str(error)) from error
        if not found:  # it may have been interrupted before it read the tables
            return seen
    except (SqlConnectionLost, Unavailable) as error:
        raise ConnectionAbortedError(str(error)) from error
    return frozenset(found)
