"""The connection of one engine instance: opened when first needed, one call at a time, reopened after it was closed.

The first call that finds the schema missing creates it. Other calls pay nothing for that, because there is nothing to
check first: a procedure that exists under its versioned name does what this version of Leasehold expects.
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

_TICK: Final = 0.001  # seconds: the lock timeout sent to a server is in whole milliseconds
_RECONNECT_INTERVAL: Final = 0.2  # seconds between a waiter's attempts to connect
_MAX_DRAINING: Final = 4  # connections that the client gave up and the server has not closed yet


class SerialConnection(ABC):
    """One session at a time; calls are made in order of arrival. Subclasses supply what depends on the kind of server:
    how to open a session, the statement of each verb, and how to create the schema."""

    def __init__(self, runtime: Runtime, engine: str, server_name: str) -> None:
        self._runtime, self._engine, self._server_name = runtime, engine, server_name
        self._fifo_lock = FifoLock(runtime, engine)
        self._session: SqlSession | None = None
        self._unanswered: dict[str, SqlSession] = {}  # by id hash: the session whose attempt has no answer yet
        self._draining: list[DrainingSocket] = []  # of sessions given up, until the server has closed them
        self.server: DatabaseServer | None = None  # as of the last connection
        self._closed = False

    @abstractmethod
    async def _open(self, deadline: float) -> SqlSession: ...

    @abstractmethod
    def _statement(self, verb: str) -> bytes: ...

    @abstractmethod
    async def _create_schema(self, session: SqlSession, deadline: float) -> None:
        """Called when the schema is missing, or of another version."""

    @abstractmethod
    def _schema_missing(self, why: object) -> ConfigError: ...

    async def call(self, verb: str, values: Sequence[Value], deadline: float, claim: Claim | None = None) -> list[Row]:
        """One verb in one round trip: its rows, as text. Raises no driver exception (E9).

        `claim`: the claim that attempts. If it is queued, a lost or refused connection is retried, at most until the
        deadline; all other calls fail at once."""
        return await self._execute(self._statement(verb), values, deadline, claim)

    def decode_reply(self, row: Row) -> Row:
        """The columns of an attempt's reply. Overridden if a server returns them packed into one value."""
        return row

    async def ping(self, deadline: float) -> None:
        await self._execute(b"select 1", (), deadline)

    def compensate(self, id_hash: str, values: Sequence[Value]) -> None:
        """Send a release behind an attempt that has no answer yet, on the same connection. Never waits."""
        session = self._unanswered.pop(id_hash, None)
        if session is not None:
            self._track_draining(session.send_compensation(self._statement("release"), values))

    async def ensure_connected(self, deadline: float) -> DatabaseServer:
        """The server that calls go to; connects if necessary. If that fails, the server of the last connection."""
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
        """Does not interrupt a call: a caller that is in one closes the session when its call ends."""
        self._closed = True
        if self._fifo_lock.is_free:
            session, self._session = self._session, None
            if session is not None:
                session.close()
            while self._draining:
                self._draining.pop().close()

    def _release_lock(self, caller: LockCaller, claim: Claim | None = None) -> None:
        if self._closed and claim is not None and self._session is not None and self._fifo_lock.is_held_by(caller):
            # The client is closed, so this attempt will be compensated.
            self._unanswered[claim.id_hash], self._session = self._session, None
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
                    # A waiter survives a restart of the server: a repeated attempt gets the same answer (E2).
                    if claim is None or not claim.queue or self._runtime.now() >= deadline:
                        raise self._connection_lost(lost) from lost
                    earlier_loss = lost
        except BaseException as error:
            self._detach_unanswered(claim.id_hash if claim is not None else "")
            if earlier_loss is not None and isinstance(error, ConfigError):  # the earlier call may have been applied
                raise Unavailable(
                    f"{self._connection_lost(earlier_loss)}; the retry failed: {error}", engine=self._engine
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
        return Unavailable(f"{self._server_name}: connection lost before the reply: {lost}", engine=self._engine)

    def _detach_unanswered(self, id_hash: str) -> None:
        """Take an unanswered session out of use. With an id hash it is kept, so that `compensate` can use it."""
        session = self._session
        if session is None or not session.unanswered:
            return
        self._session = None
        # Earlier sessions will not be compensated any more: a caller that gives up calls `compensate` as soon as its
        # call has failed.
        for earlier in self._unanswered.values():
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
        """Wait while too many given-up sessions are open at this server: short timeouts must not exhaust its
        connections."""
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
                        f"{self._server_name} is still busy with {len(still_draining)} earlier calls "
                        "that this client gave up; retry later"
                    )
                    raise Unavailable(message, engine=self._engine)
                await self._runtime.wait_fd(still_draining[0].descriptor, min(left, _RECONNECT_INTERVAL))
        except BaseException:
            session.close()
            raise

    async def _ensure_session(self, deadline: float, retry_until: float = 0.0) -> SqlSession:
        """The open session, or a new one. A waiter retries until `retry_until` or the deadline, whichever is first, so
        that it survives a restart or a failover."""
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
