"""HTTP services: the responses of both middlewares, workers that share highest tokens, and client hooks."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest
import requests

from leasehold import Client, ConfigError, StaleToken, fences
from leasehold.fences import TokenInfo

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
def test_lease_auth_and_raise_for_stale_work_with_requests_and_httpx(kind, resource):
    url = resource(kind).url
    seen = []
    with Client("memory://", on_event=seen.append) as client:
        late = client.lock("a").acquire()
        client.break_lock("a", token=late.token)
        with client.lock("a") as lease:
            response = requests.put(url, b"1", auth=fences.LeaseAuth(lease), timeout=30)
            fences.raise_for_stale(response)
            assert response.status_code == 200
        with httpx.Client(auth=fences.LeaseAuth(late)) as web:
            refused = [web.put(url, content=b"2")]
        refused.append(requests.put(url, b"2", headers=fences.headers(late), timeout=30))
        for response in refused:
            with pytest.raises(StaleToken) as stale:
                fences.raise_for_stale(response, late)
            assert (stale.value.token, stale.value.highest) == (late.token, lease.token)
    assert [event.kind for event in seen].count("stale_token") == 2
    assert requests.get(url, timeout=30).content == b"1"
    assert fences.headers(TokenInfo(7, slot=2)) == {"Lease-Token": "7", "Lease-Slot": "2"}
    assert fences.headers(TokenInfo(7, shared=True)) == {"Lease-Token": "7", "Lease-Shared": "1"}


def test_raise_for_stale_ignores_other_responses():
    def make_response(status: int, body: bytes, kind: str = "application/problem+json") -> httpx.Response:
        return httpx.Response(status, content=body, headers={"Content-Type": kind})

    stale = b'{"type": "urn:leasehold:stale-token", "resource": "a", "token": 1, "highest": 2}'
    for response in (
        make_response(200, stale),
        make_response(409, stale, "application/json"),
        make_response(409, b'{"type": "about:blank"}'),
        make_response(409, b'{"type": "urn:leasehold:stale-token"}'),
        make_response(409, b"[]"),
        make_response(409, b"not json"),
    ):
        fences.raise_for_stale(response)
    with pytest.raises(StaleToken):
        fences.raise_for_stale(make_response(409, stale))
    with pytest.raises(ConfigError):
        fences.HTTPFence("ftp://a")


@each_side
def test_stale_claim_raises_stale_token_and_is_counted(kind, resource):
    """`claim` sends HEAD, and the response to HEAD has no body: the tokens are in its headers."""
    number = resource(kind)
    seen: list[Any] = []
    with Client("memory://", on_event=seen.append) as client:
        late = client.lock("a").acquire()
        client.break_lock("a", token=late.token)
        with client.lock("a") as lease:
            number.fence.claim(lease)
        for call in (
            lambda: number.fence.claim(late),
            lambda: fences.raise_for_stale(requests.head(number.url, headers=fences.headers(late), timeout=30), late),
            lambda: fences.raise_for_stale(httpx.head(number.url, headers=fences.headers(late)), late),
        ):
            with pytest.raises(StaleToken) as stale:
                call()
            assert (stale.value.token, stale.value.highest, stale.value.slot) == (late.token, lease.token, None)
            assert number.url.endswith(stale.value.resource)
    assert [event.kind for event in seen].count("stale_token") == 3
    number.fence.claim(TokenInfo(9, slot=2))
    with pytest.raises(StaleToken, match="slot 2, refused token 8: it has seen 9"):
        number.fence.claim(TokenInfo(8, slot=2))


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
def test_stale_claim_of_any_path_names_the_resource(kind, resource):
    """A path may contain characters that a header cannot."""
    number = resource(kind)
    url = f"{number.url}/caf%C3%A9%0d%0aX:%201%20%25"
    fences.HTTPFence(url).claim(9)
    with pytest.raises(StaleToken) as by_head:
        fences.HTTPFence(url).claim(8)
    with pytest.raises(StaleToken) as by_get:
        fences.HTTPFence(url).read(8)
    assert by_head.value.resource == by_get.value.resource


@pytest.mark.parametrize(
    "more",
    [
        *({"Lease-Token": "x"}, {"Lease-Token": "0"}, {"Lease-Token": "-1"}, {"Lease-Token": "9"}, {"Lease-Token": ""}),
        *({"Lease-Highest-Token": "9007199254740992"}, {"Lease-Highest-Token": "nan"}, {"Lease-Highest-Token": "9.0"}),
        *({"Lease-Highest-Token": "9" * 5000}, {"Lease-Slot": "-1"}, {"Lease-Slot": "2147483648"}, {"Lease-Slot": "x"}),
    ],
)
def test_stale_response_with_invalid_headers_is_not_parsed(more):
    valid = {"Lease-Resource": "/a", "Lease-Token": "8", "Lease-Highest-Token": "9"}
    with pytest.raises(StaleToken, match="/a refused token 8: it has seen 9"):
        fences.raise_for_stale(httpx.Response(409, headers=valid))
    for missing in valid:
        fences.raise_for_stale(httpx.Response(409, headers={name: valid[name] for name in valid if name != missing}))
    fences.raise_for_stale(httpx.Response(200, headers=valid))
    fences.raise_for_stale(httpx.Response(409, headers={**valid, **more}))


@pytest.mark.parametrize("token", [0, -1, True, 2**53, 7.0, float("nan"), "7", None])
def test_client_refuses_invalid_token_before_it_sends_a_request(token):
    unreachable = fences.HTTPFence("http://127.0.0.1:1/")
    for call in (
        lambda: fences.headers(token),
        lambda: fences.LeaseAuth(token),
        lambda: unreachable.claim(token),
        lambda: unreachable.read(token),
        lambda: unreachable.write(token, "1"),
    ):
        with pytest.raises(ConfigError):
            call()


def test_http_fence_raises_other_refusals_as_http_error(resource):
    fence = resource("http-wsgi").fence
    with pytest.raises(urllib.error.HTTPError) as refused:
        fence.call(TokenInfo(7, shared=True), "PUT", b"1")
    refused.value.close()
    assert refused.value.code == 400
    fence.claim(9)
    with pytest.raises(StaleToken):
        fence.read(8)


@pytest.mark.parametrize("side", ["wsgi", "asgi"])
def test_workers_share_highest_tokens_in_files_across_restart(side, service, tmp_path):
    workers = [service(side, str(tmp_path / "tokens")).start() for _ in range(2)]
    try:
        urls = [f"http://127.0.0.1:{worker.port}/a" for worker in workers]
        fences.HTTPFence(urls[0]).write(7, "1")
        with pytest.raises(StaleToken):
            fences.HTTPFence(urls[1]).write(6, "2")
        workers[1].restart()
        with pytest.raises(StaleToken):
            fences.HTTPFence(urls[1]).read(6)
        fences.HTTPFence(urls[1]).write(7, "3")
    finally:
        for worker in workers:
            worker.kill()


# ---------------------------------------------------- while a request is in flight


def wsgi_call(app: Any, token: str, method: str = "PUT") -> tuple[str, Any]:
    statuses = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": "/a", "HTTP_LEASE_TOKEN": token}
    return statuses, app(environ, lambda status, headers: statuses.append(status))


def test_wsgi_request_counts_as_in_flight_until_response_is_closed():
    """An app may still work while its response is being sent."""
    entered = []

    def app(environ, start_response):
        start_response("200 OK", [])
        entered.append(environ["leasehold.token_info"])
        return iter([b"1"])

    fenced = fences.WSGIFence(app, wait=0.05)
    statuses, first = wsgi_call(fenced, "5")
    assert statuses == ["200 OK"]
    again = wsgi_call(fenced, "5")[1]  # another request under the same lease
    busy, _ = wsgi_call(fenced, "9")
    assert busy == ["503 Service Unavailable"]
    assert list(first) == [b"1"]
    first.close()
    first.close()
    assert wsgi_call(fenced, "9")[0] == ["503 Service Unavailable"]
    again.close()
    statuses, last = wsgi_call(fenced, "9")
    assert statuses == ["200 OK"]
    last.close()
    assert entered == [TokenInfo(5), TokenInfo(5), TokenInfo(9)]
    assert wsgi_call(fenced, "5")[0] == ["409 Conflict"]


def test_wsgi_app_that_raises_is_no_longer_in_flight():
    def app(environ, start_response):
        raise RuntimeError

    fenced = fences.WSGIFence(app, wait=0.05)
    for token in ("5", "9"):
        with pytest.raises(RuntimeError):
            wsgi_call(fenced, token)


@pytest.mark.parametrize("in_files", [False, True])
def test_asgi_newer_token_waits_until_app_returns_or_is_cancelled(in_files, tmp_path):
    order = []

    async def app(scope, receive, send):
        order.append(("in", scope["leasehold.token_info"].token))
        await (may_return if scope["leasehold.token_info"].token == 5 else asyncio.sleep(0))
        order.append(("out", scope["leasehold.token_info"].token))

    async def request(token: int) -> list[int]:
        statuses = []

        async def send(message):
            statuses.append(message.get("status"))

        scope = {"type": "http", "method": "PUT", "path": "/a", "headers": [(b"lease-token", str(token).encode())]}
        await fenced(scope, None, send)
        return statuses

    async def main() -> None:
        nonlocal may_return
        may_return = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(request(5))
        while not order:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(request(9))
        await asyncio.sleep(0.05)
        assert not second.done()
        may_return.set_result(None)
        await first
        await second
        assert order == [("in", 5), ("out", 5), ("in", 9), ("out", 9)]
        assert 409 in await request(5)
        for pause in (0, 0.0001, 0.001, 0.005):  # a request cancelled at any moment stops counting as in flight
            task = asyncio.create_task(request(10))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(request(11), 10)

    may_return: Any = None
    fenced = fences.ASGIFence(app, fences.FileTokens(tmp_path) if in_files else None)
    asyncio.run(main())


def test_asgi_fence_passes_websocket_through():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(fences.ASGIFence(app)({"type": "websocket"}, None, None))
    assert seen == ["websocket"]


def test_threads_with_different_tokens_are_never_in_flight_together():
    tokens, in_flight, in_flight_counts = fences.MemoryTokens(), [], []

    def work(first: int) -> None:
        for token in range(first, 2_000, 4):
            try:
                leave = tokens.enter("a", TokenInfo(token))
            except StaleToken:
                continue
            if leave is not None:
                in_flight.append(token)
                in_flight_counts.append(len(set(in_flight)))
                in_flight.remove(token)
                leave()

    threads = [threading.Thread(target=work, args=[n]) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(in_flight_counts) == {1}
    assert tokens._in_flight == {}
