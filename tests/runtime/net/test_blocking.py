"""Blocking streams to a server that answers late, in pieces, never, or with too much."""

from __future__ import annotations

import copy
import socket
import threading
import time

import pytest

from leasehold.runtime.net import blocking
from leasehold.runtime.net.blocking import RepliesTooLong, ReplyUnasked, SocketAddress, SocketStream, connect_blocking
from leasehold.runtime.threads import boot_clock as clock
from tests.support.timing import check_seconds


def deadline_in(seconds: float = 5.0) -> float:
    return clock() + seconds


def send_byte_by_byte(connection: socket.socket, line: bytes) -> None:
    for byte in line + b"\n":
        connection.sendall(bytes([byte]))
        time.sleep(0.001)  # pause: the next byte is a segment of its own


def test_call_returns_its_reply(echo) -> None:
    stream = echo.connect()
    assert stream.call(b"one\n", deadline_in()) == b"one"
    assert stream.calls(b"two\nthree\n", 2, deadline_in()) == [b"two", b"three"]
    echo.answer = send_byte_by_byte
    assert stream.call(b"in pieces\n", deadline_in()) == b"in pieces"
    stream.close()


def test_call_to_unresponsive_server_times_out_at_deadline(echo) -> None:
    echo.answer = lambda connection, line: None
    for seconds in (0.05, 0.2):
        stream = echo.connect()
        began = clock()
        with pytest.raises(TimeoutError):
            stream.call(b"hello?\n", began + seconds)
        assert clock() - began >= seconds - 0.03
        check_seconds(clock() - began, seconds + 0.4)
        stream.close()
    stream = echo.connect()
    with pytest.raises(TimeoutError):
        stream.call(b"too late already\n", clock() - 1)
    stream.close()


def test_trickling_reply_does_not_extend_the_deadline(echo) -> None:
    def trickle(connection: socket.socket, line: bytes) -> None:
        for _ in range(200):
            connection.sendall(b".")
            time.sleep(0.02)  # pause: a slow server

    echo.answer = trickle
    for call in (lambda s, at: s.call(b"a\n", at), lambda s, at: s.calls(b"a\nb\n", 2, at)):
        stream = echo.connect()
        began = clock()
        with pytest.raises(TimeoutError):
            call(stream, began + 0.3)
        check_seconds(clock() - began, 0.3 + 0.4)
        stream.close()


def test_closed_and_refused_connections_raise_os_error(echo, line_protocol) -> None:
    echo.answer = lambda connection, line: connection.shutdown(socket.SHUT_RDWR)
    stream = echo.connect()
    with pytest.raises(ConnectionError):
        stream.call(b"bye\n", deadline_in())
    stream.close()
    with pytest.raises(OSError, match="refused"):
        connect_blocking(SocketAddress("127.0.0.1", 1), None, line_protocol(), clock, deadline_in())
    with pytest.raises(FileNotFoundError):
        connect_blocking(SocketAddress(path="/does/not/exist"), None, line_protocol(), clock, deadline_in())


@pytest.mark.parametrize("second", [b"one\n", b"o"], ids=["whole", "part"])
def test_second_reply_that_comes_later_fails_the_next_call(echo, second) -> None:
    connections: list[socket.socket] = []

    def answer(connection: socket.socket, line: bytes) -> None:
        connections.append(connection)
        connection.sendall(line + b"\n")

    echo.answer = answer
    for ask in (lambda s: s.call(b"two\n", deadline_in()), lambda s: s.calls(b"two\nthree\n", 2, deadline_in())):
        stream = echo.connect()
        assert stream.call(b"one\n", deadline_in()) == b"one"
        assert stream.quiet()
        connections[-1].sendall(second)
        assert not stream.quiet()
        with pytest.raises(ConnectionAbortedError, match="without a request"):
            ask(stream)
        stream.close()
    assert echo.received == [b"one"] * 2, "the next request was not sent"


@pytest.mark.parametrize("second", [b"one\n", b"o"], ids=["whole", "part"])
def test_second_reply_that_comes_with_the_first_is_refused(echo, second) -> None:
    echo.answer = lambda connection, line: connection.sendall(b"one\n" + second)
    for first in (lambda s: s.call(b"one\n", deadline_in()), lambda s: s.calls(b"one\n", 1, deadline_in())):
        stream = echo.connect()
        with pytest.raises(ConnectionAbortedError, match="without a request"):
            first(stream)
            stream.call(b"two\n", deadline_in())
        stream.close()


def test_error_of_a_reply_without_a_request_can_be_copied() -> None:
    """As that of a batch is, for each of its calls."""
    assert str(copy.copy(ReplyUnasked())) == str(ReplyUnasked())


def test_oversized_reply_raises_connection_error(echo, monkeypatch) -> None:
    monkeypatch.setattr(blocking, "MAX_REPLY_SIZE", 1_000_000)
    echo.answer = lambda connection, line: connection.sendall(b"x" * 3_000_000)
    stream = echo.connect()
    with pytest.raises(ConnectionError, match="exceeds 8 MiB"):
        stream.call(b"how much?\n", deadline_in())
    stream.close()


def test_batch_with_long_replies_raises_connection_error(echo) -> None:
    """Each reply is acceptable. The first three of a batch may be long."""
    stream, long = echo.connect(), b"x" * 200_000
    echo.answer = lambda connection, line: connection.sendall(long + b"\n")
    assert stream.calls(b"a\n" * 3, 3, deadline_in()) == [long] * 3
    with pytest.raises(RepliesTooLong):
        stream.calls(b"a\n" * 6, 6, deadline_in())
    stream.close()


def test_slow_send_does_not_extend_the_deadline(line_protocol) -> None:
    client_socket, server_socket = socket.socketpair()
    client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    may_read = threading.Event()

    def read_late() -> None:
        may_read.wait(0.4)
        while server_socket.recv(65_536):
            pass

    reader = threading.Thread(target=read_late)
    reader.start()
    stream = SocketStream(client_socket, line_protocol(), clock)
    began = clock()
    with pytest.raises(TimeoutError):
        stream.call(b"x" * 1_000_000, began + 0.5)
    check_seconds(clock() - began, 0.8)
    stream.close()
    reader.join(60)
    server_socket.close()


def test_send_and_close_delivers_its_data(echo) -> None:
    echo.answer = lambda connection, line: None
    stream = echo.connect()
    with pytest.raises(TimeoutError):
        stream.call(b"take\n", deadline_in(0.05))
    stream.send_and_close(b"give back\n")
    end = deadline_in()
    while echo.received != [b"take", b"give back"]:
        assert clock() < end
        time.sleep(0.005)


def test_listen_returns_pushed_data_or_times_out(echo) -> None:
    stream = echo.connect()
    with pytest.raises(TimeoutError):
        stream.listen(0.05)
    stream.send(b"news\n", deadline_in())
    assert stream.listen(5) == b"news"
    stream.close()


def test_self_pipe_wakes_a_listening_stream(echo) -> None:
    stream, self_pipe = echo.connect(), blocking.SelfPipe()
    stream.send(b"one\ntwo\n", deadline_in())
    assert [stream.listen(5, self_pipe), stream.listen(5, self_pipe)] == [b"one", b"two"]
    threading.Timer(0.05, self_pipe.set).start()
    assert stream.listen(5, self_pipe) is blocking.WOKEN
    for _ in range(1000):  # more than fit into the pipe
        self_pipe.set()
    assert stream.listen(5, self_pipe) is blocking.WOKEN
    with pytest.raises(TimeoutError):
        while stream.listen(0.05, self_pipe) is blocking.WOKEN:
            continue
    stream.close()
    self_pipe.close()
    self_pipe.set()  # harmless after close()


def test_address_is_shown_as_a_url_has_it():
    addresses = [SocketAddress("::1", 6379), SocketAddress("db", 6379), SocketAddress(path="/run/redis.sock")]
    assert [str(address) for address in addresses] == ["[::1]:6379", "db:6379", "/run/redis.sock"]
