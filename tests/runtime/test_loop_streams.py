"""Streams of a loop: many calls share one, are cancelled, come late, and find out together when it ends."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading

import pytest

from leasehold.runtime import streams
from leasehold.runtime.loopstream import dial_in_loop
from leasehold.runtime.streams import Address
from leasehold.runtime.threads import boot_clock as clock


def soon(seconds: float = 5.0) -> float:
    return clock() + seconds


def test_a_shut_stream_in_a_loop_fails_its_calls(echo) -> None:
    async def main() -> None:
        echo.answer = lambda near, line: None
        stream = await echo.dial_in_loop()
        call = stream.call(b"one\n", soon())
        await asyncio.to_thread(stream.shut)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await call
        assert not stream.good

    asyncio.run(main())


def test_tasks_share_a_connection(echo) -> None:
    async def main() -> None:
        stream = await echo.dial_in_loop()
        names = [f"{number}".encode() for number in range(500)]
        assert await asyncio.gather(*[stream.call(name + b"\n", soon()) for name in names]) == names
        assert await stream.calls(b"a\nb\nc\n", 3, soon()) == [b"a", b"b", b"c"]
        stream.close()

    asyncio.run(main())


def test_requests_larger_than_the_kernel_takes_at_once(echo) -> None:
    async def main() -> None:
        stream = await echo.dial_in_loop()
        large = [bytes([65 + number]) * 3_000_000 for number in range(3)]
        answers = await asyncio.gather(*[stream.call(each + b"\n", soon(30)) for each in large])
        assert answers == large
        stream.close()

    asyncio.run(main())


def test_a_cancelled_call_keeps_its_slot(echo) -> None:
    async def main() -> None:
        stream = await echo.dial_in_loop()
        for _ in range(20):
            tasks = [asyncio.ensure_future(stream.call(b"%d\n" % number, soon())) for number in range(30)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            for number, answer in enumerate(answers):
                assert isinstance(answer, asyncio.CancelledError) if number % 3 == 0 else answer == b"%d" % number
        stream.close()

    asyncio.run(main())


def test_deadlines_of_many_are_watched_by_one_timer(echo) -> None:
    async def main() -> None:
        echo.answer = lambda near, line: None if line == b"silent" else near.sendall(line + b"\n")
        stream = await echo.dial_in_loop()
        began = clock()
        calls = [stream.call(b"silent\n", began + wait) for wait in (0.3, 0.1, 0.2)]
        for call, wait in zip(calls, (0.3, 0.1, 0.2), strict=True):
            call.add_done_callback(lambda _, wait=wait: took.append((wait, clock() - began)))
        took: list[tuple[float, float]] = []
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, TimeoutError)
        assert [wait for wait, _ in took] == [0.1, 0.2, 0.3]
        for wait, seconds in took:
            assert wait - 0.02 <= seconds < wait + 0.4
        assert not stream.good, "nobody else is sent there"
        with pytest.raises(ConnectionError):
            await stream.call(b"late\n", soon())

    asyncio.run(main())


def test_a_late_answer_is_still_in_order(echo) -> None:
    async def main() -> None:
        gate = threading.Event()

        def answer(near: socket.socket, line: bytes) -> None:
            gate.wait(5)
            near.sendall(line + b"\n")

        echo.answer = answer
        stream = await echo.dial_in_loop()
        first, second = stream.call(b"first\n", soon(0.1)), stream.call(b"second\n", soon())
        with pytest.raises(TimeoutError):
            await first
        assert not stream.good
        gate.set()
        assert await second == b"second", "not the answer to the first"
        stream.close()

    asyncio.run(main())


@pytest.mark.parametrize("says", [b"garbage\n", b"one\ntwo\nthree\n", b""])
def test_nonsense_ends_the_connection_for_all(echo, says) -> None:
    def answer(near: socket.socket, line: bytes) -> None:
        near.sendall(says)
        near.shutdown(socket.SHUT_RDWR)

    async def main() -> None:
        echo.answer = answer
        stream = await echo.dial_in_loop()
        calls = [stream.call(b"a\n", soon()) for _ in range(2)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(outcome, Exception) for outcome in outcomes) or len(says) > 8
        while stream.good:
            await asyncio.sleep(0.01)
        with pytest.raises((ConnectionError, ValueError)):
            await stream.call(b"again\n", soon())

    asyncio.run(main())


def test_an_answer_too_large_to_be_true_in_a_loop(echo, monkeypatch) -> None:
    monkeypatch.setattr(streams, "LARGEST", 1_000_000)
    echo.answer = lambda near, line: near.sendall(b"x" * 3_000_000)

    async def main() -> None:
        stream = await echo.dial_in_loop()
        with pytest.raises(ConnectionError, match="larger"):
            await stream.call(b"how much?\n", soon())

    asyncio.run(main())


def test_a_post_is_answered_to_whoever_asked(echo) -> None:
    async def main() -> None:
        stream = await echo.dial_in_loop()
        said: list[object] = []
        assert stream.post(b"posted\n", soon(), said.append)
        while not said:
            await asyncio.sleep(0.005)
        assert said == [b"posted"]
        echo.answer = lambda near, line: None
        assert stream.post(b"lost\n", soon(0.05), said.append)
        while len(said) < 2:
            await asyncio.sleep(0.005)
        assert isinstance(said[1], TimeoutError)
        assert not stream.post(b"too late\n", soon(), said.append)

    asyncio.run(main())


def test_a_silent_door_costs_no_more_than_the_deadline(lines) -> None:
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    door.listen(0)
    filler = [socket.socket() for _ in range(4)]
    for each in filler:  # the backlog is full: nobody is let in
        each.setblocking(False)
        each.connect_ex(door.getsockname())

    async def main() -> None:
        began = clock()
        with pytest.raises(TimeoutError):
            await dial_in_loop(Address(*door.getsockname()), None, lines(), clock, soon(0.2))
        assert clock() - began < 0.2 + 0.4

    try:
        asyncio.run(main())
    finally:
        for each in (door, *filler):
            each.close()


def test_a_stream_nobody_has_any_more_is_closed(echo) -> None:
    async def main() -> None:
        stream = await echo.dial_in_loop()
        assert await stream.call(b"a\n", soon()) == b"a"
        sock = stream._sock
        stream._watch(clock() + 0.01)  # its timer must not keep it either
        await asyncio.sleep(0.05)
        del stream
        gc.collect()
        await asyncio.sleep(0.05)
        assert sock.fileno() == -1

    asyncio.run(main())
    with asyncio.Runner() as runner:
        left = runner.run(echo.dial_in_loop())
    sock = left._sock  # its loop is closed
    del left
    gc.collect()
    assert sock.fileno() == -1
