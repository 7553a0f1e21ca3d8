"""One run of one conformance case: a rig, a runtime, and all that a case written once needs to run on either.

Cases work on two levels: a `Seat` is one machine at the seam, a `Caller` is a client seen through its face, blocking or
asyncio, as users see it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, Generic, TypeVar, Unpack

import pytest

from leasehold.errors import Unavailable
from leasehold.model import Traits
from leasehold.runtime.base import settle, step
from leasehold.testing.faces import Caller
from leasehold.testing.faulty import Faults
from leasehold.testing.rig import ClientArguments, Rig, RuntimeName
from leasehold.testing.seat import CALL_TIMEOUT, Seat

T = TypeVar("T")

PATIENCE: Final = 10.0  # for what must happen, but takes as long as a busy machine makes it take
_POLL: Final = 0.005


class Doing(Generic[T]):
    """Something a case has running beside itself: a thread, or a task."""

    def __init__(self, work: Coroutine[Any, Any, T], mode: RuntimeName, patience: float) -> None:
        self._work, self._patience = work, patience
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        if mode == "asyncio":
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self._thread = threading.Thread(target=lambda: step(self._run()), name="conformance", daemon=True)
            self._thread.start()

    async def _run(self) -> None:
        try:
            self._outcome.append(await self._work)
        except BaseException as error:  # for result() to raise
            self._error = error

    def done(self) -> bool:
        return bool(self._outcome) or self._error is not None

    async def ended(self, seconds: float) -> bool:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
        else:
            self._thread.join(seconds)
        return self.done()

    async def result(self, beyond: float = 0.0) -> T:
        """What it gave, or the error it ended with; `beyond`: seconds it may take on top of our patience."""
        seconds = beyond + self._patience
        assert await self.ended(seconds), f"still running after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class Trial:
    """What a case is given."""

    def __init__(self, rig: Rig, mode: RuntimeName, patience: float = PATIENCE) -> None:
        self.rig, self.mode, self.patience = rig, mode, patience
        self.runtime = rig.runtime(mode)
        self.namespace = f"conformance-{self.runtime.entropy(6).hex()}"
        self._traits: Traits | None = None
        self._callers: list[Caller] = []
        self._seats: list[Seat] = []
        self._doings: list[Doing[Any]] = []

    async def traits(self) -> Traits:
        """As they are once the engine has been asked."""
        if self._traits is None:
            engine = self.seat().engine
            await engine.ping(self.runtime.now() + CALL_TIMEOUT)
            self._traits = engine.traits
        return self._traits

    def seat(self) -> Seat:
        self._seats.append(Seat(self))
        return self._seats[-1]

    def caller(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> Caller:
        """A client of the face that is under test, on a machine of its own."""
        given: ClientArguments = {
            "namespace": self.namespace,
            "ttl": self.rig.ttl,
            "call_timeout": CALL_TIMEOUT,
            **arguments,
        }
        if self.mode == "blocking":
            self._callers.append(Caller(self.rig.client(faults, **given)))
        else:
            self._callers.append(Caller(self.rig.async_client(faults, **given)))
        return self._callers[-1]

    def spawn(self, work: Coroutine[Any, Any, T]) -> Doing[T]:
        doing = Doing(work, self.mode, self.patience)
        self._doings.append(doing)
        return doing

    async def until(self, what: Callable[[], bool | Awaitable[bool]], why: str, beyond: float = 0.0) -> None:
        """Poll until it is so; an assertion that says `why` if that takes longer than our patience, and `beyond`."""
        seconds = beyond + self.patience
        end = time.monotonic() + seconds
        while not await settle(what()):
            assert time.monotonic() < end, f"not within {seconds} s: {why}"
            await self.runtime.sleep(_POLL)

    async def reached(self, caller: Caller) -> None:
        """It is connected: a first call may take longer than a short call_timeout allows."""

        async def answers() -> bool:
            try:
                await caller.ping()
            except Unavailable:
                return False
            return True

        await self.until(answers, "the engine answers")

    async def unavailable(self, call: Callable[[], Awaitable[object]], seconds: float, what: str) -> None:
        """The call ends as Unavailable, so soon. The best of three: a stall of this machine says nothing of it."""

        async def try_it() -> None:
            await call()

        took: list[float] = []
        while len(took) < 3:
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await self.spawn(try_it()).result()
            took.append(time.monotonic() - began)
            if took[-1] < seconds:
                return
        raise AssertionError(f"{what} took {min(took):.2f} s to find out that nobody answers, not {seconds} s")

    async def pass_time(self, seconds: float) -> None:
        """Travel where the rig can, else let it pass."""
        if self.rig.can_travel:
            self.rig.travel(seconds)
        else:
            await self.runtime.sleep(seconds)

    async def close(self) -> None:
        try:
            self.rig.heal()
            for caller in self._callers:
                await caller.close()
            for doing in self._doings:
                await doing.ended(self.patience)
            for seat in self._seats:
                await seat.engine.close()
        finally:
            self.rig.close()
