"""Highest tokens of a service: workers that share them, and requests that are in flight."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from leasehold import StaleToken, fences
from leasehold.fences import TokenInfo
from tests.support import probe_http


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

    fenced = fences.WSGIFence(app, wait="50ms")
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
        await asyncio.sleep(0.05)  # pause: the second could wrongly pass meanwhile
        assert not second.done()
        may_return.set_result(None)
        await first
        await second
        assert order == [("in", 5), ("out", 5), ("in", 9), ("out", 9)]
        assert 409 in await request(5)
        for pause in (0, 0.0001, 0.001, 0.005):  # a request cancelled at any moment stops counting as in flight
            task = asyncio.create_task(request(10))
            await asyncio.sleep(pause)  # pause: cancelled at any moment
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(request(11), 10)

    may_return: Any = None
    fenced = fences.ASGIFence(app, fences.FileTokens(tmp_path) if in_files else None)
    asyncio.run(main())


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
    assert probe_http.tokens_in_flight(tokens) == {}


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


# ------------------------------------------------------------------------------- events


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("side", ["wsgi", "asgi"])
def test_refused_request_is_reported_to_the_hook_of_fences(side, folder, tmp_path, refusals):
    tokens = fences.FileTokens(tmp_path) if folder else fences.MemoryTokens()
    statuses = []

    def wsgi(token: str) -> None:
        app = fences.WSGIFence(lambda _environ, start: start("200 OK", []) or [], tokens)
        environ = {"REQUEST_METHOD": "PUT", "PATH_INFO": "/stock", "HTTP_LEASE_TOKEN": token}
        body = app(environ, lambda status, _headers: statuses.append(int(status[:3])))
        getattr(body, "close", lambda: None)()

    def asgi(token: str) -> None:
        async def ok(_scope: Any, _receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})

        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        scope = {"type": "http", "method": "PUT", "path": "/stock", "headers": [(b"lease-token", token.encode())]}
        asyncio.run(fences.ASGIFence(ok, tokens)(scope, None, send))

    for token in ("7", "6"):
        {"wsgi": wsgi, "asgi": asgi}[side](token)
    assert statuses == [200, 409]
    (event,) = refusals
    assert (event.kind, event.fence, event.name) == ("stale_token", "http", "/stock")
    assert (event.token, event.seen) == (6, 7)
