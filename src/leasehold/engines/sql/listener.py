"""Wake-ups: one listening session per client, read by a thread of its own.

Other clients notify a client by its address: 16 hex digits, new for every session. As its proof of life the session
holds a lock of the server, named by a hash of the address. The server frees that lock as soon as the session ends, and
before a name is reserved for a waiter, the lock is checked. So a waiter whose process died is passed over at once, and
not only after its reservation expires.

A client that cannot be notified has no address: a pooler or proxy hands its calls to other sessions, or no connection
is available. It polls: often at the head of the queue, seldom further back.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, Final, TypeAlias
from weakref import ReferenceType, ref

from leasehold.core.timing import STABLE_AFTER, WAITER_TTL, backoff
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.engines.repeated_logs import log_once
from leasehold.engines.sql.fair_mutex import FairMutex
from leasehold.engines.sql.session import DatabaseServer, SqlConnectionLost, SqlServerError, SqlSession
from leasehold.errors import LeaseholdError
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime, log_unexpected

_RETRY_AFTER: Final = 5.0  # seconds after a failed attempt to open the listening session
_RESTART_PAUSE: Final = 0.5  # seconds after an unexpected error; until then, waiters poll

ListenLoop: TypeAlias = "Callable[[Runtime, ReferenceType[ClaimRegistry]], Coroutine[Any, Any, None]]"


class SqlListener(ABC):
    """Receives a client's notifications. Shared by its two engine instances. Subclasses know one kind of server."""

    _not_direct: ClassVar[str]  # why notifications do not reach a session behind a pooler or proxy, and what to do
    _other_server: ClassVar[str]  # the same of a session with another server than the calls go to

    def __init__(self, registry: ClaimRegistry, runtime: Runtime, engine: str, enabled: bool) -> None:
        self._registry_ref, self._runtime, self._engine = ref(registry), runtime, engine
        self._log = logging.getLogger(f"leasehold.{engine}")
        self._connect_mutex = FairMutex(runtime, engine)
        self._mutex = runtime.mutex()
        self._session: SqlSession | None = None
        self._liveness_session: SqlSession | None = None  # a second session that `_start_listening` may open
        self._retry_at = 0.0
        self._began, self._misses = 0.0, 0  # when the session was opened, and how many in a row ended soon
        self._enabled = enabled
        self.unavailable = not enabled
        self.address = ""  # empty: this client cannot be notified
        self._server_identity = ""  # of the server that the session listens at

    @abstractmethod
    async def _open(self, runtime: Runtime, deadline: float) -> SqlSession:
        """Open the session that will listen."""

    @abstractmethod
    async def _start_listening(
        self, session: SqlSession, address: str, runtime: Runtime, deadline: float
    ) -> ListenLoop:
        """Subscribe the session to an address. The result is the loop that a thread runs until the session ends; it
        then raises OSError."""

    def _unusable_reason(self, server: DatabaseServer, call_server: DatabaseServer | None) -> str:
        """Why notifications would not reach this session; empty if they do."""
        if not server.direct:
            return self._not_direct
        if call_server is not None and server.identity != call_server.identity:
            return self._other_server
        return ""

    async def ensure_listening(self, runtime: Runtime, deadline: float, call_server: DatabaseServer | None) -> str:
        """This client's address, once its session listens; empty if it has to poll."""
        if self.address or not self._enabled or runtime.now() < self._retry_at:
            return self.address
        caller = self._connect_mutex.new_caller()
        try:
            await self._connect_mutex.acquire(caller, deadline)
            if not self.address and runtime.now() >= self._retry_at:
                await self._connect(runtime, deadline, call_server)
        finally:
            self._connect_mutex.release(caller)
        return self.address

    async def _connect(self, runtime: Runtime, deadline: float, call_server: DatabaseServer | None) -> None:
        self._retry_at = retry_at = max(runtime.now() + _RETRY_AFTER, deadline)  # until then, other calls poll
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
            # Before the thread starts: it may end at once, and then says that this session is lost.
            self._server_identity = session.server.identity
            self._session, self.address, self._retry_at, self._began = session, address, 0.0, runtime.now()
            runtime.start_thread(
                _make_listen_thread(session, listen_loop, ref(self), self._registry_ref), "leasehold-listener"
            )
            self.unavailable = False
            self._wake_waiters()  # claims that joined a queue meanwhile did so without an address
        # RuntimeError: no thread could be started.
        except (LeaseholdError, SqlServerError, SqlConnectionLost, RuntimeError) as error:
            self._abandon(session, retry_at)
            self._set_unavailable(str(error))
        except BaseException:
            self._abandon(session, retry_at)
            raise

    def _abandon(self, session: SqlSession, retry_at: float) -> None:
        """The session could not be made to listen."""
        self._session, self.address, self._retry_at = None, "", retry_at
        session.close()
        self._close_liveness_session()

    def _set_unavailable(self, why: str) -> None:
        if not self.unavailable:
            text = f"push notifications unavailable, falling back to polling: {why}"
            log_once(self._log, logging.WARNING, text)
        self.unavailable = True

    def check_same_server(self, call_server: DatabaseServer | None) -> None:
        """End the listening session if calls now go to another server (a failover), or if its proof of life is
        gone."""
        session = self._session
        if session is not None and (
            not self._is_liveness_session_alive()
            or (call_server is not None and call_server.identity != self._server_identity)
        ):
            self.on_session_lost(session)
            session.shutdown()

    def _is_liveness_session_alive(self) -> bool:
        with self._mutex:  # several threads may check at once
            return self._liveness_session is None or self._liveness_session.usable()

    def on_session_lost(self, session: SqlSession, pause: float = 0.0) -> None:
        """The session has ended, and wake-ups may have been missed: all waiters attempt again, which reconnects, though
        not within `pause` seconds, and not at once if the last sessions ended soon, as behind a proxy that cuts off
        each one."""
        if self._session is session:
            self._session, self.address = None, ""
            now = self._runtime.now()
            self._misses = 0 if now - self._began >= STABLE_AFTER else self._misses + 1
            if self._misses > 1:
                pause = max(pause, backoff(self._misses, 0.02, 1.0, 0.5 + self._runtime.random() / 2))
            self._retry_at = now + pause if pause else 0.0
            self._close_liveness_session()
            self._wake_waiters()

    def _wake_waiters(self) -> None:
        """Make all waiters attempt again."""
        if (registry := self._registry_ref()) is not None:
            for id_hash, _ in snapshot_items(registry.waiting):
                registry.on_notification("recheck", id_hash, 0.0, None)

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
        self._connect_mutex.after_fork()
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
    """A thread that reads the session until it ends. It holds the client weakly, so that an unused client can be
    garbage-collected."""

    async def listen(runtime: Runtime) -> None:
        pause = 0.0
        try:
            with suppress(OSError):
                await listen_loop(runtime, registry)
        except Exception as error:
            pause = _RESTART_PAUSE
            if (listener := listener_ref()) is not None and listener._session is session:  # not closed meanwhile
                log_unexpected(listener._log, "the listening thread", error)
        finally:  # always: a client that believes it is listening would never poll
            try:
                if (listener := listener_ref()) is not None:
                    listener.on_session_lost(session, pause)
            finally:
                session.close()

    return listen


def deliver_notification(
    registry: ClaimRegistry, kind: object, id_hash: object, seconds: float, namespace: object, name: object
) -> None:
    """Pass a notification on to the registry; ignore one that Leasehold would not send."""
    if not (isinstance(id_hash, str) and isinstance(namespace, str) and isinstance(name, str)):
        return
    if kind == "reserved" or kind == "recheck" or kind == "broken":
        registry.on_notification(
            kind, id_hash, seconds, Claim(namespace, name, "", id_hash, Holder("stray"), WAITER_TTL)
        )
