"""Requests of the fences that use HTTP: redirects and caches."""

from __future__ import annotations

import pytest

from leasehold import ConfigError, Unavailable, fences
from tests.support.fixed_response import serve_response


def test_redirect_is_not_followed_with_credentials():
    with (
        serve_response(body=b"7", headers={"ETag": '"1"'}) as target,
        serve_response(status=302, headers={"Location": target.url}) as redirecting,
    ):
        secret = {"Authorization": "Basic c2VjcmV0"}
        for call in (
            lambda: fences.HTTPFence(redirecting.url, headers=secret).read(5),
            lambda: fences.ObjectFence(fences.HTTPObjects(redirecting.url, headers=secret), "a").read(5),
            lambda: fences.EtcdFence(redirecting.url, "a", headers=secret).read(5),
        ):
            with pytest.raises((OSError, ConfigError, Unavailable)) as refused:
                call()
            assert "c2VjcmV0" not in str(refused.value)
        assert target.asked == []


def test_http_reads_ask_caches_not_to_answer():
    """A cached response raises no token."""
    with serve_response(body=b"7", headers={"ETag": '"1"'}) as server:
        fences.HTTPFence(server.url).read(5)
        fences.HTTPObjects(server.url).get("a")
        assert [headers.get("Cache-Control") for _, _, headers in server.asked] == ["no-cache", "no-cache"]
