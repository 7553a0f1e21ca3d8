"""When the requests of a loop's tasks leave: the only one at once, others together."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from leasehold.runtime.loopstream import LoopStream
from leasehold.runtime.threads import boot_clock as clock


class Words:
    """A reply is a word."""

    def feed(self, data: bytes) -> None:
        self._words = data.split()

    def gets(self) -> object:
        return self._words.pop(0) if self._words else False


def test_only_those_behind_others_wait_for_the_turn_to_end() -> None:
    near, far = socket.socketpair()
    far.setblocking(False)

    async def main() -> None:
        stream = LoopStream(near, Words(), clock)
        first = stream.call(b"one\n", clock() + 5)
        assert far.recv(100) == b"one\n"  # the loop has not turned
        others = [stream.call(line, clock() + 5) for line in (b"two\n", b"three\n")]
        with pytest.raises(BlockingIOError):
            far.recv(100)
        await asyncio.sleep(0)
        assert far.recv(100) == b"two\nthree\n"
        far.sendall(b"1 2 3 ")
        assert await asyncio.gather(first, *others) == [b"1", b"2", b"3"]
        stream.close()

    with far:
        asyncio.run(main())


def test_a_request_torn_while_it_is_sent_ends_the_connection(monkeypatch) -> None:
    near, far = socket.socketpair()
    complaints: list[object] = []

    def torn(_: LoopStream) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
        stream = LoopStream(near, Words(), clock)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LoopStream, "_flush", torn)
            stream.call(b"one\n", clock() + 5)
        assert not stream.open
        with pytest.raises(ConnectionAbortedError, match="torn"):
            await stream.call(b"two\n", clock() + 5)
        gc.collect()

    with far:
        asyncio.run(main())
    assert not complaints, "an answer that nobody could await is not said to be missed"
