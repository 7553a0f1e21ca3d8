"""Requests to several servers at once, from one task: the asyncio twin of `fanout_blocking.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from leasehold.runtime.net.blocking import Clock
from leasehold.runtime.net.fanout_blocking import AnswersByServer, Correction, FanoutRequests, WaitPolicy


async def gather_answers(
    send: Callable[[int, bytes], Awaitable[Any]], requests: FanoutRequests, policy: WaitPolicy, clock: Clock
) -> AnswersByServer:
    """Send each server its request, and wait for the answers as long as the policy says. A connection that is still
    being opened by then is given up. Servers missing from the result were not asked.

    Answers to requests already sent are futures and need no task. A task runs only for a server to which a connection
    must be opened first.
    """
    run = _FanoutRun(send, requests.later, requests.correction, policy, clock)
    try:
        run.send_all(requests.first)
        run.check()
        await run.finished
    finally:
        run.cancel()
    return run.answers | dict.fromkeys(run.waiting, TimeoutError("no reply in time"))


class _FanoutRun:
    def __init__(
        self,
        send: Callable[[int, bytes], Awaitable[Any]],
        later: Mapping[int, bytes],
        correction: Correction,
        policy: WaitPolicy,
        clock: Clock,
    ) -> None:
        self._send, self._later, self._correction, self._policy, self._clock = send, later, correction, policy, clock
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("-inf")
        self.answers: AnswersByServer = {}
        self.futures: list[asyncio.Future[Any]] = []
        self.waiting: set[int] = set()
        self.finished: asyncio.Future[None] = self._loop.create_future()

    def send_all(self, requests: Mapping[int, bytes]) -> None:
        for number, data in requests.items():
            self.waiting.add(number)
            self.futures.append(asyncio.ensure_future(self._send(number, data)))
            self.futures[-1].add_done_callback(partial(self._on_answer, number, data))

    def _on_answer(self, number: int, data: bytes, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            return
        answer = future.exception() or future.result()  # retrieved even after the end, or asyncio would log a warning
        if self.finished.done():
            return
        if (corrected := self._correction(number, data, answer)) is not None:
            self.send_all({number: corrected})
            return
        self.answers[number] = answer
        self.waiting.discard(number)
        if not self.waiting or self._clock() >= self._policy.all_until:
            self.check()

    def check(self) -> None:
        """End the wait, or set the timer for the next check."""
        now = self._clock()
        if self._later and self._policy.needs_more(now, self.answers, self.waiting):
            later, self._later = self._later, {}
            self.send_all(later)
        until = self._policy.wait_until(now, self.answers)
        if until <= now or not self.waiting:
            self.finish()
        elif until != self._timer_at:
            self._stop_timer()
            self._timer_at, self._timer = until, self._loop.call_later(until - now, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_at = float("-inf")
        self.check()

    def finish(self) -> None:
        self._stop_timer()
        if not self.finished.done():
            self.finished.set_result(None)

    def cancel(self) -> None:
        """Stop: the caller no longer waits. If the loop was closed meanwhile, it accepts no calls and runs nothing."""
        if self._loop.is_closed():
            return
        self.finish()
        for future in self.futures:
            if isinstance(future, asyncio.Task):
                future.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
