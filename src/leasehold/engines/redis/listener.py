"""Wake-ups: one subscription of a client, for its waiters (`go`, `head`) and for its holders (`lost`).

It has a thread of its own, also under asyncio: a break is told even while the loop is blocked. Whether a client can be
told is the server's own count of subscribers, taken inside the script that decides. A subscription that broke is made
anew, and everybody in line looks once: what was said meanwhile is lost. Without one a waiter asks now and then (E4).

Each hand-off makes another waiter the head of its line, which is to look later, unless its turn comes first: as a rule
that is so, and it is not woken only to sleep on (`Looks`).
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

from leasehold.book import Book, every
from leasehold.core.timing import BEAT, BEAT_EVERY, LATE, backoff
from leasehold.engines.redis.requests import named
from leasehold.engines.redis.scripts import MICROS, Publishing
from leasehold.engines.redis.server import BROKEN, pack
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.model import Claim, Holder
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.streams import NUDGED, Nudge, SocketStream

_log = logging.getLogger("leasehold.redis")

_PATIENCE: Final = 1.0  # how long an attempt waits for a subscription that does not come
_KINDS: Final[dict[bytes, Literal["go", "lost"]]] = {b"go": "go", b"lost": "lost"}
_STALE: Final = 64  # looks of waiters long gone that may be kept


class Ear(Protocol):
    """One channel: that of the client, or in a cluster that of the client for one bucket."""

    on: bool  # wake-ups reach this client

    def start(self) -> None:
        """See that it listens, or tries to."""

    async def ready(self, runtime: Runtime, deadline: float) -> None:
        """Once it listens, unless that fails or takes too long: without it a waiter still gets its turn, only later."""

    def miscounted(self, unheard: bool) -> bool:
        """Told by a reply whether the server counts this client among its subscribers. True: it does not, though it
        should: the connection is dead and nobody said so. One made anew that is not counted either is no reason to try
        again for ever: some proxies hide the count."""


class Listening(Protocol):
    """All ears of a client: on the shelf of its book, shared by both twins."""

    def at(self, tag: str) -> Ear:
        """For the names of this bucket."""

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


class Opens(Protocol):
    """Where a listener connects to: a server, or whoever it is at the time."""

    async def open(self, runtime: Runtime, deadline: float) -> SocketStream | LoopStream: ...

    def refusal(self, error: Exception) -> LeaseholdError: ...


class Hearing(ABC):
    """What every ear does the same way."""

    def __init__(self) -> None:
        self.on = False
        self._doubted = False  # the server did not count it
        self._waiting: list[Signal] = []

    @property
    @abstractmethod
    def failing(self) -> bool:
        """It could not be had, the last time."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def shut(self) -> None:
        """End its connection, from any thread: it makes a new one."""

    async def ready(self, runtime: Runtime, deadline: float) -> None:
        self.start()
        signal = runtime.signal()
        self._waiting.append(signal)
        if not self.on and not self.failing:
            await signal.wait(min(deadline - runtime.now(), _PATIENCE))

    def miscounted(self, unheard: bool) -> bool:
        if not unheard:
            self._doubted = False
        elif not self._doubted:
            self._doubted, self.on = True, False
            self.shut()
            return True
        return False

    def wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            each.set()


class Looks:
    """Heads of a line, and when each is to look. Used by the thread that listens."""

    def __init__(self) -> None:
        self._due: list[tuple[float, str]] = []  # a heap; may name those who left, or asked again since

    def note(self, book: Book, mark: str, at: float) -> None:
        if (waiter := book.waiting.get(mark)) is None:
            return
        waiter.look_at = at  # if it wakes before that, for whatever reason, it knows
        heappush(self._due, (at, mark))
        if len(self._due) > _STALE + 2 * len(book.waiting):
            self._due = [each for each in self._due if each[1] in book.waiting]
            heapify(self._due)

    def wake(self, book: Book, now: float) -> None:
        """Those whose time has come."""
        while self._due and self._due[0][0] <= now:
            at, mark = heappop(self._due)
            if (waiter := book.waiting.get(mark)) is not None and waiter.look_at == at:
                waiter.signal.set()

    def first(self) -> float:
        return self._due[0][0] if self._due else float("inf")


class Listener(Hearing):
    """One connection, one channel: enough for all names where one server has them all."""

    nudge: Nudge | None = None

    def __init__(self, server: Opens, publishing: Publishing, runtime: Runtime, book: Book, patience: float) -> None:
        self._server, self._publishing, self._runtime = server, publishing, runtime
        self._book, self._patience = ref(book, lambda _: self.close()), patience  # a dropped client listens no more
        self.after_fork()

    def after_fork(self) -> None:
        """In a forked child: the thread is not here, and the connection is the parent's."""
        if (stream := getattr(self, "_stream", None)) is not None:
            stream.after_fork()
        super().__init__()
        self._guard = self._runtime.guard()
        self._stream: SocketStream | None = None
        self._running = self._heard = self._failing = False
        self._looks = Looks()
        self._ended: list[bool] = []  # of the thread that runs: not empty, it is to end

    @property
    def failing(self) -> bool:
        return self._failing

    def at(self, tag: str) -> Ear:
        return self

    def start(self) -> None:
        if self._running:
            return
        with self._guard:
            if self._running:
                return
            self._running, self._ended = True, []
        try:
            self._runtime.aside(self._run(self._ended), "leasehold-redis")
        except BaseException as error:  # whoever comes next tries again
            self._running, self._failing = False, True
            if not isinstance(error, RuntimeError):
                raise
            _log.warning("no thread can be started to listen for wake-ups: waiters look now and then")

    def shut(self) -> None:
        if self._stream is not None:
            self._stream.shut()

    def close(self) -> None:
        self._ended.append(True)
        self.shut()

    # ------------------------------------------------------- on its thread

    def _run(self, ended: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        async def run(runtime: Runtime) -> None:
            misses = 0
            while not ended and self._book() is not None:
                try:
                    await self._listen(runtime, ended)
                except Exception as error:  # whatever it was: without this thread nobody is woken again
                    foreseen = isinstance(error, (*BROKEN, Unavailable))
                    level = logging.DEBUG if foreseen or misses else logging.WARNING
                    _log.log(level, "no wake-ups reach this client, so its waiters look now and then: %s", error)
                heard, self._heard = self._heard, False
                misses = 0 if heard else misses + 1
                self._failing = not heard  # one that was lost is had again in a moment, and worth waiting for
                self._hung_up()
                if (book := self._book()) is not None:
                    self._looks.wake(book, float("inf"))  # from here on they have to watch the time themselves
                    del book
                if not ended:
                    await runtime.sleep(backoff(misses, 0.02, 1.0, 0.5 + runtime.fraction() / 2))

        return run

    async def _listen(self, runtime: Runtime, ended: list[bool]) -> None:
        stream = cast(SocketStream, await self._open(runtime))
        try:
            self._stream = stream
            if (book := self._book()) is None or ended:
                return
            wishes = self._wishes(book.client)
            del book
            stream.send(wishes, runtime.now() + self._patience)
            await self._hear(stream.listen(self._patience), runtime)
            quiet, asked = runtime.now() + BEAT_EVERY, False
            while not ended and (book := self._book()) is not None:
                now = runtime.now()
                self._looks.wake(book, now)
                del book
                try:
                    # After a pause too: what has come by then is read before it is judged missing.
                    said = stream.listen(max(LATE, min(quiet, self._looks.first()) - now), self.nudge)
                except TimeoutError:
                    if runtime.now() < quiet:
                        continue  # somebody is to look, also while an answer is awaited
                    if asked:
                        raise
                    await self._idle(runtime)  # nothing to say, or nobody there: only asking tells
                    stream.send(pack("PING"), runtime.now() + self._patience)
                    quiet, asked = runtime.now() + self._patience, True
                    continue
                if said is not NUDGED:
                    quiet, asked = runtime.now() + BEAT_EVERY, False
                await self._hear(said, runtime)
        finally:
            self._stream = None
            stream.close()

    async def _open(self, runtime: Runtime) -> SocketStream | LoopStream:
        return await self._server.open(runtime, runtime.now() + self._patience)

    def _wishes(self, client: str) -> bytes:
        """What it subscribes to."""
        return pack(self._publishing.subscribe, f"{self._publishing.channel('')}{client}")

    async def _idle(self, runtime: Runtime) -> None:
        """Nothing was said for a while."""

    async def _hear(self, said: Any, runtime: Runtime) -> None:
        book = self._book()
        if book is None or not isinstance(said, list) or len(said) < 2:
            if isinstance(said, hiredis.ReplyError):
                raise self._server.refusal(said)
            return
        if said[0] == self._publishing.subscribe.lower().encode():
            self._subscribed(book)
        elif said[0] in (b"message", b"smessage") and len(said) == 3 and isinstance(said[2], bytes):
            self._told(book, said[2])

    def _subscribed(self, book: Book) -> None:
        self.on, self._heard, self._failing = True, True, False
        self.wake()
        for mark, _ in every(book.waiting):  # their turn may have come while nobody could tell them
            book.deliver("head", mark, 0.0, None)

    def _told(self, book: Book, message: bytes) -> None:
        """A message of a script's: kind, microseconds, key, mark."""
        with suppress(ValueError, OverflowError):  # not ours
            kind, after, key, raw = message.split(b" ", 3)
            mark = raw.hex()
            if kind == b"head":
                self._looks.note(book, mark, self._runtime.now() + int(after) / MICROS + LATE)
            elif kind in _KINDS:
                # Whoever knows it now releases it, also one that is just leaving.
                whose = None if book.knows(mark) else named(key.decode())
                stray = whose and Claim(*whose, "", mark, Holder("stray"), BEAT)
                book.deliver(_KINDS[kind], mark, 0.0, stray)

    def _hung_up(self) -> None:
        self.on = False
        if self._failing:
            self.wake()
