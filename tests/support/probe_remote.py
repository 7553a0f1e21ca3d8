"""What tests read and change inside the engine that asks lock servers."""

from __future__ import annotations

from typing import Any, TypeAlias, cast

from leasehold.engines.remote import engine
from leasehold.engines.remote.engine import RemoteEngine
from leasehold.engines.remote.listener import Listener
from leasehold.engines.remote.parsing import ResponseParser
from leasehold.engines.remote.servers import Call, Failover, Servers, Tries
from leasehold.runtime.base import run_sync
from tests.support import probe
from tests.support.probe import AnyClient, Place

AnyEngine: TypeAlias = AnyClient | RemoteEngine

MAX_PAGES = engine._MAX_PAGES  # of one listing
MOVE_TO = Place(Servers, "_move_to")  # called when another server becomes the one to ask first

LISTENER_STEPS = [  # functions that the listener's thread calls
    Place(Listener, "_listen"),
    Place(Listener, "_on_notification"),
    Place(Listener, "_wake_waiters"),
]


def engine_of(user: AnyEngine) -> RemoteEngine:
    return cast(RemoteEngine, probe.engine(user))


def use_server(servers: Servers, index: int) -> None:
    """Make it the server to ask first."""
    servers._index = index


def is_woken_by(user: AnyEngine, index: int) -> bool:
    """Whether the engine listens, and its calls go to this server."""
    found = engine_of(user)
    return bool(found._listener.active and found._servers.current.index == index)


def polling_waiters(user: AnyEngine) -> set[str]:
    """The id hashes of waiters that their server cannot wake."""
    return engine_of(user)._polling


def begin_round(failover: Failover, call: Call, tries: Tries) -> bool:
    """As after every server has failed. False: the call does not try again."""
    return run_sync(failover._begin_round(call, tries))


def unread_bytes(parser: ResponseParser) -> int:
    """How much the parser copies when more arrives."""
    found: Any = parser._buffer
    return len(found)
