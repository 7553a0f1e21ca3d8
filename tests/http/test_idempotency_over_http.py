"""`Idempotency-Key` behind a real server: chunked bodies, senders that hang up, concurrent requests."""

import asyncio
import contextlib
import http.client
import socket
import threading
import time

import pytest

import leasehold
from leasehold.http.idempotency import IdempotencyKey


class CountingApp:
    """Takes orders; each waits until `go` is set."""

    def __init__(self) -> None:
        self.orders: list[bytes] = []
        self.go = threading.Event()
        self.go.set()

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.orders.append(body)
        number = len(self.orders)
        await asyncio.to_thread(self.go.wait, 30)
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"order %d" % number})


@pytest.fixture
def shop():
    return CountingApp()


@pytest.fixture
def port(shop):
    uvicorn = pytest.importorskip("uvicorn")
    listening = socket.create_server(("127.0.0.1", 0))
    running, ready = [], threading.Event()

    async def main():
        async with leasehold.AsyncClient("memory://") as client:
            config = uvicorn.Config(IdempotencyKey(shop, client), lifespan="off", log_level="critical")
            running.append(uvicorn.Server(config))
            ready.set()
            await running[0].serve(sockets=[listening])

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(30)
    yield listening.getsockname()[1]
    shop.go.set()
    running[0].should_exit = True
    thread.join(30)
    listening.close()


def order(port, body, key="k", path="/orders"):
    """`body` may be an iterable, which is sent in chunks."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST", path, body, {"Idempotency-Key": key})
        response = connection.getresponse()
        return response.status, response.getheader("Idempotency-Replayed"), response.read()


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_key_is_honoured_over_http(port, shop):
    assert order(port, "a") == (201, None, b"order 1")
    assert order(port, "a") == (201, "true", b"order 1")
    assert order(port, "b")[0] == 422
    assert order(port, "a", path="/refunds")[0] == 422
    assert order(port, "b", "k2") == (201, None, b"order 2")
    assert shop.orders == [b"a", b"b"]


def test_chunked_body_is_the_same_request(port, shop):
    assert order(port, iter([b"a" * 70_000, b"b" * 70_000])) == (201, None, b"order 1")
    assert order(port, b"a" * 70_000 + b"b" * 70_000) == (201, "true", b"order 1")
    assert order(port, iter([b"a" * 70_000, b"b" * 69_999]))[0] == 422
    assert len(shop.orders) == 1


def test_request_with_incomplete_body_is_not_executed(port, shop):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"POST /orders HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 9\r\n\r\nhalf")
    assert order(port, "whole") == (201, None, b"order 1")
    assert shop.orders == [b"whole"]


def test_response_is_kept_for_sender_that_hung_up(port, shop):
    shop.go.clear()
    host = f"127.0.0.1:{port}".encode()  # the Host header that http.client will send
    request = b"POST /orders HTTP/1.1\r\nHost: %s\r\nIdempotency-Key: k\r\nContent-Length: 1\r\n\r\na" % host
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        wait_until(lambda: shop.orders)
        assert order(port, "a")[0] == 409, "the first request is still in progress"
    shop.go.set()
    wait_until(lambda: order(port, "a")[0] != 409)
    assert order(port, "a") == (201, "true", b"order 1")
    assert len(shop.orders) == 1


def test_one_of_many_concurrent_requests_is_executed(port, shop):
    statuses: list[int] = []

    def send() -> None:
        end = time.monotonic() + 30
        while (status := order(port, "a")[0]) == 409 and time.monotonic() < end:
            time.sleep(0.01)
        statuses.append(status)

    threads = [threading.Thread(target=send) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [201] * 12
    assert len(shop.orders) == 1
