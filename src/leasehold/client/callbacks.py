"""Runs callbacks and event hooks on a thread of their own, so that user code cannot delay a renewal."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from leasehold.errors import ConfigError
from leasehold.runtime.base import Runtime, Signal

_log = logging.getLogger("leasehold.callbacks")


def check_callback(where: str, callback: object) -> None:
    from inspect import iscoroutinefunction  # only here: it would slow `import leasehold` down

    if not callable(callback) or iscoroutinefunction(callback):
        raise ConfigError(f"{where} takes a plain function of one argument, the lease; it runs on another thread")


class CallbackThread:
    """One thread per client. It starts with the first callback and runs callbacks in the order submitted."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.after_fork()

    def after_fork(self) -> None:
        self._queue: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._signal: Signal | None = None
        self._running = False
        self._mutex = self._runtime.mutex()
        self._stops_when_idle = False

    def __len__(self) -> int:
        """How many callbacks wait for the thread."""
        return len(self._queue)

    def submit(self, fn: Callable[..., object], *args: object) -> None:
        with self._mutex:
            self._queue.append((fn, args))
            starts, self._running = not self._running, True
        if starts:
            try:
                self._runtime.start_thread(self._run, "leasehold-callbacks")
            except BaseException as error:  # no thread could be started: the next submit() tries again
                self._running = False
                if not isinstance(error, RuntimeError):  # the caller may be the watchdog, which must survive this
                    raise
        elif self._signal is not None:
            self._signal.set()

    def stop_when_idle(self) -> None:
        """End the thread once its queue is empty. Safe inside a finaliser."""
        self._stops_when_idle = True
        if self._signal is not None:
            self._signal.set()

    async def _run(self, runtime: Runtime) -> None:
        self._signal = signal = runtime.signal()
        while True:
            while self._queue:
                fn, args = self._queue.popleft()
                try:
                    fn(*args)
                except BaseException:  # sys.exit() in a callback ends the callback, not this thread
                    with suppress(Exception):  # a log handler of the program may fail as well
                        _log.exception("callback %s failed", getattr(fn, "__qualname__", fn))
                del fn, args  # or the idle thread would keep a lease alive
            with self._mutex:
                if self._stops_when_idle and not self._queue:
                    self._running, self._signal = False, None
                    return
            await signal.wait(3600.0)
