"""What tests read and change inside the ZooKeeper engine, its session and the client of kazoo that it uses."""

from __future__ import annotations

import socket
import threading
from typing import Any

from leasehold.engines.zookeeper import requests
from leasehold.engines.zookeeper.attempt import ZookeeperAttempt
from leasehold.engines.zookeeper.connection import KazooConnection
from leasehold.engines.zookeeper.kazoo_adapter import KazooAdapter
from leasehold.engines.zookeeper.session import ZookeeperSession
from tests.support import probe
from tests.support.probe import AnyClient, Place

MAX_FEW = Place(requests, "_MAX_FEW")  # children of a node; the pipeline of a listing reads no more
RECORD_WRITE = Place(ZookeeperAttempt, "_record_write")  # called after each write of a claim that was answered

LISTENER_STEPS = [  # functions that the connection's thread calls
    Place(KazooConnection, "_connect"),
    Place(KazooConnection, "_read_header"),
    Place(KazooConnection, "_send_request"),
]


def session(client: AnyClient) -> ZookeeperSession:
    """The client's session, which its two engine instances share."""
    found = probe.engine_state(client)["zookeeper"]
    assert isinstance(found, ZookeeperSession)
    return found


def watches_by_claim(session: ZookeeperSession) -> dict[str, Any]:
    return session._watch_by_id_hash


def is_connected(session: ZookeeperSession) -> bool:
    return session._connected


def seconds_since_heartbeat(session: ZookeeperSession) -> float:
    """How long ago the server last answered a heartbeat."""
    return session.now() - session.expiry._heartbeats[-1][0]


# -------------------------------------------------------------------- kazoo


def adapter(session: ZookeeperSession) -> KazooAdapter:
    """The client of kazoo that the session uses now."""
    kazoo = session._kazoo
    assert kazoo is not None
    return kazoo


def is_idle(adapter: KazooAdapter) -> bool:
    """Whether every request was sent and answered."""
    return not adapter._queue and not adapter._pending


def member_port(session: ZookeeperSession) -> int:
    """The port of the member that the session is connected to, or last tried."""
    port: int = adapter(session)._connection._last_server[2]
    return port


def connection_thread(adapter: KazooAdapter) -> threading.Thread | None:
    thread: threading.Thread | None = adapter._connection._connection_routine
    return thread


def connection_socket(adapter: KazooAdapter) -> socket.socket:
    sock: socket.socket = adapter._connection._socket
    return sock
