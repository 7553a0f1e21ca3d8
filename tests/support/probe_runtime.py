"""What tests read and change inside the runtimes and their connections."""

from __future__ import annotations

import socket
from typing import Any

from leasehold.runtime.loop import Loop
from leasehold.runtime.net import host_names, tls_socket
from leasehold.runtime.net.event_loop import LoopStream
from leasehold.testing import clock
from tests.support.probe import Place

FLUSH = Place(LoopStream, "_flush")  # sends what several calls of one step have written
MAX_LOOK_UPS = Place(host_names, "_MAX_LOOK_UPS")  # threads that look up names

MAX_TLS_ANSWERS = Place(tls_socket, "_MAX_ANSWERS")  # bytes of OpenSSL's own answers that are kept
MAX_TLS_OVERHEAD = Place(tls_socket, "_MAX_OVERHEAD")  # bytes of messages of TLS itself, without data between them
CALLBACK_TIMEOUT = Place(clock, "_CALLBACK_TIMEOUT")  # how long the tests' clock waits for callbacks


def look_ups() -> Any:
    """Those of the process."""
    return host_names._state


def socket_of(stream: LoopStream) -> socket.socket:
    return stream._sock


def set_timer(stream: LoopStream, at: float) -> None:
    """As for a call that must be answered by then."""
    stream._set_timer(at)


def spawned_tasks(runtime: Loop) -> set[Any]:
    return runtime._tasks
