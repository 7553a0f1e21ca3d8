"""Heads of a line that are to look later: woken then, not before, and never forgotten."""

from __future__ import annotations

import socket
import threading
import time

import hiredis
import pytest

from leasehold import Client
from leasehold.book import Book, Waiter
from leasehold.core.timing import BEAT, PROBE
from leasehold.engines.redis import listener
from leasehold.engines.redis.listener import Listener, Looks
from leasehold.engines.redis.scripts import Publishing
from leasehold.errors import Unavailable
from leasehold.model import Claim, Holder
from leasehold.runtime.base import step
from leasehold.runtime.streams import SocketStream
from leasehold.runtime.threads import Threads, boot_clock


def claim(number: int) -> Claim:
    return Claim("", "job", f"id-{number}", f"{number:032x}", Holder("me"), 30.0, queue=True)


def woken(waiter: Waiter) -> bool:
    return step(waiter.signal.wait(0.0))


@pytest.fixture
def book() -> Book:
    return Book(Threads(), "client")


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_head_is_woken_when_it_is_to_look_and_not_before(book, looks) -> None:
    waiter = book.enter(claim(1), Threads())
    looks.note(book, claim(1).mark, 10.0)
    assert looks.first() == waiter.look_at == 10.0
    looks.wake(book, 9.9)
    assert not woken(waiter)
    looks.wake(book, 10.0)
    assert woken(waiter)
    assert looks.first() == float("inf")


def test_the_earlier_of_two_words_counts(book, looks) -> None:
    waiter = book.enter(claim(1), Threads())
    looks.note(book, claim(1).mark, 10.0)
    looks.note(book, claim(1).mark, 5.0)
    looks.wake(book, 5.0)
    assert woken(waiter)


def test_one_that_asked_again_since_knows_better(book, looks) -> None:
    waiter = book.enter(claim(1), Threads())
    looks.note(book, claim(1).mark, 10.0)
    book.enter(claim(1), Threads())
    looks.wake(book, 10.0)
    assert not woken(waiter)


def test_those_who_left_are_not_kept(book, looks) -> None:
    for number in range(1000):
        book.enter(claim(number), Threads())
        looks.note(book, claim(number).mark, 1e9 + number)
        book.leave(claim(number).mark)
    assert len(looks._due) < 100
    looks.note(book, claim(1).mark, 1.0)  # and nobody of whom nothing is known
    assert looks.first() >= 1e9


class Silent:
    """Takes a subscription, tells one waiter when to look, and says nothing more."""

    def __init__(self, mark: str, after: float) -> None:
        self.near, self.far = socket.socketpair()
        told = b"head %d leasehold:{:0}:job " % (after * 1e6) + bytes.fromhex(mark)
        self.far.sendall(b"*3\r\n$9\r\nsubscribe\r\n$1\r\nc\r\n:1\r\n")
        self.far.sendall(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$%d\r\n%b\r\n" % (len(told), told))

    async def open(self, runtime, _deadline: float) -> SocketStream:
        return SocketStream(self.near, hiredis.Reader(), runtime.now)


def test_a_head_looks_in_time_also_while_the_listener_waits_for_an_answer(book, until, monkeypatch) -> None:
    # A connection that died without a word: it is asked whether it is there, and that takes its time.
    monkeypatch.setattr(listener, "BEAT_EVERY", 0.1)
    waiter = book.enter(claim(1), Threads())
    server = Silent(claim(1).mark, after=1.0)
    hears = Listener(server, Publishing(), Threads(), book, patience=4.0)
    hears.start()
    try:
        until(lambda: waiter.look_at is not None and waiter.look_at > boot_clock() + 0.1)  # told
        began = time.monotonic()
        assert step(waiter.signal.wait(5.0))  # connected: everybody looks once
        assert step(waiter.signal.wait(5.0))
        assert time.monotonic() - began < 3.0
        assert b"PING" in server.far.recv(1000)
    finally:
        hears.close()
        server.far.close()


class Line:
    """One holds; two of another client wait, the first of them for its turn."""

    def __init__(self, url: str, until) -> None:
        self.holder, self.client, self.errors = Client(url), Client(url, call_timeout=1.0), []
        self.lease = self.holder.lock("job").acquire()
        self.go = threading.Event()
        self.threads = []
        for number in (1, 2):
            self.threads.append(threading.Thread(target=self._work))
            self.threads[-1].start()
            until(lambda n=number: len([h for h in self.holder.inspect("job") if h.state == "waiting"]) == n)

    def _work(self) -> None:
        try:
            with self.client.lock("job"):
                self.go.wait(30)
        except Unavailable as error:
            self.errors.append((time.monotonic(), error))

    def second(self) -> Waiter | None:
        """Once the first has its turn, and this one was told."""
        waiting = list(self.client._desk.book.waiting.values())
        return waiting[0] if len(waiting) == 1 and waiting[0].look_at is not None else None


def test_the_next_in_line_sleeps_on_until_it_is_to_look(start_redis, until) -> None:
    line = Line(f"redis://127.0.0.1:{start_redis().port}", until)
    now, set_at = line.client._desk.runtime.now, []
    for waiter in line.client._desk.book.waiting.values():
        waiter.signal = Noted(waiter.signal, set_at, now)
    line.lease.release()
    until(line.second)
    look_at = line.second().look_at
    assert look_at <= now() + PROBE + 0.1
    until(
        lambda: line.client._desk.book.waiting and next(iter(line.client._desk.book.waiting.values())).look_at is None
    )
    line.go.set()
    for thread in line.threads:
        thread.join(30)
    # Both are in the list: the first was told to go. Nobody else was woken before it was to look.
    assert sorted(set_at)[1] >= look_at
    line.client.close()
    line.holder.close()


class Noted:
    """A signal, and when it was set."""

    def __init__(self, true, set_at, now) -> None:
        self._true, self._set_at, self._now = true, set_at, now
        self.wait = true.wait

    def set(self) -> None:
        self._set_at.append(self._now())
        self._true.set()


def test_without_a_server_the_next_in_line_watches_the_time_itself(start_redis, until) -> None:
    server = start_redis()
    line = Line(f"redis://127.0.0.1:{server.port}", until)
    line.lease.release()
    until(line.second)
    began = time.monotonic()
    server.kill()
    line.threads[1].join(30)
    line.go.set()
    line.threads[0].join(30)
    assert line.errors, "it looked, and there was nobody to ask"
    assert min(at for at, _ in line.errors) < began + BEAT / 3
