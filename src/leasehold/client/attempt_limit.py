"""How many attempts of one client are under way at a time. The others wait here, in order of arrival.

Thousands of callers of one client share a few connections. If all sent their attempts at once, each would wait for the
answers to all the others, longer than its `call_timeout`, though the engine is healthy; and a waiter that was notified
would come too late for its reservation. So the `call_timeout` of an attempt begins when the attempt is sent. Waiting
here ends

- with `Unavailable`, once the engine has given no answer to this client for `call_timeout`;
- with `Crowded`, once the caller's `wait` is over, but not before `call_timeout` is.

So on a silent engine every caller gets its error within `call_timeout` of its call, or of the engine's last answer.
Only attempts wait here. Renewals and releases are never held up, and neither is a claim that may be granted now.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Final

from leasehold.errors import Crowded, NotSent
from leasehold.runtime.base import Runtime, Signal

# Enough to keep every engine busy, and few enough that an engine which answers fifty a second answers them all within
# the three seconds of a reservation.
MAX_ATTEMPTS: Final = 128


class _Caller:
    __slots__ = ("admitted", "ended", "id_hash", "signal")

    def __init__(self, id_hash: str, signal: Signal) -> None:
        self.id_hash, self.signal, self.admitted, self.ended = id_hash, signal, False, False


class AttemptLimit:
    """Used by all threads of a client without a mutex: two threads that meet may exceed the limit by one."""

    def __init__(self, runtime: Runtime, call_timeout: float, engine_name: str) -> None:
        self._runtime, self._call_timeout, self._engine_name = runtime, call_timeout, engine_name
        self.reset()

    def reset(self) -> None:
        """In a forked child, or when the event loop has changed: the callers are gone."""
        self._under_way: set[str] = set()  # id hashes
        self._waiting: deque[_Caller] = deque()
        self._answered_at = 0.0  # recorded only while callers wait

    def try_enter(self, id_hash: str) -> bool:
        if self._waiting or len(self._under_way) >= MAX_ATTEMPTS:
            return False
        self._under_way.add(id_hash)
        return True

    async def enter(self, id_hash: str, until: float) -> float:
        """Wait until the attempt may be sent, at most until this instant. Returns the time of the engine's last answer,
        or of this call if that was later: `call_timeout` counts from there. However this ends, `leave` must follow."""
        now, caller = self._runtime.now, _Caller(id_hash, self._runtime.signal())
        entered_at = now()
        try:
            self._waiting.append(caller)
            self._admit()
            while True:
                since = max(entered_at, self._answered_at)
                left = min(since + self._call_timeout, until) - now()
                if left <= 0:
                    raise self._refusal(entered_at)
                if caller.admitted:
                    return since
                await caller.signal.wait(left)
        finally:
            caller.ended = True  # first: another thread may be about to admit it
            if not caller.admitted:  # else `_admit` removes it
                self._remove(caller)

    def _refusal(self, entered_at: float) -> NotSent:
        now, engine = self._runtime.now(), self._engine_name
        if self._answered_at <= entered_at or now >= self._answered_at + self._call_timeout:
            text = f"{engine} did not answer any call of this client for {self._call_timeout:g} s"
            return NotSent(text, engine=engine, seconds=now - entered_at)
        text = (
            f"{len(self._waiting)} other calls of this client were waiting to be sent to {engine} until the deadline "
            "of this one: pass a longer wait, or use several clients"
        )
        return Crowded(text, engine=engine, seconds=now - entered_at)

    def leave(self, id_hash: str, *, answered: bool) -> None:
        self._under_way.discard(id_hash)
        if self._waiting:
            if answered:
                self._answered_at = self._runtime.now()
            self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._under_way) < MAX_ATTEMPTS:
            try:
                caller = self._waiting[0]
            except IndexError:  # another thread was faster
                return
            self._under_way.add(caller.id_hash)
            if caller.ended:  # in another thread: its `leave` may have come before `add`
                self._under_way.discard(caller.id_hash)
            else:
                caller.admitted = True
                caller.signal.set()
            self._remove(caller)  # last: if Ctrl-C comes before, the next `leave` admits it again

    def _remove(self, caller: _Caller) -> None:
        with suppress(ValueError):
            self._waiting.remove(caller)
