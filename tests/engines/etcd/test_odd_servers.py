"""Servers that are no etcd, or speak HTTP/2 as nobody should."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

import pytest

from leasehold import LeaseholdError, Unavailable
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
    """Takes one connection, reads a request, says these bytes, and leaves it open."""

    def __init__(self, *said: bytes) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._said = said
        self.read = b""
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                taken, _ = self._door.accept()
                self._open.append(taken)
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


def answer(*said: bytes, seconds: float = 1.0) -> tuple[wire.LeaseLife, bytes]:
    odd, runtime = Odd(*said), Threads()
    calls = Calls(address(EngineConfig.parse(f"etcd://127.0.0.1:{odd.port}", 5.0)), runtime, Login())
    try:
        found = step(calls.ask(wire.LIFE, wire.LeaseId(5), runtime.now() + seconds))
        time.sleep(0.05)
        return found, odd.read
    finally:
        calls.close()
        odd.close()


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
