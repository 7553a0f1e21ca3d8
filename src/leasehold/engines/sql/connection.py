"""One twin's connection: opened when first needed, one call at a time, opened anew after whatever closed it.

The schema is made on the first call that finds it missing. No call pays for that otherwise: there is nothing to ask
before, for a procedure that is there under its versioned name does what this version of Leasehold expects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from leasehold.engines.sql.fifo_lock import FifoLock, LockCaller
from leasehold.engines.sql.session import (
    DatabaseServer,
    DrainingSocket,
    Row,
    SchemaMissing,
    SqlConnectionLost,
    SqlServerError,
    SqlSession,
    TransactionConflict,
    Value,
)
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

_TICK: Final = 0.001  # seconds: servers are told in whole milliseconds how long they may wait for a lock
_RECONNECT_INTERVAL: Final = 0.2  # seconds between tries to connect, of somebody in line
_MAX_DRAINING: Final = 4  # connections that were given up, and the server not yet done with


class SerialConnection(ABC):
    """Subclasses know one server: how a session begins, what a verb is called, and how the schema is made."""

    def __init__(self, runtime: Runtime, engine: str, server_name: str) -> None:
        self._runtime, self._engine, self._server_name = runtime, engine, server_name
        self._fifo_lock = FifoLock(runtime, engine)
        self._session: SqlSession | None = None
        self._unanswered: dict[str, SqlSession] = {}  # by mark: the connection on which its attempt is still on its way
        self._draining: list[
            DrainingSocket
        ] = []  # of connections that were given up, until the server is done with them
        self.server: DatabaseServer | None = None  # as last met
        self._closed = False

    @abstractmethod
    async def _open(self, deadline: float) -> SqlSession: ...

    @abstractmethod
    def _statement(self, verb: str) -> bytes: ...

    @abstractmethod
    async def _create_schema(self, session: SqlSession, deadline: float) -> None:
        """The schema is missing, or it is another version's."""

    @abstractmethod
    def _schema_missing(self, why: object) -> ConfigError: ...

    async def call(self, verb: str, values: Sequence[Value], deadline: float, claim: Claim | None = None) -> list[Row]:
        """One verb, one trip: its rows, as text. Raises nothing but what Leasehold raises (E9). `claim`: whose attempt
        this is; one in line may be kept waiting for a connection until the deadline, others are told at once."""
        return await self._execute(self._statement(verb), values, deadline, claim)

    def decode_reply(self, row: Row) -> Row:
        """The columns of an attempt's answer."""
        return row

    async def ping(self, deadline: float) -> None:
        await self._execute(b"select 1", (), deadline)

    def compensate(self, id_hash: str, values: Sequence[Value]) -> None:
        """Release a claim behind its attempt, if that is still on its way on a connection of ours. Never waits."""
        session = self._unanswered.pop(id_hash, None)
        if session is not None:
            self._track_draining(session.send_compensation(self._statement("release"), values))

    async def ensure_connected(self, deadline: float) -> DatabaseServer:
        """Who is on the other side now, as far as that can be known; connects if need be."""
        caller = self._fifo_lock.new_caller()
        try:
            await self._fifo_lock.acquire(caller, deadline)
            await self._ensure_session(deadline)
        except Unavailable:
            if self.server is None:
                raise
        finally:
            self._release_lock(caller)
        assert self.server is not None
        return self.server

    def close(self) -> None:
        """No call is cut short: whoever is in one closes what it used."""
        self._closed = True
        if self._fifo_lock.is_free:
            session, self._session = self._session, None
            if session is not None:
                session.close()
            while self._draining:
                self._draining.pop().close()

    def _release_lock(self, caller: LockCaller, claim: Claim | None = None) -> None:
        if self._closed and claim is not None and self._session is not None and self._fifo_lock.is_held_by(caller):
            self._unanswered[claim.id_hash], self._session = (
                self._session,
                None,
            )  # its client is gone: it will be taken back
        self._fifo_lock.release(caller)
        if self._closed:
            self.close()

    def after_fork(self) -> None:
        for session in self._detach_sessions():
            session.after_fork()
        self._fifo_lock.after_fork()

    def _detach_sessions(self) -> list[SqlSession]:
        sessions = [session for session in (self._session, *self._unanswered.values()) if session is not None]
        self._session = None
        self._unanswered.clear()
        for draining in self._draining:
            draining.close()
        self._draining = []
        return sessions

    async def _execute(
        self, statement: bytes, values: Sequence[Value], deadline: float, claim: Claim | None = None
    ) -> list[Row]:
        caller = self._fifo_lock.new_caller()
        earlier_loss: SqlConnectionLost | None = None
        try:
            await self._fifo_lock.acquire(caller, deadline)
            while True:
                try:
                    session = await self._ensure_session(
                        deadline, claim.wait_deadline if claim is not None and claim.queue else 0.0
                    )
                    return await self._execute_or_create_schema(session, statement, values, deadline)
                except TransactionConflict as conflict:
                    if self._runtime.now() + _TICK >= deadline:
                        raise Unavailable(f"{self._server_name}: {conflict}", engine=self._engine) from conflict
                except SqlConnectionLost as lost:
                    # Whoever stands in line outlasts a restart: asked again, an attempt gives the same answer (E2).
                    if claim is None or not claim.queue or self._runtime.now() >= deadline:
                        raise self._connection_lost(lost) from lost
                    earlier_loss = lost
        except BaseException as error:
            self._detach_unanswered(claim.id_hash if claim is not None else "")
            if earlier_loss is not None and isinstance(error, ConfigError):  # what was lost before may have been done
                raise Unavailable(
                    f"{self._connection_lost(earlier_loss)}; and since then: {error}", engine=self._engine
                ) from error
            raise
        finally:
            self._release_lock(caller, claim)

    async def _execute_or_create_schema(
        self, session: SqlSession, statement: bytes, values: Sequence[Value], deadline: float
    ) -> list[Row]:
        try:
            return await session.execute(statement, values, deadline)
        except SqlServerError as error:
            classified = error.classify()
            if not isinstance(classified, SchemaMissing):
                raise classified from error
        await self._create_schema(session, deadline)
        try:
            return await session.execute(statement, values, deadline)
        except SqlServerError as error:
            classified = error.classify()
            raise (self._schema_missing(error) if isinstance(classified, SchemaMissing) else classified) from error

    def _connection_lost(self, lost: SqlConnectionLost) -> Unavailable:
        return Unavailable(f"{self._server_name}: the connection was lost: {lost}", engine=self._engine)

    def _detach_unanswered(self, id_hash: str) -> None:
        """The answer was not waited for: its connection is of no more use, but to take the call back by."""
        session = self._session
        if session is None or not session.unanswered:
            return
        self._session = None
        for (
            earlier
        ) in self._unanswered.values():  # nobody took these back, and nobody will: whoever gives up does so at once
            self._track_draining(earlier.hang_up())
        self._unanswered.clear()
        if id_hash:
            self._unanswered[id_hash] = session
        else:
            self._track_draining(session.hang_up())

    def _track_draining(self, draining: DrainingSocket | None) -> None:
        if draining is not None and not self._closed:
            self._draining.append(draining)

    async def _await_drained(self, session: SqlSession, deadline: float) -> SqlSession:
        """Wait until the server is done with what was given up there: the impatient must not use up its connections."""
        try:
            while True:
                for draining in [draining for draining in self._draining if draining.is_drained()]:
                    self._draining.remove(draining)
                still_draining = [
                    draining for draining in self._draining if draining.server_identity == session.server.identity
                ]
                if len(still_draining) < _MAX_DRAINING:
                    return session
                left = deadline - self._runtime.now()
                if left <= 0:
                    message = (
                        f"{self._server_name} has not ended {len(still_draining)} earlier calls that were given up"
                    )
                    raise Unavailable(message, engine=self._engine)
                await self._runtime.wait_fd(still_draining[0].descriptor, min(left, _RECONNECT_INTERVAL))
        except BaseException:
            session.close()
            raise

    async def _ensure_session(self, deadline: float, retry_until: float = 0.0) -> SqlSession:
        """`retry_until`: whoever stands in line outlasts a restart or a fail-over, if that is over by then and by the
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
                self._session = await self._await_drained(await self._open(deadline), deadline)
            except Unavailable:
                if self._runtime.now() + _RECONNECT_INTERVAL >= min(deadline, retry_until):
                    raise
                await self._runtime.sleep(_RECONNECT_INTERVAL * (0.5 + self._runtime.random() / 2))
        self.server = self._session.server
        return self._session
