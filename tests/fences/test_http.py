"""HTTP services: the answers of both middlewares, workers that share marks, and the hooks of clients."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest
import requests

from leasehold import Client, ConfigError, StaleToken, fences
from leasehold.fences import Pass

SIDES = ("http-wsgi", "http-asgi")
each_side = pytest.mark.parametrize("kind", SIDES)


def asked(url: str, method: str = "PUT", **headers: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, b"1" if method == "PUT" else None, headers, method=method)
    try:
        answer = urllib.request.urlopen(request, timeout=30)
    except urllib.error.HTTPError as refused:
        answer = refused
    with answer:
        if answer.status == 200:
            return 200, {}
        assert answer.headers["Content-Type"] == "application/problem+json"
        return answer.status, json.loads(answer.read())


@each_side
def test_the_answers(kind, resource):
    url = resource(kind).url
    assert asked(url, **{"Lease-Token": "7"}) == (200, {})
    status, problem = asked(url, **{"Lease-Token": "6"})
    assert status == problem["status"] == 409
    assert problem["type"] == "urn:leasehold:stale-token"
    assert (problem["token"], problem["highest"], problem["slot"]) == (6, 7, None)
    assert url.endswith(problem["resource"])
    assert "it has seen 7" in problem["detail"]
    assert asked(url)[0] == 428
    assert asked(url, "GET")[0] == 200  # who only reads needs no token
    for bad in ("", "0", "-1", "7.0", "9007199254740992", "seven", "\u0667", "7" * 40, "+7", "0x7"):
        assert asked(url, **{"Lease-Token": bad.encode().decode("latin-1")})[0] == 400, bad
    assert asked(url, **{"Lease-Token": "7", "Lease-Slot": "x"})[0] == 400
    assert asked(url, **{"Lease-Token": "7", "Lease-Shared": "1"})[0] == 400
    assert asked(url, "GET", **{"Lease-Token": "6", "Lease-Shared": "1"})[0] == 409
    assert asked(url, "GET", **{"Lease-Token": "7", "Lease-Shared": "1"})[0] == 200
    assert asked(url, **{"Lease-Token": "1", "Lease-Slot": "0"})[0] == 200


@each_side
def test_hooks_of_the_usual_clients(kind, resource):
    url = resource(kind).url
    seen = []
    with Client("memory://", on_event=seen.append) as client:
        late = client.lock("a").acquire()
        client.break_lock("a", token=late.token)
        with client.lock("a") as lease:
            answer = requests.put(url, b"1", auth=fences.LeaseAuth(lease), timeout=30)
            fences.raise_for_stale(answer)
            assert answer.status_code == 200
        with httpx.Client(auth=fences.LeaseAuth(late)) as web:
            refused = [web.put(url, content=b"2")]
        refused.append(requests.put(url, b"2", headers=fences.headers(late), timeout=30))
        for answer in refused:
            with pytest.raises(StaleToken) as stale:
                fences.raise_for_stale(answer, late)
            assert (stale.value.token, stale.value.highest) == (late.token, lease.token)
    assert [event.kind for event in seen].count("stale_token") == 2
    assert requests.get(url, timeout=30).content == b"1"
    assert fences.headers(Pass(7, slot=2)) == {"Lease-Token": "7", "Lease-Slot": "2"}
    assert fences.headers(Pass(7, shared=True)) == {"Lease-Token": "7", "Lease-Shared": "1"}


def test_other_answers_are_no_refusal():
    def answered(status: int, body: bytes, kind: str = "application/problem+json") -> httpx.Response:
        return httpx.Response(status, content=body, headers={"Content-Type": kind})

    stale = b'{"type": "urn:leasehold:stale-token", "resource": "a", "token": 1, "highest": 2}'
    for answer in (
        answered(200, stale),
        answered(409, stale, "application/json"),
        answered(409, b'{"type": "about:blank"}'),
        answered(409, b'{"type": "urn:leasehold:stale-token"}'),
        answered(409, b"[]"),
        answered(409, b"not json"),
    ):
        fences.raise_for_stale(answer)
    with pytest.raises(StaleToken):
        fences.raise_for_stale(answered(409, stale))
    with pytest.raises(ConfigError):
        fences.HTTPFence("ftp://a")


def test_a_refusal_of_another_sort_is_the_clients_own(resource):
    fence = resource("http-wsgi").fence
    with pytest.raises(urllib.error.HTTPError) as refused:
        fence.call(Pass(7, shared=True), "PUT", b"1")
    refused.value.close()
    assert refused.value.code == 400
    fence.claim(9)
    with pytest.raises(StaleToken):
        fence.read(8)


@pytest.mark.parametrize("side", ["wsgi", "asgi"])
def test_workers_of_one_machine_share_their_marks_and_keep_them(side, service, tmp_path):
    workers = [service(side, str(tmp_path / "marks")).start() for _ in range(2)]
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


# ------------------------------------------------------- while a request is inside


def wsgi_call(app: Any, token: str, method: str = "PUT") -> tuple[str, Any]:
    said = []
    environ = {"REQUEST_METHOD": method, "PATH_INFO": "/a", "HTTP_LEASE_TOKEN": token}
    return said, app(environ, lambda status, headers: said.append(status))


def test_wsgi_is_inside_until_the_answer_is_closed():
    """An app may do its work while its answer is sent."""
    inside = []

    def app(environ, start_response):
        start_response("200 OK", [])
        inside.append(environ["leasehold.pass"])
        return iter([b"1"])

    fenced = fences.WSGIFence(app, wait=0.05)
    said, first = wsgi_call(fenced, "5")
    assert said == ["200 OK"]
    again = wsgi_call(fenced, "5")[1]  # more requests of the same lease
    busy, _ = wsgi_call(fenced, "9")
    assert busy == ["503 Service Unavailable"]
    assert list(first) == [b"1"]
    first.close()
    first.close()
    assert wsgi_call(fenced, "9")[0] == ["503 Service Unavailable"]
    again.close()
    said, last = wsgi_call(fenced, "9")
    assert said == ["200 OK"]
    last.close()
    assert inside == [Pass(5), Pass(5), Pass(9)]
    assert wsgi_call(fenced, "5")[0] == ["409 Conflict"]


def test_an_app_that_fails_leaves():
    def app(environ, start_response):
        raise RuntimeError

    fenced = fences.WSGIFence(app, wait=0.05)
    for token in ("5", "9"):
        with pytest.raises(RuntimeError):
            wsgi_call(fenced, token)


@pytest.mark.parametrize("in_files", [False, True])
def test_asgi_keeps_others_out_until_the_app_returns_and_when_cancelled(in_files, tmp_path):
    order = []

    async def app(scope, receive, send):
        order.append(("in", scope["leasehold.pass"].token))
        await (gate if scope["leasehold.pass"].token == 5 else asyncio.sleep(0))
        order.append(("out", scope["leasehold.pass"].token))

    async def ask(token: int) -> list[int]:
        said = []

        async def send(message):
            said.append(message.get("status"))

        scope = {"type": "http", "method": "PUT", "path": "/a", "headers": [(b"lease-token", str(token).encode())]}
        await fenced(scope, None, send)
        return said

    async def main() -> None:
        nonlocal gate
        gate = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(ask(5))
        while not order:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(9))
        await asyncio.sleep(0.05)
        assert not second.done()
        gate.set_result(None)
        await first
        await second
        assert order == [("in", 5), ("out", 5), ("in", 9), ("out", 9)]
        assert 409 in await ask(5)
        for pause in (0, 0.0001, 0.001, 0.005):  # cancelled at any moment, it is out again
            task = asyncio.create_task(ask(10))
            await asyncio.sleep(pause)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(ask(11), 10)

    gate: Any = None
    fenced = fences.ASGIFence(app, fences.FileMarks(tmp_path) if in_files else None)
    asyncio.run(main())


def test_asgi_passes_what_is_not_http():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(fences.ASGIFence(app)({"type": "websocket"}, None, None))
    assert seen == ["websocket"]


def test_many_threads_at_marks_in_memory():
    marks, inside, worst = fences.Marks(), [], []

    def work(first: int) -> None:
        for token in range(first, 2_000, 4):
            try:
                leave = marks.enter("a", Pass(token))
            except StaleToken:
                continue
            if leave is not None:
                inside.append(token)
                worst.append(len(set(inside)))
                inside.remove(token)
                leave()

    threads = [threading.Thread(target=work, args=[n]) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(worst) == {1}
    assert marks._inside == {}
