"""Turns at one connection: one caller at a time, in the order they came, and nobody waits beyond its deadline.

place = gate.place()
try:
    await gate.enter(place, deadline)
    ...
finally:
    gate.leave(place)       # whatever happened, and wherever: also before the turn came
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from leasehold.errors import Reentered, Unavailable
from leasehold.runtime.base import Guard, Runtime, Signal


class Place:
    __slots__ = ("owner", "signal")

    def __init__(self, runtime: Runtime) -> None:
        self.owner = runtime.owner()
        self.signal: Signal | None = None


class Gate:
    def __init__(self, runtime: Runtime, engine: str) -> None:
        self._runtime, self._engine = runtime, engine
        self.after_fork()

    def after_fork(self) -> None:
        self._guard: Guard = self._runtime.guard()
        self._line: deque[Place] = deque()
        self._inside: Place | None = None

    @property
    def idle(self) -> bool:
        return self._inside is None

    def has(self, place: Place) -> bool:
        return self._inside is place

    def place(self) -> Place:
        return Place(self._runtime)

    async def enter(self, place: Place, deadline: float) -> None:
        with self._guard:
            if self._inside is None:
                self._inside = place
                return
            if self._inside.owner == place.owner:  # a finaliser or signal handler, in the midst of its thread's call
                raise Reentered
            place.signal = self._runtime.signal()
            self._line.append(place)
        await place.signal.wait(deadline - self._runtime.now())
        if self._inside is not place:
            raise Unavailable("other calls of this client used the connection until the deadline", engine=self._engine)

    def leave(self, place: Place) -> None:
        with self._guard:
            if self._inside is not place:
                with suppress(ValueError):
                    self._line.remove(place)
                return
            self._inside = self._line.popleft() if self._line else None
            if self._inside is not None and self._inside.signal is not None:
                self._inside.signal.set()
