"""The circuit breaker: an engine that does not answer is asked once a second, not by every caller.

While it is open, new attempts and questions fail at once with `Unavailable`. Renewals and releases always pass: a lease
may depend on one, and they tell whether the engine answers again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from leasehold.core.breaker import MAX_UNANSWERED, PROBE_INTERVAL, Breaker
from leasehold.engines.base import Engine, WrappedEngine
from leasehold.errors import LeaseholdError, NotSent, Overloaded, Reentered, TransactionOpen, Unavailable
from leasehold.model import Alive, Busy, Claim, Gone, Grant, Holding
from leasehold.runtime.base import Runtime

T = TypeVar("T")

_OPENED: Final = (
    f"the engine did not answer {MAX_UNANSWERED} calls in a row: the circuit breaker is open, new attempts fail at "
    f"once, and one call in {PROBE_INTERVAL:g} s is sent"
)
_CLOSED: Final = "the engine answers again: the circuit breaker is closed"


class SharedBreaker:
    """The breaker of one client: both its engine instances, and all threads, count together."""

    def __init__(self, runtime: Runtime, engine_name: str, report: Callable[[bool, str], None]) -> None:
        self._runtime, self._engine_name, self._report = runtime, engine_name, report
        self.after_fork()

    def after_fork(self) -> None:
        self._mutex = self._runtime.mutex()
        self._breaker = Breaker()

    def refuse_if_open(self) -> None:
        with self._mutex:
            unanswered, retry_in = self._breaker.unanswered, self._breaker.retry_in(self._runtime.now())
        if retry_in:
            raise NotSent(
                f"the engine did not answer the last {unanswered} calls, so this one was not sent: "
                f"the circuit breaker tries again in {retry_in:.1f} s",
                engine=self._engine_name,
                retry_in=retry_in,
            )

    def on_answer(self) -> None:
        if not self._breaker.unanswered:  # the usual case, without the mutex
            return
        with self._mutex:
            closed = self._breaker.on_answer()
        if closed:
            self._report(False, _CLOSED)

    def on_silence(self, error: Unavailable) -> None:
        with self._mutex:
            opened = self._breaker.on_silence(self._runtime.now())
        if opened:
            self._report(True, f"{_OPENED}; last: {error}")


class BreakerEngine(WrappedEngine):
    """The verbs of another engine, behind a breaker. Verbs of that engine alone, such as those for records, pass."""

    def __init__(self, engine: Engine, breaker: SharedBreaker) -> None:
        super().__init__(engine)
        self._breaker = breaker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def attempt(self, claim: Claim, deadline: float) -> Grant | Busy:
        self._breaker.refuse_if_open()
        return await self._counted(self._engine.attempt(claim, deadline))

    async def break_(self, namespace: str, name: str, token: int, deadline: float) -> bool:
        self._breaker.refuse_if_open()
        return await self._counted(self._engine.break_(namespace, name, token, deadline))

    async def set_limit(self, namespace: str, name: str, limit: int | None, deadline: float) -> None:
        self._breaker.refuse_if_open()
        await self._counted(self._engine.set_limit(namespace, name, limit, deadline))

    async def inspect(self, namespace: str, prefix: str, exact: bool, deadline: float) -> Sequence[Holding]:
        self._breaker.refuse_if_open()
        return await self._counted(self._engine.inspect(namespace, prefix, exact, deadline))

    async def ping(self, deadline: float) -> None:
        self._breaker.refuse_if_open()
        await self._counted(self._engine.ping(deadline))

    async def release(self, claim: Claim, deadline: float) -> bool | None:
        return await self._counted(self._engine.release(claim, deadline))

    async def decline(self, claim: Claim, deadline: float) -> bool:
        return await self._counted(self._engine.decline(claim, deadline))

    async def renew(self, claims: Sequence[Claim], deadline: float) -> Sequence[Alive | Gone | Unavailable]:
        replies = await self._engine.renew(claims, deadline)  # raises nothing: it answers per claim (E5)
        if replies and isinstance(replies[0], Unavailable) and all(isinstance(r, Unavailable) for r in replies):
            self._breaker.on_silence(replies[0])
        else:
            self._breaker.on_answer()
        return replies

    async def _counted(self, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except Reentered:  # says nothing about the engine
            raise
        except (TransactionOpen, Overloaded):  # that is an answer
            self._breaker.on_answer()
            raise
        except Unavailable as error:
            self._breaker.on_silence(error)
            raise
        except LeaseholdError:  # refused: that is an answer
            self._breaker.on_answer()
            raise
        self._breaker.on_answer()
        return answer
