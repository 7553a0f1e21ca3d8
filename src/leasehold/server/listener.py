"""Accepts connections, more of them in each turn of the event loop as long as more wait.

uvloop's own server accepts one in each turn. While a caller's lists of locks make each turn take tens of milliseconds,
a few hundred new connections of that caller would hold up those of all others for many seconds.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

MAX_ACCEPTED: Final = 64  # in one turn; when few wait it is one, so that workers share them evenly
MAX_HANDSHAKES: Final = 1000  # of TLS, under way; then the oldest is ended: they are no connections yet
_HANDSHAKE_SECONDS: Final = 5.0
_PAUSE: Final = 0.1  # seconds after an error, such as too many open files
_LOG_INTERVAL: Final = 60.0  # seconds between two log lines about that: callers may cause ten a second

_log = logging.getLogger("leasehold.server")


class Listener:
    """A socket that is listening, served with protocols that `connect` makes until `close`. With `context`, over TLS:
    it is asked for the context of each handshake."""

    def __init__(
        self,
        sock: socket.socket,
        connect: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._sock, self._connect, self._context = sock, connect, context
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[Any], None] = {}  # the oldest first
        self._most = 1
        self._log_after = 0.0  # errors before are not logged
        self._paused: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more. Connections that are open stay open."""
        if self._paused is not None:
            self._paused.cancel()
        self._loop.remove_reader(self._sock)
        self._end_handshakes(len(self._opening))

    async def wait_closed(self) -> None:
        """For uvicorn."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(self._most):
            try:
                accepted, _address = self._sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                self._most = 1
                return
            except OSError as error:
                if self._loop.time() >= self._log_after:
                    _log.error("no connection can be accepted: %s; trying again", error)
                    self._log_after = self._loop.time() + _LOG_INTERVAL
                self._end_handshakes(MAX_ACCEPTED)
                self._loop.remove_reader(self._sock)  # else it would be tried again in each turn
                self._paused = self._loop.call_later(_PAUSE, self._loop.add_reader, self._sock, self._accept)
                return
            self._open(accepted)
        self._most = min(2 * self._most, MAX_ACCEPTED)

    def _open(self, accepted: socket.socket) -> None:
        if len(self._opening) >= MAX_HANDSHAKES:
            self._end_handshakes(1)
        accepted.setblocking(False)
        context = None if self._context is None else self._context()
        timeout = None if context is None else _HANDSHAKE_SECONDS  # the default is a minute
        opening = self._loop.connect_accepted_socket(
            self._connect, accepted, ssl=context, ssl_handshake_timeout=timeout
        )
        task = self._loop.create_task(opening)
        self._opening[task] = None
        task.add_done_callback(self._opened)

    def _end_handshakes(self, most: int) -> None:
        """End the oldest of them. Without TLS there are none: a connection is open a turn after it was accepted, and if
        it were cancelled meanwhile, uvloop would close it without telling its protocol."""
        if self._context is None:
            return
        for task in list(islice(self._opening, most)):
            del self._opening[task]
            task.cancel()

    def _opened(self, task: asyncio.Task[Any]) -> None:
        self._opening.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, OSError):
            _log.error("a connection could not be opened", exc_info=error)  # an OSError: the caller is gone, or no TLS
