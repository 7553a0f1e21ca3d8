"""The service's side: middleware that checks `Lease-Token` before a request is served, for WSGI and ASGI.

Checking and serving are one step: while a request is inside, no other token is let in for its resource. This covers
what one process does (`Marks`), or all processes on this machine (`FileMarks`). A service whose effect is in a database
fences it there, in the same transaction, with the pass that the middleware hands on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeAlias

from leasehold.errors import ConfigError, StaleToken
from leasehold.fences.rules import NO_TOKEN, Pass, check_token
from leasehold.fences.token_file import TokenFile, unlock
from leasehold.http import headers

LeaveCallback: TypeAlias = Callable[[], None]
Document: TypeAlias = dict[str, Any]
Environ: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PASS_KEY: Final = "leasehold.pass"  # noqa: S105  # the key in environ and scope under which the app finds what was shown
SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110: they only look
_MIN_PAUSE, _MAX_PAUSE = 0.001, 0.05


def normalize_path(path: str) -> str:
    """A path as one resource, however it is written: `//a`, `/a/`, `/./a` and `/b/../a` reach what `/a` reaches in many
    an app. To share a mark too often refuses too much; too seldom, and a holder of the past comes in."""
    return posixpath.normpath("/" + path.strip("/"))


class TokenStore(Protocol):
    """Where marks are kept."""

    def enter(self, resource: str, token_info: Pass) -> LeaveCallback | None:
        """Compare, raise the mark, and keep other tokens out until `leave()`. None: one is inside. Never waits.
        Raises `StaleToken`."""


class Marks:
    """Marks in the memory of this process: for a service that is one process, and may forget them when it restarts."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._highest_tokens: dict[tuple[str, int | None], int] = {}
        self._in_flight: dict[tuple[str, int | None], list[Pass]] = {}

    def enter(self, resource: str, token_info: Pass) -> LeaveCallback | None:
        """One token at a time for each resource, with any number of requests; readers beside each other."""
        key = resource, token_info.slot
        with self._mutex:
            in_flight = self._in_flight.get(key, [])
            # Also for one that must wait: what was shown counts, or those inside could go on coming for ever.
            self._highest_tokens[key] = check_token(
                token_info, token_info, self._highest_tokens.get(key, NO_TOKEN), resource
            )
            if any(other != token_info and not (other.shared and token_info.shared) for other in in_flight):
                return None
            self._in_flight.setdefault(key, []).append(token_info)
        return lambda: self._leave(key, token_info)

    def _leave(self, key: tuple[str, int | None], token_info: Pass) -> None:
        with self._mutex:
            self._in_flight[key].remove(token_info)
            if not self._in_flight[key]:
                del self._in_flight[key]


class FileMarks:
    """Marks in a folder, shared by all workers on this machine, and kept over restarts. One request at a time for
    each resource."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(folder)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def enter(self, resource: str, token_info: Pass) -> LeaveCallback | None:
        """One request at a time for each resource."""
        # A resource is any text; a hash of it is a safe name of any file system.
        token_file = TokenFile(
            os.path.join(self._folder, hashlib.sha256(resource.encode("utf-8", "surrogatepass")).hexdigest())
        )
        if (fd := token_file.try_lock()) is None:
            return None
        try:
            token_file.check_and_raise(fd, token_info, token_info, resource)
        except BaseException:
            unlock(fd)
            raise
        return lambda: unlock(fd)


class _BaseFenceMiddleware:
    """What both middlewares decide: the same answers, whoever waits and sends."""

    def __init__(
        self,
        app: Any,
        marks: TokenStore | None = None,
        *,
        resource: Callable[[str], str] | None = None,
        required: Collection[str] | None = None,
        wait: float = 30.0,
    ) -> None:
        """`resource`: from the request's path, what is fenced; None: the path, one for all its spellings. `required`:
        methods refused without a token, with 428; None: all that do more than look. Of others a token is checked if
        there is one. `wait`: how long another token may be inside; then 503."""
        self._app, self._token_store = app, Marks() if marks is None else marks
        self._resource, self._wait = resource or normalize_path, wait
        self._required = None if required is None else frozenset(map(str.upper, required))

    def _check_headers(self, method: str, values: tuple[str | None, str | None, str | None]) -> Pass | Document | None:
        """The pass; or a problem; or None: neither is there nor needed."""
        try:
            token_info = headers.parse_token_headers(*values)
        except ConfigError as bad:
            return headers.problem(400, "Not a lease token", detail=str(bad))
        method = method.upper()  # as frameworks do: "put" is served as PUT
        if token_info is None and (method not in SAFE_METHODS if self._required is None else method in self._required):
            detail = f"{method} needs the header {headers.TOKEN_HEADER}: the token of the lease under which it is made"
            return headers.problem(428, "Lease token required", detail=detail)
        if token_info is not None and token_info.shared and method not in SAFE_METHODS:
            return headers.problem(400, "A shared lease cannot write", detail="it takes the write side of the rwlock")
        return token_info

    def _try_enter(self, resource: str, token_info: Pass) -> LeaveCallback | Document | None:
        """Inside, refused, or not yet."""
        try:
            return self._token_store.enter(resource, token_info)
        except StaleToken as stale:
            return headers.stale_problem(stale)

    def _busy_problem(self) -> Document:
        return headers.problem(503, "Resource busy", detail=f"another lease's request is inside for {self._wait:g} s")


class WSGIFence(_BaseFenceMiddleware):
    """WSGI middleware: `app = WSGIFence(app)`. The app finds the pass in `environ["leasehold.pass"]`."""

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve a request whose token is not stale."""
        names = (headers.TOKEN_HEADER, headers.SLOT_HEADER, headers.SHARED_HEADER)
        values = [environ.get(f"HTTP_{name.upper().replace('-', '_')}") for name in names]
        token_info = self._check_headers(environ["REQUEST_METHOD"], (values[0], values[1], values[2]))
        if token_info is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        if not isinstance(token_info, Pass):
            return _respond(token_info, start_response)
        entered = self._enter(self._resource(environ.get("PATH_INFO", "")), token_info)
        if isinstance(entered, dict):
            return _respond(entered, start_response)
        environ[PASS_KEY] = token_info
        try:
            return _ResponseBody(self._app(environ, start_response), entered)
        except BaseException:
            entered()
            raise

    def _enter(self, resource: str, token_info: Pass) -> LeaveCallback | Document:
        end, pause = time.monotonic() + self._wait, _MIN_PAUSE
        while (entered := self._try_enter(resource, token_info)) is None:
            if time.monotonic() >= end:
                return self._busy_problem()
            time.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return entered


class _ResponseBody:
    """An app may do its work while its answer is being sent: the request is inside until that is closed."""

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


def _respond(document: Document, start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = json.dumps(document).encode()
    status = HTTPStatus(document["status"])
    start_response(
        f"{status.value} {status.phrase}", [("Content-Type", headers.PROBLEM_JSON), ("Content-Length", str(len(body)))]
    )
    return [body]


class ASGIFence(_BaseFenceMiddleware):
    """ASGI middleware: `app = ASGIFence(app)`. The app finds the pass in `scope["leasehold.pass"]`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose token is not stale; what is not HTTP passes unseen."""
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
            await self._enter(self._resource(scope["path"]), token_info) if isinstance(token_info, Pass) else token_info
        )
        if isinstance(entered, dict):
            await _send(entered, send)
            return
        try:
            await self._app({**scope, PASS_KEY: token_info}, receive, send)
        finally:
            entered()

    async def _enter(self, resource: str, token_info: Pass) -> LeaveCallback | Document:
        end, pause = time.monotonic() + self._wait, _MIN_PAUSE
        while (entered := await self._try_enter_off_loop(resource, token_info)) is None:
            if time.monotonic() >= end:
                return self._busy_problem()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
        return entered

    async def _try_enter_off_loop(self, resource: str, token_info: Pass) -> LeaveCallback | Document | None:
        if isinstance(self._token_store, Marks):
            return self._try_enter(resource, token_info)
        entering = asyncio.ensure_future(
            asyncio.to_thread(self._try_enter, resource, token_info)
        )  # disks take their time
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:  # it enters all the same, and must leave again
            entering.add_done_callback(_leave_when_entered)
            raise


def _leave_when_entered(entering: asyncio.Future[LeaveCallback | Document | None]) -> None:
    if not entering.cancelled() and entering.exception() is None and callable(entered := entering.result()):
        entered()


def _header_value(scope: Scope, name: str) -> str | None:
    """Of a header; given twice, both, as WSGI has it: which of two tokens would count?"""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name.lower().encode()]
    return ", ".join(values) if values else None


async def _send(document: Document, send: Send) -> None:
    body = json.dumps(document).encode()
    response_headers = [(b"content-type", headers.PROBLEM_JSON.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": document["status"], "headers": response_headers})
    await send({"type": "http.response.body", "body": body})
