"""Starlette and FastAPI, in process: locks of requests, answers when they are busy, jobs that one of many runs."""

import asyncio
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Path, UploadFile
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from leasehold import AsyncClient, AsyncLease, ConfigError, LeaseLost, current_lease
from leasehold.integrations import starlette as integration
from leasehold.integrations.fastapi import lifespan, lock
from leasehold.integrations.starlette import leading, locked
from tests.support import probe_integrations


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not await condition():
            await asyncio.sleep(0.005)


def waiting(client, name="order:7"):
    async def look():
        return any(holding.state == "waiting" for holding in await client.inspect(name))

    return look


def requests(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def shop(client: AsyncClient, **options: Any) -> FastAPI:
    app = FastAPI()
    held = lock("order:{order_id}", client=client, **options)

    @app.post("/orders/{order_id}")
    async def pay(order_id: int, lease: Annotated[AsyncLease, Depends(held)]) -> dict[str, Any]:
        return {"name": lease.name, "current": current_lease() is lease, "order": order_id}

    @app.get("/orders/{order_id}", dependencies=[Depends(held)])
    def show(order_id: int) -> str:  # FastAPI runs it on another thread
        return current_lease().name

    @app.put("/orders/{order_id}", dependencies=[Depends(held, scope="function")])
    async def sleep(order_id: int) -> None:
        await client.break_lock("order:7", token=current_lease().token)
        await asyncio.sleep(600)

    @app.post("/orders/{order_id}/files", dependencies=[Depends(held)])
    async def upload(order_id: int, file: UploadFile) -> str:
        return (await file.read()).decode()

    return app


def test_dependency_holds_the_lock_while_the_endpoint_runs() -> None:
    async def main():
        async with AsyncClient("memory://") as client, requests(shop(client)) as http:
            answer = await http.post("/orders/7")
            assert answer.json() == {"name": "order:7", "current": True, "order": 7}
            assert (await http.get("/orders/7")).json() == "order:7"
            uploaded = await http.post("/orders/7/files", files={"file": b"pages"})
            assert uploaded.json() == "pages"
            assert await client.inspect() == []

    asyncio.run(main())


class Size(StrEnum):
    SMALL = "small"


def sized(size: Size) -> Size:
    return size


@pytest.mark.parametrize(
    ("path", "same", "name"),
    [
        ("/orders/7", ["/orders/07", "/orders/+7", "/orders/7.0", "/orders/%207"], "order:7"),
        (f"/carts/{'ab' * 16}", [f"/carts/{'AB' * 16}", f"/carts/{{{UUID('ab' * 16)}}}"], f"cart:{UUID('ab' * 16)}"),
        ("/shirts/small", [], "shirt:small"),
    ],
)
def test_spellings_of_one_parameter_give_one_lock(path, same, name) -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            app = FastAPI()
            order, cart, shirt = (
                Depends(lock(template, client=client)) for template in ("order:{id}", "cart:{cart}", "shirt:{size}")
            )
            router = APIRouter()

            @app.post("/orders/{id}", dependencies=[order])
            async def pay(order_id: Annotated[int, Path(alias="id")]) -> str:
                return current_lease().name

            @router.post("/{cart}", dependencies=[cart])
            async def empty(cart: UUID) -> str:
                return current_lease().name

            @app.post("/shirts/{size}", dependencies=[shirt, Depends(sized)])
            async def wash() -> str:
                return current_lease().name

            app.include_router(router, prefix="/carts")
            async with requests(app) as http:
                for each in [path, *same]:
                    assert (await http.post(each)).json() == name

    asyncio.run(main())


def test_parameter_that_is_not_valid_answers_422_and_leaves_no_lock() -> None:
    async def main():
        async with AsyncClient("memory://") as client, requests(shop(client)) as http:
            assert (await http.post("/orders/seven")).status_code == 422
            assert await client.inspect() == []

    asyncio.run(main())


def test_busy_lock_answers_409_with_retry_after_as_problem() -> None:
    async def main():
        client = AsyncClient("memory://")
        async with client, requests(shop(client, retry_after="2500ms")) as http, client.lock("order:7"):
            answer = await http.post("/orders/7")
            assert (await http.post("/orders/8")).status_code == 200
        assert (answer.status_code, answer.headers["Retry-After"]) == (409, "3")
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json() == {"detail": "another request is in progress here; repeat this one later"}

    asyncio.run(main())


def test_unavailable_engine_answers_503_with_retry_after() -> None:
    async def main():
        async with AsyncClient("redis://127.0.0.1:1", call_timeout=1) as client, requests(shop(client)) as http:
            answer = await http.post("/orders/7")
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "nothing was carried out" in answer.json()["detail"]

    asyncio.run(main())


def test_lost_lease_stops_the_endpoint_and_answers_503() -> None:
    async def main():
        async with AsyncClient("memory://") as client, requests(shop(client)) as http, asyncio.timeout(30):
            answer = await http.put("/orders/7")
        assert answer.status_code == 503
        assert "may have been carried out" in answer.json()["detail"]

    asyncio.run(main())


def test_path_that_gives_no_valid_name_answers_400() -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            app = FastAPI()

            @app.get("/files/{path:path}", dependencies=[Depends(lock("file:{path}", client=client))])
            async def read() -> None: ...

            @app.get("/typo/{path}", dependencies=[Depends(lock("file:{name}", client=client))])
            async def typo() -> None: ...

            async with requests(app) as http:
                assert (await http.get("/files/" + "x" * 5000)).status_code == 400
                assert (await http.get("/files/a%00b")).status_code == 400
                with pytest.raises(ConfigError, match=r"'name', which is not a parameter .* \(its parameters: path\)"):
                    await http.get("/typo/a")

    asyncio.run(main())


def test_waiting_request_gets_the_lock_when_it_is_released() -> None:
    async def main():
        async with AsyncClient("memory://") as client, requests(shop(client, wait=60)) as http:
            async with client.lock("order:7"):
                request = asyncio.create_task(http.post("/orders/7"))
                await until(waiting(client))
            assert (await request).status_code == 200

    asyncio.run(main())


async def call(app, path, messages: asyncio.Queue[dict[str, Any]], sent: list[Any]) -> None:
    """What a server does, with messages of the sender that the test chooses."""

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "root_path": ""}
    await app({**scope, "http_version": "1.1", "scheme": "http"}, messages.get, send)


def test_waiting_request_leaves_the_queue_when_its_sender_disconnects() -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            app, messages, sent = shop(client, wait=None), asyncio.Queue(), []
            async with client.lock("order:7"), asyncio.timeout(30):
                request = asyncio.create_task(call(app, "/orders/7", messages, sent))
                await messages.put({"type": "http.request", "body": b"", "more_body": False})
                await until(waiting(client))
                await messages.put({"type": "http.disconnect"})
                await request
                assert not await waiting(client)()
        assert sent[0]["status"] == 499

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/orders/7", "/plain"])
def test_sender_that_disconnects_in_its_body_causes_no_traceback(path) -> None:
    """`ClientDisconnect` reached the server, which logs it as an error of the application."""

    async def main():
        async with AsyncClient("memory://") as client:
            app, messages, sent = shop(client), asyncio.Queue(), []

            @locked("plain", client=client)
            async def plain(request):
                return PlainTextResponse("done")

            app.router.routes.append(Route("/plain", plain, methods=["POST"]))
            messages.put_nowait({"type": "http.request", "body": b"half", "more_body": True})
            messages.put_nowait({"type": "http.disconnect"})
            await call(app, path, messages, sent)
            assert await client.inspect() == []
        assert sent[0]["status"] == 499

    asyncio.run(main())


def test_lock_is_not_held_while_the_body_is_being_sent() -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            app, messages, sent = shop(client), asyncio.Queue(), []
            request = asyncio.create_task(call(app, "/orders/7", messages, sent))
            await messages.put({"type": "http.request", "body": b"{", "more_body": True})
            await until(lambda: asyncio.sleep(0, messages.empty()))
            assert await client.inspect() == []
            await messages.put({"type": "http.request", "body": b"}", "more_body": False})
            await request
        assert sent[0]["status"] == 200

    asyncio.run(main())


async def pieces(count: int, read: list[int]):
    for number in range(count):
        read.append(number)
        yield b"x" * 1000


@pytest.mark.parametrize("path", ["/plain", "/orders/7"])
def test_body_that_is_too_large_answers_413_and_is_not_read_on(path) -> None:
    """An endpoint that reads no body would let every caller fill the memory of the server."""

    async def main():
        async with AsyncClient("memory://") as client:
            app = FastAPI()

            @app.delete("/orders/{order_id}", dependencies=[Depends(lock("order", client=client, max_body=5000))])
            async def cancel() -> None: ...

            async def length(request):
                return PlainTextResponse(str(len(await request.body())))

            app.router.routes.append(
                Route("/plain", locked("order", client=client, max_body=5000)(length), methods=["DELETE"])
            )
            async with requests(app) as http:
                assert (await http.request("DELETE", path, content=pieces(5, []))).text in ("null", "5000")
                answer = await http.request("DELETE", path, content=pieces(1000, read := []))
                assert answer.status_code == 413
                assert answer.headers["content-type"] == "application/problem+json"
                assert len(read) < 10
                assert await client.inspect() == []

    asyncio.run(main())


@pytest.mark.parametrize("max_body", [-1, True, "1"])
def test_max_body_that_is_no_number_of_bytes_is_refused(max_body) -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            with pytest.raises(ConfigError, match="max_body must be a number of bytes"):
                async with requests(shop(client, max_body=max_body)) as http:
                    await http.get("/orders/7")

    asyncio.run(main())


def test_body_that_fastapi_has_read_has_no_bound_of_the_lock() -> None:
    async def main():
        async with AsyncClient("memory://") as client, requests(shop(client, max_body=0)) as http:
            uploaded = await http.post("/orders/7/files", files={"file": b"pages"})
            assert uploaded.json() == "pages"

    asyncio.run(main())


def test_lock_of_streamed_answer_is_released_when_sender_disconnects() -> None:
    async def main():
        async with AsyncClient("memory://") as client:
            app, messages, sent = FastAPI(), asyncio.Queue(), []

            @app.post("/orders/{order_id}", dependencies=[Depends(lock("order:{order_id}", client=client))])
            async def follow() -> StreamingResponse:
                async def lines():
                    yield b"line\n"
                    await asyncio.sleep(600)

                return StreamingResponse(lines())

            async with asyncio.timeout(30):
                request = asyncio.create_task(call(app, "/orders/7", messages, sent))
                await messages.put({"type": "http.request", "body": b"", "more_body": False})
                await until(lambda: asyncio.sleep(0, len(sent) > 1))
                assert (await client.inspect("order:7"))[0].state == "held"
                await messages.put({"type": "http.disconnect"})
                await request
            assert await client.inspect() == []

    asyncio.run(main())


def test_lifespan_gives_its_client_to_endpoints_and_mounted_applications() -> None:
    @locked(lambda request: f"user:{request.query_params['user']}")
    async def rename(request):
        return PlainTextResponse(current_lease().name)

    @asynccontextmanager
    async def own(app):
        yield {"own": "kept"}

    @locked("a")
    async def busy(request):
        async with integration.hold(request, "b"):
            return await inner_busy(request)

    @locked("b")
    async def inner_busy(request):
        return PlainTextResponse(request.state.own)

    routes = [Route("/rename", rename), Route("/busy", busy)]
    app = Starlette(routes=[*routes, Mount("/v1", Starlette(routes=routes))], lifespan=lifespan("memory://", inner=own))

    async def main():
        async with app.router.lifespan_context(app) as state:

            async def started(scope, receive, send):  # what a server does
                await app({**scope, "state": dict(state)}, receive, send)

            async with requests(started) as http:
                assert (await http.get("/rename", params={"user": "7"})).text == "user:7"
                assert (await http.get("/v1/rename", params={"user": "8"})).text == "user:8"
                answer = await http.get("/busy")
        assert (answer.status_code, answer.headers["Content-Type"]) == (409, "application/problem+json")
        assert answer.json()["status"] == 409
        async with requests(app) as http:
            with pytest.raises(ConfigError, match=r"has no Leasehold client: .*lifespan\(URL\)"):
                await http.get("/rename", params={"user": "7"})

    asyncio.run(main())


def test_one_of_many_lifespans_runs_the_job_and_hands_it_over() -> None:
    async def main():
        running, ended = [], []

        def job_of(number):
            async def job(lease):
                running.append((number, lease.token))
                assert current_lease() is lease
                try:
                    await asyncio.sleep(600)
                finally:
                    ended.append(number)

            return job

        stops = [asyncio.Event() for _ in range(3)]

        async def worker(number):
            app = FastAPI()
            async with lifespan("memory://jobs", jobs={"mailer": job_of(number)})(app):
                await stops[number].wait()

        workers = [asyncio.create_task(worker(number)) for number in range(3)]
        for count in range(1, 4):
            await until(lambda count=count: asyncio.sleep(0, len(running) == count))
            assert len(ended) == count - 1  # one at a time
            stops[running[-1][0]].set()
        await asyncio.gather(*workers)
        assert sorted(ended) == [0, 1, 2]
        assert [token for _, token in running] == sorted(token for _, token in running)

    asyncio.run(main())


def test_job_that_fails_or_loses_its_lease_is_started_again(monkeypatch, caplog) -> None:
    monkeypatch.setattr(*probe_integrations.starlette_shortest_pause(), 0.01)

    async def main():
        starts = asyncio.Queue()

        async def job(lease):
            await starts.put(lease)
            if starts.qsize() == 1 and len(seen) == 0:
                raise KeyError("mine")
            if len(seen) == 1:
                return
            await asyncio.sleep(600)

        seen = []
        async with AsyncClient("memory://") as client, leading(client, "job", job), asyncio.timeout(30):
            for _ in range(3):
                seen.append(await starts.get())
            await client.break_lock("job", token=seen[-1].token)
            last = await starts.get()
            assert last.token > seen[-1].token
        with pytest.raises(LeaseLost):
            last.check()

    asyncio.run(main())
    assert "a job failed" in caplog.text
    assert "the job returned" in caplog.text
    assert "does not lead" in caplog.text


def test_job_that_awaited_a_cancelled_task_is_started_again(monkeypatch, caplog) -> None:
    """It awaited a task that something else had cancelled, and no process ran the job any more."""
    monkeypatch.setattr(*probe_integrations.starlette_shortest_pause(), 0.01)

    async def main():
        starts = asyncio.Queue()

        async def job(lease):
            await starts.put(lease)
            other = asyncio.create_task(asyncio.sleep(600))
            other.cancel()
            await other

        async with AsyncClient("memory://") as client, asyncio.timeout(30):
            async with leading(client, "job", job):
                tokens = [(await starts.get()).token for _ in range(3)]
            assert tokens == sorted(set(tokens))

    asyncio.run(main())
    assert "a job failed" in caplog.text


def test_job_that_is_not_async_is_refused_when_built() -> None:
    with pytest.raises(ConfigError, match="the job mailer must be an async function"):
        lifespan("memory://", jobs={"mailer": print})
