"""Runs callbacks and event hooks on a thread of their own, so that no user's code can hold up a renewal."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from leasehold.runtime.base import Runtime, Signal

_log = logging.getLogger("leasehold.teller")


class Teller:
    """One thread per client, started when there is first something to tell, in the order told."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.after_fork()

    def after_fork(self) -> None:
        self._todo: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._signal: Signal | None = None
        self._running = False
        self._guard = self._runtime.guard()
        self._retired = False

    def tell(self, fn: Callable[..., object], *args: object) -> None:
        with self._guard:
            self._todo.append((fn, args))
            starts, self._running = not self._running, True
        if starts:
            try:
                self._runtime.aside(self._run, "leasehold-teller")
            except BaseException as error:  # no thread to be had: the next thing to tell tries again
                self._running = False
                if not isinstance(error, RuntimeError):  # what tells is the watchdog above all: it must not end by that
                    raise
        elif self._signal is not None:
            self._signal.set()

    def retire(self) -> None:
        """End the thread once everything is told. Safe inside a finaliser."""
        self._retired = True
        if self._signal is not None:
            self._signal.set()

    async def _run(self, runtime: Runtime) -> None:
        self._signal = signal = runtime.signal()
        while True:
            while self._todo:
                fn, args = self._todo.popleft()
                try:
                    fn(*args)
                except BaseException:  # sys.exit() in a callback ends the callback, not the teller
                    _log.exception("%s failed", getattr(fn, "__qualname__", fn))
                del fn, args  # or an idle teller would keep a lease alive
            with self._guard:
                if self._retired and not self._todo:
                    self._running, self._signal = False, None
                    return
            await signal.wait(3600.0)
