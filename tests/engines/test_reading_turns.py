"""Who reads notifications, the listener's thread or a waiter: the rules of `engines/reading_turns.py`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from leasehold.engines import reading_turns
from leasehold.engines.reading_turns import ReadingSignal, ReadingTurns
from leasehold.runtime.base import Signal, run_sync
from leasehold.runtime.net.blocking import WOKEN, SelfPipe
from leasehold.runtime.threads import Threads

LONG = 60.0  # seconds: longer than any test


class Listener:
    """A listener whose messages are single bytes: `w` wakes the waiter `signal`. It has just woken a waiter, and its
    thread stays away until `returned`."""

    def __init__(self, max_silence: float = LONG, stays_away: bool = True) -> None:
        self.server_side, self._socket = socket.socketpair()
        self.turns = ReadingTurns(Threads(), max_silence, self._receive, self._handle, lambda: self.alone)
        self.alone, self.handled_on = True, list[threading.Thread]()
        self.signal = self.turns.make_signal()
        self.on_message: Callable[[], None] = lambda: None
        self.error: BaseException | None = None
        if stays_away:
            self.stay_away()

    def stay_away(self) -> None:
        self.returned = threading.Event()
        threading.Thread(target=self._stay_away, daemon=True).start()

    def _stay_away(self) -> None:
        try:
            while not run_sync(self.turns.after_wakeup()):
                continue
        except BaseException as error:
            self.error = error
        self.returned.set()

    def _receive(self, seconds: float, pipe: SelfPipe) -> Any:
        try:
            return WOKEN if pipe.wait_woken(self._socket, seconds) else self._socket.recv(1)
        except TimeoutError:
            return WOKEN

    def _handle(self, message: Any) -> None:
        self.handled_on.append(threading.current_thread())
        self.on_message()
        if message == b"w":
            self.signal.set()

    def wait(self, signal: ReadingSignal | None = None) -> Waiting:
        return Waiting(signal or self.signal)

    def close(self) -> None:
        self.turns.end()
        self.server_side.close()
        self._socket.close()


class Waiting:
    """A thread that waits for a signal."""

    def __init__(self, signal: ReadingSignal) -> None:
        self.woken: bool | None = None
        self.error: BaseException | None = None
        self._signal = signal
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            self.woken = run_sync(self._signal.wait(LONG))
        except BaseException as error:
            self.error = error

    def join(self) -> bool | None:
        self.thread.join(LONG)
        return self.woken


class SleptSignal:
    """A signal that records whether a thread has begun to sleep on it."""

    def __init__(self, signal: Signal) -> None:
        self.set, self._signal, self.slept = signal.set, signal, False

    async def wait(self, seconds: float) -> bool:
        self.slept = seconds > 0
        return await self._signal.wait(seconds)


@pytest.fixture(autouse=True)
def _long_absence(monkeypatch) -> None:
    """Until a reader stops, the listener's thread stays away: nothing here depends on time."""
    monkeypatch.setattr(reading_turns, "_ABSENCE", 100 * LONG)


@pytest.fixture
def make_listener() -> Iterator[Callable[..., Listener]]:
    listeners = []

    def make(**options: Any) -> Listener:
        listeners.append(Listener(**options))
        return listeners[-1]

    yield make
    for listener in listeners:
        listener.close()


@pytest.fixture
def listener(make_listener) -> Listener:
    return make_listener()


@pytest.fixture
def reader(listener, wait_until) -> Waiting:
    """A waiter that reads, and is asleep."""
    wait_until(lambda: listener.turns._away)
    waiting = listener.wait()
    wait_until(lambda: listener.turns._polling is listener.signal)
    return waiting


def call_back(listener: Listener) -> None:
    """Make the listener's thread look whether a waiter reads, as at the end of `_ABSENCE`."""
    listener.turns._calls_back.set()


def test_only_waiter_reads_its_own_notification(listener, reader) -> None:
    listener.server_side.send(b"w")
    assert reader.join()
    assert listener.handled_on == [reader.thread]
    assert not listener.returned.is_set()  # it stays away for the next waiter
    call_back(listener)
    assert listener.returned.wait(LONG)
    assert listener.error is None


def test_listener_stays_while_other_waiters_are_asleep(make_listener) -> None:
    listener = make_listener(stays_away=False)
    listener.alone = False
    assert not any(run_sync(listener.turns.after_wakeup()) for _ in range(10))


def test_waiter_sleeps_while_the_listener_reads(make_listener) -> None:
    listener = make_listener(stays_away=False)
    waiting = listener.wait()
    listener.server_side.send(b"w")
    listener.signal.set()
    assert waiting.join()
    assert not listener.handled_on


def test_second_waiter_does_not_read_and_is_woken_by_the_first(listener, reader, wait_until) -> None:
    second = listener.turns.make_signal()
    sleeper = listener.wait(second)
    listener.on_message = second.set
    listener.server_side.send(b"x")
    assert sleeper.join()
    assert listener.handled_on == [reader.thread]
    listener.server_side.send(b"w")
    assert reader.join()


def test_listener_is_called_back_when_a_reader_leaves_others_asleep(listener, reader) -> None:
    listener.alone = False
    listener.server_side.send(b"w")
    assert reader.join()
    assert listener.returned.wait(LONG)


def test_listener_that_looked_while_a_waiter_read_is_called_back(listener, reader, wait_until) -> None:
    call_back(listener)
    wait_until(lambda: not listener.turns._returns_soon)
    assert not listener.returned.is_set()
    listener.server_side.send(b"w")
    assert reader.join()
    assert listener.returned.wait(LONG)


def test_signal_set_by_another_thread_ends_the_reading(listener, reader) -> None:
    listener.signal.set()  # as by close()
    assert reader.join()
    assert not listener.handled_on


def test_signal_that_was_set_before_the_wait_is_remembered(listener, wait_until) -> None:
    wait_until(lambda: listener.turns._away)
    listener.signal.set()
    assert listener.wait().join()


def test_error_of_a_reader_is_left_to_the_listener(listener, reader) -> None:
    listener.server_side.close()
    listener.on_message = lambda: (_ for _ in ()).throw(ConnectionResetError("closed"))
    assert listener.returned.wait(LONG)
    assert isinstance(listener.error, ConnectionResetError)
    assert reader.thread.is_alive()  # it waits on, and is woken by the listener
    listener.signal.set()
    assert reader.join()


def test_interrupted_reader_makes_the_listener_reconnect(listener, reader) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    listener.on_message = interrupt
    listener.server_side.send(b"x")
    reader.join()
    assert isinstance(reader.error, KeyboardInterrupt)
    assert listener.returned.wait(LONG)
    assert isinstance(listener.error, ConnectionAbortedError)  # who knows what was read, and not handled


def test_reader_leaves_a_silent_connection_to_the_listener(make_listener, wait_until) -> None:
    listener = make_listener(max_silence=0.2)
    wait_until(lambda: listener.turns._away)
    waiting = listener.wait()
    call_back(listener)
    assert listener.returned.wait(LONG)
    assert listener.error is None
    listener.signal.set()
    assert waiting.join()


def test_connection_of_a_stuck_reader_is_replaced(make_listener, wait_until, monkeypatch) -> None:
    monkeypatch.setattr(reading_turns, "_GRACE", 0.1)
    listener, go_on = make_listener(max_silence=0.1), threading.Event()
    listener.on_message = lambda: go_on.wait(LONG) and None
    signal = listener.signal.signal = SleptSignal(listener.signal.signal)
    wait_until(lambda: listener.turns._away)
    listener.server_side.send(b"xw")  # while the first is handled, a signal handler seems to interrupt the reader
    waiting = listener.wait()
    wait_until(lambda: listener.handled_on)
    call_back(listener)
    assert listener.returned.wait(LONG)
    assert isinstance(listener.error, ConnectionAbortedError)
    listener.turns._max_silence = LONG
    listener.stay_away()  # with the next connection
    wait_until(lambda: listener.turns._away)
    go_on.set()
    wait_until(lambda: signal.slept or not waiting.thread.is_alive())
    assert len(listener.handled_on) == 1  # the rest is the listener's
    listener.signal.set()
    assert waiting.join()


def test_reader_interrupted_by_a_fork_reads_no_more_in_the_child(listener, reader, wait_until) -> None:
    listener.turns._mutex.acquire()  # by another thread of the parent, which the child does not have
    listener.on_message = listener.turns.after_fork  # as if a signal handler forked while the message was handled
    listener.server_side.send(b"xw")
    wait_until(lambda: listener.handled_on)
    wait_until(lambda: listener.turns._polling is None)
    listener.signal.set()
    assert reader.join()
    assert len(listener.handled_on) == 1
