"""`Idempotency-Key`: which requests and keys are the same."""

import json

import pytest


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


def test_sender_and_key_that_make_up_the_same_text_are_apart(http):
    """Or the sender 1 could get an answer of the sender 12."""

    async def work(app, shop):
        for who, key in ((b"1", b"2k"), (b"12", b"k")):
            assert (await http.post(app, key=key, more=[(b"cookie", who)]))[0] == 201
        assert len(shop.orders) == 2

    http.served(work, who=lambda scope: dict(scope["headers"])[b"cookie"].decode())


@pytest.mark.parametrize("key", [None, b"", b"k" * 256])
def test_missing_or_invalid_key_is_400(key, http):
    async def work(app, shop):
        assert (await http.post(app, key=key))[0] == 400
        assert (await http.post(app, more=[(b"idempotency-key", b"second")]))[0] == 400
        assert shop.orders == []

    http.served(work, required=True)


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
