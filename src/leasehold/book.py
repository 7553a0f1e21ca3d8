"""The memory that the two sides of a client share: the caller's runtime, and the watchdog's thread.

It knows which claims stand in line, which are held, and which releases are owed. Engines write what they hear into
it (`deliver`); the watchdog works through it. Thread-safe: single steps on dictionaries, and remembered signals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from leasehold.core.timing import BEAT, BEAT_EVERY, LATE
from leasehold.model import Busy, Claim, Reason
from leasehold.runtime.base import Runtime, Signal

K = TypeVar("K")
V = TypeVar("V")


class Losable(Protocol):
    def _lose(self, reason: Reason) -> bool: ...

    def _doubt(self, why: str) -> None: ...


class Waiter:
    """A claim that stands in line, and what the engine has told it since it last asked."""

    __slots__ = ("claim", "go", "look_at", "over", "signal")

    def __init__(self, claim: Claim, signal: Signal) -> None:
        self.claim = claim
        self.signal = signal
        self.go = False
        self.over = False  # the client is closed: nothing is worth waiting for
        self.look_at: float | None = None


class Owed(NamedTuple):
    """A release not yet confirmed, and until when it is worth repeating: after that the claim has lapsed."""

    claim: Claim
    until: float


class Book:
    def __init__(self, runtime: Runtime, client: str) -> None:
        self.client = client  # this client's address for wake-ups; public, new after a fork
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[str, Callable[[], Losable | None]] = {}  # by mark: leases, weakly
        self.owed: dict[str, Owed] = {}
        self.shelf: dict[str, object] = {}  # what else the twins of an engine share
        self.twins: WeakSet[object] = WeakSet()  # the client's engines; a task left in a loop of before may keep one
        self.over = False  # the client is closed
        self.lingers = BEAT  # how long a claim may stay at the engine that nothing more is heard of
        self.stir: Callable[[float], None] = _nobody  # has the watchdog look by an instant; safe inside a finaliser
        self.doubted: object = None  # another one each time the engine lost its way
        self._now = runtime.now

    def enter(self, claim: Claim, runtime: Runtime) -> Waiter:
        """Register for the wake-up of a queued claim, before it is sent (E4). What was told before is out of date."""
        waiter = self.waiting.get(claim.mark)
        if waiter is None:
            self.waiting[claim.mark] = waiter = Waiter(claim, runtime.signal())
            self.stir(self._now() + BEAT_EVERY)  # the watchdog keeps its place in line from now on (E7)
        else:
            waiter.go, waiter.look_at = False, None
        return waiter

    def leave(self, mark: str) -> None:
        self.waiting.pop(mark, None)

    def owe(self, claim: Claim, soon: bool = True) -> Owed:
        """Have the watchdog repeat the release until the engine answered, or the claim has ended by itself.
        `soon=False`: the caller has sent one, and stirs the watchdog if that is not answered."""
        now = self._now()
        owed = self.owed[claim.mark] = Owed(claim, now + max(claim.ttl + claim.delay, self.lingers))
        if soon:
            self.stir(now)
        return owed

    def last(self, engine: object) -> bool:
        """An engine is closed. True: so is what its twins share. The watchdog's twin comes and goes."""
        self.twins.discard(engine)
        return self.over or not self.twins

    def knows(self, mark: str) -> bool:
        return mark in self.waiting or mark in self.held or mark in self.owed

    def deliver(self, kind: Literal["go", "head", "lost"], mark: str, seconds: float, stray: Claim | None) -> None:
        """Note what the engine told about a claim. From any thread.

        A turn for a claim nobody here knows is a late attempt of one long given up: `stray`, a claim made from the
        message and without an id, is released, or the line would stand still until its reservation ends. Without an id
        no engine ends a grant for it: the grant may have been taken and handed on before this word came.
        """
        if kind == "lost":
            if (held := self.held.get(mark)) and (lease := held()):
                lease._lose("broken")
            return
        waiter = self.waiting.get(mark)
        if waiter is None:
            if kind == "go" and stray is not None and not self.knows(mark):
                self.owe(stray)
            return
        if kind == "go":
            waiter.go = True
        else:
            waiter.look_at = self._now() + seconds + LATE
        waiter.signal.set()

    def doubt(self, why: str) -> None:
        """The engine lost its way to whatever holds: every lease is at risk until its next answer. From any thread."""
        self.doubted = object()  # first: a lease that is being entered meanwhile is either met below, or sees this
        for _, held in every(self.held):
            if lease := held():
                lease._doubt(why)


def every(found: dict[K, V]) -> list[tuple[K, V]]:
    """What is in a dictionary that other threads change meanwhile: a garbage collection in here may let one of them in,
    and the dictionary is then found to have changed."""
    while True:
        try:
            return list(found.items())
        except RuntimeError:
            continue


def _nobody(_at: float) -> None:
    """Without a watchdog, as in a test of one engine, nobody is stirred."""


async def turn(runtime: Runtime, waiter: Waiter, busy: Busy, seconds: float) -> None:
    """What `wait` is for every engine that pushes: until told to go, or it is time to look again (E4)."""
    end = runtime.now() + seconds
    # Only the head of the line times the holder: everyone further back is told when that becomes them.
    look_at = end if busy.place or busy.left is None else runtime.now() + busy.left + LATE
    while not waiter.go and not waiter.over:
        if waiter.look_at is not None:
            look_at = waiter.look_at
        left = min(end, look_at) - runtime.now()
        if left <= 0 or not await waiter.signal.wait(left):
            return
