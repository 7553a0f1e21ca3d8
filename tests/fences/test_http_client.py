"""Clients of a fenced service: hooks for HTTP libraries, and refusals as `StaleToken`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import httpx
import pytest
import requests

from leasehold import Client, ConfigError, StaleToken, fences
from leasehold.fences import TokenInfo
from leasehold.http.headers import parse_stale_problem

SIDES = ("http-wsgi", "http-asgi")


each_side = pytest.mark.parametrize("kind", SIDES)


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


@pytest.mark.parametrize(
    "more",
    [
        *({"token": 1e999}, {"token": "x"}, {"token": True}, {"token": 1.0}, {"token": 0}, {"token": 2}),
        *({"highest": None}, {"highest": 2**53}, {"slot": []}, {"slot": 1e999}, {"slot": -1}, {"resource": None}),
    ],
)
def test_stale_problem_with_invalid_fields_is_not_parsed(more):
    document = {"type": "urn:leasehold:stale-token", "resource": "a", "token": 1, "highest": 2}
    assert isinstance(parse_stale_problem(document), StaleToken)
    assert parse_stale_problem(json.loads(json.dumps({**document, **more}))) is None


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
