"""Streams of both runtimes over a server that answers as a test wants it to: late, in pieces, never, or nonsense."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from leasehold.runtime import streams
from leasehold.runtime.loopstream import dial_in_loop
from leasehold.runtime.streams import Address, SocketStream, dial
from leasehold.runtime.threads import boot_clock as clock


class Lines:
    """The simplest protocol there is: a reply is a line. One that says `garbage` cannot be read."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> None:
        self._kept += data

    def gets(self) -> object:
        line, found, rest = self._kept.partition(b"\n")
        if not found:
            return False
        self._kept = rest
        if line == b"garbage":
            raise ValueError("garbage")
        return line


class Echo:
    """Answers each line by itself, or as `answer` says."""

    def __init__(self) -> None:
        self.answer: Callable[[socket.socket, bytes], None] = lambda near, line: near.sendall(line + b"\n")
        self.heard: list[bytes] = []
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._door.getsockname())
        self._near: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._door.accept()
            except OSError:
                return
            self._near.append(near)
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        kept = b""
        with near:
            while True:
                try:
                    data = near.recv(65536)
                    if not data:
                        return
                    *whole, kept = (kept + data).split(b"\n")
                    for line in whole:
                        self.heard.append(line)
                        self.answer(near, line)
                except OSError:
                    return

    def close(self) -> None:
        self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for near in self._near:
            near.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


def soon(seconds: float = 5.0) -> float:
    return clock() + seconds


def in_pieces(near: socket.socket, line: bytes) -> None:
    for byte in line + b"\n":
        near.sendall(bytes([byte]))
        time.sleep(0.001)


# ------------------------------------------------------------------ blocking


def test_a_call_and_its_answer(echo) -> None:
    stream = dial(echo.address, None, Lines(), clock, soon())
    assert stream.call(b"one\n", soon()) == b"one"
    assert stream.calls(b"two\nthree\n", 2, soon()) == [b"two", b"three"]
    echo.answer = in_pieces
    assert stream.call(b"in pieces\n", soon()) == b"in pieces"
    stream.close()


def test_a_silent_server_is_noticed_at_the_deadline(echo) -> None:
    echo.answer = lambda near, line: None
    for seconds in (0.05, 0.2):
        stream = dial(echo.address, None, Lines(), clock, soon())
        began = clock()
        with pytest.raises(TimeoutError):
            stream.call(b"hello?\n", began + seconds)
        assert seconds - 0.03 <= clock() - began < seconds + 0.4
        stream.close()
    stream = dial(echo.address, None, Lines(), clock, soon())
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
        stream = dial(echo.address, None, Lines(), clock, soon())
        began = clock()
        with pytest.raises(TimeoutError):
            ask(stream, began + 0.3)
        assert clock() - began < 0.3 + 0.4
        stream.close()


def test_a_closed_connection_and_one_that_never_was(echo, monkeypatch) -> None:
    echo.answer = lambda near, line: near.shutdown(socket.SHUT_RDWR)
    stream = dial(echo.address, None, Lines(), clock, soon())
    with pytest.raises(ConnectionError):
        stream.call(b"bye\n", soon())
    stream.close()
    with pytest.raises(OSError, match="refused"):
        dial(Address("127.0.0.1", 1), None, Lines(), clock, soon())
    with pytest.raises(FileNotFoundError):
        dial(Address(path="/does/not/exist"), None, Lines(), clock, soon())


def test_an_answer_too_large_to_be_true(echo, monkeypatch) -> None:
    monkeypatch.setattr(streams, "LARGEST", 1_000_000)
    echo.answer = lambda near, line: near.sendall(b"x" * 3_000_000)
    stream = dial(echo.address, None, Lines(), clock, soon())
    with pytest.raises(ConnectionError, match="larger"):
        stream.call(b"how much?\n", soon())
    stream.close()


def test_a_request_that_leaves_slowly_does_not_double_its_deadline() -> None:
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    gate = threading.Event()

    def read_late() -> None:
        gate.wait(0.4)
        while far.recv(65_536):
            pass

    reader = threading.Thread(target=read_late)
    reader.start()
    stream = SocketStream(near, Lines(), clock)
    began = clock()
    with pytest.raises(TimeoutError):
        stream.call(b"x" * 1_000_000, began + 0.5)
    assert clock() - began < 0.8
    stream.close()
    reader.join(10)
    far.close()


def test_last_words_are_heard(echo) -> None:
    echo.answer = lambda near, line: None
    stream = dial(echo.address, None, Lines(), clock, soon())
    with pytest.raises(TimeoutError):
        stream.call(b"take\n", soon(0.05))
    stream.last_words(b"give back\n")
    end = soon()
    while echo.heard != [b"take", b"give back"]:
        assert clock() < end
        time.sleep(0.005)


def test_listening(echo) -> None:
    stream = dial(echo.address, None, Lines(), clock, soon())
    with pytest.raises(TimeoutError):
        stream.listen(0.05)
    stream.send(b"news\n", soon())
    assert stream.listen(5) == b"news"
    stream.close()


# ------------------------------------------------------------------- asyncio


def test_whoever_listens_can_be_nudged(echo) -> None:
    stream, nudge = dial(echo.address, None, Lines(), clock, soon()), streams.Nudge()
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


def test_a_shut_stream_in_a_loop_fails_its_calls(echo) -> None:
    async def main() -> None:
        echo.answer = lambda near, line: None
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
        call = stream.call(b"one\n", soon())
        await asyncio.to_thread(stream.shut)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            await call
        assert not stream.good

    asyncio.run(main())


def test_tasks_share_a_connection(echo) -> None:
    async def main() -> None:
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
        names = [f"{number}".encode() for number in range(500)]
        assert await asyncio.gather(*[stream.call(name + b"\n", soon()) for name in names]) == names
        assert await stream.calls(b"a\nb\nc\n", 3, soon()) == [b"a", b"b", b"c"]
        stream.close()

    asyncio.run(main())


def test_requests_larger_than_the_kernel_takes_at_once(echo) -> None:
    async def main() -> None:
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
        large = [bytes([65 + number]) * 3_000_000 for number in range(3)]
        answers = await asyncio.gather(*[stream.call(each + b"\n", soon(30)) for each in large])
        assert answers == large
        stream.close()

    asyncio.run(main())


def test_a_cancelled_call_keeps_its_slot(echo) -> None:
    async def main() -> None:
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
        with pytest.raises(ConnectionError, match="larger"):
            await stream.call(b"how much?\n", soon())

    asyncio.run(main())


def test_a_post_is_answered_to_whoever_asked(echo) -> None:
    async def main() -> None:
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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


def test_a_silent_door_costs_no_more_than_the_deadline() -> None:
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
            await dial_in_loop(Address(*door.getsockname()), None, Lines(), clock, soon(0.2))
        assert clock() - began < 0.2 + 0.4

    try:
        asyncio.run(main())
    finally:
        for each in (door, *filler):
            each.close()


def test_a_stream_nobody_has_any_more_is_closed(echo) -> None:
    async def main() -> None:
        stream = await dial_in_loop(echo.address, None, Lines(), clock, soon())
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
        left = runner.run(dial_in_loop(echo.address, None, Lines(), clock, soon()))
    sock = left._sock  # its loop is closed
    del left
    gc.collect()
    assert sock.fileno() == -1
