"""How many connections of a server one caller keeps from the others."""

import contextlib
import secrets
import socket
from datetime import UTC, datetime

import pytest

from leasehold.server import keys
from leasehold.server.keys import Right
from tests.support.running_server import SECONDS, poll, running


@pytest.fixture
def tenants(tmp_path):
    """The file of the keys of two callers, and the keys."""
    path = tmp_path / "keys.toml"
    made = [
        keys.create(path, who, [Right.parse(f"lock,read:{who}:")], now=datetime.now(UTC)) for who in ("flooder", "shop")
    ]
    return path, *made


def head(method, path, key, *lines):
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines, "", ""]
    ).encode()


@contextlib.contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        yield connection


NO_BODY = ("Content-Length: 50", "Expect: 100-continue")  # the server answers that once it knows the caller


@pytest.mark.parametrize(
    "request_",
    [
        ("GET", "/engines?namespace=flooder"),
        ("GET", "/ui/stream?page=locks&namespace=flooder"),
        ("POST", "/ui/break", *NO_BODY),
        ("POST", "/v1/renew", *NO_BODY),
    ],
    ids=["pages", "live-pages", "forms", "renewals"],
)
def test_one_key_cannot_keep_all_connections_of_a_server(tenants, request_):
    """The dashboard did not count them, and those above the limit of the key were never closed for other callers."""
    path, flooder, shop = tenants
    method, target, *lines = request_
    limits = ["--limits-connections", "12", "--limits-connections-per-key", "4"]
    with running("--keys", str(path), *limits) as server, contextlib.ExitStack() as stack:
        for _ in range(24):
            connection = stack.enter_context(connected(server))
            with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(head(method, target, flooder, *lines))
                connection.recv(1)
        for _ in range(3):
            assert server.get("/v1/traits", key=shop).status == 200


def test_pages_above_the_limit_of_a_key_are_told_so(tenants):
    path, flooder, shop = tenants
    with running("--keys", str(path), "--limits-connections-per-key", "1") as server:
        with server.stream("/ui/stream?page=locks&namespace=flooder", key=flooder) as first:
            first.wait_for("event: frame")
            page = server.get("/locks?namespace=flooder", key=flooder)
            assert (page.status, page.headers["connection"]) == (200, "close")
            answer = server.open("/ui/stream?page=locks&namespace=flooder", key=flooder)
            assert answer.status == 429
            assert b" has 1 connections" in answer.body
            assert b'shed_total{reason="connections_per_key"} 2.0\n' in server.get("/metrics", key=shop).body
        poll(lambda: server.get("/locks?namespace=flooder", key=flooder).headers.get("connection") != "close")


@pytest.mark.extended
def test_answers_that_a_caller_does_not_read_leave_room_for_others(tenants):
    """Three hundred connections took a gigabyte of the kernel's memory, and a quarter of one of the server's."""
    path, flooder, shop = tenants
    with running("--keys", str(path)) as server, contextlib.ExitStack() as stack:
        for first in range(0, 5000, 500):
            claims = [
                {"namespace": "flooder", "name": f"n{number}", "id": secrets.token_hex(16), "ttl": 3600}
                | {"holder": ["h" * 150, "", 0, "p" * 150]}
                for number in range(first, first + 500)
            ]
            attempts = [{"do": "attempt", "claim": claim} for claim in claims]
            assert server.post("/v1/calls", attempts, key=flooder).status == 200
        before = server.memory()
        inspect = b'[{"do": "inspect", "namespace": "flooder"}]'
        for _ in range(60):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(SECONDS)
            deaf.connect(("127.0.0.1", server.port))
            deaf.sendall(head("POST", "/v1/calls", flooder, f"Content-Length: {len(inspect)}") + inspect)
            deaf.recv(1)
        assert server.memory() - before < 64 * 1024 * 1024
        assert b'reason="unread_answers_per_key"' in server.get("/metrics", key=shop).body
        assert server.get("/locks?namespace=shop", key=shop).status == 200


def test_connections_above_the_limit_of_a_server_are_counted(tenants):
    path, _, shop = tenants
    with running("--keys", str(path), "--limits-connections", "1") as server, connected(server) as only:
        only.sendall(head("GET", "/v1/traits", shop))
        only.recv(1)
        assert server.get("/healthz").status == 503
        only.sendall(head("GET", "/metrics", shop))
        received = b""
        while b'shed_total{reason="connections"} 1.0\n' not in received:
            part = only.recv(65_536)
            assert part, received
            received += part
