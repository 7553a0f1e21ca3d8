"""Requests by urllib for the fences that use HTTP: redirects are not followed, and caches are bypassed.

A redirect would send the caller's credentials to another host. A cache would answer a read without raising the highest
token.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any, Final, cast

from leasehold.errors import ConfigError

NO_CACHE: Final = {"Cache-Control": "no-cache"}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Return None, so that the redirect response is raised as an HTTPError."""


def check_url(url: str, what: str) -> str:
    """The URL, if its scheme is http or https. `what` begins the error message."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{what} must begin with http:// or https://")
    return url


def send_request(
    url: str,
    method: str,
    body: bytes | None,
    headers: Mapping[str, str],
    *,
    timeout: float,
    tls: ssl.SSLContext | None = None,
) -> HTTPResponse:
    """The response. Raises `urllib.error.HTTPError` if it is not a success."""
    request = urllib.request.Request(url, body, dict(headers), method=method)  # noqa: S310  # the scheme was checked
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=tls))
    return cast(HTTPResponse, opener.open(request, timeout=timeout))
