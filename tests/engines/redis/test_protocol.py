"""Replies, keys and messages of a server that Leasehold did not expect, and the encoding of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
import tracemalloc
from contextlib import suppress

import pytest

from leasehold import AsyncClient, Client, ConfigError, Unavailable
from leasehold.engines.redis import protocol
from tests.support.foreign_clients import serve_fixed_reply
from tests.support.redis_servers import url


class FakeServer:
    """A server that accepts every handshake and then sends the same reply to every request."""

    def __init__(self, reply: bytes) -> None:
        self._reply = reply
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65_536)
            connection.sendall(b"$20\r\nredis_version:7.0.15\r\n*0\r\n")
            while request := connection.recv(65_536):
                connection.sendall(
                    b"*3\r\n$9\r\nsubscribe\r\n$1\r\nx\r\n:1\r\n" if b"SUBSCRIBE" in request else self._reply
                )

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


BUSY = b"*6\r\n:0\r\n:5\r\n:0\r\n:7\r\n%b:1\r\n"


# ----------------------------------------------------------- malformed replies


@pytest.mark.parametrize(
    "reply",
    [
        b"-NOSCRIPT for ever\r\n",
        BUSY % b"$1\r\n\xff\r\n",
        BUSY % b"$3\r\na\0b\r\n",
        BUSY % b"$5\r\na\0b\0c\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"_\r\n",
        b",1.5\r\n",
        b"*2\r\n$1\r\n0\r\n:5\r\n",
    ],
)
def test_malformed_replies_raise_unavailable(reply) -> None:
    fake_server = FakeServer(reply)
    try:
        with Client(f"redis://127.0.0.1:{fake_server.port}", call_timeout=0.3) as client:
            with pytest.raises(Unavailable):
                client.lock("job").acquire(wait=0.2)
            with pytest.raises(Unavailable):
                client.inspect()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{fake_server.port}", call_timeout=0.3) as client:
                with pytest.raises(Unavailable):
                    await client.lock("job").acquire(wait=0.2)

        asyncio.run(main())
    finally:
        fake_server.close()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n", b"*-1\r\n" * 9, b"", b"$-5\r\n"])
def test_server_that_is_not_redis_is_refused(reply) -> None:
    with serve_fixed_reply(reply) as port:
        client = Client(f"redis://127.0.0.1:{port}", call_timeout=0.3)
        with client, pytest.raises((Unavailable, ConfigError)):
            client.lock("job").acquire()

        async def main() -> None:
            async with AsyncClient(f"redis://127.0.0.1:{port}", call_timeout=0.3) as client:
                with pytest.raises((Unavailable, ConfigError)):
                    await client.lock("job").acquire()

        asyncio.run(main())


def test_holders_of_megabytes_are_not_kept() -> None:
    """The last 256 holders were, even after the client was closed: up to four gigabytes."""
    tracemalloc.start()
    try:
        for number in range(20):
            holder = protocol.decode_holder(b"%d%b\0host\x007\0purpose" % (number, b"x" * 2**20))
            assert (holder.pid, holder.purpose) == (7, "purpose")
        assert tracemalloc.get_traced_memory()[0] < 4 * 2**20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------ keys


def test_inspect_skips_foreign_keys(server) -> None:
    server.ask("SET", "lh1:{%:1}:%zz", "1")
    server.ask("SET", "lh1:{:1}:%FF", "1")
    with Client(url(server)) as client, client.lock("job"):
        assert [holding.name for holding in client.inspect()] == ["job"]


def test_msgpack_encoding_matches_lua_cmsgpack(start_redis) -> None:
    server = start_redis()
    for value in (0, 1, 127, 128, 10**15, -1, "", "a", "a" * 31, "a" * 32, "ü" * 400):
        equal = server.ask("EVAL", "return cmsgpack.unpack(ARGV[1]) == (tonumber(ARGV[2]) or ARGV[2]) and 1 or 0", 0,
                           protocol.encode_msgpack(value), value)  # fmt: skip
        assert equal == 1, value
