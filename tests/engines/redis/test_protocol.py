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


PATIENT = 10.0  # seconds: the servers here answer at once
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


def test_second_reply_to_a_request_is_no_answer_to_the_next() -> None:
    """A server or proxy that sent each reply twice made a client hold names that other clients held."""
    fake_server = FakeServer(b"*3\r\n:7\r\n:30000000\r\n:-1\r\n" * 2)
    try:
        with Client(f"redis://127.0.0.1:{fake_server.port}", call_timeout=0.5) as client:
            for name in ("job", "other"):
                with pytest.raises(Unavailable, match="without a request"):
                    client.lock(name).try_acquire()
    finally:
        fake_server.close()


def entry_with(field: int, value: bytes) -> bytes:
    """A reply to `inspect` with two waiters, in which one field of the second is this value."""
    waiter = [b"$16\r\n" + b"x" * 16, *[b":0"] * 7, b":3", b":1900000000000000", b"$1\r\nc", b"$8\r\nh\x001\0work"]
    other = [*waiter[:field], value, *waiter[field + 1 :]]
    entries = b"".join(b"*12\r\n" + b"\r\n".join(each) + b"\r\n" for each in (waiter, other))
    return b"*4\r\n:1800000000000000\r\n:0\r\n" + entries


@pytest.mark.parametrize(
    "reply",
    [
        b"*2\r\n$1\r\n0\r\n*1\r\n:5\r\n",  # to SCAN: a key that is no text
        b"*2\r\n$1\r\n0\r\n*1\r\n*0\r\n",
        b"*2\r\n$1\r\n0\r\n*1\r\n-ERR no key\r\n",
        *(entry_with(field, b"$1\r\n1") for field in range(1, 10)),
        *(entry_with(field, b":1") for field in (0, 10, 11)),
        entry_with(4, b":5"),  # no such state
        entry_with(4, b":-6"),
        entry_with(11, b"$3\r\na\0b"),  # not a holder
        b"*3\r\n:1800000000000000\r\n$1\r\n1\r\n*0\r\n",
    ],
)
def test_malformed_list_of_locks_raises_unavailable(reply) -> None:
    fake_server = FakeServer(reply)
    try:
        with Client(f"redis://127.0.0.1:{fake_server.port}", call_timeout=PATIENT) as client:
            for exact in (False, True):
                with pytest.raises(Unavailable):
                    client.inspect("job", exact=exact)
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
