"""How long the calls of an engine take, measured around the engine itself: without queues, hooks and HTTP.

For a lock server: it wraps its engine once, `engine = calls.measured(engine)`, and shows `calls` among its metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Final, TypeAlias, TypeVar

from leasehold.engines.base import Engine
from leasehold.errors import Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding, Traits
from leasehold.telemetry.families import Family, Histogram
from leasehold.telemetry.metrics import RENEW_BUCKETS

T = TypeVar("T")

# Makes a span of this name, such as `otel.Hook.span`.
StartSpan: TypeAlias = Callable[[str], AbstractContextManager[object]]
_LABELS: Final = ("engine", "call", "outcome")


class EngineCalls:
    """A source of metrics. `engine`: its label. `span`: makes the spans `leasehold.engine.attempt` and `.wait`."""

    def __init__(self, engine: str, span: StartSpan | None = None) -> None:
        self._engine, self._span = engine, span
        text = "Seconds that calls of the engine took."
        self._seconds = Histogram("leasehold_engine_call_seconds", text, RENEW_BUCKETS, _LABELS)

    def measured(self, engine: Engine) -> MeasuredEngine:
        return MeasuredEngine(engine, self)

    def families(self) -> Iterable[Family]:
        return [self._seconds.family()]

    def span(self, name: str) -> AbstractContextManager[object]:
        return nullcontext() if self._span is None else self._span(f"leasehold.engine.{name}")

    async def measure(self, call: str, answer: Awaitable[T]) -> T:
        began, outcome = perf_counter(), "error"
        try:
            found = await answer
            outcome = "ok"
            return found
        except Unavailable:
            outcome = "unavailable"
            raise
        finally:
            self._seconds.series(self._engine, call, outcome).observe(perf_counter() - began)


class MeasuredEngine:
    """The verbs of another engine, measured. Its other methods pass."""

    def __init__(self, engine: Engine, calls: EngineCalls) -> None:
        self._engine, self._calls = engine, calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def traits(self) -> Traits:
        return self._engine.traits

    @property
    def queues_at_once(self) -> bool:
        return self._engine.queues_at_once

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        with self._calls.span("attempt"):
            return await self._calls.measure("attempt", self._engine.attempt(claim, deadline))

    async def wait(self, claim: Claim, busy: Busy, seconds: float) -> None:
        with self._calls.span("wait"):
            await self._engine.wait(claim, busy, seconds)

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        return await self._calls.measure("renew", self._engine.renew(claims, deadline))

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        return await self._calls.measure("release", self._engine.release(claim, deadline))

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        return await self._calls.measure("break", self._engine.break_(namespace, name, token, deadline))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        return await self._calls.measure("inspect", self._engine.inspect(namespace, prefix, exact, deadline))

    async def ping(self, deadline: float) -> None:
        await self._calls.measure("ping", self._engine.ping(deadline))

    def forget(self, claim: Claim) -> None:
        self._engine.forget(claim)

    def after_fork(self) -> None:
        self._engine.after_fork()

    async def close(self) -> None:
        await self._engine.close()
