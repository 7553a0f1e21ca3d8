"""`Idempotency-Key`: which responses are stored and repeated. The middleware is called directly."""

from leasehold import Unavailable
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


def test_requests_without_key_other_methods_and_lifespan_pass_through(http):
    async def work(app, shop):
        for _ in range(2):
            assert b"idempotency-replayed" not in (await http.post(app, key=None))[1]
            await http.post(app, method="GET")
        await app({"type": "lifespan"}, None, None)
        assert len(shop.orders) == 4

    http.served(work)


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
            raise Unavailable("no answer")
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


def test_large_answer_is_the_only_one_if_its_record_cannot_be_written(http, caplog):
    async def work(app, shop):
        assert (await http.post(app))[::2] == (201, b"x" * 200)

    http.served(work, http.Shop(body=b"x" * 200), store=SilentStore(after=1), max_answer=100)
    assert "could not record" in caplog.text


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
