"""Event-loop streams: calls that share one stream, are cancelled, get late replies, and fail together with it."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading

import pytest

from leasehold.runtime.net import blocking
from leasehold.runtime.net.blocking import RepliesTooLong, SocketAddress
from leasehold.runtime.net.event_loop import connect_in_loop
from leasehold.runtime.threads import boot_clock as clock
from tests.support import probe_runtime
from tests.support.timing import check_seconds


def deadline_in(seconds: float = 5.0) -> float:
    return clock() + seconds


def test_shutdown_stream_fails_its_pending_calls(echo) -> None:
    async def main() -> None:
        echo.answer = lambda connection, line: None
        stream = await echo.connect_in_loop()
        call = stream.call(b"one\n", deadline_in())
        await asyncio.to_thread(stream.shutdown)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await call
        assert not stream.usable

    asyncio.run(main())


def test_concurrent_calls_share_one_connection(echo) -> None:
    async def main() -> None:
        stream = await echo.connect_in_loop()
        names = [f"{number}".encode() for number in range(500)]
        assert await asyncio.gather(*[stream.call(name + b"\n", deadline_in()) for name in names]) == names
        assert await stream.calls(b"a\nb\nc\n", 3, deadline_in()) == [b"a", b"b", b"c"]
        stream.close()

    asyncio.run(main())


def test_requests_larger_than_socket_buffer_are_sent_whole(echo) -> None:
    async def main() -> None:
        stream = await echo.connect_in_loop()
        large = [bytes([65 + number]) * 3_000_000 for number in range(3)]
        answers = await asyncio.gather(*[stream.call(request + b"\n", deadline_in(30)) for request in large])
        assert answers == large
        stream.close()

    asyncio.run(main())


def test_cancelled_call_does_not_shift_later_replies(echo) -> None:
    async def main() -> None:
        stream = await echo.connect_in_loop()
        for _ in range(20):
            tasks = [asyncio.ensure_future(stream.call(b"%d\n" % number, deadline_in())) for number in range(30)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for number, answer in enumerate(answers):
                assert isinstance(answer, asyncio.CancelledError) if number % 3 == 0 else answer == b"%d" % number
        stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("second", [b"one\n", b"o"], ids=["whole", "part"])
def test_second_reply_fails_a_call_before_the_loop_has_read_it(echo, second) -> None:
    connections: list[socket.socket] = []

    def answer(connection: socket.socket, line: bytes) -> None:
        connections.append(connection)
        connection.sendall(line + b"\n")

    async def main() -> None:
        echo.answer = answer
        stream = await echo.connect_in_loop()
        assert await stream.call(b"one\n", deadline_in()) == b"one"
        connections[0].sendall(second)
        with pytest.raises(ConnectionAbortedError, match="without a request"):
            await stream.call(b"two\n", deadline_in())
        assert not stream.usable

    asyncio.run(main())
    assert echo.received == [b"one"], "the next request was not sent"


def test_each_call_times_out_at_its_own_deadline(echo) -> None:
    async def main() -> None:
        echo.answer = lambda connection, line: None if line == b"silent" else connection.sendall(line + b"\n")
        stream = await echo.connect_in_loop()
        began = clock()
        calls = [stream.call(b"silent\n", began + wait) for wait in (0.3, 0.1, 0.2)]
        for call, wait in zip(calls, (0.3, 0.1, 0.2), strict=True):
            call.add_done_callback(lambda _, wait=wait: took.append((wait, clock() - began)))
        took: list[tuple[float, float]] = []
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, TimeoutError)
        assert [wait for wait, _ in took] == [0.1, 0.2, 0.3]
        for wait, seconds in took:
            assert seconds >= wait - 0.02
            check_seconds(seconds, wait + 0.4)
        assert not stream.usable, "a stream with an overdue reply takes no further calls"
        with pytest.raises(ConnectionError):
            await stream.call(b"late\n", deadline_in())

    asyncio.run(main())


def test_late_reply_is_not_given_to_the_next_call(echo) -> None:
    async def main() -> None:
        may_answer = threading.Event()

        def answer(connection: socket.socket, line: bytes) -> None:
            may_answer.wait(5)
            connection.sendall(line + b"\n")

        echo.answer = answer
        stream = await echo.connect_in_loop()
        first, second = stream.call(b"first\n", deadline_in(0.1)), stream.call(b"second\n", deadline_in())
        with pytest.raises(TimeoutError):
            await first
        assert not stream.usable
        may_answer.set()
        assert await second == b"second", "the second call must not get the reply to the first"
        stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("says", [b"garbage\n", b"one\ntwo\nthree\n", b""])
def test_invalid_reply_closes_connection_for_all_calls(echo, says) -> None:
    def answer(connection: socket.socket, line: bytes) -> None:
        connection.sendall(says)
        connection.shutdown(socket.SHUT_RDWR)

    async def main() -> None:
        echo.answer = answer
        stream = await echo.connect_in_loop()
        calls = [stream.call(b"a\n", deadline_in()) for _ in range(2)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(outcome, Exception) for outcome in outcomes) or len(says) > 8
        while stream.usable:
            await asyncio.sleep(0.01)
        with pytest.raises((ConnectionError, ValueError)):
            await stream.call(b"again\n", deadline_in())

    asyncio.run(main())


def test_oversized_reply_raises_connection_error(echo, monkeypatch) -> None:
    monkeypatch.setattr(blocking, "MAX_REPLY_SIZE", 1_000_000)
    echo.answer = lambda connection, line: connection.sendall(b"x" * 3_000_000)

    async def main() -> None:
        stream = await echo.connect_in_loop()
        with pytest.raises(ConnectionError, match="exceeds 8 MiB"):
            await stream.call(b"how much?\n", deadline_in())

    asyncio.run(main())


def test_batch_with_long_replies_raises_connection_error(echo) -> None:
    """Each reply is acceptable. The first three of a batch may be long."""
    long = b"x" * 200_000
    echo.answer = lambda connection, line: connection.sendall(long + b"\n")

    async def main() -> None:
        stream = await echo.connect_in_loop()
        assert await stream.calls(b"a\n" * 3, 3, deadline_in()) == [long] * 3
        with pytest.raises(RepliesTooLong):
            await stream.calls(b"a\n" * 6, 6, deadline_in())

    asyncio.run(main())


def test_post_passes_reply_or_error_to_its_callback(echo) -> None:
    async def main() -> None:
        stream = await echo.connect_in_loop()
        replies: list[object] = []
        assert stream.post(b"posted\n", deadline_in(), replies.append)
        while not replies:
            await asyncio.sleep(0.005)
        assert replies == [b"posted"]
        echo.answer = lambda connection, line: None
        assert stream.post(b"lost\n", deadline_in(0.05), replies.append)
        while len(replies) < 2:
            await asyncio.sleep(0.005)
        assert isinstance(replies[1], TimeoutError)
        assert not stream.post(b"too late\n", deadline_in(), replies.append)

    asyncio.run(main())


def test_connect_to_unresponsive_listener_times_out_at_deadline(line_protocol) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    backlog = [socket.socket() for _ in range(4)]
    for sock in backlog:  # fill the backlog, so that no further connection is accepted
        sock.setblocking(False)
        sock.connect_ex(listener.getsockname())

    async def main() -> None:
        began = clock()
        with pytest.raises(TimeoutError):
            await connect_in_loop(
                SocketAddress(*listener.getsockname()), None, line_protocol(), clock, deadline_in(0.2)
            )
        check_seconds(clock() - began, 0.2 + 0.4)

    try:
        asyncio.run(main())
    finally:
        for sock in (listener, *backlog):
            sock.close()


def test_unreferenced_stream_is_closed(echo) -> None:
    async def main() -> None:
        stream = await echo.connect_in_loop()
        assert await stream.call(b"a\n", deadline_in()) == b"a"
        sock = probe_runtime.socket_of(stream)
        probe_runtime.set_timer(stream, clock() + 0.01)  # the timer must not keep the stream alive
        await asyncio.sleep(0.05)  # pause: longer than the timer
        del stream
        gc.collect()
        end = clock() + 30
        while sock.fileno() != -1:
            assert clock() < end
            await asyncio.sleep(0.001)

    asyncio.run(main())
    with asyncio.Runner() as runner:
        left = runner.run(echo.connect_in_loop())
    sock = probe_runtime.socket_of(left)  # the loop is closed
    del left
    gc.collect()
    assert sock.fileno() == -1
