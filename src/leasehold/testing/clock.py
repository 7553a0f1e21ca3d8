"""A clock that a test moves, and the two runtimes that go by it.

It stands still. However slow the machine, however long a debugger holds a test up, nothing is renewed, lapses or is
lost unless the test says so by `advance`: the same test sees the same instants on every run, to the last digit. It runs
only while a call of the caller's waits (`acquire(wait=5)`, `wait_lost(2)`), as fast as the real one, for else such a
call would never end; `skipping()` makes those pass at once too.

`advance` is not one jump. It goes from one instant at which somebody wanted to be woken to the next, and at each of
them lets the watchdogs finish what they do, callbacks included. An hour passes in a moment, with every renewal in it,
and what is due has been done when `advance` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from leasehold.runtime.base import Runtime, Signal, step
from leasehold.runtime.loop import Loop, LoopSignal, _call_soon
from leasehold.runtime.threads import Threads

_PATIENCE: Final = 5.0  # real seconds; a callback that blocks for longer is not waited for
_BACKSTOP: Final = 0.5  # how soon a sleeper looks again though nobody woke it


class _Pace(NamedTuple):
    """Read in one step, by any thread."""

    at: float
    since: float | None  # the real instant from which it runs; None: it stands still


class _Sleep:
    """One wait upon the clock: of a thread that runs aside, or of a caller."""

    __slots__ = ("aside", "deadline", "poke", "ready", "thread")

    def __init__(
        self, deadline: float, ready: Callable[[], bool], aside: bool, poke: Callable[[], None] | None = None
    ) -> None:
        self.deadline, self.ready, self.aside, self.poke = deadline, ready, aside, poke
        self.thread = threading.current_thread()


class Clock:
    """Seconds that pass when `advance` says so."""

    def __init__(self) -> None:
        self._turn = threading.Condition(threading.RLock())  # reentrant: a finaliser may set a signal at any moment
        self._start = 1_000_000.0
        self._pace = _Pace(self._start, None)
        self._sleeps: list[_Sleep] = []
        self._asides: set[threading.Thread] = set()
        self._wall = time.time()
        self.skips = False

    def now(self) -> float:
        at, since = self._pace
        return at if since is None else at + time.monotonic() - since

    def wall(self) -> float:
        """The time of day, moved along."""
        return self._wall + self.now() - self._start

    def advance(self, seconds: float) -> None:
        """Let so much time pass for everybody who goes by this clock: clients, engine, watchdogs.

        A healthy client's leases are renewed on the way. To see one run out, `expire` it.
        """
        if not seconds >= 0:
            raise ValueError(f"time goes forward, not by {seconds!r} seconds")
        self.walk(self.now() + seconds, lambda: False)

    @contextmanager
    def skipping(self) -> Iterator[None]:
        """Inside, a call that waits is not kept waiting: the clock moves on at once, until it has what it waits for or
        its time is up. For tests in which nobody else could let it go first."""
        before, self.skips = self.skips, True
        try:
            yield
        finally:
            self.skips = before

    def settle(self) -> None:
        """Wait until watchdogs and callbacks have done what is due by now. Takes no time on this clock."""
        end = time.monotonic() + _PATIENCE
        with self._turn:
            while not self._settled() and time.monotonic() < end:
                self._turn.wait(0.05)

    # ------------------------------------------------------ for the runtimes

    def walk(self, target: float, enough: Callable[[], bool]) -> None:
        """From instant to instant, until there or until enough."""
        while True:
            self.settle()
            with self._turn:
                now = self.now()
                if enough() or now >= target:
                    return
                then = min([target, *(sleep.deadline for sleep in self._sleeps if sleep.deadline > now)])
                at, since = self._pace
                self._pace = _Pace(then if since is None else at + (then - now), since)  # to the last digit
                self._wake()

    def _settled(self) -> bool:
        now, here, asleep = self.now(), threading.current_thread(), 0
        for sleep in self._sleeps:
            if (sleep.ready() or sleep.deadline <= now) and sleep.thread is not here:
                return False
            asleep += sleep.aside
        return asleep >= len(self._asides) - (here in self._asides)  # a callback may itself move the clock

    def _wake(self) -> None:
        for sleep in self._sleeps:
            if sleep.poke is not None:
                sleep.poke()
        self._turn.notify_all()

    def begin(self, sleep: _Sleep) -> None:
        with self._turn:
            self._sleeps.append(sleep)
            if not sleep.aside and self._pace.since is None:
                self._pace = _Pace(self._pace.at, time.monotonic())
            self._wake()  # at another pace; and whoever settles counts the sleepers

    def end(self, sleep: _Sleep) -> None:
        with self._turn:
            self._sleeps.remove(sleep)
            if all(other.aside for other in self._sleeps):
                self._pace = _Pace(self.now(), None)
            self._turn.notify_all()

    def wait(self, ready: Callable[[], bool], seconds: float, aside: bool) -> None:
        """Block this thread until ready, at most so long by this clock."""
        deadline = self.now() + seconds
        if self.skips and not aside:
            self.walk(deadline, ready)
        with self._turn:
            if ready() or self.now() >= deadline:
                return
            sleep = _Sleep(deadline, ready, aside)
            self.begin(sleep)
            try:
                while not ready() and (left := deadline - self.now()) > 0:
                    self._turn.wait(_BACKSTOP if self._pace.since is None else min(left, _BACKSTOP))
            finally:
                self.end(sleep)

    def notify(self) -> None:
        with self._turn:
            self._turn.notify_all()

    def run_aside(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        def run() -> None:
            try:
                step(start(ClockThreads(self, aside=True)))
            finally:
                with self._turn:
                    self._asides.discard(thread)
                    self._turn.notify_all()

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._turn:
            self._asides.add(thread)
        thread.start()


class _Signal:
    def __init__(self, clock: Clock, aside: bool) -> None:
        self._clock, self._aside, self._set = clock, aside, False

    def set(self) -> None:
        self._set = True
        self._clock.notify()

    async def wait(self, seconds: float) -> bool:
        self._clock.wait(lambda: self._set, seconds, self._aside)
        woken, self._set = self._set, False
        return woken


class _LoopSignal(LoopSignal):
    __slots__ = ("_clock",)

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def _ready(self) -> bool:
        return self._set

    def _poke(self) -> None:
        _call_soon(self._loop, self._wake)

    async def wait(self, seconds: float) -> bool:
        clock = self._clock
        deadline = clock.now() + seconds
        if clock.skips:
            clock.walk(deadline, self._ready)
        sleep = _Sleep(deadline, self._ready, False, self._poke)
        clock.begin(sleep)
        try:
            woken = await super().wait(0)
            while not woken and (left := deadline - clock.now()) > 0:
                woken = await super().wait(left)
        finally:
            clock.end(sleep)
        return woken


class ClockThreads(Threads):
    """Blocking mode by a `Clock`. `aside`: of a watchdog, whose waits do not make the clock run."""

    def __init__(self, clock: Clock, *, aside: bool = False) -> None:
        super().__init__(clock.now)
        self.clock, self._is_aside = clock, aside
        self.wall = clock.wall
        self.fraction = _half

    async def sleep(self, seconds: float) -> None:
        self.clock.wait(lambda: False, seconds, self._is_aside)

    def signal(self) -> _Signal:  # type: ignore[override]  # the protocol is met; ThreadSignal is one way to meet it
        return _Signal(self.clock, self._is_aside)

    def aside(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self.clock.run_aside(start, name)


class ClockLoop(Loop):
    """asyncio mode by a `Clock`. `ended`: the test is over, and there may be no loop any more to close a client in."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock.now)
        self.clock, self.ended = clock, False
        self.wall = clock.wall
        self.fraction = _half

    def bind(self) -> bool:
        return self.ended or super().bind()

    def owner_mark(self) -> str:
        return self._threads.owner_mark() if self.ended else super().owner_mark()

    async def sleep(self, seconds: float) -> None:
        await self.signal().wait(seconds)

    def signal(self) -> Signal:  # type: ignore[override]
        return _Signal(self.clock, aside=False) if self.ended else _LoopSignal(self.clock)

    def aside(self, start: Callable[[Runtime], Coroutine[Any, Any, None]], name: str) -> None:
        self.clock.run_aside(start, name)


def _half() -> float:
    """For jitter: none, so that renewals fall on the same instants in every run."""
    return 0.5
