"""`Idempotency-Key`: the middleware, called directly."""

import asyncio
import json

import pytest

import leasehold
from leasehold import ConfigError, Unavailable
from leasehold.http.idempotency import IdempotencyKey
from leasehold.records.stores.memory import MemoryStore
from leasehold.runtime.loop import Loop


def test_repeated_request_is_answered_from_the_stored_response(http):
    async def work(app, shop):
        first = await http.post(app, b'{"n": 1}')
        second = await http.post(app, b'{"n": 1}', chunks=[b'{"n"', b": 1}"])
        assert first == (201, {b"x-order": b"yes"}, b"order 1")
        assert second == (201, {b"x-order": b"yes", b"idempotency-replayed": b"true"}, b"order 1")
        assert shop.orders == [b'{"n": 1}']

    http.served(work)


@pytest.mark.parametrize(
    "other",
    [{"body": b"other"}, {"path": "/refunds"}, {"query": b"a=1"}, {"method": "PATCH"}],
    ids=["body", "path", "query", "method"],
)
def test_different_request_with_same_key_is_422(other, http):
    async def work(app, shop):
        await http.post(app)
        status, headers, body = await http.post(app, **other)
        assert status == 422
        assert headers[b"content-type"] == b"application/problem+json"
        assert json.loads(body)["detail"] == "this Idempotency-Key was already used for a different request"
        assert len(shop.orders) == 1

    http.served(work)


def test_repeated_request_is_409_while_first_is_in_progress(http):
    async def work(app, shop):
        first = asyncio.create_task(http.post(app))
        while not shop.orders:
            await asyncio.sleep(0)
        status, headers, _ = await http.post(app)
        assert (status, headers[b"retry-after"]) == (409, b"3")
        assert (await http.post(app, b"other"))[0] == 422
        shop.gate.set()
        assert (await first)[2] == b"order 1"
        assert (await http.post(app))[2] == b"order 1"
        assert len(shop.orders) == 1

    http.served(work, http.Shop(gate=asyncio.Event()), retry_after=3)


def test_same_key_of_different_senders_is_executed_for_each(http):
    async def work(app, shop):
        for who in (b"Basic ada", b"Basic bob", b"Basic ada"):
            await http.post(app, more=[(b"authorization", who)])
        assert len(shop.orders) == 2

    http.served(work)

    async def by_cookie(app, shop):
        for who in (b"ada", b"bob", b"ada"):
            await http.post(app, more=[(b"cookie", who)])
        assert len(shop.orders) == 2

    http.served(by_cookie, who=lambda scope: dict(scope["headers"])[b"cookie"].decode())


def test_requests_without_key_other_methods_and_lifespan_pass_through(http):
    async def work(app, shop):
        for _ in range(2):
            assert b"idempotency-replayed" not in (await http.post(app, key=None))[1]
            await http.post(app, method="GET")
        await app({"type": "lifespan"}, None, None)
        assert len(shop.orders) == 4

    http.served(work)


@pytest.mark.parametrize("key", [None, b"", b"k" * 256])
def test_missing_or_invalid_key_is_400(key, http):
    async def work(app, shop):
        assert (await http.post(app, key=key))[0] == 400
        assert (await http.post(app, more=[(b"idempotency-key", b"second")]))[0] == 400
        assert shop.orders == []

    http.served(work, required=True)


def test_too_large_or_incomplete_body_is_not_executed(http):
    async def work(app, shop):
        assert (await http.post(app, chunks=[b"x" * 60, b"x" * 60]))[0] == 413
        assert await http.post(app, chunks=[b"x" * 60, None]) is None
        assert shop.orders == []
        assert (await http.post(app, b"x" * 100))[0] == 201

    http.served(work, max_body=100)


def test_too_large_response_is_sent_once_and_not_replayed(http):
    async def work(app, shop):
        assert (await http.post(app))[2] == b"x" * 200
        status, _, body = await http.post(app)
        assert (status, b"too large to be stored" in body) == (409, True)
        assert len(shop.orders) == 1

    http.served(work, http.Shop(body=b"x" * 200), max_answer=100)


def test_request_may_be_repeated_after_server_error(http):
    async def work(app, shop):
        assert (await http.post(app))[0] == 503
        shop.status = 201
        assert (await http.post(app))[0] == 201
        assert (await http.post(app))[1][b"idempotency-replayed"] == b"true"
        assert len(shop.orders) == 2

    http.served(work, http.Shop(status=503))


def test_exception_of_application_is_raised_each_time(http):
    async def broken(scope, receive, send):
        raise ValueError("no paper")

    async def work(app, _):
        for _ in range(2):
            with pytest.raises(ValueError, match="no paper"):
                await http.post(app)

    http.served(work, broken)


def test_client_error_response_is_replayed(http):
    async def work(app, shop):
        assert [(await http.post(app))[0] for _ in range(3)] == [404, 404, 404]
        assert len(shop.orders) == 1

    http.served(work, http.Shop(status=404))


class SilentStore(MemoryStore):
    def __init__(self, *, after: int) -> None:
        super().__init__(Loop())
        self.left = after

    def write(self, *args):
        if self.left == 0:
            raise Unavailable("nobody answers")
        self.left -= 1
        return super().write(*args)


def test_silent_store_is_503_before_execution_but_not_after(http):
    async def before(app, shop):
        status, headers, _ = await http.post(app)
        assert (status, b"retry-after" in headers, shop.orders) == (503, True, [])

    async def after(app, shop):
        assert (await http.post(app))[2] == b"order 1", "the request was executed, so its sender must get the response"

    http.served(before, store=SilentStore(after=0))
    http.served(after, store=SilentStore(after=1))


def test_middleware_refuses_a_blocking_client(http):
    with leasehold.Client("memory://") as client, pytest.raises(ConfigError, match="AsyncClient"):
        IdempotencyKey(http.Shop(), client)


def test_too_large_response_headers_are_sent_once_and_not_replayed(http):
    async def verbose(scope, receive, send):
        calls.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x", b"y" * 20_000)]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def work(app, _):
        assert (await http.post(app))[2] == b"ok", "the request was executed, so its sender must get the response"
        assert (await http.post(app))[0] == 409
        assert calls == [1]

    calls: list[int] = []
    http.served(work, verbose, max_answer=1)


def test_application_without_response_is_runtime_error(http):
    async def mute(scope, receive, send):
        pass

    async def work(app, _):
        with pytest.raises(RuntimeError, match="without a response"):
            await http.post(app)

    http.served(work, mute)


def test_unusable_store_is_raised_as_config_error(http):
    async def work(app, _):
        with pytest.raises(ConfigError):
            await http.post(app)

    http.served(work, store="etcd://nowhere")
