"""Wake-ups: one stream of events per client, from the server in use, for its waiters and its holders.

The listener has a thread of its own, even under asyncio: a holder is notified of a break even while the loop is
blocked. When the client moves to another server, the stream moves with it. Every time a stream begins, every waiter
attempts once: notifications sent meanwhile are lost, and the attempt tells the new server which client to wake. Without
a stream, waiters poll (E4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final
from weakref import ref

from leasehold.core.timing import HEARTBEAT_INTERVAL, backoff
from leasehold.engines.listener_thread import ListenerThread
from leasehold.engines.registry import ClaimRegistry, make_unknown_claim, snapshot_items
from leasehold.engines.remote import wire
from leasehold.engines.remote.parsing import KEEP_ALIVE, Response, StreamParser
from leasehold.engines.remote.servers import Server, Servers, read_answers
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, log_unexpected, restarting
from leasehold.runtime.net.blocking import connect_blocking

_log = logging.getLogger("leasehold.remote")

_THREAD: Final = "the thread for push notifications"


class Listener(ListenerThread):
    """The client's stream. Shared by its engine instances."""

    _thread_name = "leasehold-remote"
    _thread_log = _log

    def __init__(self, servers: Servers, runtime: Runtime, registry: ClaimRegistry, call_timeout: float) -> None:
        self._servers, self._runtime, self._call_timeout = servers, runtime, call_timeout
        # When the client is garbage-collected, the listener stops.
        self._registry_ref = ref(registry, lambda _: self.close())
        servers.on_move = self.drop_connection
        self.after_fork()

    def after_fork(self) -> None:
        self._reset_thread()
        super().__init__()

    # ------------------------------------------------------- on its thread

    def _run(self, stop_flag: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        async def run(runtime: Runtime) -> None:
            misses = 0
            while not stop_flag and self._registry_ref() is not None:
                server, failed_unexpectedly, began = self._servers.current, False, runtime.now()
                try:
                    self._listen(server, runtime, stop_flag)
                except (OSError, LeaseholdError) as error:
                    self._on_failure(server, error, first=not misses)
                except Exception as error:  # without this thread no waiter is woken
                    log_unexpected(_log, _THREAD, error)
                    failed_unexpectedly = True  # even if the stream had begun: the pauses must become longer
                self.active = False
                misses = self._count_misses(misses, runtime.now() - began, failed_unexpectedly)
                if self._failing:
                    self.wake_attempts()
                if not stop_flag:
                    await runtime.sleep(backoff(misses, 0.02, 1.0, 0.5 + runtime.random() / 2))

        return restarting(run, _log, _THREAD)

    def _on_failure(self, server: Server, error: Exception, first: bool) -> None:
        expected = isinstance(error, (OSError, Unavailable, wire.Malformed))
        level = logging.WARNING if first and not expected else logging.DEBUG
        _log.log(level, "push notifications unavailable, falling back to polling: %s", error)
        if isinstance(error, OSError) and not self._succeeded:
            self._servers.leave(server)

    def _listen(self, server: Server, runtime: Runtime, stop_flag: list[bool]) -> None:
        now = runtime.now
        stream = connect_blocking(server.address, server.tls, StreamParser(), now, now() + self._call_timeout)
        try:
            self._stream = stream
            if (registry := self._registry_ref()) is None or stop_flag:
                return
            stream.send(server.stream_request(registry.client_id), now() + self._call_timeout)
            del registry
            begin = stream.listen(self._call_timeout)
            if not isinstance(begin, Response) or not begin.is_stream:
                read_answers(begin.status, begin.body, -1, "http")  # raises what the server said
            while not stop_flag and self._registry_ref() is not None and self._servers.current is server:
                # A server sends something every HEARTBEAT_INTERVAL.
                event = stream.listen(HEARTBEAT_INTERVAL + self._call_timeout)
                if event != KEEP_ALIVE:
                    for notification in wire.notifications_from_json(wire.decode(event)):
                        self._on_notification(notification, server)
        finally:
            self._stream = None
            stream.close()

    def _on_notification(self, notification: wire.Notification, server: Server) -> None:
        registry = self._registry_ref()
        if registry is None:
            return
        match notification:
            case wire.Hello(traits):
                self._servers.traits = traits
                self._wake_waiters()  # wake-ups may have been lost meanwhile
                self.active, self._succeeded, self._failing = True, True, False
                self.wake_attempts()
            case wire.Wakeup(namespace, name, id_hash):
                # A claim still in the registry, even one about to leave, is released by its own caller.
                unknown_claim = None if registry.knows(id_hash) else make_unknown_claim(namespace, name, id_hash)
                registry.on_notification("reserved", id_hash, 0.0, unknown_claim)
            case wire.Lost(id_hash):
                registry.on_notification("broken", id_hash, 0.0, None)
            case wire.Moved():
                self._servers.leave(server)
                raise ConnectionResetError("the server is shutting down")

    def _wake_waiters(self) -> None:
        """Make all waiters attempt again."""
        if (registry := self._registry_ref()) is not None:
            for id_hash, _ in snapshot_items(registry.waiting):
                registry.on_notification("recheck", id_hash, 0.0, None)
