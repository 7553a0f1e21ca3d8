"""Blocking streams over a server that answers as a test wants it to: late, in pieces, never, or nonsense."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from leasehold.runtime import streams
from leasehold.runtime.streams import Address, SocketStream, dial
from leasehold.runtime.threads import boot_clock as clock


def soon(seconds: float = 5.0) -> float:
    return clock() + seconds


def in_pieces(near: socket.socket, line: bytes) -> None:
    for byte in line + b"\n":
        near.sendall(bytes([byte]))
        time.sleep(0.001)


def test_a_call_and_its_answer(echo) -> None:
    stream = echo.dial()
    assert stream.call(b"one\n", soon()) == b"one"
    assert stream.calls(b"two\nthree\n", 2, soon()) == [b"two", b"three"]
    echo.answer = in_pieces
    assert stream.call(b"in pieces\n", soon()) == b"in pieces"
    stream.close()


def test_a_silent_server_is_noticed_at_the_deadline(echo) -> None:
    echo.answer = lambda near, line: None
    for seconds in (0.05, 0.2):
        stream = echo.dial()
        began = clock()
        with pytest.raises(TimeoutError):
            stream.call(b"hello?\n", began + seconds)
        assert seconds - 0.03 <= clock() - began < seconds + 0.4
        stream.close()
    stream = echo.dial()
    with pytest.raises(TimeoutError):
        stream.call(b"too late already\n", clock() - 1)
    stream.close()


def test_a_trickle_does_not_move_the_deadline(echo) -> None:
    def trickle(near: socket.socket, line: bytes) -> None:
        for _ in range(200):
            near.sendall(b".")
            time.sleep(0.02)

    echo.answer = trickle
    for ask in (lambda s, at: s.call(b"a\n", at), lambda s, at: s.calls(b"a\nb\n", 2, at)):
        stream = echo.dial()
        began = clock()
        with pytest.raises(TimeoutError):
            ask(stream, began + 0.3)
        assert clock() - began < 0.3 + 0.4
        stream.close()


def test_a_closed_connection_and_one_that_never_was(echo, lines) -> None:
    echo.answer = lambda near, line: near.shutdown(socket.SHUT_RDWR)
    stream = echo.dial()
    with pytest.raises(ConnectionError):
        stream.call(b"bye\n", soon())
    stream.close()
    with pytest.raises(OSError, match="refused"):
        dial(Address("127.0.0.1", 1), None, lines(), clock, soon())
    with pytest.raises(FileNotFoundError):
        dial(Address(path="/does/not/exist"), None, lines(), clock, soon())


def test_an_answer_too_large_to_be_true(echo, monkeypatch) -> None:
    monkeypatch.setattr(streams, "LARGEST", 1_000_000)
    echo.answer = lambda near, line: near.sendall(b"x" * 3_000_000)
    stream = echo.dial()
    with pytest.raises(ConnectionError, match="larger"):
        stream.call(b"how much?\n", soon())
    stream.close()


def test_a_request_that_leaves_slowly_does_not_double_its_deadline(lines) -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    gate = threading.Event()

    def read_late() -> None:
        gate.wait(0.4)
        while far.recv(65_536):
            pass

    reader = threading.Thread(target=read_late)
    reader.start()
    stream = SocketStream(near, lines(), clock)
    began = clock()
    with pytest.raises(TimeoutError):
        stream.call(b"x" * 1_000_000, began + 0.5)
    assert clock() - began < 0.8
    stream.close()
    reader.join(10)
    far.close()


def test_last_words_are_heard(echo) -> None:
    echo.answer = lambda near, line: None
    stream = echo.dial()
    with pytest.raises(TimeoutError):
        stream.call(b"take\n", soon(0.05))
    stream.last_words(b"give back\n")
    end = soon()
    while echo.heard != [b"take", b"give back"]:
        assert clock() < end
        time.sleep(0.005)


def test_listening(echo) -> None:
    stream = echo.dial()
    with pytest.raises(TimeoutError):
        stream.listen(0.05)
    stream.send(b"news\n", soon())
    assert stream.listen(5) == b"news"
    stream.close()


def test_whoever_listens_can_be_nudged(echo) -> None:
    stream, nudge = echo.dial(), streams.Nudge()
    stream.send(b"one\ntwo\n", soon())
    assert [stream.listen(5, nudge), stream.listen(5, nudge)] == [b"one", b"two"]
    threading.Timer(0.05, nudge.set).start()
    assert stream.listen(5, nudge) is streams.NUDGED
    for _ in range(1000):  # more than fit in
        nudge.set()
    assert stream.listen(5, nudge) is streams.NUDGED
    with pytest.raises(TimeoutError):
        while stream.listen(0.05, nudge) is streams.NUDGED:
            continue
    stream.close()
    nudge.close()
    nudge.set()  # late, and harmless
