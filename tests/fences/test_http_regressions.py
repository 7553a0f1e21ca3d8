"""Attacks on the middlewares: other spellings of a path, method or header, and a flood of old requests."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from leasehold import StaleToken, fences
from leasehold.fences import TokenInfo

SIDES = ("http-wsgi", "http-asgi")
each_side = pytest.mark.parametrize("kind", SIDES)


def status_of(port: int, text: str) -> int:
    """Send a hand-written request, because HTTP clients would normalize it."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(text.replace("\n", "\r\n").encode("latin-1"))
        response = b""
        while b"\r\n" not in response and (chunk := connection.recv(4096)):
            response += chunk
    return int(response.split()[1]) if response else 0


def put(number: Any, path: str, headers: str, method: str = "PUT") -> int:
    port = number.spec[number.side]
    return status_of(port, f"{method} {path} HTTP/1.1\nHost: a\nConnection: close\nContent-Length: 1\n{headers}\n\n9")


@each_side
def test_other_spelling_of_a_path_is_the_same_resource(kind, resource):
    number = resource(kind)
    number.write(9, 1)
    path = f"/accts/{number.spec['run']}"
    run = number.spec["run"]
    for other in (f"{path}/", f"/{path}", f"//{path}//", f"/accts/./{run}", f"/accts/x/../{run}", f"/%61ccts/{run}",
                  f"{path}?a=1", f"/accts/{run}/.", f"/../accts/{run}"):  # fmt: skip
        assert put(number, other, "Lease-Token: 8") == 409, other
    assert put(number, path, "Lease-Token: 9") == 200


@each_side
@pytest.mark.parametrize("method", ["PUT", "put", "Put", "MOVE", "MKCOL", "NONSENSE"])
def test_writing_or_unknown_method_requires_a_current_token(kind, method, resource):
    """Frameworks accept `put` as PUT. What they do with other methods is unknown."""
    number = resource(kind)
    number.write(9, 1)
    path = f"/accts/{number.spec['run']}"
    assert put(number, path, "X: 1", method) in (428, 400, 405, 501)
    assert put(number, path, "Lease-Token: 8", method) in (409, 400, 405, 501)
    assert put(number, path, "Lease-Token: 9\nLease-Shared: 1", method) in (400, 405, 501)
    assert number.peek() == 1


@each_side
@pytest.mark.parametrize(
    "headers",
    [
        *("Lease-Token: 5\nLease-Token: 12", "Lease-Token: 12\nLease-Token: 5", "Lease-Token: 12\nlease-token: 12"),
        *("Lease-Token: 12, 13", "Lease-Token: 12;13", "Lease-Token: 1_2", "Lease-Token: 1 2", "Lease-Token: 12.0"),
        *("Lease-Token: \xb2", "Lease-Token: \xd9\xa7", "Lease-Token: 9007199254740992", "Lease-Token: 1e3"),
        *("Lease-Token: 00000000000000012", "Lease-Token: " + "9" * 5000, "Lease-Token:", "Lease-Token: -12"),
        *("Lease-Token: 12\nLease-Slot: -1", "Lease-Token: 12\nLease-Slot: 1\nLease-Slot: 2"),
        *("Lease-Token: 12\nLease-Slot: 100000", "Lease-Token: 12\nLease-Shared: yes"),
        *("Lease-Token: 12\nLease-Shared: 1\nLease-Shared: 1", "Lease-Token: 12\nLease-Slot:"),
    ],
)
def test_ambiguous_lease_headers_are_400(kind, headers, resource):
    number = resource(kind)
    number.write(9, 1)
    assert put(number, f"/accts/{number.spec['run']}", headers) == 400
    number.write(9, 2)  # the highest token was not raised either
    assert number.peek() == 2


@each_side
def test_white_space_around_a_token_is_ignored(kind, resource):
    number = resource(kind)
    assert put(number, f"/accts/{number.spec['run']}", "Lease-Token: \t 12 \t") == 200
    with pytest.raises(StaleToken):
        number.write(11, 1)


def test_required_option_accepts_methods_in_any_case():
    async def ask(method: str) -> int:
        statuses: list[int] = []

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        await fenced({"type": "http", "method": method, "path": "/a", "headers": []}, None, send)
        return statuses[0] if statuses else 0

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    fenced = fences.ASGIFence(app, required=["get"])
    assert asyncio.run(ask("GET")) == 428
    assert asyncio.run(ask("PUT")) == 0


def test_newer_token_enters_despite_repeated_requests_of_older_token():
    tokens, stop, refused = fences.MemoryTokens(), threading.Event(), []

    def enter_repeatedly() -> None:
        leave = tokens.enter("a", TokenInfo(5))
        while not stop.is_set():
            try:
                next_leave = tokens.enter("a", TokenInfo(5))  # before the previous request has left
            except StaleToken:
                refused.append(True)
                next_leave = None
            assert leave is not None
            leave()
            if next_leave is None:
                return
            leave = next_leave
            time.sleep(0.001)

    thread = threading.Thread(target=enter_repeatedly)
    thread.start()
    end, leave = time.monotonic() + 10, None
    while leave is None and time.monotonic() < end:
        leave = tokens.enter("a", TokenInfo(9))
        time.sleep(0.001)
    stop.set()
    thread.join(30)
    assert leave is not None, "the newer token never entered"
    assert refused
