"""One run of one conformance case: a rig, a runtime, and what a case that is written once needs to run in both modes.

Cases work on two levels: an `EngineDriver` calls the engine interface directly; a `UnifiedClient` uses the public API,
blocking or asyncio, as users do."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar, Unpack

import pytest

from leasehold.errors import Unavailable
from leasehold.model import Traits
from leasehold.runtime.base import maybe_await, run_sync
from leasehold.testing.conformance.engine_driver import EngineDriver
from leasehold.testing.conformance.rig import ClientArguments, Rig, RuntimeName
from leasehold.testing.conformance.unified_client import UnifiedClient
from leasehold.testing.faulty import Faults

T = TypeVar("T")

TIMEOUT: Final = 60.0  # for events that must happen, however busy the machine is
UNHURRIED_TTL: Final = 120.0  # so that no claim expires on a busy machine
UNHURRIED_CALL: Final = 60.0
SHORT_CALL: Final = 2.0  # of a case that waits until calls fail
_POLL: Final = 0.005


class BackgroundTask(Generic[T]):
    """Work that a case runs in the background: a thread, or a task."""

    def __init__(self, work: Coroutine[Any, Any, T], mode: RuntimeName, timeout: float) -> None:
        self._work, self._timeout = work, timeout
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        if mode == "asyncio":
            self._task = asyncio.get_running_loop().create_task(self._run())
        else:
            self._thread = threading.Thread(target=lambda: run_sync(self._run()), name="conformance", daemon=True)
            self._thread.start()

    async def _run(self) -> None:
        try:
            self._outcome.append(await self._work)
        except BaseException as error:  # for result() to raise
            self._error = error

    def done(self) -> bool:
        return bool(self._outcome) or self._error is not None

    async def finished(self, seconds: float) -> bool:
        if self._task is not None:
            await asyncio.wait([self._task], timeout=seconds)
        else:
            self._thread.join(seconds)
        return self.done()

    async def result(self, beyond: float = 0.0) -> T:
        """Its result, or raise its error; `beyond`: seconds it may take in addition to the timeout."""
        seconds = beyond + self._timeout
        assert await self.finished(seconds), f"still running after {seconds} s"
        if self._error is not None:
            raise self._error
        return self._outcome[0]


class CaseContext:
    """What a case is given."""

    def __init__(self, rig: Rig, mode: RuntimeName, timeout: float = TIMEOUT) -> None:
        self.rig, self.mode, self.timeout = rig, mode, timeout
        self.ttl, self.call_timeout = UNHURRIED_TTL, UNHURRIED_CALL  # of clients and claims that state none
        self.runtime = rig.runtime(mode)
        self.namespace = f"conformance-{self.runtime.random_bytes(6).hex()}"
        self._traits: Traits | None = None
        self._callers: list[UnifiedClient] = []
        self._seats: list[EngineDriver] = []
        self._background_tasks: list[BackgroundTask[Any]] = []

    async def traits(self) -> Traits:
        """The engine's traits, read after a first call: some engines know them only then."""
        if self._traits is None:
            engine = self.driver().engine
            await engine.ping(self.runtime.now() + self.call_timeout)
            self._traits = engine.traits
        return self._traits

    def driver(self) -> EngineDriver:
        self._seats.append(EngineDriver(self))
        return self._seats[-1]

    def client(self, faults: Faults | None = None, **arguments: Unpack[ClientArguments]) -> UnifiedClient:
        """A client of the API under test, with a client path of its own."""
        given: ClientArguments = {
            "namespace": self.namespace,
            "ttl": self.ttl,
            "call_timeout": self.call_timeout,
            **arguments,
        }
        if self.mode == "blocking":
            self._callers.append(UnifiedClient(self.rig.client(faults, **given)))
        else:
            self._callers.append(UnifiedClient(self.rig.async_client(faults, **given)))
        return self._callers[-1]

    def spawn(self, work: Coroutine[Any, Any, T]) -> BackgroundTask[T]:
        task = BackgroundTask(work, self.mode, self.timeout)
        self._background_tasks.append(task)
        return task

    async def until(self, what: Callable[[], bool | Awaitable[bool]], why: str, beyond: float = 0.0) -> None:
        """Poll until `what()` is true; an AssertionError with `why` if that takes longer than timeout plus `beyond`.
        A call that gets no answer in time, as on a busy machine, is made again."""
        seconds = beyond + self.timeout
        end = time.monotonic() + seconds
        while True:
            with suppress(Unavailable):
                if await maybe_await(what()):
                    return
            assert time.monotonic() < end, f"not within {seconds} s: {why}"
            await self.runtime.sleep(_POLL)

    async def wait_until_connected(self, caller: UnifiedClient) -> None:
        """Wait until the client is connected: its first call may take longer than a short call_timeout."""

        async def answers() -> bool:
            await caller.ping()
            return True

        await self.until(answers, "the engine answers")

    async def assert_unavailable(self, call: Callable[[], Awaitable[object]], seconds: float, what: str) -> None:
        """The call raises Unavailable within `seconds`. Best of ten, because this machine may stall."""

        async def try_it() -> None:
            await call()

        took: list[float] = []
        while len(took) < 10:
            began = time.monotonic()
            with pytest.raises(Unavailable):
                await self.spawn(try_it()).result()
            took.append(time.monotonic() - began)
            if took[-1] < seconds:
                return
        raise AssertionError(f"{what} took {min(took):.2f} s to raise Unavailable, not {seconds} s")

    async def pass_time(self, seconds: float) -> None:
        """Advance the rig's clock if it can, else sleep."""
        if self.rig.can_advance_clock:
            self.rig.advance_clock(seconds)
        else:
            await self.runtime.sleep(seconds)

    async def close(self) -> None:
        try:
            self.rig.restore_all()
            for caller in self._callers:
                await caller.close()
            for task in self._background_tasks:
                await task.finished(self.timeout)
            for seat in self._seats:
                await seat.engine.close()
        finally:
            self.rig.close()
