"""Sessions whose callers gave up before the reply, until the server has closed them."""

from __future__ import annotations

from typing import Final

from leasehold.engines.sql.session import UNANSWERED, SqlSession, Values
from leasehold.errors import Unavailable
from leasehold.runtime.base import Runtime

_MAX_DRAINING: Final = 4  # sessions that a server has not closed yet
_DRAIN_INTERVAL: Final = 0.2  # seconds between two checks


class AbandonedSessions:
    def __init__(self, runtime: Runtime, engine: str, server_name: str) -> None:
        self._runtime, self._engine, self._server_name = runtime, engine, server_name
        self._unanswered: dict[str, SqlSession] = {}  # by id hash: the session whose attempt has no answer
        self._draining: list[SqlSession] = []
        self._closed = False

    def add(self, session: SqlSession, id_hash: str) -> None:
        """Add a session. With the id hash of the claim that attempted, it waits for `compensate`."""
        # Earlier sessions will not be compensated any more: a caller that gives up calls `compensate` as soon as its
        # call has failed.
        for earlier in self._unanswered.values():
            self._disconnect(earlier)
        self._unanswered.clear()
        if id_hash:
            session.transition(UNANSWERED)
            self._unanswered[id_hash] = session
        else:
            self._disconnect(session)

    def compensate(self, id_hash: str, statement: bytes, values: Values) -> None:
        """Send a release behind the claim's attempt, if that has no answer yet. Never waits."""
        if (session := self._unanswered.pop(id_hash, None)) is not None:
            session.send_compensation(statement, values)
            self._track(session)

    def _disconnect(self, session: SqlSession) -> None:
        session.disconnect()
        self._track(session)

    def _track(self, session: SqlSession) -> None:
        if self._closed:
            session.stop_draining()
        else:
            self._draining.append(session)

    async def wait_for_room(self, server_identity: str, deadline: float) -> None:
        """Wait while this server has too many of these sessions: short timeouts must not exhaust its connections.
        Raises `Unavailable` at the deadline."""
        while True:
            for session in [session for session in self._draining if session.is_drained()]:
                self._draining.remove(session)
            here = [session for session in self._draining if session.server.identity == server_identity]
            if len(here) < _MAX_DRAINING:
                return
            left = deadline - self._runtime.now()
            if left <= 0:
                raise Unavailable(
                    f"{self._server_name} is still busy with {len(here)} earlier calls that this client gave up; "
                    "retry later",
                    engine=self._engine,
                )
            await self._runtime.wait_fd(here[0].draining_descriptor, min(left, _DRAIN_INTERVAL))

    def close(self) -> None:
        """Stop draining. A session that waits for `compensate` stays: the client sends pending releases last."""
        self._closed = True
        while self._draining:
            self._draining.pop().stop_draining()

    def after_fork(self) -> None:
        for session in self._unanswered.values():
            session.after_fork()
        for session in self._draining:
            session.stop_draining()
        self._unanswered.clear()
        self._draining.clear()
