"""Runs a slow hook, such as one that sends events over the network, on a thread of its own.

client = leasehold.Client(url, on_event=background(send_to_my_service))
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from typing import Final

from leasehold.errors import ConfigError
from leasehold.events import Event, Hook, call_hook, count_dropped_event
from leasehold.runtime.base import log_unexpected

_log = logging.getLogger("leasehold.events")

_EXIT_SECONDS: Final = 1.0  # that the exit of the interpreter waits for each hook, at most
_BACKGROUND: weakref.WeakSet[Background] = weakref.WeakSet()  # for the handlers at fork and exit


def background(hook: Hook, *, max_events: int = 10_000) -> Background:
    """A hook that passes events on to `hook` on one thread, in order, and never waits for it.

    If `max_events` wait, new ones are dropped, and counted in `leasehold_events_dropped_total`. At exit the program
    waits up to a second for events that are still to be passed on.
    """
    if not callable(hook) or not isinstance(max_events, int) or max_events < 1:
        raise ConfigError("background takes a hook, and max_events of at least 1")
    return Background(hook, max_events)


class Background:
    def __init__(self, hook: Hook, max_events: int) -> None:
        self._hook, self._max_events = hook, max_events
        self._start()
        _BACKGROUND.add(self)

    def _start(self) -> None:
        """Also in a forked child: the events that wait are the parent's, as is the thread."""
        self._events: deque[Event] = deque()
        self._wake = threading.Event()
        self._mutex = threading.RLock()  # reentrant: a signal handler may acquire a lock
        self._busy = self._stopping = False
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        if len(self._events) >= self._max_events:
            count_dropped_event()
            return
        self._events.append(event)
        if self._thread is None:
            with self._mutex:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="leasehold-events", daemon=True)
                    self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def flush(self, seconds: float) -> bool:
        """Wait until the hook got all events so far, at most `seconds`. False: it did not."""
        end = time.monotonic() + seconds
        while self._events or self._busy:
            if time.monotonic() >= end:
                return False
            time.sleep(0.005)
        return True

    def stop(self, seconds: float) -> bool:
        """`flush`, and end the thread. Call it when no more events come."""
        flushed, thread = self.flush(seconds), self._thread
        if flushed and thread is not None:
            self._stopping = True
            self._wake.set()
            thread.join(seconds)
        return flushed

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            while self._events:
                self._busy = True
                try:
                    call_hook(self._hook, self._events.popleft(), may_be_slow=True)
                except BaseException as error:  # sys.exit() in the hook ends its call, not this thread
                    log_unexpected(_log, "the thread of a background hook", error)
                finally:
                    self._busy = False
        self._thread, self._stopping = None, False


def _after_fork_in_child() -> None:
    for each in list(_BACKGROUND):
        each._start()


@atexit.register
def _flush_at_exit() -> None:
    for each in list(_BACKGROUND):
        each.flush(_EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
