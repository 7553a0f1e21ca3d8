"""What hosts without a key can do to a running server: nothing that a good caller notices."""

import contextlib
import http.client
import resource
import socket
import time
from datetime import UTC, datetime

import pytest

from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.running_server import running

MIB = 1024 * 1024


@pytest.fixture
def guarded(tmp_path):
    """A server with keys, and one of them."""
    path = tmp_path / "keys.toml"
    key = keys.create(path, "web", [Right.parse("lock::")], now=datetime.now(UTC))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # as a shell may have it: the server raises it
    try:
        with running("--keys", str(path)) as server:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
            yield server, key
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(server):
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def use_locks(server, key, times=100):
    """Acquire and release, and return the processor seconds that this took the server."""
    before = server.cpu()
    for n in range(times):
        body = {"name": f"n{n}", "id": f"{n:032}"}
        assert server.post("/v1/acquire", body, key=key).status == 200
        assert server.post("/v1/release", body, key=key).json == {"released": True}
    return server.cpu() - before


@pytest.mark.extended
def test_half_open_connections_leave_a_good_caller_unharmed(guarded):
    server, key = guarded
    use_locks(server, key)  # what is loaded lazily is loaded now
    alone, before = use_locks(server, key), server.memory()
    with contextlib.ExitStack() as stack:
        for n in range(1000):
            half = stack.enter_context(connect(server))
            if n % 3:
                half.sendall(b"POST /v1/acquire HTTP/1.1\r\nHost: x\r\n" + b"Content-Length: 9\r\n\r\n{" * (n % 3 - 1))
        beside = use_locks(server, key)
        # Not the caller's time: on a busy machine that says little. Some half-open connections may time out meanwhile.
        assert beside < 3 * alone + 0.5, f"{alone:.2f} s of a processor without them, {beside:.2f} s with them"
        assert server.memory() - before < 40 * MIB


def test_strangers_cannot_keep_callers_with_a_key_out(tmp_path):
    """They kept all connections with requests that need no key, so that a caller was answered 503."""
    path = tmp_path / "keys.toml"
    key = keys.create(path, "web", [Right.parse("lock::")], now=datetime.now(UTC))
    authorization = {"Authorization": f"Bearer {key}"}

    def ask(connection, target, headers):
        connection.request("GET", target, headers=headers)
        response = connection.getresponse()
        response.read()
        return response.status

    with running("--keys", str(path), "--limits-connections", "20") as server, contextlib.ExitStack() as stack:

        def new_connection():
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            return stack.enter_context(contextlib.closing(connection))

        known = new_connection()
        assert ask(known, "/v1/traits", authorization) == 200
        sock = known.sock
        for _ in range(40):
            assert ask(new_connection(), "/healthz", {}) == 200
        for _ in range(5):
            assert ask(new_connection(), "/v1/traits", authorization) == 200
        assert ask(known, "/v1/traits", authorization) == 200
        assert known.sock is sock, "the connection of a caller with a key was closed"


def test_bodies_of_callers_without_a_key_are_not_kept(guarded):
    server, key = guarded
    use_locks(server, key, 10)
    before = server.memory()
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stranger = stack.enter_context(connect(server))
            stranger.sendall(b"POST /v1/calls HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n\r\n")
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                stranger.sendall(b"[" * (MIB - 1))
        assert server.memory() - before < 40 * MIB
        use_locks(server, key, 10)


def test_bodies_that_come_with_their_heads_are_not_kept(guarded):
    """Those of requests that were refused stayed in memory while their connections were open: 130 kB for each, and for
    a caller with a key above its share, too."""
    server, key = guarded
    use_locks(server, key, 10)
    before = server.memory()
    head = b"POST /v1/calls HTTP/1.1\r\nHost: x\r\nContent-Length: 1048576\r\n"
    with contextlib.ExitStack() as stack:
        for authorization in (b"", b"Authorization: Bearer " + key.encode() + b"\r\n"):
            for _ in range(800):
                connection = stack.enter_context(connect(server))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(head + authorization + b"\r\n" + b"[" * 240_000)
        use_locks(server, key, 10)
        assert server.memory() - before < 100 * MIB, "a key has 32 MiB"


def test_headers_without_end_do_not_fill_the_memory(guarded):
    server, key = guarded
    use_locks(server, key, 10)
    before, sent = server.memory(), 0
    with connect(server) as stranger:
        stranger.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for n in range(3000):
                stranger.sendall(b"X-%d: " % n + b"a" * 32_000 + b"\r\n")
                sent += 32_000
    assert sent < 20 * MIB, "96 MB were to be sent"
    assert server.memory() - before < 10 * MIB


def test_wrong_keys_are_answered_late_and_good_ones_at_once(guarded):
    server, key = guarded
    began = time.monotonic()
    for _ in range(5):
        assert server.get("/v1/traits", key=key[:-1] + "x").status == 401
    assert time.monotonic() - began >= 0.5
    assert server.get("/v1/traits", key=key).status == 200
