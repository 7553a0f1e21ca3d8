"""Both middlewares: the response to each request, and other spellings of a path, method or header."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest

from leasehold import StaleToken, fences

SIDES = ("http-wsgi", "http-asgi")


each_side = pytest.mark.parametrize("kind", SIDES)


def send_request(url: str, method: str = "PUT", **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, b"1" if method == "PUT" else None, headers, method=method)
    try:
        response = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as refused:
        response = refused
    with response:
        if response.status == 200:
            return 200, {}
        assert response.headers["Content-Type"] == "application/problem+json"
        return response.status, json.loads(response.read())


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
def test_fenced_service_status_codes(kind, resource):
    url = resource(kind).url
    assert send_request(url, **{"Lease-Token": "7"}) == (200, {})
    status, problem = send_request(url, **{"Lease-Token": "6"})
    assert status == problem["status"] == 409
    assert problem["type"] == "urn:leasehold:stale-token"
    assert (problem["token"], problem["highest"], problem["slot"]) == (6, 7, None)
    assert url.endswith(problem["resource"])
    assert "it has seen 7" in problem["detail"]
    assert send_request(url)[0] == 428
    assert send_request(url, "GET")[0] == 200  # reads need no token
    for bad in ("", "0", "-1", "7.0", "9007199254740992", "seven", "\u0667", "7" * 40, "+7", "0x7"):
        assert send_request(url, **{"Lease-Token": bad.encode().decode("latin-1")})[0] == 400, bad
    assert send_request(url, **{"Lease-Token": "7", "Lease-Slot": "x"})[0] == 400
    assert send_request(url, **{"Lease-Token": "7", "Lease-Shared": "1"})[0] == 400
    assert send_request(url, "GET", **{"Lease-Token": "6", "Lease-Shared": "1"})[0] == 409
    assert send_request(url, "GET", **{"Lease-Token": "7", "Lease-Shared": "1"})[0] == 200
    assert send_request(url, **{"Lease-Token": "1", "Lease-Slot": "0"})[0] == 200


@each_side
def test_stale_response_to_head_has_no_body(kind, resource):
    number = resource(kind)
    number.fence.claim(9)
    with socket.create_connection(("127.0.0.1", number.spec[number.side]), timeout=30) as connection:
        path = f"/accts/{number.spec['run']}"
        connection.sendall(f"HEAD {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nLease-Token: 8\r\n\r\n".encode())
        response = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.split()[1] == b"409"
    assert body == b""


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


def test_asgi_fence_passes_websocket_through():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(fences.ASGIFence(app)({"type": "websocket"}, None, None))
    assert seen == ["websocket"]
