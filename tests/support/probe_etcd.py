"""What tests read and change inside the etcd engine."""

from __future__ import annotations

import socket
from typing import Any, TypeAlias, cast

from leasehold.engines.etcd import messages, watch
from leasehold.engines.etcd.attempt import EtcdAttempt
from leasehold.engines.etcd.client_state import ClaimState, EtcdClientState
from leasehold.engines.etcd.engine import EtcdEngine
from leasehold.engines.etcd.grpc import frames
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.release import EtcdRelease
from leasehold.engines.etcd.rpc import RpcClient
from leasehold.engines.etcd.waiter_leases import WaiterLeases
from leasehold.engines.etcd.watch import Watcher
from leasehold.runtime.base import run_sync
from tests.support import probe
from tests.support.probe import AnyClient, Place

AnyEngine: TypeAlias = AnyClient | EtcdEngine

OWN_WATCH_DELAY = Place(watch, "_OWN_WATCH_DELAY")  # how long a lease is held before its key is watched

# Steps that tests watch, or during which they do harm.
DECODE_REPLY = Place(RpcClient, "_decode_reply")
ON_FRAME = Place(GrpcConnection, "_on_frame")  # of the thread that reads
REQUEUE_AS_WAITER = Place(EtcdAttempt, "_requeue_as_waiter")
SECONDS_UNTIL_NEEDED = Place(Watcher, "_seconds_until_needed")
SEND_DUE = Place(Watcher, "_send_due")  # the watches that are due
SEND_KEEP_ALIVE = Place(WaiterLeases, "_send")
TRY_ONCE = Place(RpcClient, "_try_once")
WRITE = Place(GrpcConnection, "_write")

varint = messages._varint


def engine_of(user: AnyEngine) -> EtcdEngine:
    return cast(EtcdEngine, probe.engine(user))


def state(user: AnyEngine) -> EtcdClientState:
    """What the client knows of its claims, keys and leases."""
    return engine_of(user)._client_state


# ----------------------------------------------------------------- the watch


def watcher(user: AnyEngine) -> Watcher:
    return state(user).watcher


def watch_stream(user: AnyEngine) -> Any:
    """The open stream of the watch; None while there is none."""
    return watcher(user)._open_stream


def pretend_running(watcher: Watcher) -> None:
    """As if the watch's thread ran: the test takes its steps."""
    watcher._running = True


def deferred_watches(watcher: Watcher) -> dict[Any, float]:
    """When watches that may not be needed will be made."""
    return watcher._deferred


def make_watches_due(watcher: Watcher) -> None:
    watcher._deferred = dict.fromkeys(watcher._deferred, 0.0)


def send_due_watches(watcher: Watcher) -> None:
    watcher._send_due()


def watches(watcher: Watcher) -> Any:
    return watcher._watches


# ---------------------------------------------------------------- the claims


def release_leases(release: EtcdRelease, claim_state: ClaimState) -> None:
    """The last step of a release: give the leases back."""
    run_sync(release._release_leases(claim_state))


# ----------------------------------------------------------- the connection


def connection(user: AnyEngine) -> GrpcConnection | None:
    """The one that the calls of the engine share."""
    return engine_of(user).rpc._connection


def replace_login(rpc: RpcClient, token: str) -> list[str]:
    """The token that the client has for its user and password, and now another one. None before it has signed in."""
    found = rpc._memory.auth_token
    rpc._memory.auth_token = token if found else ""
    return [found] if found else []


def use_up_stream_ids(connection: GrpcConnection) -> None:
    """Leave room for only one more call."""
    connection._next_stream_id = frames.MAX_INT31 - 2


def socket_of(connection: GrpcConnection) -> socket.socket:
    sock = connection._socket
    assert sock is not None
    return sock


def use_socket(connection: GrpcConnection, sock: socket.socket) -> None:
    """As if the connection had been made."""
    connection._socket = sock


def initial_stream_window(connection: GrpcConnection) -> int:
    """How much the server lets a new call send."""
    return connection._initial_stream_window


def write(connection: GrpcConnection, data: bytes) -> None:
    with connection._mutex:
        connection._write(data)
