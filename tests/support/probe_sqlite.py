"""What tests read and change inside the SQLite engine."""

from __future__ import annotations

import math
import socket
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

from leasehold.engines.registry import Waiter
from leasehold.engines.sqlite import connection as connections
from leasehold.engines.sqlite import engine as engines
from leasehold.engines.sqlite import location, rows, wakeup_socket
from leasehold.engines.sqlite.connection import SqliteConnection
from leasehold.engines.sqlite.engine import InFlightAttempt, SqliteEngine
from leasehold.engines.sqlite.wakeup_socket import WakeupSocket
from leasehold.model import Busy, Claim, Grant
from leasehold.runtime.base import run_sync
from tests.support import probe
from tests.support.probe import AnyClient, Place

# Limits that tests lower.
CEILING_STEP = Place(rows, "_CEILING_STEP")  # how far the ceiling of the tokens is raised, in microseconds
CHECKPOINT_EVERY = Place(engines, "_CHECKPOINT_EVERY")  # calls of a loop
FORK_TIMEOUT = Place(connections, "_FORK_TIMEOUT")  # how long a fork waits for a transaction
LIST_PAGE = Place(rows, "_PAGE")  # rows of a list in one transaction
MAX_REACHED = Place(wakeup_socket, "_MAX_REACHED")  # clients that are remembered as reachable
MAX_RETIRED = Place(wakeup_socket, "_MAX_RETIRED")  # sockets that were replaced and are kept open
STALE_AFTER = Place(wakeup_socket, "_STALE_AFTER")  # the age at which a dead client's socket is removed

# Steps that tests watch, or during which they do harm.
ALL_CONNECTIONS = Place(connections, "_all_connections")  # of the process: those to close before a fork
CHOOSE_ADDRESS = Place(WakeupSocket, "_choose_address")
CONNECT = Place(SqliteConnection, "_connect")
DISPATCH = Place(wakeup_socket, "_dispatch")  # of a wake-up to its waiter
FILE_LOCKS = Place(location, "_LOCKS")  # those against journals
LOCK_AGAINST_JOURNALS = Place(location, "_lock_against_journals")
OPEN_FOLDER = Place(WakeupSocket, "_open_folder")  # that of the sockets
OPEN_DATABASE = Place(location, "_open_database")
CALL_WITH_PATH = Place(WakeupSocket, "_call_with_path")  # probes an address, or sends to it
SENDER_SOCKETS = Place(WakeupSocket, "_sender_sockets")  # gives the two: to probe, and to send
SET_SOCKET_MODE = Place(WakeupSocket, "_set_socket_mode")
TRANSACT = Place(SqliteConnection, "_transact")
mapped_errors = location._mapped_errors

AnyEngine: TypeAlias = AnyClient | SqliteEngine


def engine_of(user: AnyEngine) -> SqliteEngine:
    return cast(SqliteEngine, probe.engine(user))


# ----------------------------------------------------------- the connection


def connection(user: AnyEngine) -> SqliteConnection:
    return engine_of(user)._connection


def database(user: AnyEngine) -> sqlite3.Connection:
    db = connection(user)._db
    assert db is not None
    return db


def connection_mutex(user: AnyEngine) -> Any:
    """Who holds it is in a transaction."""
    return connection(user)._mutex


def make_file_check_due(user: AnyEngine) -> None:
    """Whether the file was replaced is checked in the next transaction."""
    connection(user)._file_check_at = 0.0


def inodes(user: AnyEngine) -> list[int]:
    """Of the files that the connection has open."""
    return [inode for _, inode in connection(user)._inodes]


# ------------------------------------------------------------------- forks


def connections_never_closed() -> int:
    """How many connections of the process were given up without closing them."""
    return len(connections._NEVER_CLOSED)


def freeze_all() -> None:
    """As before a fork."""
    connections._freeze_all()


def thaw_all() -> None:
    """As in the parent, after a fork."""
    connections._thaw_all()


def forks_in_progress() -> int:
    return len(connections._FORKS_IN_PROGRESS)


# ---------------------------------------------------------------- decisions


def attempt_on_worker(user: AnyEngine, claim: Claim, in_flight: InFlightAttempt) -> Grant | Busy:
    """The part of an attempt that a worker thread of an event loop runs."""
    return engine_of(user)._attempt(claim, in_flight, math.inf)


def decide(user: AnyEngine, decision: Callable[..., Any], deadline: float) -> None:
    """Run a decision in a write transaction, and send the notifications it makes."""
    engine_of(user)._decide(decision, deadline)


def should_attempt(user: AnyEngine, waiter: Waiter) -> bool:
    """Whether a holder for which it waits may have ended without a release."""
    return engine_of(user)._should_attempt(waiter)


def retrying(user: AnyEngine) -> dict[str, set[Any]]:
    """The calls that wait because the file is locked, by the API key for which they are made; empty: for none."""
    return engine_of(user)._retrying


def pretend_retrying(user: AnyEngine, calls: int, key: str = "") -> None:
    engine_of(user)._retrying = {"": set(), key: set(range(calls))}


def run_with_retry(user: AnyEngine, deadline: float, verb: Callable[..., Any]) -> Any:
    return run_sync(engine_of(user)._run_with_retry(deadline, verb))


# ---------------------------------------------------------------- wake-ups


def wakeups(user: AnyEngine) -> WakeupSocket:
    """The client's socket for wake-ups, and its way to send to others."""
    return engine_of(user)._wakeup_socket


def wakeup_path(user: AnyEngine) -> Path:
    """The file of the client's socket."""
    bound = wakeups(user)
    return Path(bound._socket_path(bound.address))


def listening_socket(user: AnyEngine) -> socket.socket:
    """The one that the client's wake-up thread reads."""
    sock = wakeups(user)._socket
    assert sock is not None
    return sock


def stop_listener(user: AnyEngine) -> None:
    """Let the client's wake-up thread end, and close the socket. The file stays."""
    wakeups(user)._stop_flag.append(True)
    sock = listening_socket(user)
    sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def retired_sockets(user: AnyEngine) -> int:
    """How many sockets of the client were replaced, and are still open."""
    return len(wakeups(user)._retired)


def reached_at(user: AnyEngine) -> dict[str, float]:
    """When this client last reached others, by their address."""
    return wakeups(user)._reached_at


def inspect(user: AnyEngine, deadline: float) -> Any:
    """A list of everything in the namespace without a name."""
    return run_sync(engine_of(user).inspect("", "", False, deadline))
