"""Leader election: a lock whose holder leads, and observers of its terms.

What is promised beyond the lock:

- *Terms.* A term is a grant of the name. Its token fences the leader's writes and rises from term to term. If the
  engine's grants may outlive their client, a term that is resigned early stays visible for a second (`min_hold`), and
  the term of a leader that dies stays visible until its ttl ends. So an observer that polls more often than that sees
  every term once and in order. If an observer could not poll in time, the next term it yields says so: `missed`.
- *Callbacks.* `serve` calls start, then stop, then perhaps start again, on its caller's own thread or task. A start
  that returned is followed by exactly one stop, even after a loss, an error or a cancellation. A start that raised is
  not followed by a stop. When the leader resigns, stop returns before the name is released: that is the time to drain.
  In one process no start begins before the stop of an earlier term of the same election has returned.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from leasehold.client.decorator import accepted_parameters, refuse_coroutine
from leasehold.client.lease import BaseLease, wait_lost
from leasehold.client.lock import BaseLock
from leasehold.config import Duration, LockArguments, Unset, check_seconds
from leasehold.core import names, timing
from leasehold.engines.base import Engine
from leasehold.engines.registry import snapshot_items
from leasehold.errors import ConfigError, SelfDeadlock, Unavailable
from leasehold.model import Holding, Term, Traits
from leasehold.runtime.base import maybe_await

L = TypeVar("L", bound=BaseLease)

_log = logging.getLogger("leasehold.election")

_POLL_INTERVAL: Final = 0.02
# By election: the terms whose callbacks are running in this process.
_ACTIVE_TERMS: Final[dict[tuple[object, ...], list[BaseLease]]] = {}


class Resigned(Exception):
    """Ends the wait of a candidate that resigned. Never reaches the caller."""


def election_options(traits: Traits, options: LockArguments) -> LockArguments:
    """The options of an election's lock: fencing is required, and terms stay visible."""
    if options.get("reentrant"):
        raise ConfigError("an election cannot be reentrant: leave out reentrant=True")
    given: LockArguments = {**options, "require": {"fencing", *options.get("require", ())}}
    if traits.outlives:
        max_hold, min_hold = options.get("max_hold"), check_seconds("min_hold", options.get("min_hold", 0.0))
        visible_for = timing.TERM_VISIBLE
        if max_hold is not None:
            visible_for = min(visible_for, check_seconds("max_hold", max_hold, allow_zero=False))
        given["min_hold"] = max(visible_for, min_hold)
    return given


class BaseElection(Generic[L]):
    """What `Election` and `AsyncElection` share: one candidate, and any number of observers."""

    def __init__(self, lock: BaseLock[L]) -> None:
        self._lock, self._core = lock, lock._core
        self._term: L | None = None  # referenced until resigned: a lease without a reference is released
        self._serving = self._resigned = False
        self._owner_id = ""  # the thread or task that serves

    @property
    def name(self) -> str:
        """The election's name."""
        return self._lock.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ttl={self._lock.options.ttl}>"

    # ------------------------------------------------------------- leading

    async def _campaign(self, wait: Duration | Unset | None) -> L:
        self._refuse_second_candidacy()
        try:
            self._term = await self._lock._acquire_lease(wait)
        except SelfDeadlock as error:  # in a `with` of this name; an election cannot be reentrant
            raise SelfDeadlock(self.name, token=error.token, why="leave its `with` block before you campaign") from None
        return self._term

    def _refuse_second_candidacy(self) -> None:
        if self._serving:
            raise ConfigError(
                f"serve() of this election ({self.name}) is running: create another election to campaign again"
            )
        if self._term is not None and self._term.held:
            raise SelfDeadlock(self.name, token=self._term.token, why="this candidate leads; call resign() first")

    async def _resign(self) -> bool:
        """Step down. True: this candidate led. Under `serve` this is only a request: its own thread drains and
        releases."""
        if self._serving:
            return self.resign_nowait()
        term, self._term = self._term, None
        return term is not None and await term._release_explicitly()

    def resign_nowait(self) -> bool:
        """Step down without waiting for the engine. True: this candidate led. For handlers: may be called from any
        thread, from a signal handler, and as a callback of an event loop (`loop.add_signal_handler`). While `serve` is
        running, this is only a request: `serve` calls `stop`, releases the name and returns."""
        term = self._term
        led = term is not None and term.held
        if not self._serving:
            self._term = None
            if term is not None:
                self._core.held_locks.mark_released(term)
                term._release_nowait()
            return led
        self._resigned = True
        for _, waiter in snapshot_items(self._core.registry.waiting):
            if waiter.claim.name == self.name and names.owner_of(waiter.claim.id_hash) == self._owner_id:
                waiter.cancelled = True  # once woken, it calls `_engine_unless_resigned` and leaves the queue
                waiter.signal.set()
        if term is not None:
            term._set_signals()
        return led

    async def _serve(self, start: Callable[[L], object], stop: Callable[[L], object]) -> None:
        """Campaign and lead, term after term, until resigned."""
        for callback in (start, stop):
            if not callable(callback) or (self._core.runtime.blocking and inspect.iscoroutinefunction(callback)):
                raise ConfigError(
                    "serve() takes two functions, start(term) and stop(term); async ones need AsyncElection"
                )
            accepted_parameters(callback, self._core.runtime.blocking)  # refuses a generator function
        self._refuse_second_candidacy()
        self._owner_id = self._core.runtime.owner_id()
        self._serving, self._resigned = True, False
        try:
            while not self._resigned:
                term = await self._next_term()
                if term is not None:
                    await self._lead(term, start, stop)
        finally:
            self._serving, self._term = False, None

    async def _next_term(self) -> L | None:
        """The next term, or None after a resignation. If the engine does not answer, retries with growing pauses."""
        tries = 0
        while not self._resigned:
            try:
                return await self._lock._acquire_lease(None, self._engine_unless_resigned)
            except Resigned:
                return None
            except Unavailable as error:
                tries += 1
                pause = timing.backoff(tries, 0.1, 5.0, 0.5 + self._core.runtime.random() / 2)
                _log.warning("%s: the campaign failed; retrying in %.1f s: %s", self.name, pause, error)
                await self._pause(pause)
        return None

    async def _pause(self, seconds: float) -> None:
        """Sleeps in short steps, so that a resignation takes effect soon."""
        end = self._core.runtime.now() + seconds
        while not self._resigned and (left := end - self._core.runtime.now()) > 0:
            await self._core.runtime.sleep(min(left, 0.1))

    def _engine_unless_resigned(self) -> Engine:
        if self._resigned:
            raise Resigned
        return self._core.engine()

    async def _lead(self, term: L, start: Callable[[L], object], stop: Callable[[L], object]) -> None:
        """Lead one term, with its callbacks. Whatever happens, a start that returned is followed by one stop."""
        self._term = term
        key = (os.getpid(), self._core.config.url, self._core.options.namespace, self.name)
        active_terms = _ACTIVE_TERMS.setdefault(key, [])
        try:
            active_terms.append(term)
            await self._wait_for_earlier_terms(term, active_terms)
            if term.held and not self._resigned:
                blocking = self._core.runtime.blocking
                result: Any = start(term)
                if not blocking:
                    await maybe_await(result)
                try:
                    if blocking:  # inside of the `try`: Ctrl-C in it must not skip `stop`
                        refuse_coroutine(result, start)
                    await wait_lost([term], None, lambda: self._resigned)
                finally:
                    result = stop(term)  # called right here: Ctrl-C inside a helper could skip it
                    refuse_coroutine(result, stop) if blocking else await maybe_await(result)
        finally:
            if term in active_terms:  # not if Ctrl-C came before it was added
                active_terms.remove(term)
            await term._release()

    async def _wait_for_earlier_terms(self, term: L, active_terms: list[BaseLease]) -> None:
        """Wait until the callbacks of every earlier term of this election, in this process, have returned.

        A term that was renewed after our grant is not an earlier one: it belongs to another engine behind the same URL.
        """
        runtime, granted = self._core.runtime, self._core.runtime.now()
        while term.held and any(
            other_term is not term
            and other_term.token < term.token
            and not (other_term.held and other_term._validity.asked_at > granted)
            for other_term in active_terms
        ):
            await runtime.sleep(_POLL_INTERVAL)

    # ---------------------------------------------------------- observing

    async def _leader(self) -> Term | None:
        return next((term_of(holding) for holding in await self._visible_terms() if holding.state == "held"), None)

    async def _visible_terms(self) -> list[Holding]:
        """The visible terms: the current one, or one that has just ended."""
        core = self._core
        found = await core.engine().inspect(core.options.namespace, self.name, True, core.deadline())
        return [holding for holding in found if holding.state in ("held", "cooling") and holding.token is not None]


class BaseTerms:
    """The terms of an election for one observer, each once and in order."""

    def __init__(self, election: BaseElection[Any], seconds: Duration | None) -> None:
        if seconds is not None:
            seconds = check_seconds("seconds", seconds)
        self._election, self._runtime = election, election._core.runtime
        self._deadline = timing.NEVER if seconds is None else self._runtime.now() + seconds
        options = election._lock.options
        self._visible_for = min(timing.TERM_VISIBLE, options.ttl, options.max_hold or timing.TERM_VISIBLE)
        self._last_poll_at: float | None = None  # when the last answered poll was sent
        self._last_token, self._missed, self._next_poll_at = 0, False, 0.0

    async def _next(self) -> Term | None:
        """The next term, or None when the time is over."""
        now = self._runtime.now
        while True:
            pause = min(self._next_poll_at, self._deadline) - now()
            if pause > 0:
                await self._runtime.sleep(pause)
            if self._last_poll_at is not None and now() >= self._deadline:
                return None
            asked_at = now()
            self._next_poll_at = asked_at + timing.observe_interval(self._visible_for)
            try:
                found = await self._election._visible_terms()
            except Unavailable as error:
                if now() >= self._deadline:
                    return None
                _log.info("%s: the observer got no answer; retrying: %s", self._election.name, error)
                continue
            self._missed |= self._last_poll_at is not None and now() - self._last_poll_at > self._visible_for
            self._last_poll_at = asked_at
            for holding in found:
                if (holding.token or 0) > self._last_token:
                    term, self._missed = term_of(holding, self._missed), False
                    self._last_token = term.token
                    return term


def term_of(holding: Holding, missed: bool = False) -> Term:
    return Term(holding.name, holding.token or 0, holding.holder, holding.age, missed)
