"""One watch stream per client, on which etcd reports changes of keys: the entry ahead of a waiter, and a holder's own.

The watch of an entry ahead starts at the current revision. etcd serves watches that start in the past, even by a single
change, only ten times a second. etcd reports the revision at which the watch started. If that is later than the
revision at which the queue was read, the watch may have missed a change, and the waiter reads the queue again. This
also makes a broken stream harmless: its watches start again at another member. A change at the very moment a watch
starts can still be delayed by that tick of a tenth of a second, so the first waiter reads once more soon after.

If a read finds an earlier entry gone, a watch that starts in the past shows how the entry ended.

A holder's own key is watched only after a moment, because most locks are released before a watch would pay off. That
watch does start in the past, at the grant. If etcd has compacted that revision, it starts at the oldest revision that
etcd still has; the next renewal detects an earlier loss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, Final, Literal, NamedTuple, TypeAlias
from weakref import ref

from leasehold.core.texts import server_text
from leasehold.core.timing import STABLE_AFTER, backoff
from leasehold.engines.etcd import messages
from leasehold.engines.etcd.grpc.connection import GrpcConnection
from leasehold.engines.etcd.grpc.frames import UNAUTHENTICATED, ConnectionBroken, GrpcStatus, GrpcStream
from leasehold.engines.etcd.grpc.hpack import encode_literal
from leasehold.engines.etcd.leases import EtcdLease
from leasehold.engines.etcd.rpc import HAS_LEADER, ClusterMemory, RpcClient
from leasehold.engines.etcd.url import EtcdUrl
from leasehold.engines.etcd.waiter_leases import WaiterLeases
from leasehold.errors import LeaseholdError
from leasehold.runtime.base import Mutex, Runtime, Signal, restarting

_log = logging.getLogger("leasehold.etcd")

_OWN_WATCH_DELAY: Final = 0.05
_POLL_INTERVAL: Final = 0.1  # how often the reader checks for due watches while new ones are likely
_ACTIVE_PERIOD: Final = 2.0  # new watches are likely for this long after the last one
_CONNECT_TIMEOUT: Final = 5.0
_RECONNECT_PAUSE: Final = 0.05
_MAX_RECONNECT_PAUSE: Final = 2.0
_RECHECK_SOON: Final = 0.003  # about the time in which a lock changes hands twice


ClaimKey: TypeAlias = tuple[str, str, str]  # namespace, name and id hash: an id may be in use for several names

# ahead: an entry ahead of a waiter; own: the claim's own key; past: an entry that was ahead and is gone.
WatchReason: TypeAlias = Literal["ahead", "own", "past"]


class KeyWatch(NamedTuple):
    watch_id: int
    claim_key: ClaimKey
    reason: WatchReason
    key: bytes
    end: bytes
    since_revision: int  # the revision at which the queue was read
    include_puts: bool
    is_next: bool  # for the first waiter: the change may come at any moment

    def request(self) -> bytes:
        filters, start = (
            () if self.include_puts else (messages.NO_PUTS,),
            0 if self.reason == "ahead" else self.since_revision + 1,
        )
        return messages.encode(
            messages.WatchRequest(messages.WatchCreateRequest(self.key, self.end, start, filters, 1, self.watch_id))
        )


# The watch and its event. None: a change may have been missed, so read the queue again after these seconds. If they are
# None, too: etcd has refused the watch, so poll.
WatchCallback: TypeAlias = "Callable[[KeyWatch, messages.WatchEvent | None, float | None], None]"


class Watcher:
    """Shared by the client's two engine instances. Its thread and connection start with the first watch."""

    def __init__(
        self,
        url: EtcdUrl,
        runtime: Runtime,
        memory: ClusterMemory,
        callback: WatchCallback,
        list_waiters_leases: Callable[[], list[EtcdLease]],
    ) -> None:
        self._url, self._runtime, self._memory, self._callback = url, runtime, memory, callback
        self._list_waiters_leases = list_waiters_leases
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: drop all watches and the parent's stream, and send nothing."""
        if (open_stream := getattr(self, "_open_stream", None)) is not None:
            open_stream[0].close_descriptor()
        self._mutex: Mutex = self._runtime.mutex()
        self._watch_ids = count(1)
        self._watches: dict[int, KeyWatch] = {}
        self._by_claim: dict[ClaimKey, set[int]] = {}
        self._deferred: dict[int, float] = {}  # watches not requested yet, and when they are due
        self._open_stream: tuple[GrpcConnection, GrpcStream] | None = None
        self._signal: Signal | None = None
        self._running = self._closed = False
        self._idle = False  # the thread sleeps until it is needed
        self.has_no_thread = False  # none could be started
        self._last_watch_at = 0.0
        self._waiter_leases = WaiterLeases(self._runtime.now, self._list_waiters_leases, _answer_time(self._memory))

    # ------------------------------------------------------- from any thread

    def watch_conflict(
        self, claim_key: ClaimKey, key: bytes, end: bytes, since_revision: int, *, include_puts: bool, is_next: bool
    ) -> None:
        """For a waiter: notify it once when this key (or, with `end`, any in the range) is deleted after
        `since_revision`. `include_puts`: or written. `is_next`: it is the first waiter."""
        with self._mutex:
            for old in self._watches_of(claim_key):
                if old.reason == "ahead" and (old.key, old.end, old.include_puts) == (key, end, include_puts):
                    return
                if old.reason == "ahead":
                    self._remove(old.watch_id)
            self._send(self._add(claim_key, "ahead", key, end, since_revision, include_puts, is_next).request())
        if self._signal is not None:
            self._signal.set()

    def watch_history(self, claim_key: ClaimKey, key: bytes, since_revision: int) -> None:
        """For a waiter: find out how this key ended, which still existed at `since_revision`."""
        with self._mutex:
            self._send(self._add(claim_key, "past", key, b"", since_revision, False, False).request())
        if self._signal is not None:
            self._signal.set()

    def watch_own(self, claim_key: ClaimKey, key: bytes, since_revision: int) -> None:
        """For a holder: report changes of its own key after `since_revision`. The watch starts after a moment."""
        with self._mutex:
            watch_id = self._add(claim_key, "own", key, b"", since_revision, True, False).watch_id
            self._deferred[watch_id] = self._last_watch_at + _OWN_WATCH_DELAY
            idle, self._idle = self._idle, False
        if idle and self._signal is not None:  # not for every lock: most need no watch
            self._signal.set()

    def keep_waiters(self) -> None:
        """For a waiter that has nothing to watch: keep its lease alive."""
        with self._mutex:
            self._ensure_thread()
        if self._signal is not None:
            self._signal.set()

    def _watches_of(self, claim_key: ClaimKey) -> list[KeyWatch]:
        """The caller holds the mutex."""
        found = map(self._watches.get, self._by_claim.get(claim_key, ()))
        return [key_watch for key_watch in found if key_watch is not None]  # None: Ctrl-C interrupted its removal

    def _add(
        self,
        claim_key: ClaimKey,
        reason: WatchReason,
        key: bytes,
        end: bytes,
        since_revision: int,
        include_puts: bool,
        is_next: bool,
    ) -> KeyWatch:
        """The caller holds the mutex."""
        new = KeyWatch(next(self._watch_ids), claim_key, reason, key, end, since_revision, include_puts, is_next)
        self._watches[new.watch_id] = new
        self._by_claim.setdefault(claim_key, set()).add(new.watch_id)
        self._last_watch_at = self._runtime.now()
        self._ensure_thread()
        return new

    def unwatch(self, claim_key: ClaimKey) -> None:
        with self._mutex:
            for old in self._watches_of(claim_key):
                self._remove(old.watch_id)

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            open_stream, self._open_stream = self._open_stream, None
        if open_stream is not None:
            open_stream[0].fail("closed")
        if self._signal is not None:
            self._signal.set()

    def __del__(self) -> None:
        self._closed = True
        if (signal := getattr(self, "_signal", None)) is not None:
            signal.set()

    def _ensure_thread(self) -> None:
        if not self._running and not self._closed:
            self._running = True
            try:
                watch_loop = _watch_loop(ref(self), self._url, self._memory)
                self._runtime.start_thread(restarting(watch_loop, _log, "the watch thread"), "leasehold-etcd-watch")
                self.has_no_thread = False
            except RuntimeError as error:  # the waiters poll, and the next watch tries again
                self._running, self.has_no_thread = False, True
                _log.debug("cannot start the watch thread, waiters poll: %s", error)
            except BaseException:
                self._running = False
                raise

    def _remove(self, watch_id: int) -> None:
        """The caller holds the mutex."""
        was_deferred = self._deferred.pop(watch_id, None) is not None  # first: each of these has its watch
        if (removed := self._watches.pop(watch_id, None)) is None:
            return
        watch_ids = self._by_claim[removed.claim_key]
        watch_ids.discard(watch_id)
        if not watch_ids:
            del self._by_claim[removed.claim_key]
        if not was_deferred:
            self._send(messages.encode(messages.WatchRequest(cancel=messages.WatchCancelRequest(watch_id))))

    def _send(self, request: bytes) -> None:
        """The caller holds the mutex. If sending fails, the next stream requests all current watches again."""
        if self._open_stream is not None:
            connection, stream = self._open_stream
            try:
                connection.send(stream, request)
            except (ConnectionBroken, LeaseholdError):
                self._open_stream = None

    # ------------------------------------------------------- on its thread

    def _send_due(self) -> float | None:
        """Request the watches that are due. Returns the seconds until the next check."""
        now = self._runtime.now()
        if self._deferred:
            with self._mutex:
                for watch_id, due_at in list(self._deferred.items()):
                    if due_at <= now:
                        del self._deferred[watch_id]
                        self._send(self._watches[watch_id].request())
        pauses = [_POLL_INTERVAL] if now < self._last_watch_at + _ACTIVE_PERIOD else []
        try:
            pause = self._waiter_leases.send_due(can_switch=len(self._url.endpoints) > 1)
        except (ConnectionBroken, LeaseholdError):
            pause = _POLL_INTERVAL  # the reader ends, or the server is about to close the connection
        return min(pauses + ([] if pause is None else [pause]), default=None)

    def _seconds_until_needed(self) -> float:
        """Seconds until a stream is needed. Negative: now."""
        with self._mutex:
            now = self._runtime.now()
            if len(self._watches) > len(self._deferred) or self._waiter_leases.is_needed:
                return -1.0
            self._idle = not self._deferred
            return min(self._deferred.values(), default=now + 3600.0) - now

    def _on_connected(self, connection: GrpcConnection) -> None:
        stream = _WatchStream(ref(self))
        metadata = HAS_LEADER
        if self._memory.auth_token:
            metadata += encode_literal(b"token", self._memory.auth_token.encode())
        connection.start(stream, messages.WATCH.path, metadata, None, False)
        connection.tick = _weak_tick(ref(self))
        self._waiter_leases.use(connection, metadata)
        with self._mutex:
            self._open_stream = (connection, stream)
            for watch_id, key_watch in self._watches.items():
                if watch_id not in self._deferred:
                    self._send(key_watch.request())

    def handle_message(self, message: bytes) -> None:
        try:
            response = messages.decode(messages.WatchResponse, message)
        except messages.MalformedReply:
            if self._open_stream is not None:
                self._open_stream[0].fail("etcd sent an invalid watch event")
            return
        key_watch = self._watches.get(response.watch_id)
        if key_watch is None:
            if response.created and response.canceled:
                self._on_watch_refused(response.cancel_reason)
            return
        if response.created and key_watch.reason == "ahead" and response.header:
            missed = response.header.revision > key_watch.since_revision
            if missed or key_watch.is_next:
                self._callback(key_watch, None, 0.0 if missed else _RECHECK_SOON)
        if response.events or response.canceled:
            self._notify(key_watch, response)

    def _on_watch_refused(self, cancel_reason: str) -> None:
        """etcd refused one of the watches and does not say which. If the login is stale, the stream is reopened with a
        new one. Otherwise all waiters read their queues again and request new watches."""
        open_stream = self._open_stream
        refused = GrpcStatus(UNAUTHENTICATED, cancel_reason)
        if open_stream is not None and self._url.user and self._memory.discard_stale_login(refused):
            open_stream[0].fail(server_text(cancel_reason))
            return
        with self._mutex:
            removed = [key_watch for key_watch in self._watches.values() if key_watch.reason != "own"]
            for key_watch in removed:
                self._remove(key_watch.watch_id)
        for key_watch in removed:
            self._callback(key_watch, None, None)

    def _notify(self, key_watch: KeyWatch, response: messages.WatchResponse) -> None:
        is_own = key_watch.reason == "own"
        if response.canceled or not is_own:  # a waiter reads the queue again, and watches again if it has to
            with self._mutex:
                self._remove(key_watch.watch_id)
        if response.canceled and is_own and response.compact_revision:
            self.watch_own(key_watch.claim_key, key_watch.key, response.compact_revision - 1)
        elif response.canceled:
            self._callback(key_watch, None, None)
        for event in response.events:
            self._callback(key_watch, event, 0.0)


class _WatchStream(GrpcStream):
    def __init__(self, watcher: ref[Watcher]) -> None:
        super().__init__(None, max_bytes=messages.WATCH.max_reply)
        self._watcher = watcher

    def on_message(self, message: bytes) -> None:
        """Any number of messages may come: none is kept."""
        if (live_watcher := self._watcher()) is not None:
            live_watcher.handle_message(message)

    def on_end(self, status: GrpcStatus) -> None:
        """Close the connection with its only stream."""
        if self.status is not None:
            return
        super().on_end(status)
        if (
            (live_watcher := self._watcher()) is not None
            and (open_stream := live_watcher._open_stream) is not None
            and open_stream[1] is self
        ):
            open_stream[0].fail(status.text or "the watch stream ended")
            live_watcher._memory.discard_stale_login(status)


def _answer_time(memory: ClusterMemory) -> Callable[[], float]:
    return lambda: memory.last_answer


def _weak_tick(watcher: ref[Watcher]) -> Callable[[], float | None]:
    def tick() -> float | None:
        return live_watcher._send_due() if (live_watcher := watcher()) is not None else None

    return tick


def _watch_loop(
    watcher: ref[Watcher], url: EtcdUrl, memory: ClusterMemory
) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
    """Holds only a weak reference to the watcher, so that an unused client can be collected."""

    async def run(runtime: Runtime) -> None:
        rpc, failures = RpcClient(url, runtime, memory), 0
        signal = runtime.signal()
        while True:
            if (live_watcher := watcher()) is None or live_watcher._closed:
                return
            live_watcher._signal = signal
            if (seconds := live_watcher._seconds_until_needed()) > 0:
                live_watcher = None
                await signal.wait(seconds)
                continue
            began, reader = runtime.now(), None
            try:
                connection = await rpc.connect_unshared(began + _CONNECT_TIMEOUT)
                try:
                    live_watcher._on_connected(connection)
                    reader = connection.make_reader()
                except BaseException:
                    connection.fail("the watch stream was not opened")
                    raise
                del connection
            except (ConnectionBroken, LeaseholdError) as error:
                _log.debug("cannot open the watch stream: %s", error)
            live_watcher = None
            if reader is not None:
                await reader(runtime)
            failures = 0 if runtime.now() > began + STABLE_AFTER else failures + 1
            await signal.wait(backoff(failures, _RECONNECT_PAUSE, _MAX_RECONNECT_PAUSE, 0.5 + runtime.random() / 2))

    return run
