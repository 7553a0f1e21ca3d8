"""When an event-loop stream sends requests: the first at once, further ones in one batch."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from leasehold.runtime.net.event_loop import LoopStream
from leasehold.runtime.threads import boot_clock as clock
from tests.support import probe_runtime


class WordProtocol:
    """A reply is a word."""

    mid_reply = False

    def feed(self, data: bytes) -> None:
        self._words = data.split()

    def gets(self) -> object:
        return self._words.pop(0) if self._words else False


def test_first_request_is_sent_at_once_and_later_ones_are_batched() -> None:
    client_socket, server_socket = socket.socketpair()
    server_socket.setblocking(False)

    async def main() -> None:
        stream = LoopStream(client_socket, WordProtocol(), clock)
        first = stream.call(b"one\n", clock() + 5)
        assert server_socket.recv(100) == b"one\n"  # before the loop runs again
        others = [stream.call(line, clock() + 5) for line in (b"two\n", b"three\n")]
        with pytest.raises(BlockingIOError):
            server_socket.recv(100)
        await asyncio.sleep(0)
        assert server_socket.recv(100) == b"two\nthree\n"
        server_socket.sendall(b"1 2 3 ")
        assert await asyncio.gather(first, *others) == [b"1", b"2", b"3"]
        stream.close()

    with server_socket:
        asyncio.run(main())


def test_request_interrupted_while_sent_closes_the_connection(monkeypatch) -> None:
    client_socket, server_socket = socket.socketpair()
    loop_errors: list[object] = []

    def interrupt(_: LoopStream) -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: loop_errors.append(context))
        stream = LoopStream(client_socket, WordProtocol(), clock)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(*probe_runtime.FLUSH, interrupt)
            stream.call(b"one\n", clock() + 5)
        assert not stream.open
        with pytest.raises(ConnectionAbortedError, match="interrupted"):
            await stream.call(b"two\n", clock() + 5)
        gc.collect()

    with server_socket:
        asyncio.run(main())
    assert not loop_errors, "the loop must not report the reply of the interrupted call as never retrieved"
