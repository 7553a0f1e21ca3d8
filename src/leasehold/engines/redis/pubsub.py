"""Wake-ups: one subscription per client, for its waiters (`reserved`, `recheck`) and its holders (`broken`).

The listener has a thread of its own, even under asyncio: a holder is notified of a break even while the loop is
blocked. A client is reachable if the server counts a subscriber, and the script that decides reads that count. After a
disconnect the listener subscribes again, and every waiter attempts once: notifications sent meanwhile are lost. Without
a subscription, waiters poll (E4).

The listener keeps the times at which heads of queues must re-check (`RecheckTimer`).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, Protocol, cast
from weakref import ref

import hiredis

from leasehold.core.timing import HEARTBEAT_INTERVAL, WAKEUP_SLACK, backoff
from leasehold.engines.listener_thread import ListenerThread, PushStatus
from leasehold.engines.redis.protocol import parse_key
from leasehold.engines.redis.scripts import MICROS, PubSubCommands
from leasehold.engines.redis.server import CONNECTION_ERRORS, encode_command
from leasehold.engines.registry import ClaimRegistry, RecheckTimer, make_unknown_claim, snapshot_items
from leasehold.engines.repeated_logs import log_once
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.runtime.base import Runtime, log_unexpected, restarting
from leasehold.runtime.net.blocking import WOKEN, SelfPipe, SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_log = logging.getLogger("leasehold.redis")

_NOTIFICATION_KINDS: Final[dict[bytes, Literal["reserved", "broken"]]] = {b"reserved": "reserved", b"broken": "broken"}
_MESSAGES: Final = (b"message", b"smessage")


class Subscription(Protocol):
    """One channel: the client's, or in a cluster the client's for one bucket."""

    active: bool  # wake-ups reach this client

    def start(self) -> None:
        """Make sure that the listener runs."""

    async def wait_active(self, runtime: Runtime, deadline: float) -> None:
        """Return when subscribed, or when that fails or takes too long. Without it waiters are only slower."""

    def reconnect_if_lost(self, not_subscribed: bool) -> bool:
        """`not_subscribed`: by its reply, the server does not count this client as a subscriber. Returns True if the
        connection must be dead, and drops it. If the server does not count the next one either, it is kept: some
        proxies hide the count."""


class Subscriptions(Protocol):
    """All subscriptions of a client, shared by its engine instances."""

    def for_bucket(self, tag: str) -> Subscription:
        """The subscription for the names of this bucket."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Connector(Protocol):
    """Opens a listener's connection: to a fixed server, or to the current primary."""

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream: ...

    def map_error(self, error: Exception) -> LeaseholdError: ...


class BaseSubscription(PushStatus):
    """What all subscriptions have in common."""

    def __init__(self) -> None:
        super().__init__()
        self._was_uncounted = False  # the server did not count this subscriber

    @abstractmethod
    def drop_connection(self) -> None:
        """Close the connection, from any thread: the listener opens a new one."""

    def reconnect_if_lost(self, not_subscribed: bool) -> bool:
        if not not_subscribed:
            self._was_uncounted = False
        elif not self._was_uncounted:
            self._was_uncounted, self.active = True, False
            self.drop_connection()
            return True
        return False


class PubSubListener(ListenerThread, BaseSubscription):
    """One connection and one channel, for all names of one server."""

    _thread_name = "leasehold-redis"
    _thread_log = _log
    self_pipe: SelfPipe | None = None

    def __init__(
        self,
        server: Connector,
        pubsub_commands: PubSubCommands,
        runtime: Runtime,
        registry: ClaimRegistry,
        call_timeout: float,
    ) -> None:
        self._server, self._pubsub_commands, self._runtime = server, pubsub_commands, runtime
        # When the client is garbage-collected, the listener stops.
        self._registry_ref, self._call_timeout = ref(registry, lambda _: self.close()), call_timeout
        self.after_fork()

    def after_fork(self) -> None:
        self._reset_thread()
        super().__init__()
        self._recheck_timer = RecheckTimer()

    def for_bucket(self, tag: str) -> Subscription:
        return self

    # ------------------------------------------------------- on its thread

    def _run(self, stop_flag: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        async def run(runtime: Runtime) -> None:
            misses = 0
            while not stop_flag and self._registry_ref() is not None:
                failed_unexpectedly, began = False, runtime.now()
                try:
                    await self._listen(runtime, stop_flag)
                except (*CONNECTION_ERRORS, LeaseholdError) as error:
                    expected = isinstance(error, (*CONNECTION_ERRORS, Unavailable))
                    level = logging.DEBUG if expected or misses else logging.WARNING
                    text = f"push notifications unavailable, falling back to polling: {error}"
                    log_once(_log, level, text)
                except Exception as error:  # without this thread no waiter is woken
                    log_unexpected(_log, "the thread for push notifications", error)
                    failed_unexpectedly = True  # even if it had subscribed: the pauses must become longer
                misses = self._count_misses(misses, runtime.now() - began, failed_unexpectedly)
                self._on_disconnect()
                if (registry := self._registry_ref()) is not None:
                    self._recheck_timer.wake_due(registry, float("inf"))  # waiters now have to keep the time themselves
                    del registry
                if not stop_flag:
                    await runtime.sleep(backoff(misses, 0.02, 1.0, 0.5 + runtime.random() / 2))

        return restarting(run, _log, "the thread for push notifications")

    async def _listen(self, runtime: Runtime, stop_flag: list[bool]) -> None:
        stream = cast(SocketStream, await self._open(runtime))
        try:
            self._stream = stream
            if (registry := self._registry_ref()) is None or stop_flag:
                return
            commands = self._subscribe_commands(registry.client_id)
            del registry
            stream.send(commands, runtime.now() + self._call_timeout)
            await self._on_push(stream.listen(self._call_timeout), runtime)
            ping_at, pinged = runtime.now() + HEARTBEAT_INTERVAL, False
            while not stop_flag and (registry := self._registry_ref()) is not None:
                now = runtime.now()
                self._recheck_timer.wake_due(registry, now)
                del registry
                try:
                    # Even after a long pause of this process: read what has arrived before declaring a timeout.
                    reply = stream.listen(
                        max(WAKEUP_SLACK, min(ping_at, self._recheck_timer.next_due()) - now), self.self_pipe
                    )
                except TimeoutError:
                    if runtime.now() < ping_at:
                        continue  # a waiter must re-check, even while the reply to PING is pending
                    if pinged:
                        raise
                    await self._on_idle(runtime)  # idle or dead: PING tells which
                    stream.send(encode_command("PING"), runtime.now() + self._call_timeout)
                    ping_at, pinged = runtime.now() + self._call_timeout, True
                    continue
                if reply is not WOKEN:
                    ping_at, pinged = runtime.now() + HEARTBEAT_INTERVAL, False
                await self._on_push(reply, runtime)
        finally:
            self._stream = None
            stream.close()

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        return await self._server.open(runtime, runtime.now() + self._call_timeout)

    def _subscribe_commands(self, client: str) -> bytes:
        """The commands that subscribe."""
        return encode_command(self._pubsub_commands.subscribe, f"{self._pubsub_commands.channel_prefix('')}{client}")

    async def _on_idle(self, runtime: Runtime) -> None:
        """Called when no message has arrived for a while."""

    async def _on_push(self, reply: Any, runtime: Runtime) -> None:
        registry = self._registry_ref()
        if reply.__class__ is list:  # first what comes with every hand-off
            if registry is None or len(reply) < 2:
                return
            if reply[0] in _MESSAGES:
                if len(reply) == 3 and isinstance(reply[2], bytes):
                    self._on_notification(registry, reply[2])
            elif reply[0] == self._pubsub_commands.subscribe.lower().encode():
                self._on_subscribed(registry)
        elif isinstance(reply, hiredis.ReplyError):
            raise self._server.map_error(reply)
        elif reply is not WOKEN:  # a server may send such replies without end
            raise ConnectionAbortedError("the server sent a reply that is not a message")

    def _on_subscribed(self, registry: ClaimRegistry) -> None:
        self.active, self._succeeded, self._failing = True, True, False
        self.wake_attempts()
        for id_hash, _ in snapshot_items(registry.waiting):  # wake-ups may have been lost meanwhile
            registry.on_notification("recheck", id_hash, 0.0, None)

    def _on_notification(self, registry: ClaimRegistry, message: bytes) -> None:
        """A message from a script: kind, microseconds, key, id hash."""
        try:
            kind, after, key, raw = message.split(b" ", 3)
            id_hash = raw.hex()
            if kind == b"recheck":
                self._recheck_timer.schedule(
                    registry, id_hash, self._runtime.now() + int(after) / MICROS + WAKEUP_SLACK
                )
            elif kind in _NOTIFICATION_KINDS:
                # A claim still in the registry, even one about to leave, is released by its own caller.
                name_id = None if registry.knows(id_hash) else parse_key(key.decode())
                unknown_claim = name_id and make_unknown_claim(*name_id, id_hash)
                registry.on_notification(_NOTIFICATION_KINDS[kind], id_hash, 0.0, unknown_claim)
        except (ValueError, OverflowError):  # not our format
            return

    def _on_disconnect(self) -> None:
        self.active = False
        if self._failing:
            self.wake_attempts()
