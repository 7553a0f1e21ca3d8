"""`Idempotency-Key`: options that cannot work are refused."""

import pytest

import leasehold
from leasehold import ConfigError
from leasehold.http.idempotency import IdempotencyKey
from tests.support import probe_http


@pytest.mark.parametrize(
    "wrong",
    [
        {"methods": "POST"},
        {"methods": ()},
        {"max_body": -1},
        {"max_body": 1.5},
        {"max_answer": None},
        {"max_answer": True},
        {"keep": "soon"},
        {"retry_after": "3 s"},
        {"who": "user"},
        {"app": None},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_invalid_option_is_refused_when_middleware_is_built(http, wrong):
    async def work(app, shop):
        with pytest.raises(ConfigError):
            IdempotencyKey(**{"app": shop, "client": probe_http.client_of(app), **wrong})

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


def test_middleware_refuses_a_blocking_client(http):
    with leasehold.Client("memory://") as client, pytest.raises(ConfigError, match="AsyncClient"):
        IdempotencyKey(http.Shop(), client)


def test_engine_without_records_as_store_is_config_error(http):
    async def work(app, _):
        with pytest.raises(ConfigError):
            await http.post(app)

    http.served(work, store="redlock://a,b,c")
