"""Requests by urllib for the fences that use HTTP: redirects are not followed, and caches are bypassed.

A redirect would send the caller's credentials to another host. A cache would answer a read without raising the highest
token. By itself urllib waits as long as a server sends one byte after the other, and looks up names without a deadline.
"""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any, Final, cast

from leasehold.errors import ConfigError
from leasehold.runtime.net.http_client import DeadlineConnection

NO_CACHE: Final = {"Cache-Control": "no-cache"}
MIN_RATE: Final = 1000.0  # bytes per second, of bodies of any size


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        """Return None, so that the redirect response is raised as an HTTPError."""


class _Http(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, tls: ssl.SSLContext | None, min_rate: float) -> None:
        super().__init__()
        self._tls, self._min_rate = tls, min_rate

    def _connection(self, host: str, timeout: float) -> DeadlineConnection:
        return DeadlineConnection(host, timeout=timeout, min_rate=self._min_rate)

    def _tls_connection(self, host: str, timeout: float) -> DeadlineConnection:
        tls = self._tls or ssl.create_default_context()
        return DeadlineConnection(host, timeout=timeout, tls=tls, min_rate=self._min_rate)

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._connection, request)  # type: ignore[arg-type]

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._tls_connection, request)  # type: ignore[arg-type]


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
    min_rate: float = float("inf"),
) -> HTTPResponse:
    """The response. Raises `urllib.error.HTTPError` if it is not a success.

    The connection must be made within the timeout, the request sent within another, and the response complete within a
    third. A body may take longer if it comes with `min_rate` bytes per second.
    """
    request = urllib.request.Request(url, body, dict(headers), method=method)  # noqa: S310  # the scheme was checked
    opener = urllib.request.build_opener(_NoRedirect, _Http(tls, min_rate))
    return cast(HTTPResponse, opener.open(request, timeout=timeout))
