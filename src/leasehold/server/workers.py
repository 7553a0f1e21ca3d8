"""Several workers of one host: processes that share the listening sockets, and pass wake-ups on to each other.

A client's stream and its attempts may reach different workers. The worker that gets the wake-up sends it to the worker
that has the stream, as a datagram over sockets that only these processes have. A worker that is busy takes only a few
hundred. A wake-up that it does not take is lost: then the client is slower and just as correct, because wake-ups are
hints (E4). All else is sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from leasehold.engines.remote import wire
from leasehold.errors import ConfigError
from leasehold.events import Event
from leasehold.server.feed import Feed
from leasehold.server.routes import ClientKey
from leasehold.server.service import Service

_MAX_DATAGRAM: Final = 65_536
_MAX_BATCH: Final = 49_152  # bytes of events in one datagram
_BATCH_SECONDS: Final = 0.05
_MAX_RENEWALS: Final = 25  # of one batch: others show a part of them if there are more than 500 a second
_MAX_UNSENT: Final = 20_000  # events for a worker that does not read
_MAX_TOLD: Final = 100  # streams of one datagram
_HELLO: Final[ClientKey] = ("", "")
_MAX_CATCH_UP: Final = 10.0  # seconds until a worker continues without the past, if no other worker sends it
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RESTART_PAUSE: Final = 1.0  # seconds before a worker that ended is replaced

_log = logging.getLogger("leasehold.server")


class Worker(NamedTuple):
    """What one worker needs to know."""

    number: int
    inbox: socket.socket  # datagrams for this worker
    outboxes: Sequence[socket.socket]  # one for each worker
    started: int  # a descriptor: a byte written there says that the worker serves
    alive: int  # a descriptor: at its end the parent is gone

    def on_started(self) -> None:
        os.write(self.started, b".")

    def watch_parent(self, on_gone: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self.alive)
            on_gone()

        loop.add_reader(self.alive, gone)


class _Message(msgspec.Struct, array_like=True):
    """A message between workers. `what`: hello; streams (opened and closed), notify (to one); events (the feed)."""

    what: str
    worker: int
    who: str = ""
    client: str = ""
    payload: Any = None


class WorkerRelay:
    """One worker's connection to the others. Knows which of them has which client's stream."""

    def __init__(self, worker: Worker, service: Service, feed: Feed) -> None:
        self._own, self._service, self._feed = worker.number, service, feed
        # A worker that replaces another learns the past from the others. Each event has the pid of its worker and a
        # number, because it may come from its own worker as well.
        self._past: deque[bytes] = deque(maxlen=_MAX_UNSENT)
        self._count = 0
        self._renewals = 0  # since the last batch
        self._before_live: list[Any] | None = []  # events until the past is complete; None: it is complete
        self._seen_past: set[tuple[int, ...]] = set()  # numbers of the events of the past
        self._unsent: dict[int, deque[bytes]] = {}  # by worker
        self._losses: deque[tuple[int, _Message]] = deque(maxlen=_MAX_UNSENT)  # notices of breaks, and for which worker
        self._sending: asyncio.TimerHandle | None = None
        self._inbox, self._outboxes = worker.inbox, worker.outboxes
        self._at: dict[ClientKey, int] = {}  # clients whose stream is at another worker
        self._others = [number for number in range(len(worker.outboxes)) if number != worker.number]
        # By worker: clients of which it is to hear whether their stream is here. `_HELLO`: it must first forget all
        # that it heard. A worker that never heard of the end of a stream would know its client for ever.
        self._untold: dict[int, dict[ClientKey, None]] = {number: {_HELLO: None} for number in self._others}
        self._decoder = msgspec.json.Decoder(_Message)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._inbox.fileno(), self._receive)
        self._feed.send_to_workers = self._send_event
        self._tell_others()
        asyncio.get_running_loop().call_later(_MAX_CATCH_UP, self._begin_live)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._inbox.fileno())
        if self._sending is not None:
            self._sending.cancel()

    # ------------------------------------------------------ for the service

    def opened(self, client: ClientKey) -> None:
        self._at.pop(client, None)
        self._tell_others(client)

    def closed(self, client: ClientKey) -> None:
        self._tell_others(client)

    def knows(self, client: ClientKey) -> bool:
        return client in self._at

    def notify(self, client: ClientKey, notification: wire.Notification) -> bool:
        """Send it to the worker that has the client's stream. False: none has, or it does not take it."""
        worker = self._at.get(client)
        if worker is None:
            return False
        message = _Message("notify", self._own, *client, wire.notification_to_json(notification))
        sent = self._send(worker, message)
        if not sent and isinstance(notification, wire.Lost):  # nothing else tells the holder before it renews
            self._losses.append((worker, message))
            self._send_soon()
        return sent

    # --------------------------------------------------------- for the feed

    def _send_event(self, event: Event, trace: str) -> None:
        """Events go in batches: a datagram for each would leave no room for wake-ups."""
        if event.kind == "renewed":
            self._renewals += 1
            if self._renewals > _MAX_RENEWALS:
                return
        self._count += 1
        encoded = msgspec.json.encode([(os.getpid(), self._count), trace, *event])
        self._past.append(encoded)
        for worker in self._others:
            self._queue_for(worker, [encoded])

    def _queue_for(self, worker: int, events: Iterable[bytes]) -> None:
        self._unsent.setdefault(worker, deque(maxlen=_MAX_UNSENT)).extend(events)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._sending is None:
            self._sending = asyncio.get_running_loop().call_later(_BATCH_SECONDS, self._send_waiting)

    def _send_waiting(self) -> None:
        """Send what fits into one datagram to each worker. What a worker does not accept now is sent later."""
        self._sending, self._renewals = None, 0
        for worker in self._others:
            self._tell(worker)
        self._losses = deque((each for each in self._losses if not self._send(*each)), _MAX_UNSENT)
        for worker, unsent in self._unsent.items():
            size = 0
            batch: list[msgspec.Raw] = []
            for encoded in unsent:
                size += len(encoded) + 1
                if batch and size > _MAX_BATCH:
                    break
                batch.append(msgspec.Raw(encoded))
            if batch and self._send(worker, _Message("events", self._own, payload=batch)):
                for _ in batch:
                    unsent.popleft()
        if self._losses or any(self._unsent.values()):
            self._send_soon()

    def _on_events(self, received: Iterable[Any]) -> None:
        """An event is a list. A number is the pid of a worker that has got all events before its start."""
        for each in received:
            if isinstance(each, int):
                if each == os.getpid():
                    self._begin_live()
            elif self._before_live is None:
                self._record(each)
            else:
                self._before_live.append(each)

    def _begin_live(self) -> None:
        """Record the events of the past, in order, and from now on each event as it arrives."""
        waiting, self._before_live = self._before_live, None
        for each in sorted(waiting or (), key=lambda each: each[2 + Event._fields.index("at")]):
            self._record(each)
            self._seen_past.add(tuple(each[0]))
        asyncio.get_running_loop().call_later(_MAX_CATCH_UP, self._seen_past.clear)

    def _record(self, received: list[Any]) -> None:
        """Record an event, unless it has already arrived among those of the past."""
        number, trace, *fields = received
        if tuple(number) not in self._seen_past:
            self._past.append(msgspec.json.encode(received))
            self._feed.pass_on_here(Event(*fields), trace)

    # ------------------------------------------------------ where streams are

    def _tell_others(self, *clients: ClientKey) -> None:
        for worker in self._others:
            self._tell(worker, *clients)

    def _tell(self, worker: int, *clients: ClientKey) -> None:
        """Tell a worker whether the streams of these clients, and of those before, are here: at once, or as soon as it
        accepts more."""
        untold, streams = self._untold[worker], self._service.streams
        untold.update(dict.fromkeys(clients))
        if len(untold) > _MAX_UNSENT:  # it has not read for long
            untold.clear()
            untold.update(dict.fromkeys((_HELLO, *streams)))
        while untold:
            says_hello = _HELLO in untold
            told = [_HELLO] if says_hello else list(itertools.islice(untold, _MAX_TOLD))
            if says_hello:
                needs_past = self._before_live is not None
                message = _Message("hello", self._own, payload=os.getpid() if needs_past else None)
            else:
                message = _Message("streams", self._own, payload=[(*client, client in streams) for client in told])
            if not self._send(worker, message):
                self._send_soon()
                return
            for client in told:
                del untold[client]

    # -------------------------------------------------------------- datagrams

    def _send(self, worker: int, message: _Message) -> bool:
        try:
            self._outboxes[worker].send(msgspec.json.encode(message))
        except OSError:  # it is too busy, or being replaced
            return False
        return True

    def _receive(self) -> None:
        for _ in range(100):  # then let other work run
            try:
                message = self._decoder.decode(self._inbox.recv(_MAX_DATAGRAM))
            except BlockingIOError:
                return
            except (OSError, msgspec.DecodeError) as error:
                _log.error("a message of another worker cannot be read: %s", error)
                return
            self._handle(message)

    def _handle(self, message: _Message) -> None:
        match message.what:
            case "hello":  # it has just started: what its predecessor had is gone, and it does not know our streams
                for lost in [each for each, worker in self._at.items() if worker == message.worker]:
                    self._gone(lost)
                for stream in self._service.streams.values():
                    # The predecessor was to wake waiters whose stream is here: let them attempt again.
                    stream.push(wire.Hello(self._service.engine.traits))
                self._tell(message.worker, *self._service.streams)
                is_lowest = self._own == min({*range(len(self._outboxes))} - {message.worker})
                if is_lowest and message.payload is not None:
                    self._queue_for(message.worker, [*self._past, b"%d" % message.payload])
            case "streams":
                for who, client_id, is_open in message.payload:
                    self._on_stream((who, client_id), message.worker, is_open)
            case "notify":
                client = (message.who, message.client)
                for notification in wire.notifications_from_json([message.payload]):
                    if not self._service.notify_here(client, notification):
                        self._tell(message.worker, client)
            case "events":
                self._on_events(message.payload)

    def _on_stream(self, client: ClientKey, worker: int, is_open: bool) -> None:
        if is_open:
            self._at[client] = worker
            self._service.end_stream(client)  # an earlier one, here
        elif self._at.get(client) == worker:
            self._gone(client)

    def _gone(self, client: ClientKey) -> None:
        del self._at[client]
        self._service.on_stream_gone(client)


class Workers:
    """The parent of the workers: starts them, replaces one that ends, and passes signals on."""

    def __init__(self, count: int, run: Callable[[Worker], None]) -> None:
        self._count, self._run_worker = count, run
        self._pids: dict[int, int] = {}  # pid -> worker
        self._ending = False

    def run(self, on_started: Callable[[], None]) -> None:
        """Return when all workers have ended after a signal. Raises ConfigError if one cannot start."""
        self._started, self._alive = os.pipe(), os.pipe()
        # Made before any worker, so that a worker that replaces another has the same.
        self._boxes = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(self._count)]
        for sock in itertools.chain(*self._boxes):
            sock.setblocking(False)
        try:
            for number in _SIGNALS:
                signal.signal(number, self._pass_on)
            for worker in range(self._count):
                self._start(worker)
            started = self._await_started()
            if started:
                on_started()
            self._supervise()
            if not started:
                raise ConfigError("a worker could not start: its log lines above say why")
        finally:
            for descriptor in (*self._started, *self._alive):
                os.close(descriptor)
            for sock in itertools.chain(*self._boxes):
                sock.close()

    def _start(self, worker: int) -> None:
        # Blocked: the parent's handler must know the pid, and must not run in the child.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        pid = os.fork()
        if pid:
            self._pids[pid] = worker
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            return
        code = 1
        try:
            os.close(self._alive[1])  # now only the parent has it open
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            outboxes = [outbox for _, outbox in self._boxes]
            self._run_worker(Worker(worker, self._boxes[worker][0], outboxes, self._started[1], self._alive[0]))
            code = 0
        except ConfigError as error:
            _log.error("%s", error)
        except BaseException as error:
            _log.error("a worker failed", exc_info=error)
        finally:
            os._exit(code)  # never returns into the parent's code

    def _await_started(self) -> bool:
        """Whether every worker serves. If one ends before that, the others are ended too."""
        waiting = self._count
        os.set_blocking(self._started[0], False)
        while waiting and not self._ending:
            with contextlib.suppress(BlockingIOError):
                waiting -= len(os.read(self._started[0], waiting))
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                del self._pids[pid]
                self._end()
                return False
            time.sleep(0.01)
        return True

    def _supervise(self) -> None:
        while self._pids:
            pid, status = os.waitpid(-1, 0)
            worker = self._pids.pop(pid, None)
            if worker is not None and not self._ending:
                _log.error("worker %d ended with status %d: it is replaced", worker, os.waitstatus_to_exitcode(status))
                time.sleep(_RESTART_PAUSE)
                if not self._ending:
                    self._start(worker)

    def _pass_on(self, number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            self._signal(signal.SIGHUP)
        else:
            self._end()

    def _end(self) -> None:
        self._ending = True
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for pid in list(self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
