"""A clock that a test advances, and the two runtimes that use it.

The clock stands still. However slow the machine, however long a debugger stops the test, nothing is renewed, expires or
is lost unless the test calls `advance`: the same test sees the same instants on every run, to the last digit. The clock
runs only while a call of the test waits (`acquire(wait=5)`, `wait_lost(2)`), as fast as the real clock, because such a
call would never end otherwise; with `skipping()` these waits pass at once too.

`advance` is not one jump. It moves from one instant at which a sleeper is due to the next, and at each instant lets the
watchdogs finish their work, callbacks included. An hour passes in a moment, with every renewal in it, and everything
that is due has been done when `advance` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from leasehold.runtime.base import Runtime, Signal, run_sync
from leasehold.runtime.loop import Loop, LoopSignal, _call_soon
from leasehold.runtime.threads import Threads

_CALLBACK_TIMEOUT: Final = 5.0  # real seconds; the clock does not wait longer for a callback that blocks
_RECHECK_INTERVAL: Final = 0.5  # how often a sleeper re-checks without being woken


class _Pace(NamedTuple):
    """A tuple, so that any thread can read it in one step."""

    at: float
    since: float | None  # the real instant from which the clock runs; None: it stands still


class _Sleep:
    """One wait on the clock: of a background thread, or of a caller."""

    __slots__ = ("background", "deadline", "is_ready", "thread", "wake")

    def __init__(
        self, deadline: float, is_ready: Callable[[], bool], background: bool, wake: Callable[[], None] | None = None
    ) -> None:
        self.deadline, self.is_ready, self.background, self.wake = deadline, is_ready, background, wake
        self.thread = threading.current_thread()


class Clock:
    """A clock that moves only when `advance` is called, or while a call of the test waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.RLock())  # reentrant: finalisers may set signals at any time
        self._start = 1_000_000.0
        self._pace = _Pace(self._start, None)
        self._sleeps: list[_Sleep] = []
        self._background_threads: set[threading.Thread] = set()
        self._wall = time.time()
        self.skips = False

    def now(self) -> float:
        at, since = self._pace
        return at if since is None else at + time.monotonic() - since

    def wall(self) -> float:
        """The time of day, advanced together with this clock."""
        return self._wall + self.now() - self._start

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass for everything that uses this clock: clients, engine, watchdogs.

        The watchdog renews the leases of a healthy client meanwhile. To make a lease expire, call `expire`.
        """
        if not seconds >= 0:
            raise ValueError(f"seconds must be 0 or more, not {seconds!r}")
        self.advance_until(self.now() + seconds, lambda: False)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside this block, calls do not wait: the clock advances at once until the call has what it waits for or its
        time is up. For tests in which no other thread or task ends the wait earlier."""
        before, self.skips = self.skips, True
        try:
            yield
        finally:
            self.skips = before

    def wait_idle(self) -> None:
        """Wait until watchdogs and callbacks have done everything that is due. Takes no time on this clock."""
        end = time.monotonic() + _CALLBACK_TIMEOUT
        with self._condition:
            while not self._settled() and time.monotonic() < end:
                self._condition.wait(0.05)

    # ------------------------------------------------------ for the runtimes

    def advance_until(self, target: float, is_enough: Callable[[], bool]) -> None:
        """Advance from one due instant to the next, until `target` or until `is_enough()`."""
        while True:
            self.wait_idle()
            with self._condition:
                now = self.now()
                if is_enough() or now >= target:
                    return
                then = min([target, *(sleep.deadline for sleep in self._sleeps if sleep.deadline > now)])
                at, since = self._pace
                self._pace = _Pace(then if since is None else at + (then - now), since)  # exactly `then`, not rounded
                self._wake()

    def _settled(self) -> bool:
        now, here, asleep = self.now(), threading.current_thread(), 0
        for sleep in self._sleeps:
            if (sleep.is_ready() or sleep.deadline <= now) and sleep.thread is not here:
                return False
            asleep += sleep.background
        # This thread does not count: a callback may itself advance the clock.
        return asleep >= len(self._background_threads) - (here in self._background_threads)

    def _wake(self) -> None:
        for sleep in self._sleeps:
            if sleep.wake is not None:
                sleep.wake()
        self._condition.notify_all()

    def add_sleep(self, sleep: _Sleep) -> None:
        with self._condition:
            self._sleeps.append(sleep)
            if not sleep.background and self._pace.since is None:
                self._pace = _Pace(self._pace.at, time.monotonic())
            self._wake()  # the pace may have changed, and wait_idle counts the sleepers

    def remove_sleep(self, sleep: _Sleep) -> None:
        with self._condition:
            self._sleeps.remove(sleep)
            if all(other.background for other in self._sleeps):
                self._pace = _Pace(self.now(), None)
            self._condition.notify_all()

    def wait(self, is_ready: Callable[[], bool], seconds: float, background: bool) -> None:
        """Block this thread until `is_ready()`, at most `seconds` of this clock."""
        deadline = self.now() + seconds
        if self.skips and not background:
            self.advance_until(deadline, is_ready)
        with self._condition:
            if is_ready() or self.now() >= deadline:
                return
            sleep = _Sleep(deadline, is_ready, background)
            self.add_sleep(sleep)
            try:
                while not is_ready() and (left := deadline - self.now()) > 0:
                    self._condition.wait(
                        _RECHECK_INTERVAL if self._pace.since is None else min(left, _RECHECK_INTERVAL)
                    )
            finally:
                self.remove_sleep(sleep)

    def notify(self) -> None:
        with self._condition:
            self._condition.notify_all()

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        def run() -> None:
            try:
                run_sync(start(ClockThreads(self, background=True)))
            finally:
                with self._condition:
                    self._background_threads.discard(thread)
                    self._condition.notify_all()

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._condition:
            self._background_threads.add(thread)
        thread.start()


class _Signal:
    def __init__(self, clock: Clock, background: bool) -> None:
        self._clock, self._background, self._set = clock, background, False

    def set(self) -> None:
        self._set = True
        self._clock.notify()

    async def wait(self, seconds: float) -> bool:
        self._clock.wait(lambda: self._set, seconds, self._background)
        woken, self._set = self._set, False
        return woken


class _LoopSignal(LoopSignal):
    __slots__ = ("_clock",)

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def _is_set(self) -> bool:
        return self._set

    def _wake_loop(self) -> None:
        _call_soon(self._loop, self._wake)

    async def wait(self, seconds: float) -> bool:
        clock = self._clock
        deadline = clock.now() + seconds
        if clock.skips:
            clock.advance_until(deadline, self._is_set)
        sleep = _Sleep(deadline, self._is_set, False, self._wake_loop)
        clock.add_sleep(sleep)
        try:
            woken = await super().wait(0)
            while not woken and (left := deadline - clock.now()) > 0:
                woken = await super().wait(left)
        finally:
            clock.remove_sleep(sleep)
        return woken


class ClockThreads(Threads):
    """Blocking mode on a `Clock`. `background`: for a watchdog, whose waits do not make the clock run."""

    def __init__(self, clock: Clock, *, background: bool = False) -> None:
        super().__init__(clock.now)
        self.clock, self._is_background = clock, background
        self.wall = clock.wall
        self.random = _no_jitter

    async def sleep(self, seconds: float) -> None:
        self.clock.wait(lambda: False, seconds, self._is_background)

    def signal(self) -> _Signal:  # type: ignore[override]  # not a ThreadSignal, but it implements the protocol
        return _Signal(self.clock, self._is_background)

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self.clock.start_thread(start, name)


class ClockLoop(Loop):
    """asyncio mode on a `Clock`. `ended`: the test is over, and there may be no loop left in which to close clients."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.now)
        self.clock, self.ended = clock, False
        self.wall = clock.wall
        self.random = _no_jitter

    def bind(self) -> bool:
        return self.ended or super().bind()

    def owner_id(self) -> str:
        return self._threads.owner_id() if self.ended else super().owner_id()

    async def sleep(self, seconds: float) -> None:
        await self.signal().wait(seconds)

    def signal(self) -> Signal:  # type: ignore[override]
        return _Signal(self.clock, background=False) if self.ended else _LoopSignal(self.clock)

    def start_thread(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self.clock.start_thread(start, name)


def _no_jitter() -> float:
    """No jitter, so that renewals happen at the same instants in every run."""
    return 0.5
