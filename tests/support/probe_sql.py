"""What tests read and change inside what the engines of PostgreSQL and MySQL share."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from leasehold.engines.sql import listener
from leasehold.engines.sql.connection import SerialConnection
from leasehold.engines.sql.engine import SqlEngine
from tests.support import probe
from tests.support.probe import AnyClient

AnyEngine: TypeAlias = AnyClient | SqlEngine


def engine_of(user: AnyEngine) -> SqlEngine:
    return cast(SqlEngine, probe.engine(user))


def connection(user: AnyEngine) -> SerialConnection:
    """The connection of the engine, which makes one call at a time."""
    return engine_of(user)._connection


def session(user: AnyEngine) -> Any:
    """The session that the connection has open."""
    return connection(user)._session


def calls_waiting(user: AnyEngine) -> int:
    """How many calls wait until the connection is free."""
    return len(connection(user)._mutex._waiting)


def use_attempt_number(user: AnyEngine, number: int) -> None:
    """Set how many attempts there were so far: every so many of them sweep."""
    engine_of(user)._attempts = number


STABLE_AFTER = probe.Place(listener, "STABLE_AFTER")  # how long a session lasts that did not end soon


def is_listening(user: AnyEngine) -> bool:
    return bool(engine_of(user)._listener.address)


def end_listening(user: AnyEngine, pause: float = 0.0) -> float:
    """End the session that listens, as a proxy may. Returns after how many seconds another may be opened, at least
    `pause`."""
    sql_listener = engine_of(user)._listener
    session, now = sql_listener._session, sql_listener._runtime.now()
    assert session is not None
    sql_listener.on_session_lost(session, pause)
    session.shutdown()
    return sql_listener._retry_at - now
