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

from leasehold.core.timing import WAITER_TTL
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.sql.fifo_lock import FifoLock
from leasehold.engines.sql.session import DatabaseServer, SqlConnectionLost, SqlServerError, SqlSession
from leasehold.errors import LeaseholdError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime

_RETRY_AFTER: Final = 5.0  # seconds until a session that could not be had is asked for again

ListenLoop: TypeAlias = "Callable[[Runtime, ReferenceType[ClaimRegistry]], Coroutine[Any, Any, None]]"


class SqlListener(ABC):
    """A client's way to be told. Shared by both twins. Subclasses know one server."""

    def __init__(self, registry: ClaimRegistry, runtime: Runtime, engine: str, enabled: bool) -> None:
        self._registry_ref, self._runtime, self._engine = ref(registry), runtime, engine
        self._log = logging.getLogger(f"leasehold.{engine}")
        self._fifo_lock = FifoLock(runtime, engine)
        self._mutex = runtime.mutex()
        self._session: SqlSession | None = None
        self._liveness_session: SqlSession | None = None  # one that `_start_listening` may need as well
        self._retry_at = 0.0
        self._enabled = enabled
        self.unavailable = not enabled
        self.address = ""  # empty: cannot be told anything
        self._server_identity = ""  # of the server it is listened to at

    @abstractmethod
    async def _open(self, runtime: Runtime, deadline: float) -> SqlSession:
        """The session that will hear."""

    @abstractmethod
    async def _start_listening(
        self, session: SqlSession, address: str, runtime: Runtime, deadline: float
    ) -> ListenLoop:
        """Have it be told what is said to an address. Gives what a thread is to do until the session ends, and then
        raises OSError."""

    @abstractmethod
    def _unusable_reason(self, server: DatabaseServer, call_server: DatabaseServer | None) -> str:
        """Why what is said there would not reach us; empty: it does."""

    async def ensure_listening(self, runtime: Runtime, deadline: float, call_server: DatabaseServer | None) -> str:
        """This client's address, after seeing that it is listened to; empty if it has to look by itself."""
        if self.address or not self._enabled or runtime.now() < self._retry_at:
            return self.address
        caller = self._fifo_lock.new_caller()
        try:
            await self._fifo_lock.acquire(caller, deadline)
            if not self.address and runtime.now() >= self._retry_at:
                await self._connect(runtime, deadline, call_server)
        finally:
            self._fifo_lock.release(caller)
        return self.address

    async def _connect(self, runtime: Runtime, deadline: float, call_server: DatabaseServer | None) -> None:
        self._retry_at = max(runtime.now() + _RETRY_AFTER, deadline)  # meanwhile others do without
        address = runtime.random_bytes(8).hex()
        try:
            session = await self._open(runtime, deadline)
        except LeaseholdError as error:
            self._set_unavailable(str(error))
            return
        try:
            if why := self._unusable_reason(session.server, call_server):
                self._set_unavailable(why)
                session.close()
                return
            listen_loop = await self._start_listening(session, address, runtime, deadline)
            runtime.start_thread(
                _make_listen_thread(session, listen_loop, ref(self), self._registry_ref), "leasehold-listener"
            )
            self._server_identity = session.server.identity
            self._session, self.address, self.unavailable, self._retry_at = session, address, False, 0.0
            self._wake_waiters()  # those who came meanwhile stand in line without an address
        except (
            LeaseholdError,
            SqlServerError,
            SqlConnectionLost,
            RuntimeError,
        ) as error:  # RuntimeError: no thread to be had
            session.close()
            self._close_liveness_session()
            self._set_unavailable(str(error))
        except BaseException:
            session.close()
            self._close_liveness_session()
            raise

    def _set_unavailable(self, why: str) -> None:
        if not self.unavailable:
            self._log.warning("no wake-ups for this client, it has to look by itself: %s", why)
        self.unavailable = True

    def check_same_server(self, call_server: DatabaseServer | None) -> None:
        """See whether we still listen where calls are sent: not after a fail-over, nor without a proof of life."""
        session = self._session
        if session is not None and (
            not self._is_liveness_session_alive()
            or (call_server is not None and call_server.identity != self._server_identity)
        ):
            self.on_session_lost(session)
            session.shutdown()

    def _is_liveness_session_alive(self) -> bool:
        with self._mutex:  # several threads may look
            return self._liveness_session is None or self._liveness_session.usable()

    def on_session_lost(self, session: SqlSession) -> None:
        """The session has ended. Whoever waits may have missed its turn: all ask again, and are listened to again."""
        if self._session is session:
            self._session, self.address, self._retry_at = None, "", 0.0
            self._close_liveness_session()
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Have all who wait ask again."""
        if (registry := self._registry_ref()) is not None:
            for id_hash, _ in snapshot_items(registry.waiting):
                registry.on_notification("head", id_hash, 0.0, None)

    def _close_liveness_session(self) -> None:
        with self._mutex:
            liveness_session, self._liveness_session = self._liveness_session, None
            if liveness_session is not None:
                liveness_session.close()

    def close(self) -> None:
        session, self._session, self.address = self._session, None, ""
        self._close_liveness_session()
        if session is not None:
            session.shutdown()

    def after_fork(self) -> None:
        for session in (self._session, self._liveness_session):
            if session is not None:
                session.after_fork()
        self._session = self._liveness_session = None
        self.address, self._retry_at = "", 0.0
        self._fifo_lock.after_fork()
        self._mutex = self._runtime.mutex()

    def __del__(self) -> None:
        with suppress(AttributeError):
            self.close()


def _make_listen_thread(
    session: SqlSession,
    listen_loop: ListenLoop,
    listener_ref: ReferenceType[SqlListener],
    registry: ReferenceType[ClaimRegistry],
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Reads the session until it ends. Holds the client weakly: one that nobody has any more must be able to go."""

    async def listen(runtime: Runtime) -> None:
        try:
            with suppress(OSError):
                await listen_loop(runtime, registry)
        finally:  # whatever ended it: a client that believes it is listened to would never look by itself
            if (listener := listener_ref()) is not None:
                listener.on_session_lost(session)
            session.close()

    return listen


def deliver_notification(
    registry: ClaimRegistry, kind: object, id_hash: object, seconds: float, namespace: object, name: object
) -> None:
    """Pass on what was said, if it is something we would say."""
    if not (isinstance(id_hash, str) and isinstance(namespace, str) and isinstance(name, str)):
        return
    if kind == "go" or kind == "head" or kind == "lost":
        registry.on_notification(
            kind, id_hash, seconds, Claim(namespace, name, "", id_hash, Holder("stray"), WAITER_TTL)
        )
