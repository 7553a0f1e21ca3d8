"""Servers that are no etcd, or speak HTTP/2 as nobody should."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from leasehold import Client, ConfigError, LeaseholdError, Unavailable
from leasehold.config import EngineConfig
from leasehold.engines.etcd import frames, wire
from leasehold.engines.etcd.address import address
from leasehold.engines.etcd.calls import Calls, Login
from leasehold.engines.etcd.frames import frame
from leasehold.engines.etcd.hpack import plain
from leasehold.runtime.base import step
from leasehold.runtime.threads import Threads

OK = frame(frames.HEADERS, 4, 1, b"\x88") + frame(
    frames.DATA, 0, 1, frames.message(wire.encode(wire.LeaseLife(wire.Header(1, 7), 5, 9)))
)


END = plain(b"grpc-status", b"0")


LIFE = wire.LeaseLife(wire.Header(1, 7), 5, 9)


class Odd:
    """Takes one connection, reads a request, says these bytes, and leaves it open. `first` it says unasked."""

    def __init__(self, *said: bytes, first: bytes = b"") -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._first, self._said = first, said
        self.read = b""
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                taken, _ = self._door.accept()
                self._open.append(taken)
                taken.sendall(self._first)
                while b"/etcdserverpb" not in self.read:
                    self.read += taken.recv(65_536)
                for part in self._said:
                    taken.sendall(part)
                    time.sleep(0.005)
                taken.settimeout(1)
                with suppress(TimeoutError):
                    while data := taken.recv(65_536):
                        self.read += data

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for each in self._open:
            each.close()
        self._thread.join(5)


@contextmanager
def asked(odd: Odd) -> Iterator[tuple[Calls, Threads]]:
    runtime = Threads()
    calls = Calls(address(EngineConfig.parse(f"etcd://127.0.0.1:{odd.port}", 5.0)), runtime, Login())
    try:
        yield calls, runtime
    finally:
        calls.close()
        odd.close()


def answer(*said: bytes, seconds: float = 1.0) -> tuple[wire.LeaseLife, bytes]:
    odd = Odd(*said)
    with asked(odd) as (calls, runtime):
        found = step(calls.ask(wire.LIFE, wire.LeaseId(5), runtime.now() + seconds))
        time.sleep(0.05)
        return found, odd.read


@pytest.mark.parametrize(
    "said",
    [
        (OK + frame(frames.HEADERS, 5, 1, END),),
        (*(bytes([byte]) for byte in OK), frame(frames.HEADERS, 5, 1, END)),  # byte by byte
        (OK, frame(frames.HEADERS, 1, 1, END[:5]), frame(frames.CONTINUATION, 4, 1, END[5:])),
        (OK, frame(frames.HEADERS, 5 | 8 | 32, 1, b"\x03" + bytes(5) + END + bytes(3))),  # padded, with a priority
        (frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 10)), OK, frame(frames.HEADERS, 5, 1, END)),
        (frame(77, 0, 0, b"a frame of the future"), OK, frame(frames.HEADERS, 5, 1, END)),
    ],
)
def test_all_forms_of_a_good_answer_are_understood(said: tuple[bytes, ...]) -> None:
    assert answer(*said)[0] == LIFE


def test_settings_and_pings_are_answered() -> None:
    ping = frame(frames.PING, 0, 0, b"12345678")
    _, read = answer(frame(frames.SETTINGS, 0, 0, b""), ping, OK, frame(frames.HEADERS, 5, 1, END))
    assert frame(frames.SETTINGS, frames.ACK, 0, b"") in read
    assert frame(frames.PING, frames.ACK, 0, b"12345678") in read


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        bytes(200),
        b"\xff" * 200,
        frame(frames.PUSH, 4, 1, bytes(4)),
        frame(frames.CONTINUATION, 4, 1, b""),
        frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff\xff"),
        frame(frames.RESET, 0, 1, struct.pack(">I", 7)),
        frame(frames.GOAWAY, 0, 0, bytes(8)),
        frame(frames.HEADERS, 5, 1, b"\x88"),  # no status of the call
        frame(frames.HEADERS, 5, 1, plain(b":status", b"503")),
        frame(frames.HEADERS, 5, 1, plain(b"grpc-status", b"14") + plain(b"grpc-message", b"etcdserver: no leader")),
        frame(frames.HEADERS, 4, 1, b"\x88") + frame(frames.HEADERS, 5, 1, END),  # well, and says nothing
        OK[:-4] + bytes(4) + frame(frames.HEADERS, 5, 1, END),
        frame(frames.HEADERS, 4, 1, b"\x88") + frame(frames.DATA, 0, 1, b"\x01" + bytes(4)),  # compressed
        frame(frames.HEADERS, 4, 1, b"\x88") + frame(frames.DATA, 0, 1, b"\x00\xff\xff\xff\xff"),  # endless
        b"",
    ],
)
def test_whatever_else_is_said_is_unavailable_in_time(said: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(LeaseholdError) as caught:
        answer(said, seconds=0.3)
    assert isinstance(caught.value, Unavailable)
    assert time.monotonic() - began < 0.3 + 0.5 + 1.5  # the odd server's own goodbye


# ------------------------------------------------------ windows, goodbyes, floods

GOOD = OK + frame(frames.HEADERS, 5, 1, END)


def window(number: int, more: int) -> bytes:
    return frame(frames.WINDOW, 0, number, struct.pack(">I", more))


def test_a_window_that_is_closed_at_first_is_waited_for(until) -> None:
    """Not a byte of the request may be sent before it opens; here it opens bit by bit."""
    shut = frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, 0))
    odd = Odd(window(1, 3), window(1, 2), window(1, 100), GOOD, first=shut)
    with asked(odd) as (calls, runtime):
        connection = step(calls.connected(runtime.now() + 5))
        until(lambda: connection._stream_window == 0)
        assert step(calls.ask(wire.LIFE, wire.LeaseId(5), runtime.now() + 2)) == LIFE
        message = frames.message(wire.encode(wire.LeaseId(5)))
        for at, size in ((0, 3), (3, 2), (5, len(message) - 5)):
            piece = frame(frames.DATA, at == 5, 1, message[at : at + size])
            until(lambda piece=piece: piece in odd.read)


@pytest.mark.parametrize(
    "said",
    [
        (window(0, frames.MOST), window(0, frames.MOST), window(1, frames.MOST), GOOD),  # more than there may be
        (window(0, 0), window(1, 0), window(77, 5), GOOD),
        (frame(frames.SETTINGS, 0, 0, struct.pack(">HI", 4, frames.MOST) * 200), GOOD),
        (frame(frames.PING, 0, 0, bytes(8)) * 2000, GOOD),
        (frame(frames.RESET, 0, 9, bytes(4)) * 500, GOOD),
        (OK, frame(frames.GOAWAY, 0, 0, struct.pack(">II", 1, 0)), frame(frames.HEADERS, 5, 1, END)),  # it may finish
        (frame(frames.DATA, 8, 9, b"\xff"), GOOD),  # padding longer than the frame, of a call nobody knows
    ],
)
def test_what_is_merely_odd_does_no_harm(said: tuple[bytes, ...]) -> None:
    assert answer(*said)[0] == LIFE


@pytest.mark.parametrize(
    "said",
    [
        frame(frames.SETTINGS, 0, 0, b"12345"),
        frame(frames.WINDOW, 0, 0, b"1"),
        frame(frames.RESET, 0, 1, b""),
        frame(frames.GOAWAY, 0, 0, b"123"),
        frame(frames.DATA, 8, 1, b""),
        frame(frames.HEADERS, 8, 1, b""),
        frame(frames.HEADERS, 0, 1, b"\x88") + frame(frames.DATA, 0, 1, b"x"),
        frame(frames.HEADERS, 0, 1, b"\x88") + frame(frames.CONTINUATION, 0, 3, b""),
        frame(frames.HEADERS, 0, 1, b"\x88") + frame(frames.CONTINUATION, 0, 1, plain(b"x", bytes(16_000))) * 5,
        frame(frames.HEADERS, 4, 1, plain(b"x", bytes(70_000))),
        frame(frames.HEADERS, 4, 1, b"\x3f\xe1\x7f"),  # a table larger than was allowed
        frame(frames.HEADERS, 4, 1, b"\x80"),
        frame(frames.HEADERS, 4, 1, b"\xff\x80\x80\x80\x80\x80\x01"),
        struct.pack(">I", 1 << 23)[1:] + bytes(6),
        b"\x00",
    ],
)
def test_what_cannot_be_read_ends_the_connection_in_time(said: bytes) -> None:
    unfinished = said == b"\x00"  # the one that may still become something
    seconds, began = 0.4 if unfinished else 30.0, time.monotonic()
    with pytest.raises(Unavailable) as caught:
        answer(said, seconds=seconds)
    assert time.monotonic() - began < seconds + 0.5 + 1.5
    assert ("HTTP/2" in str(caught.value)) != unfinished, "said at once, not when the time is over"


def test_headers_that_unfold_without_end_cost_little() -> None:
    """Each byte names a header of 4,000 bytes learnt before: 65,000 of them in one block."""
    learn = b"\x40" + plain(b"x", bytes(4000))[1:]
    block = learn + b"\xbe" * 61_000
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    said = frame(frames.HEADERS, 0, 1, pieces[0])
    said += b"".join(frame(frames.CONTINUATION, 0, 1, piece) for piece in pieces[1:])
    began = time.process_time()
    assert answer(said + frame(frames.CONTINUATION, 4, 1, b""), GOOD, seconds=5.0)[0] == LIFE
    assert time.process_time() - began < 2.0


def test_one_byte_now_and_then_is_no_answer() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable):
        answer(*(bytes([byte]) for byte in GOOD[:-1]), seconds=0.5)
    assert time.monotonic() - began < 0.5 + 0.5 + 1.5


def test_what_a_server_says_of_an_error_is_cut_and_cleaned() -> None:
    said = plain(b"grpc-status", b"7") + plain(b"grpc-message", b"no%0Aroot: all well%1B[2J" + b"x" * 5000)
    with pytest.raises(ConfigError) as caught:
        answer(frame(frames.HEADERS, 5, 1, said))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700


def test_a_connection_whose_calls_have_used_up_all_numbers_is_followed_by_another(bare, url) -> None:
    seat = bare(url)
    seat.release(seat.takes(seat.claim()))
    first = seat.engine._calls._connection
    first._next = frames.MOST - 2
    for _ in range(3):
        seat.release(seat.takes(seat.claim()))
    assert seat.engine._calls._connection is not first


def test_a_server_that_reads_slowly_from_a_descriptor_of_any_number() -> None:
    """Its socket is full again and again; and with many files open, no number is small any more."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with asked(Odd()) as (calls, runtime):
            connection = step(calls.connected(runtime.now() + 5))
            assert connection._socket.fileno() > 1024
            connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            with connection._guard:
                connection._write(frame(frames.PING, frames.ACK, 0, bytes(8)) * 60_000)
            assert connection.broken is None
    finally:
        for each in files:
            os.close(each)


# ------------------------------------------------------------------ the way there


def test_a_name_that_is_looked_up_for_ever_is_unavailable_in_time(monkeypatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: never.wait(30) and [])
    began = time.monotonic()
    with Client("etcd://etcd.example:2379", call_timeout=0.5) as client, pytest.raises(Unavailable, match="address"):
        client.lock("job").acquire()
    assert time.monotonic() - began < 0.5 + 0.5
    never.set()


def test_a_host_of_whose_numbers_one_is_silent(monkeypatch, member) -> None:
    """A door that takes no more, as an address that nothing comes back from."""
    silent = socket.create_server(("127.0.0.2", member.port), backlog=0)
    waiting = [socket.socket() for _ in range(3)]
    for each in waiting:
        each.setblocking(False)
        each.connect_ex(silent.getsockname())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, 0)) for host in ("127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", partial(numbers, socket.getaddrinfo, found))
    with Client(f"etcd://etcd.example:{member.port}", call_timeout=2) as client:
        client.ping()
    for each in (silent, *waiting):
        each.close()


def numbers(true, found, host, *more, **words):
    return found if host == "etcd.example" else true(host, *more, **words)
