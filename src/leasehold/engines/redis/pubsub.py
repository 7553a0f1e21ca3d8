"""Wake-ups: one subscription of a client, for its waiters (`go`, `head`) and for its holders (`lost`).

It has a thread of its own, also under asyncio: a break is told even while the loop is blocked. Whether a client can be
told is the server's own count of subscribers, taken inside the script that decides. A subscription that broke is made
anew, and everybody in line looks once: what was said meanwhile is lost. Without one a waiter asks now and then (E4).

Each hand-off makes another waiter the head of its line, which is to look later, unless its turn comes first: as a rule
that is so, and it is not woken only to sleep on (`RecheckTimer`).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from heapq import heapify, heappop, heappush
from typing import Any, Final, Literal, Protocol, cast
from weakref import ref

import hiredis

from leasehold.core.timing import HEARTBEAT_INTERVAL, WAITER_TTL, WAKEUP_SLACK, backoff
from leasehold.engines.redis.protocol import parse_key
from leasehold.engines.redis.scripts import MICROS, PubSubCommands
from leasehold.engines.redis.server import CONNECTION_ERRORS, encode_command
from leasehold.engines.registry import ClaimRegistry, snapshot_items
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.net.blocking import WOKEN, SelfPipe, SocketStream
from leasehold.runtime.net.event_loop import LoopStream

_log = logging.getLogger("leasehold.redis")

_SUBSCRIBE_TIMEOUT: Final = 1.0  # how long an attempt waits for a subscription that does not come
_NOTIFICATION_KINDS: Final[dict[bytes, Literal["go", "lost"]]] = {b"go": "go", b"lost": "lost"}
_MAX_STALE_RECHECKS: Final = 64  # looks of waiters long gone that may be kept


class Subscription(Protocol):
    """One channel: that of the client, or in a cluster that of the client for one bucket."""

    active: bool  # wake-ups reach this client

    def start(self) -> None:
        """See that it listens, or tries to."""

    async def wait_active(self, runtime: Runtime, deadline: float) -> None:
        """Once it listens, unless that fails or takes too long: without it a waiter still gets its turn, only later."""

    def reconnect_if_lost(self, not_subscribed: bool) -> bool:
        """Told by a reply whether the server counts this client among its subscribers. True: it does not, though it
        should: the connection is dead and nobody said so. One made anew that is not counted either is no reason to try
        again for ever: some proxies hide the count."""


class Subscriptions(Protocol):
    """All ears of a client: on the shelf of its book, shared by both twins."""

    def for_bucket(self, tag: str) -> Subscription:
        """For the names of this bucket."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Connector(Protocol):
    """Where a listener connects to: a server, or whoever it is at the time."""

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream: ...

    def map_error(self, error: Exception) -> LeaseholdError: ...


class BaseSubscription(ABC):
    """What every ear does the same way."""

    def __init__(self) -> None:
        self.active = False
        self._was_uncounted = False  # the server did not count it
        self._waiters: list[Signal] = []

    @property
    @abstractmethod
    def failing(self) -> bool:
        """It could not be had, the last time."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def drop_connection(self) -> None:
        """End its connection, from any thread: it makes a new one."""

    async def wait_active(self, runtime: Runtime, deadline: float) -> None:
        self.start()
        signal = runtime.signal()
        self._waiters.append(signal)
        if not self.active and not self.failing:
            await signal.wait(min(deadline - runtime.now(), _SUBSCRIBE_TIMEOUT))

    def reconnect_if_lost(self, not_subscribed: bool) -> bool:
        if not not_subscribed:
            self._was_uncounted = False
        elif not self._was_uncounted:
            self._was_uncounted, self.active = True, False
            self.drop_connection()
            return True
        return False

    def wake_waiters(self) -> None:
        waiters, self._waiters = self._waiters, []
        for signal in waiters:
            signal.set()


class RecheckTimer:
    """Heads of a line, and when each is to look. Used by the thread that listens."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []  # a heap; may name those who left, or asked again since

    def schedule(self, registry: ClaimRegistry, id_hash: str, at: float) -> None:
        if (waiter := registry.waiting.get(id_hash)) is None:
            return
        waiter.recheck_at = at  # if it wakes before that, for whatever reason, it knows
        heappush(self._due, (at, id_hash))
        if len(self._due) > _MAX_STALE_RECHECKS + 2 * len(registry.waiting):
            self._due = [entry for entry in self._due if entry[1] in registry.waiting]
            heapify(self._due)

    def wake_due(self, registry: ClaimRegistry, now: float) -> None:
        """Those whose time has come."""
        while self._due and self._due[0][0] <= now:
            at, id_hash = heappop(self._due)
            if (waiter := registry.waiting.get(id_hash)) is not None and waiter.recheck_at == at:
                waiter.signal.set()

    def next_due(self) -> float:
        return self._due[0][0] if self._due else float("inf")


class PubSubListener(BaseSubscription):
    """One connection, one channel: enough for all names where one server has them all."""

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
        self._registry_ref, self._call_timeout = (
            ref(registry, lambda _: self.close()),
            call_timeout,
        )  # a dropped client listens no more
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: the thread is not here, and the connection is the parent's."""
        if (stream := getattr(self, "_stream", None)) is not None:
            stream.after_fork()
        super().__init__()
        self._mutex = self._runtime.mutex()
        self._stream: SocketStream | None = None
        self._running = self._succeeded = self._failing = False
        self._recheck_timer = RecheckTimer()
        self._stop_flag: list[bool] = []  # of the thread that runs: not empty, it is to end

    @property
    def failing(self) -> bool:
        return self._failing

    def for_bucket(self, tag: str) -> Subscription:
        return self

    def start(self) -> None:
        if self._running:
            return
        with self._mutex:
            if self._running:
                return
            self._running, self._stop_flag = True, []
        try:
            self._runtime.start_thread(self._run(self._stop_flag), "leasehold-redis")
        except BaseException as error:  # whoever comes next tries again
            self._running, self._failing = False, True
            if not isinstance(error, RuntimeError):
                raise
            _log.warning("no thread can be started to listen for wake-ups: waiters look now and then")

    def drop_connection(self) -> None:
        if self._stream is not None:
            self._stream.shutdown()

    def close(self) -> None:
        self._stop_flag.append(True)
        self.drop_connection()

    # ------------------------------------------------------- on its thread

    def _run(self, stop_flag: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        async def run(runtime: Runtime) -> None:
            misses = 0
            while not stop_flag and self._registry_ref() is not None:
                try:
                    await self._listen(runtime, stop_flag)
                except Exception as error:  # whatever it was: without this thread nobody is woken again
                    expected = isinstance(error, (*CONNECTION_ERRORS, Unavailable))
                    level = logging.DEBUG if expected or misses else logging.WARNING
                    _log.log(level, "no wake-ups reach this client, so its waiters look now and then: %s", error)
                succeeded, self._succeeded = self._succeeded, False
                misses = 0 if succeeded else misses + 1
                self._failing = not succeeded  # one that was lost is had again in a moment, and worth waiting for
                self._on_disconnect()
                if (registry := self._registry_ref()) is not None:
                    self._recheck_timer.wake_due(
                        registry, float("inf")
                    )  # from here on they have to watch the time themselves
                    del registry
                if not stop_flag:
                    await runtime.sleep(backoff(misses, 0.02, 1.0, 0.5 + runtime.random() / 2))

        return run

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
                    # After a pause too: what has come by then is read before it is judged missing.
                    reply = stream.listen(
                        max(WAKEUP_SLACK, min(ping_at, self._recheck_timer.next_due()) - now), self.self_pipe
                    )
                except TimeoutError:
                    if runtime.now() < ping_at:
                        continue  # somebody is to look, also while an answer is awaited
                    if pinged:
                        raise
                    await self._on_idle(runtime)  # nothing to say, or nobody there: only asking tells
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
        """What it subscribes to."""
        return encode_command(self._pubsub_commands.subscribe, f"{self._pubsub_commands.channel_prefix('')}{client}")

    async def _on_idle(self, runtime: Runtime) -> None:
        """Nothing was said for a while."""

    async def _on_push(self, reply: Any, runtime: Runtime) -> None:
        registry = self._registry_ref()
        if registry is None or not isinstance(reply, list) or len(reply) < 2:
            if isinstance(reply, hiredis.ReplyError):
                raise self._server.map_error(reply)
            return
        if reply[0] == self._pubsub_commands.subscribe.lower().encode():
            self._on_subscribed(registry)
        elif reply[0] in (b"message", b"smessage") and len(reply) == 3 and isinstance(reply[2], bytes):
            self._on_notification(registry, reply[2])

    def _on_subscribed(self, registry: ClaimRegistry) -> None:
        self.active, self._succeeded, self._failing = True, True, False
        self.wake_waiters()
        for id_hash, _ in snapshot_items(registry.waiting):  # their turn may have come while nobody could tell them
            registry.on_notification("head", id_hash, 0.0, None)

    def _on_notification(self, registry: ClaimRegistry, message: bytes) -> None:
        """A message of a script's: kind, microseconds, key, mark."""
        with suppress(ValueError, OverflowError):  # not ours
            kind, after, key, raw = message.split(b" ", 3)
            id_hash = raw.hex()
            if kind == b"head":
                self._recheck_timer.schedule(
                    registry, id_hash, self._runtime.now() + int(after) / MICROS + WAKEUP_SLACK
                )
            elif kind in _NOTIFICATION_KINDS:
                # Whoever knows it now releases it, also one that is just leaving.
                name_id = None if registry.knows(id_hash) else parse_key(key.decode())
                unknown_claim = name_id and Claim(*name_id, "", id_hash, Holder("stray"), WAITER_TTL)
                registry.on_notification(_NOTIFICATION_KINDS[kind], id_hash, 0.0, unknown_claim)

    def _on_disconnect(self) -> None:
        self.active = False
        if self._failing:
            self.wake_waiters()
