"""Questions to several servers at once, from one task: see `scatter.py` for what that is for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from leasehold.runtime.scatter import Answers, Limit, Questions
from leasehold.runtime.streams import Clock


async def gathering(
    ask: Callable[[int, bytes], Awaitable[Any]], asked: Questions, limit: Limit, clock: Clock
) -> Answers:
    """Ask each its question, and wait for the answers as long as the limit says. A connection still being made by then
    is given up. Who is not in what is returned was not asked.

    The answers to requests on their way are futures, and need no task; only where a connection is to be made first does
    one run for that server.
    """
    round_ = _Round(ask, asked.later, limit, clock)
    try:
        round_.ask(asked.first)
        round_.look()
        await round_.over
    finally:
        round_.leave()
    return round_.answers | dict.fromkeys(round_.waiting, TimeoutError("no answer in time"))


class _Round:
    def __init__(
        self, ask: Callable[[int, bytes], Awaitable[Any]], later: Mapping[int, bytes], limit: Limit, clock: Clock
    ) -> None:
        self._ask, self._later, self._limit, self._clock = ask, later, limit, clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._at = float("-inf")
        self.answers: Answers = {}
        self.futures: list[asyncio.Future[Any]] = []
        self.waiting: set[int] = set()
        self.over: asyncio.Future[None] = self._loop.create_future()

    def ask(self, questions: Mapping[int, bytes]) -> None:
        for number, data in questions.items():
            self.waiting.add(number)
            self.futures.append(asyncio.ensure_future(self._ask(number, data)))
            self.futures[-1].add_done_callback(partial(self._note, number))

    def _note(self, number: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        answer = future.exception() or future.result()  # taken here, also when nobody waits any more
        if self.over.done():
            return
        self.answers[number] = answer
        self.waiting.discard(number)
        if not self.waiting or self._clock() >= self._limit.patience:
            self.look()

    def look(self) -> None:
        """End it, or see when to look again."""
        now = self._clock()
        if self._later and self._limit.needs_more(now, self.answers, self.waiting):
            later, self._later = self._later, {}
            self.ask(later)
        until = self._limit.until(now, self.answers)
        if until <= now or not self.waiting:
            self.end()
        elif until != self._at:
            self._stop_timer()
            self._at, self._timer = until, self._loop.call_later(until - now, self._due)

    def _due(self) -> None:
        self._at = float("-inf")
        self.look()

    def end(self) -> None:
        self._stop_timer()
        if not self.over.done():
            self.over.set_result(None)

    def leave(self) -> None:
        """Nobody waits any more. A loop that was closed under the round takes no call, and runs nothing of it."""
        if self._loop.is_closed():
            return
        self.end()
        for future in self.futures:
            if isinstance(future, asyncio.Task):
                future.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
