"""GET requests to a lock server, for commands that show what only a server knows: history, statistics."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final
from urllib.parse import urlencode

from leasehold import __version__
from leasehold.config import ClientOptions
from leasehold.core.texts import server_text
from leasehold.engines.remote import wire
from leasehold.engines.remote.url import parse_url, read_api_key
from leasehold.errors import ConfigError, LeaseholdError, Unavailable
from leasehold.runtime.net.http_client import DeadlineConnection

_TIMEOUT: Final = 5.0
_MAX_BODY: Final = 4 * 1024 * 1024
_MAX_CONTAINERS: Final = 100_000  # lists and objects of an answer: three bytes of text can take eighty of memory
_MAX_VALUES: Final = 500_000


def is_server(url: str | None) -> bool:
    return ClientOptions(url).engine_config().scheme in ("http", "https")


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Around code that takes an answer of the server apart: Unavailable if the answer has another form."""
    try:
        yield
    except wire.Malformed as error:
        raise _another_form(path) from error
    except LeaseholdError:
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise _another_form(path) from error


def _another_form(path: str) -> Unavailable:
    text = f"the server's answer to {path} has another form than this version of Leasehold knows: check the URL, and"
    return Unavailable(f"{text} whether `leasehold --version` is older than that of the server")


class ServerApi:
    """The servers of a URL. A request goes to the first that answers, and the next one to the same."""

    def __init__(self, url: str | None) -> None:
        self._config = ClientOptions(url).engine_config()
        self._url = parse_url(self._config)
        self._key = read_api_key(self._url)
        self._addresses = list(self._url.addresses)
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **arguments: str | int) -> dict[str, Any]:
        """The JSON object at this path. Raises Unavailable if no server answers, or what a server's problem means."""
        query = urlencode({name: value for name, value in arguments.items() if value != ""})
        target = f"{self._url.base}{path}" + (f"?{query}" if query else "")
        reason = ""
        for _ in range(len(self._addresses) + 1):  # an idle connection may be closed: its server gets a second try
            address = self._addresses[0]
            try:
                status, body = self._ask(address.host, address.port, target)
            except (OSError, http.client.HTTPException) as error:
                text = getattr(error, "strerror", None) or error
                reason = reason or f"{address}: {server_text(text) or type(error).__name__}"
                self.close()
                self._addresses.append(self._addresses.pop(0))
            else:
                return self._read(path, status, body)
        raise Unavailable(f"no Leasehold server answers: {reason}", engine=self._config.scheme)

    def _ask(self, host: str, port: int, target: str) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = DeadlineConnection(host, port, timeout=_TIMEOUT, tls=self._url.tls)
        headers = {"Accept": "application/json", "User-Agent": f"leasehold/{__version__}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        self._connection.request("GET", target, headers=headers)
        response = self._connection.getresponse()
        return response.status, response.read(_MAX_BODY)

    def _read(self, path: str, status: int, body: bytes) -> dict[str, Any]:
        found = None
        if body.count(b"[") + body.count(b"{") <= _MAX_CONTAINERS and body.count(b",") <= _MAX_VALUES:
            with suppress(ValueError, RecursionError):
                found = json.loads(body, parse_float=_finite, parse_constant=_finite)
        if not isinstance(found, dict):
            text = f"the server answered {path} with {status}, and not as a Leasehold server does"
            raise Unavailable(text, engine=self._config.scheme)
        if status == 200:
            return found
        if status == 404:
            raise ConfigError(f"this server has no {path}: it runs an older version of Leasehold")
        raise wire.error_from_problem(found, self._config.scheme)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _finite(text: str) -> float:
    """A number that can be computed with, and written as JSON again: neither NaN, nor Infinity, nor 1e400."""
    if not math.isfinite(number := float(text)):
        raise ValueError("not a number of JSON")
    return number
