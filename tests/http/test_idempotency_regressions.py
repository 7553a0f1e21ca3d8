"""Attempts to make `Idempotency-Key` answer wrongly or not at all. The bugs they found are fixed."""

import asyncio

import pytest

import leasehold
from leasehold import ConfigError, LeaseLost, Mismatch, NotAcquired, RunFailed, StaleToken, Unavailable
from leasehold.http.idempotency import IdempotencyKey


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("the application's own"),
        NotAcquired("stock"),
        LeaseLost("stock"),
        Mismatch("stock", wanted="lock", found="semaphore of 3"),
        RunFailed("mail", error="no"),
        StaleToken("ledger", token=1, highest=2),
        Unavailable("the application's engine is silent"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_leasehold_error_raised_by_application_is_passed_through(http, error):
    """An application may use locks itself: an error that it raises is a crash, not an answer about the key."""

    async def app(scope, receive, send):
        raise error

    async def work(app, _):
        for _ in range(2):  # the request may be sent again
            with pytest.raises(type(error)) as raised:
                await http.post(app)
            assert raised.value is error

    http.served(work, app)


def test_response_extensions_are_hidden_from_application(http):
    """Servers offer to send files themselves. Such a response could neither be held back nor stored."""

    async def app(scope, receive, send):
        offered.append(sorted(scope["extensions"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if "http.response.pathsend" in scope["extensions"]:
            await send({"type": "http.response.pathsend", "path": "/etc/hostname"})
        else:
            await send({"type": "http.response.body", "body": b"the file"})

    async def work(app, _):
        extensions = {"tls": {}, "http.response.pathsend": {}, "http.response.trailers": {}}
        for _ in range(2):
            status, _, body = await http.post(app, scope={"extensions": extensions})
            assert (status, body) == (200, b"the file")

    offered: list[list[str]] = []
    http.served(work, app)
    assert offered == [["tls"]]


def test_same_key_with_other_host_is_422(http):
    """One application may serve several shops: a key of one must never get the response of another."""

    async def work(app, shop):
        assert (await http.post(app, more=[(b"Host", b"one.example")]))[0] == 201
        assert (await http.post(app, more=[(b"host", b"two.example")]))[0] == 422
        assert (await http.post(app, more=[(b"host", b"one.example")]))[0] == 201
        assert len(shop.orders) == 1

    http.served(work)


def test_same_body_with_other_content_type_is_422(http):
    async def work(app, shop):
        assert (await http.post(app, b"1", more=[(b"content-type", b"application/json")]))[0] == 201
        assert (await http.post(app, b"1", more=[(b"content-type", b"text/csv")]))[0] == 422
        assert len(shop.orders) == 1

    http.served(work)


@pytest.mark.parametrize(
    "wrong",
    [
        {"methods": "POST"},
        {"methods": ()},
        {"max_body": -1},
        {"max_body": 1.5},
        {"max_answer": None},
        {"max_answer": True},
        {"who": "user"},
        {"app": None},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_invalid_option_is_refused_when_middleware_is_built(http, wrong):
    async def work(app, shop):
        with pytest.raises(ConfigError):
            IdempotencyKey(**{"app": shop, "client": app._client, **wrong})

    http.served(work)


def test_methods_option_accepts_lower_case(http):
    async def work(app, shop):
        for _ in range(2):
            await http.post(app, method="PUT")
        assert len(shop.orders) == 1

    http.served(work, methods=["put"])


@pytest.mark.parametrize("who", [None, 7, b"ann"])
def test_who_that_returns_no_string_is_config_error(http, who):
    """A caller without an identity has no string. A shared default would mix the keys of different callers."""

    async def work(app, shop):
        with pytest.raises(ConfigError, match="who"):
            await http.post(app)
        assert shop.orders == []

    http.served(work, who=lambda scope: who)


def test_body_split_into_other_chunks_is_the_same_request(http):
    async def work(app, shop):
        assert (await http.post(app, chunks=[b"a", b"", b"bc"]))[0] == 201
        assert (await http.post(app, b"abc"))[1].get(b"idempotency-replayed") == b"true"
        assert (await http.post(app, chunks=[b"ab", None])) is None, "the sender hung up, so there is no response"
        assert shop.orders == [b"abc"]

    http.served(work)


def test_similar_keys_are_different_and_two_key_headers_are_400(http):
    async def work(app, shop):
        for key in (b"k", b"K", b'"k"', b"k ", b"k,k", b"\xff", "k\u0301".encode()):
            assert (await http.post(app, key=key))[0] == 201
        assert len(shop.orders) == 7
        for more in ([(b"idempotency-key", b"k")], [(b"IDEMPOTENCY-KEY", b"other")]):
            assert (await http.post(app, key=b"k", more=more))[0] == 400, "two key headers are ambiguous"

    http.served(work)


def test_one_of_fifty_concurrent_tasks_is_executed(http):
    async def work(app, shop):
        requests = [asyncio.create_task(http.post(app)) for _ in range(50)]
        while not shop.orders:
            await asyncio.sleep(0)
        shop.gate.set()
        answers = [status for status, _, _ in await asyncio.gather(*requests)]
        assert len(shop.orders) == 1
        assert set(answers) <= {201, 409}
        assert answers.count(201) >= 1
        assert (await http.post(app))[0] == 201

    async def main():
        gate = asyncio.Event()
        async with leasehold.AsyncClient("memory://") as client:
            shop = http.Shop(gate=gate)
            await work(IdempotencyKey(shop, client), shop)

    asyncio.run(main())


def test_first_requests_of_new_client_may_be_concurrent(http, tmp_path):
    """On SQLite, whose calls run on a worker thread that the first lock of the client once replaced."""

    async def main():
        async with leasehold.AsyncClient(f"sqlite://{tmp_path}/locks.db?durable=no", call_timeout=30) as client:
            app = IdempotencyKey(http.Shop(), client)
            answers = await asyncio.gather(*(http.post(app, key=b"k%d" % number) for number in range(20)))
            assert [status for status, _, _ in answers] == [201] * 20

    asyncio.run(main())


def test_cancelled_request_frees_its_key(http):
    """Some servers cancel a request when its sender hangs up."""

    async def main():
        gate = asyncio.Event()
        async with leasehold.AsyncClient("memory://") as client:
            shop = http.Shop(gate=gate)
            app = IdempotencyKey(shop, client)
            request = asyncio.create_task(http.post(app))
            while not shop.orders:
                await asyncio.sleep(0)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            gate.set()
            assert (await http.post(app))[0] == 201
            assert len(shop.orders) == 2
            assert await client.inspect() == []

    asyncio.run(main())
