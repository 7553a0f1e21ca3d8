"""Who reads a client's notifications: the thread of its listener, or the client's only waiter.

If the listener's thread reads, it has to wake the waiter, and that takes longer than to read. So while names change
hands fast, a waiter reads by itself: after some wake-ups that found no other waiter, the listener's thread stays away
for `_ABSENCE`, and the thread that waits next takes over until it stops waiting. With several waiters nothing would be
gained: each that stops reading would have to wake the next one.

- At any time at most one thread reads. All changes of that are made under one mutex.
- A reader passes on what arrives for other waiters. When it stops, and one of them is asleep, it calls the listener's
  thread back. Else that returns by itself: so a notification is late by at most `_ABSENCE`, and only one for which no
  thread waits, such as that of a break.
- If a reader meets any error, or hears nothing for `max_silence`, it also calls the listener's thread back, which alone
  checks and replaces connections. If a reader does not stop in time (a signal handler may have interrupted it), the
  listener's thread replaces the connection.

In blocking mode only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.net.blocking import WOKEN, SelfPipe

_ABSENCE: Final = 0.05  # seconds
_ALONE: Final = 3  # wake-ups in a row that found no other waiter
_GRACE: Final = 1.0  # seconds in which a reader has to stop when its time is over


class ReadingSignal:
    """A waiter's signal. Its `wait` reads notifications, if the listener's thread is away and no other waiter does."""

    __slots__ = ("_turns", "signal")

    def __init__(self, turns: ReadingTurns, signal: Signal) -> None:
        self._turns, self.signal = turns, signal

    def set(self) -> None:
        self.signal.set()
        self._turns.interrupt(self)

    async def wait(self, seconds: float) -> bool:
        return await self._turns.wait(self, seconds)


class ReadingTurns:
    """Owned by a listener. `receive` returns the next message, or WOKEN if there is none within these seconds or the
    pipe was set; `handle` handles a message; `is_alone`: whether the client has no other waiter."""

    def __init__(
        self,
        runtime: Runtime,
        max_silence: float,
        receive: Callable[[float, SelfPipe], Any],
        handle: Callable[[Any], None],
        is_alone: Callable[[], bool],
    ) -> None:
        self._runtime, self._max_silence = runtime, max_silence
        self._receive, self._handle, self._is_alone = receive, handle, is_alone
        self._mutex = runtime.mutex()
        self._calls_back = runtime.signal()  # wakes the listener's thread
        self._pipe: SelfPipe | None = None  # wakes the reader
        self._wakeups_alone = 0  # in a row
        self._away = False  # the listener's thread does not read ...
        self._returns_soon = False  # ... and will look within `_ABSENCE` whether a waiter does
        self._reader: ReadingSignal | None = None  # of the waiter that reads
        self._polling: ReadingSignal | None = None  # the same while its thread may be asleep
        self._error: Exception | None = None  # that a reader met
        self.silent_at = 0.0  # when the connection must be checked, if nothing has arrived by then

    def make_signal(self) -> ReadingSignal:
        return ReadingSignal(self, self._runtime.signal())

    def after_fork(self) -> None:
        """In the child, which has none of the parent's threads. The thread that forked may have been interrupted while
        it read: it reads no more."""
        self._mutex, self._reader = self._runtime.mutex(), None
        self.end()

    # ------------------------------------------------- on the listener's thread

    async def after_wakeup(self) -> bool:
        """The listener's thread has woken a waiter. Stays away for a while, if that seems useful (True). Raises the
        error that a reader met meanwhile."""
        self._wakeups_alone = self._wakeups_alone + 1 if self._is_alone() else 0
        if self._wakeups_alone < _ALONE:
            return False
        now = self._runtime.now
        self._pipe, self._error = self._pipe or SelfPipe(), None
        self.silent_at = now() + self._max_silence
        with self._mutex:
            self._away = self._returns_soon = True
        try:
            await self._calls_back.wait(_ABSENCE)
            while not self._may_return():
                if now() > self.silent_at + _GRACE:
                    raise ConnectionAbortedError("the thread that read the notifications did not stop in time")
                await self._calls_back.wait(self.silent_at + _GRACE - now())
        finally:
            with self._mutex:
                self._away, self._reader = False, None
        if self._error is not None:
            raise self._error
        return True

    def end(self) -> None:
        """The listener's thread has lost its connection. No waiter reads."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def _may_return(self) -> bool:
        with self._mutex:
            self._returns_soon = False  # from here on, a reader that stops calls this thread back
            return self._reader is None

    # ------------------------------------------------------ on a waiter's thread

    async def wait(self, signal: ReadingSignal, seconds: float) -> bool:
        """Wait until the signal is set, and read notifications meanwhile, if no other thread does."""
        end = self._runtime.now() + seconds
        if self._away and self._begin(signal):
            error: Exception | None = ConnectionAbortedError("the thread that read the notifications was interrupted")
            try:
                woken = await self._read(signal, end)
                error = None
                if woken:
                    return True
            except Exception as failure:
                error = failure
            finally:
                self._stop(signal, error)
        return await signal.signal.wait(end - self._runtime.now())

    def _begin(self, signal: ReadingSignal) -> bool:
        with self._mutex:
            if not self._away or self._reader is not None or self._error is not None:
                return False
            self._reader = signal
        return True

    async def _read(self, signal: ReadingSignal, end: float) -> bool:
        now, pipe = self._runtime.now, self._pipe
        while self._reader is signal and pipe is not None:
            self._polling = signal  # first: from here on, `interrupt` ends the poll
            if await signal.signal.wait(0.0):
                return True
            left = min(end, self.silent_at) - now()
            if left <= 0:
                return False
            message = self._receive(left, pipe)
            self._polling = None
            if message is not WOKEN:
                self.silent_at = now() + self._max_silence
                self._handle(message)
        return False

    def _stop(self, signal: ReadingSignal, error: Exception | None) -> None:
        with self._mutex:
            if self._reader is not signal:  # the listener's thread has replaced the connection
                return
            self._reader, self._polling, self._error = None, None, error
            returns_soon = self._returns_soon
        if not returns_soon or error is not None or not self._is_alone():
            self._calls_back.set()

    def interrupt(self, signal: ReadingSignal) -> None:
        """The signal was set: wake its thread if that reads. From any thread, even inside a finaliser."""
        if self._polling is signal and self._pipe is not None:
            self._pipe.set()
