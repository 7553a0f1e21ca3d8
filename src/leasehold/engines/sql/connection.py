"""The connection of one engine instance: opened when first needed, one call at a time, reopened after it was closed.

The first call that finds the schema missing creates it. Other calls pay nothing for that, because there is nothing to
check first: a procedure that exists under its versioned name does what this version of Leasehold expects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

from leasehold.engines.sql.abandoned import AbandonedSessions
from leasehold.engines.sql.fair_mutex import Caller, FairMutex
from leasehold.engines.sql.session import (
    BUSY,
    DatabaseServer,
    Decoding,
    Row,
    SchemaMissing,
    SqlConnectionLost,
    SqlServerError,
    SqlSession,
    TransactionConflict,
    Values,
)
from leasehold.errors import ConfigError, Unavailable
from leasehold.model import Claim
from leasehold.runtime.base import Runtime

_TICK: Final = 0.001  # seconds: the lock timeout sent to a server is in whole milliseconds
# Lists of locks take turns as if all were for one API key: each may take a second, and other calls must not wait for
# more than one, however many keys make lists.
_LISTS: Final = " lists"  # no key has such a name
_RECONNECT_INTERVAL: Final = 0.2  # seconds between a waiter's attempts to connect


class SerialConnection(ABC):
    """One session at a time; calls are made in order of arrival, those that other claims wait for first. Subclasses
    supply what depends on the kind of server: how to open a session, the statement of each verb, and how to create the
    schema."""

    def __init__(self, runtime: Runtime, engine: str, server_name: str) -> None:
        self._runtime, self._engine, self.server_name = runtime, engine, server_name
        self._mutex = FairMutex(runtime, engine)
        self._session: SqlSession | None = None  # idle, or busy with the call of the mutex's owner
        self._abandoned = AbandonedSessions(runtime, engine, server_name)
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

    async def call(
        self, verb: str, values: Values, deadline: float, claim: Claim | None = None, *, first: bool = False
    ) -> list[Row]:
        """One verb in one round trip: its rows, as text. Raises no driver exception (E9).

        `claim`: the claim that attempts. If it is queued, a lost or refused connection is retried, at most until the
        deadline; all other calls fail at once. `first`: other claims wait for what this call does, so it is made before
        the calls that wait for the connection."""
        return await self._execute(self._statement(verb), values, deadline, claim, first=first)

    async def list_rows(self, values: Values, deadline: float) -> list[bytes]:
        """The rows of `inspect`, still encoded: see `Listing`."""
        return await self._execute(self._statement("inspect"), values, deadline, listed=True)

    @abstractmethod
    def decode_listed(self, row: bytes) -> Row:
        """The columns of a row of `list_rows`."""

    def decode_reply(self, row: Row) -> Row:
        """The columns of an attempt's reply. Overridden if a server returns them packed into one value."""
        return row

    async def ping(self, deadline: float) -> None:
        await self._execute(b"select 1", (), deadline)

    def compensate(self, id_hash: str, values: Values) -> None:
        """Send a release behind an attempt that has no answer yet, on the same connection. Never waits."""
        self._abandoned.compensate(id_hash, self._statement("release"), values)

    async def ensure_connected(self, deadline: float) -> DatabaseServer:
        """The server that calls go to; connects if necessary. If that fails, the server of the last connection."""
        caller = self._mutex.new_caller()
        try:
            await self._mutex.acquire(caller, deadline)
            await self._ensure_session(deadline)
        except Unavailable:
            if self.server is None:
                raise
        finally:
            self._leave(caller)
        assert self.server is not None  # noqa: S101  # for the type checker
        return self.server

    def close(self) -> None:
        """Does not interrupt a call: a caller that is in one closes the session when its call ends."""
        self._closed = True
        if self._mutex.is_free:
            session, self._session = self._session, None
            if session is not None:
                session.close()
            self._abandoned.close()

    def after_fork(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.after_fork()
        self._abandoned.after_fork()
        self._mutex.after_fork()

    # ------------------------------------------------------------- one call

    async def _execute(
        self,
        statement: bytes,
        values: Values,
        deadline: float,
        claim: Claim | None = None,
        *,
        listed: bool = False,
        first: bool = False,
    ) -> list[Any]:
        """The rows of the statement; `listed`: still encoded."""
        caller = self._mutex.new_caller()
        if listed:
            caller.on_behalf_of = _LISTS
        try:
            await self._mutex.acquire(caller, deadline, first=first)
            return await self._execute_with_retries(statement, values, deadline, claim, listed)
        finally:
            self._leave(caller, claim)

    def _leave(self, caller: Caller, claim: Claim | None = None) -> None:
        """The end of a call. A session without the call's reply is abandoned, and so is one whose attempt was answered
        after the client was closed: both will be compensated."""
        session = self._session
        if session is not None and self._mutex.is_held_by(caller):  # not while it is busy with another caller's call
            unanswered = session.state is BUSY
            if unanswered or (self._closed and claim is not None):
                self._session = None
                self._abandoned.add(session, "" if claim is None else claim.id_hash)
        self._mutex.release(caller)
        if self._closed:
            self.close()

    async def _execute_with_retries(
        self, statement: bytes, values: Values, deadline: float, claim: Claim | None, listed: bool
    ) -> list[Any]:
        """A waiter survives a restart of the server: a repeated attempt gets the same answer (E2)."""
        waits = claim is not None and claim.queue
        retry_until = claim.wait_deadline if claim is not None and waits else 0.0
        earlier_loss: SqlConnectionLost | None = None
        while True:
            try:
                session = await self._ensure_session(deadline, retry_until)
                return await self._execute_or_create_schema(session, statement, values, deadline, listed)
            except TransactionConflict as conflict:
                if self._runtime.now() + _TICK >= deadline:
                    raise Unavailable(f"{self.server_name}: {conflict}", engine=self._engine) from conflict
            except SqlConnectionLost as lost:
                if not waits or self._runtime.now() >= deadline:
                    raise self._connection_lost(lost) from lost
                earlier_loss = lost
            except ConfigError as error:
                if earlier_loss is None:
                    raise
                raise Unavailable(  # the earlier call may have been applied
                    f"{self._connection_lost(earlier_loss)}; the retry failed: {error}", engine=self._engine
                ) from error

    async def _execute_or_create_schema(
        self, session: SqlSession, statement: bytes, values: Values, deadline: float, listed: bool
    ) -> list[Any]:
        execute = session.list_rows if listed else session.execute
        try:
            return await execute(statement, values, deadline)
        except SqlServerError as error:
            classified = error.classify()
            if not isinstance(classified, SchemaMissing):
                raise classified from error
        with Decoding(self.server_name, self._engine):  # of the schema's version
            await self._create_schema(session, deadline)
        try:
            return await execute(statement, values, deadline)
        except SqlServerError as error:
            classified = error.classify()
            raise (self._schema_missing(error) if isinstance(classified, SchemaMissing) else classified) from error

    def _connection_lost(self, lost: SqlConnectionLost) -> Unavailable:
        return Unavailable(f"{self.server_name}: connection lost before the reply: {lost}", engine=self._engine)

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
                self._session = await self._open_when_drained(deadline)
            except Unavailable:
                if self._runtime.now() + _RECONNECT_INTERVAL >= min(deadline, retry_until):
                    raise
                await self._runtime.sleep(_RECONNECT_INTERVAL * (0.5 + self._runtime.random() / 2))
        self.server = self._session.server
        return self._session

    async def _open_when_drained(self, deadline: float) -> SqlSession:
        session = await self._open(deadline)
        try:
            await self._abandoned.wait_for_room(session.server.identity, deadline)
        except BaseException:
            session.close()
            raise
        return session
