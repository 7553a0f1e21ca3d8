"""The service side: WSGI and ASGI middleware that checks `Lease-Token` before the application handles a request.

The check and the handling are one step: while a request is in progress, no other token is admitted for its resource.
This covers one process (`MemoryTokens`) or all processes of one machine (`FileTokens`). A service that writes to a
database fences the write there, in the same transaction, with the `TokenInfo` that the middleware puts in the environ
or scope.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeAlias

from leasehold import files
from leasehold.config import Duration, check_seconds
from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import NO_TOKEN, TokenInfo, check_token, report_refusal
from leasehold.fences.token_file import TokenFile, unlock
from leasehold.http import headers
from leasehold.http.responses import (
    Document,
    Receive,
    Scope,
    Send,
    header_values,
    problem,
    problem_response,
    send_problem,
)

LeaveCallback: TypeAlias = Callable[[], None]
Environ: TypeAlias = dict[str, Any]

TOKEN_INFO_KEY: Final = "leasehold.token_info"  # noqa: S105  # the key of the request's TokenInfo in environ and scope
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110: they change nothing
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05


def normalize_path(path: str) -> str:
    """One resource name for all spellings of a path: in many applications `//a`, `/a/`, `/./a` and `/b/../a` reach the
    same resource as `/a`. If two resources share a highest token, too much is refused; if one resource had two, stale
    holders would pass."""
    return posixpath.normpath("/" + path.strip("/"))


class HighestTokens(Protocol):
    """Keeps the highest token of each resource."""

    def enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | None:
        """Compare, raise the highest token, and admit no other token until the returned callback is called. None if
        another request is in progress: never waits. Raises `StaleToken`."""


class MemoryTokens:
    """Keeps highest tokens in memory, for a service of one process. A restart forgets them."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._highest_tokens: dict[tuple[str, int | None], int] = {}
        self._in_flight: dict[tuple[str, int | None], list[TokenInfo]] = {}

    def enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | None:
        """Admit one token at a time for each resource, with any number of requests, or any number of shared tokens."""
        key = resource, token_info.slot
        with self._mutex:
            in_flight = self._in_flight.get(key, [])
            # Raise it even if this request must wait, or new requests of the older token could delay it for ever.
            self._highest_tokens[key] = check_token(
                token_info, token_info, self._highest_tokens.get(key, NO_TOKEN), resource, None
            )
            if any(other != token_info and not (other.shared and token_info.shared) for other in in_flight):
                return None
            self._in_flight.setdefault(key, []).append(token_info)
        return lambda: self._leave(key, token_info)

    def _leave(self, key: tuple[str, int | None], token_info: TokenInfo) -> None:
        with self._mutex:
            self._in_flight[key].remove(token_info)
            if not self._in_flight[key]:
                del self._in_flight[key]


class FileTokens:
    """Keeps highest tokens in a folder, shared by all workers of one machine, across restarts. Admits one request at a
    time for each resource."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = files.resolve(os.fspath(folder))
        files.make_folders(self._folder)
        files.open_folder(self._folder, private=True).close()  # refuses one that another user made or could replace

    def enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | None:
        """Admit one request at a time for each resource."""
        # A resource name is any text; its hash is a valid file name everywhere.
        token_file = TokenFile(
            os.path.join(self._folder, hashlib.sha256(resource.encode("utf-8", "surrogatepass")).hexdigest())
        )
        if (fd := token_file.try_lock()) is None:
            return None
        try:
            token_file.check_and_raise(fd, token_info, token_info, resource, None)
        except BaseException:
            unlock(fd)
            raise
        return lambda: unlock(fd)


class _BaseFenceMiddleware:
    """The decisions that the WSGI and ASGI middleware share."""

    def __init__(
        self,
        app: Any,
        tokens: HighestTokens | None = None,
        *,
        resource: Callable[[str], str] | None = None,
        required: Collection[str] | None = None,
        wait: Duration = 30.0,
    ) -> None:
        """`tokens`: where the highest tokens are kept; by default in memory. `resource`: function from the path of the
        request to the fenced resource; by default the normalized path. `required`: methods that get 428 without a
        token; by default all but GET, HEAD, OPTIONS and TRACE. Other methods are checked if they have a token. `wait`:
        seconds to wait for a request with another token; then 503."""
        self._app, self._tokens = app, MemoryTokens() if tokens is None else tokens
        self._resource, self._wait = resource or normalize_path, check_seconds("wait", wait)
        self._required = None if required is None else frozenset(map(str.upper, required))

    def _check_headers(
        self, method: str, values: tuple[str | None, str | None, str | None]
    ) -> TokenInfo | Document | None:
        """The token; a problem document; or None if there is no token and none is needed."""
        try:
            token_info = headers.parse_token_headers(*values)
        except ConfigError as bad:
            return problem(400, str(bad), title="Invalid lease token")
        method = method.upper()  # like frameworks, which handle "put" as PUT
        if token_info is None and (method not in SAFE_METHODS if self._required is None else method in self._required):
            detail = f"{method} needs the header {headers.TOKEN_HEADER} with the token of a lease"
            return problem(428, detail, title="Lease token required")
        if token_info is not None and token_info.shared and method not in SAFE_METHODS:
            return problem(400, "acquire the write side of the rwlock", title="A shared lease cannot write")
        return token_info

    def _try_enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | Document | None:
        """A callback if admitted, a problem document if refused, None if the request must wait."""
        try:
            return self._tokens.enter(resource, token_info)
        except StaleToken as stale:
            # Here, not where the tokens are kept: no other request may wait for the hook.
            report_refusal(stale, "http")
            return headers.stale_problem(stale)

    def _busy_problem(self) -> Document:
        detail = f"a request of another lease has been in progress for {self._wait:g} s"
        return problem(503, detail, title="Resource busy")


class WSGIFence(_BaseFenceMiddleware):
    """WSGI middleware: `app = WSGIFence(app)`. The app finds the `TokenInfo` in `environ["leasehold.token_info"]`."""

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Handle a request, unless its token is stale."""
        names = (headers.TOKEN_HEADER, headers.SLOT_HEADER, headers.SHARED_HEADER)
        values = [environ.get(f"HTTP_{name.upper().replace('-', '_')}") for name in names]
        method = environ["REQUEST_METHOD"]
        token_info = self._check_headers(method, (values[0], values[1], values[2]))
        if token_info is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        if not isinstance(token_info, TokenInfo):
            return _respond(token_info, method, start_response)
        entered = self._enter(self._resource(environ.get("PATH_INFO", "")), token_info)
        if isinstance(entered, dict):
            return _respond(entered, method, start_response)
        environ[TOKEN_INFO_KEY] = token_info
        try:
            return _ResponseBody(self._app(environ, start_response), entered)
        except BaseException:
            entered()
            raise

    def _enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | Document:
        end, pause = time.monotonic() + self._wait, _MIN_PAUSE
        while (entered := self._try_enter(resource, token_info)) is None:
            if time.monotonic() >= end:
                return self._busy_problem()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return entered


class _ResponseBody:
    """A response body that ends the request when it is closed: an app may still work while the body is sent."""

    def __init__(self, body: Iterable[bytes], leave: LeaveCallback) -> None:
        self._body, self._leave = body, leave

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        leave, self._leave = self._leave, lambda: None
        try:
            if hasattr(self._body, "close"):
                self._body.close()
        finally:
            leave()


def _respond(document: Document, method: str, start_response: Callable[..., Any]) -> Iterable[bytes]:
    response_headers, body = problem_response(document, method)
    status = HTTPStatus(document["status"])
    start_response(f"{status.value} {status.phrase}", [*response_headers, *headers.stale_headers(document)])
    return [body]


class ASGIFence(_BaseFenceMiddleware):
    """ASGI middleware: `app = ASGIFence(app)`. The app finds the `TokenInfo` in `scope["leasehold.token_info"]`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, unless its token is stale. Scopes other than HTTP pass through unchecked."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        values = [
            _header_value(scope, name) for name in (headers.TOKEN_HEADER, headers.SLOT_HEADER, headers.SHARED_HEADER)
        ]
        token_info = self._check_headers(scope["method"], (values[0], values[1], values[2]))
        if token_info is None:
            await self._app(scope, receive, send)
            return
        entered = (
            await self._enter(self._resource(scope["path"]), token_info)
            if isinstance(token_info, TokenInfo)
            else token_info
        )
        if isinstance(entered, dict):
            await send_problem(send, entered, headers.stale_headers(entered), scope["method"])
            return
        try:
            await self._app({**scope, TOKEN_INFO_KEY: token_info}, receive, send)
        finally:
            entered()

    async def _enter(self, resource: str, token_info: TokenInfo) -> LeaveCallback | Document:
        end, pause = time.monotonic() + self._wait, _MIN_PAUSE
        while (entered := await self._try_enter_off_loop(resource, token_info)) is None:
            if time.monotonic() >= end:
                return self._busy_problem()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return entered

    async def _try_enter_off_loop(self, resource: str, token_info: TokenInfo) -> LeaveCallback | Document | None:
        if isinstance(self._tokens, MemoryTokens):
            return self._try_enter(resource, token_info)
        # In a thread, because the disk may be slow.
        entering = asyncio.ensure_future(asyncio.to_thread(self._try_enter, resource, token_info))
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:  # the thread may still enter, and must leave then
            entering.add_done_callback(_leave_when_entered)
            raise


def _leave_when_entered(entering: asyncio.Future[LeaveCallback | Document | None]) -> None:
    if not entering.cancelled() and entering.exception() is None and callable(entered := entering.result()):
        entered()


def _header_value(scope: Scope, name: str) -> str | None:
    """A header's value. Repeated values are joined, as in WSGI, so that two tokens are refused as invalid. Some servers
    leave the white space around a value, which does not belong to it (RFC 9110, 5.5)."""
    values = [value.strip(b" \t").decode("latin-1") for value in header_values(scope, name.lower().encode())]
    return ", ".join(values) if values else None
