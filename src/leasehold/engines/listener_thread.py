"""Listeners for push notifications: whether notifications arrive, and the thread that receives them. For Redis and lock
servers; the listeners of SQL servers are in `engines/sql/listener.py`.

The thread starts when a waiter first needs it. If it cannot start, the engine works on without it: waiters poll (E4),
and the next call tries again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from logging import Logger
from typing import Any, ClassVar, Final

from leasehold.core.timing import STABLE_AFTER
from leasehold.runtime.base import Runtime, Signal
from leasehold.runtime.net.blocking import SocketStream

_ACTIVE_TIMEOUT: Final = 1.0  # seconds that an attempt waits for its notifications


class PushStatus(ABC):
    """Whether wake-ups reach this client. Attempts that queue wait for that."""

    def __init__(self) -> None:
        self.active = False  # wake-ups reach this client
        self._waiting_attempts: list[Signal] = []

    @property
    @abstractmethod
    def failing(self) -> bool:
        """The last try failed."""

    @abstractmethod
    def start(self) -> None:
        """Make sure that the listener runs."""

    async def wait_active(self, runtime: Runtime, deadline: float) -> None:
        """Return when wake-ups arrive, or when that fails or takes too long. Without them waiters are only slower."""
        self.start()
        signal = runtime.signal()
        self._waiting_attempts.append(signal)
        if not self.active and not self.failing:
            await signal.wait(min(deadline - runtime.now(), _ACTIVE_TIMEOUT))

    def wake_attempts(self) -> None:
        """Let the attempts continue that wait for this listener."""
        attempts, self._waiting_attempts = self._waiting_attempts, []
        for signal in attempts:
            signal.set()


class ListenerThread(PushStatus):
    """A listener with a thread and a connection of its own."""

    _thread_name: ClassVar[str]
    _thread_log: ClassVar[Logger]
    _runtime: Runtime

    def _reset_thread(self) -> None:
        """Set everything to its first value. In a forked child there is no thread, and the connection belongs to the
        parent."""
        if (stream := getattr(self, "_stream", None)) is not None:
            stream.after_fork()
        self._mutex = self._runtime.mutex()
        self._stream: SocketStream | None = None
        self._running = self._succeeded = self._failing = False
        self._stop_flag: list[bool] = []  # of the current thread; not empty: it must stop

    @property
    def failing(self) -> bool:
        return self._failing

    @abstractmethod
    def _run(self, stop_flag: list[bool]) -> Callable[[Runtime], Coroutine[Any, Any, None]]:
        """What the thread runs until `stop_flag` is not empty."""

    def start(self) -> None:
        if self._running:
            return
        with self._mutex:
            if self._running:
                return
            self._running, self._stop_flag = True, []
        try:
            self._runtime.start_thread(self._run(self._stop_flag), self._thread_name)
        except BaseException as error:  # the next call tries again
            self._running, self._failing = False, True
            if not isinstance(error, RuntimeError):
                raise
            self._thread_log.warning("cannot start a thread for push notifications, falling back to polling")

    def _count_misses(self, misses: int, seconds: float, failed_unexpectedly: bool) -> int:
        """After a connection of so many seconds: how many misses there were in a row. The pauses become longer with
        them, also behind a proxy that cuts off each connection as soon as notifications arrive."""
        succeeded, self._succeeded = self._succeeded and not failed_unexpectedly, False
        misses = 0 if succeeded and seconds >= STABLE_AFTER else misses + 1
        self._failing = not succeeded or misses > 1  # else the next connection is worth waiting for
        return misses

    def drop_connection(self) -> None:
        """Close the connection, from any thread: the listener opens a new one."""
        if (stream := self._stream) is not None:
            stream.shutdown()

    def close(self) -> None:
        self._stop_flag.append(True)
        self.drop_connection()
