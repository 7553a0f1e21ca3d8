"""Requests by urllib, for the fences that speak HTTP: no redirect is followed, and no copy on the way will do.

A redirect would take the caller's credentials along to wherever it points; a cache would answer a read that raises no
mark.
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
        """None: the redirect itself is the answer, an HTTPError."""


def check_url(url: str, what: str) -> str:
    """The URL, if `what` can be asked there."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{what} reached by http:// or https://")
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
    """The answer; raises `urllib.error.HTTPError` for one that is no success."""
    request = urllib.request.Request(url, body, dict(headers), method=method)  # noqa: S310  # the scheme was checked
    opener = urllib.request.build_opener(_NoRedirect, urllib.request.HTTPSHandler(context=tls))
    return cast(HTTPResponse, opener.open(request, timeout=timeout))
