"""The client side of a fenced HTTP service: sends the token, and raises `StaleToken` if the service refuses it."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Mapping
from typing import Any, TypeVar

from leasehold.config import Duration, check_seconds
from leasehold.fences.rules import LeaseLike, to_bytes, token_for_write
from leasehold.fences.urllib_client import MIN_RATE, NO_CACHE, check_url, send_request
from leasehold.http.headers import headers, parse_stale_headers, parse_stale_problem
from leasehold.http.responses import PROBLEM_JSON

__all__ = ["HTTPFence", "LeaseAuth", "headers", "raise_for_stale"]

R = TypeVar("R")


class LeaseAuth:
    """An auth hook for requests and httpx, which call it for each request: `session.auth = LeaseAuth(lease)`."""

    def __init__(self, lease: LeaseLike) -> None:
        headers(lease)  # refuse an invalid token here, not at the first request
        self._lease = lease

    def __call__(self, request: R) -> R:
        """Add the headers of the lease to the request."""
        request.headers.update(headers(self._lease))  # type: ignore[attr-defined]
        return request


def raise_for_stale(response: Any, lease: LeaseLike | None = None) -> None:
    """Raise `StaleToken` if a service refused the token; call it where you call `raise_for_status()`.

    `response`: of requests, httpx or urllib (including an HTTPError). If you pass the lease, its client is notified.
    """
    status = getattr(response, "status_code", None) or getattr(response, "status", None)
    if status != 409:
        return
    error = parse_stale_headers(response.headers) or parse_stale_problem(_problem_document(response))
    if error is not None:
        if (notify := getattr(lease, "_report_stale_token", None)) is not None:
            notify(error, "http")
        raise error


def _problem_document(response: Any) -> object:
    """The problem document in the body; None if there is none."""
    if not str(response.headers.get("Content-Type", "")).startswith(PROBLEM_JSON):
        return None
    try:
        return response.json() if hasattr(response, "json") else json.loads(response.read())
    except (ValueError, RecursionError):
        return None


class HTTPFence:
    """One resource of a fenced service, over urllib: `write` is PUT, `read` is GET, `call` is any method."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None, timeout: Duration = 30.0) -> None:
        self.resource = self._url = check_url(url, "the URL of a service")
        self._headers = dict(headers or {})
        self._timeout = check_seconds("timeout", timeout, allow_zero=False)

    def claim(self, lease: LeaseLike) -> None:
        """Only raise the highest token, by HEAD. All methods raise `StaleToken`, or `urllib.error.HTTPError`."""
        token_for_write(lease)
        self.call(lease, "HEAD")

    def read(self, lease: LeaseLike) -> bytes:
        """GET, to base a write on. Older holders are refused from now on."""
        return self.call(lease, "GET")

    def write(self, lease: LeaseLike, data: bytes | str) -> bytes:
        """PUT; returns the response body. Text is sent as UTF-8."""
        token_for_write(lease)
        return self.call(lease, "PUT", to_bytes(data))

    def call(self, lease: LeaseLike, method: str, data: bytes | None = None) -> bytes:
        """Any method, with the token; returns the response body."""
        defaults = NO_CACHE if data is None else {"Content-Type": "application/octet-stream"}
        request_headers = {**defaults, **self._headers, **headers(lease)}
        try:
            with send_request(
                self._url, method, data, request_headers, timeout=self._timeout, min_rate=MIN_RATE
            ) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            with error:
                raise_for_stale(error, lease)
                raise

    def __repr__(self) -> str:
        return f"<HTTPFence {self.resource}>"
