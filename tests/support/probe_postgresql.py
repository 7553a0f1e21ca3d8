"""What tests read and change inside the PostgreSQL engine. What it shares with MySQL is in `probe_sql.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from leasehold.engines.postgresql import connect, listener
from leasehold.engines.postgresql.listener import PgListener
from leasehold.engines.postgresql.session import PgSession
from leasehold.runtime.base import Runtime, run_sync
from tests.support.probe import Place

LISTENER_STEPS = [  # functions that the listener's thread calls
    Place(PgSession, "_take_notifications"),
    Place(listener, "_deliver_payload"),
]

SESSION_SETTINGS = connect._SETTINGS  # those that each session has


def replace_libpq(session: PgSession, wrap: Callable[[Any], Any]) -> None:
    """Put `wrap` of it in place of the session's connection of libpq."""
    session._pg = wrap(session._pg)


def start_listening(listener: PgListener, session: Any, address: str, runtime: Runtime, deadline: float) -> Any:
    """What the listener's thread is to run, once the session listens."""
    return run_sync(listener._start_listening(session, address, runtime, deadline))
