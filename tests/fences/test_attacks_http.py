"""Attacks on the middlewares: other spellings of a path, a method or a header, and a crowd that lets nobody by."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import pytest

from leasehold import StaleToken, fences
from leasehold.fences import Pass

SIDES = ("http-wsgi", "http-asgi")
each_side = pytest.mark.parametrize("kind", SIDES)


def status_of(port: int, text: str) -> int:
    """Of a request written by hand: clients would tidy it up."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as line:
        line.sendall(text.replace("\n", "\r\n").encode("latin-1"))
        answer = b""
        while b"\r\n" not in answer and (more := line.recv(4096)):
            answer += more
    return int(answer.split()[1]) if answer else 0


def put(number: Any, path: str, headers: str, method: str = "PUT") -> int:
    port = number.spec[number.side]
    return status_of(port, f"{method} {path} HTTP/1.1\nHost: a\nConnection: close\nContent-Length: 1\n{headers}\n\n9")


@each_side
def test_another_spelling_of_the_path_is_the_same_resource(kind, resource):
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
def test_no_method_that_does_more_than_look_comes_in_without_a_token(kind, method, resource):
    """Frameworks take `put` for PUT; and what they make of others nobody knows."""
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
def test_headers_that_could_be_read_in_two_ways_are_refused(kind, headers, resource):
    number = resource(kind)
    number.write(9, 1)
    assert put(number, f"/accts/{number.spec['run']}", headers) == 400
    number.write(9, 2)  # nor was the mark raised
    assert number.peek() == 2


@each_side
def test_white_space_around_a_token_is_none(kind, resource):
    number = resource(kind)
    assert put(number, f"/accts/{number.spec['run']}", "Lease-Token: \t 12 \t") == 200
    with pytest.raises(StaleToken):
        number.write(11, 1)


def test_required_may_name_methods_in_any_case():
    async def ask(method: str) -> int:
        said: list[int] = []

        async def send(message: Any) -> None:
            said.append(message.get("status"))

        await fenced({"type": "http", "method": method, "path": "/a", "headers": []}, None, send)
        return said[0] if said else 0

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    fenced = fences.ASGIFence(app, required=["get"])
    assert asyncio.run(ask("GET")) == 428
    assert asyncio.run(ask("PUT")) == 0


def test_those_inside_do_not_keep_a_newer_one_out_by_coming_again_and_again():
    marks, stop, refused = fences.Marks(), threading.Event(), []

    def stale() -> None:
        leave = marks.enter("a", Pass(5))
        while not stop.is_set():
            try:
                following = marks.enter("a", Pass(5))  # before the last one has left
            except StaleToken:
                refused.append(True)
                following = None
            assert leave is not None
            leave()
            if following is None:
                return
            leave = following
            time.sleep(0.001)

    thread = threading.Thread(target=stale)
    thread.start()
    end, leave = time.monotonic() + 10, None
    while leave is None and time.monotonic() < end:
        leave = marks.enter("a", Pass(9))
        time.sleep(0.001)
    stop.set()
    thread.join(30)
    assert leave is not None, "the newer one never came in"
    assert refused
