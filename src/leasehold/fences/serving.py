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
from leasehold.fences import header
from leasehold.fences.marks import MarkFile, unlock
from leasehold.fences.rules import NEVER, Pass, raised

Leave: TypeAlias = Callable[[], None]
Document: TypeAlias = dict[str, Any]
Environ: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PASS: Final = "leasehold.pass"  # noqa: S105  # the key in environ and scope under which the app finds what was shown
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110: they only look
_SOONEST, _LATEST = 0.001, 0.05


def spelled(path: str) -> str:
    """A path as one resource, however it is written: `//a`, `/a/`, `/./a` and `/b/../a` reach what `/a` reaches in many
    an app. To share a mark too often refuses too much; too seldom, and a holder of the past comes in."""
    return posixpath.normpath("/" + path.strip("/"))


class Store(Protocol):
    """Where marks are kept."""

    def enter(self, resource: str, shown: Pass) -> Leave | None:
        """Compare, raise the mark, and keep other tokens out until `leave()`. None: one is inside. Never waits.
        Raises `StaleToken`."""


class Marks:
    """Marks in the memory of this process: for a service that is one process, and may forget them when it restarts."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._marks: dict[tuple[str, int | None], int] = {}
        self._inside: dict[tuple[str, int | None], list[Pass]] = {}

    def enter(self, resource: str, shown: Pass) -> Leave | None:
        """One token at a time for each resource, with any number of requests; readers beside each other."""
        key = resource, shown.slot
        with self._guard:
            inside = self._inside.get(key, [])
            # Also for one that must wait: what was shown counts, or those inside could go on coming for ever.
            self._marks[key] = raised(shown, shown, self._marks.get(key, NEVER), resource)
            if any(one != shown and not (one.shared and shown.shared) for one in inside):
                return None
            self._inside.setdefault(key, []).append(shown)
        return lambda: self._leave(key, shown)

    def _leave(self, key: tuple[str, int | None], shown: Pass) -> None:
        with self._guard:
            self._inside[key].remove(shown)
            if not self._inside[key]:
                del self._inside[key]


class FileMarks:
    """Marks in a folder, shared by all workers on this machine, and kept over restarts. One request at a time for
    each resource."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.path.realpath(folder)
        os.makedirs(self._folder, mode=0o700, exist_ok=True)

    def enter(self, resource: str, shown: Pass) -> Leave | None:
        """One request at a time for each resource."""
        # A resource is any text; a hash of it is a safe name of any file system.
        marks = MarkFile(
            os.path.join(self._folder, hashlib.sha256(resource.encode("utf-8", "surrogatepass")).hexdigest())
        )
        if (fd := marks.try_lock()) is None:
            return None
        try:
            marks.show(fd, shown, shown, resource)
        except BaseException:
            unlock(fd)
            raise
        return lambda: unlock(fd)


class _Gate:
    """What both middlewares decide: the same answers, whoever waits and sends."""

    def __init__(
        self,
        app: Any,
        marks: Store | None = None,
        *,
        resource: Callable[[str], str] | None = None,
        required: Collection[str] | None = None,
        wait: float = 30.0,
    ) -> None:
        """`resource`: from the request's path, what is fenced; None: the path, one for all its spellings. `required`:
        methods refused without a token, with 428; None: all that do more than look. Of others a token is checked if
        there is one. `wait`: how long another token may be inside; then 503."""
        self._app, self._marks = app, Marks() if marks is None else marks
        self._resource, self._wait = resource or spelled, wait
        self._required = None if required is None else frozenset(map(str.upper, required))

    def _look(self, method: str, values: tuple[str | None, str | None, str | None]) -> Pass | Document | None:
        """The pass; or a problem; or None: neither is there nor needed."""
        try:
            shown = header.parsed(*values)
        except ConfigError as bad:
            return header.problem(400, "Not a lease token", detail=str(bad))
        method = method.upper()  # as frameworks do: "put" is served as PUT
        if shown is None and (method not in SAFE if self._required is None else method in self._required):
            detail = f"{method} needs the header {header.TOKEN}: the token of the lease under which it is made"
            return header.problem(428, "Lease token required", detail=detail)
        if shown is not None and shown.shared and method not in SAFE:
            return header.problem(400, "A shared lease cannot write", detail="it takes the write side of the rwlock")
        return shown

    def _try(self, resource: str, shown: Pass) -> Leave | Document | None:
        """Inside, refused, or not yet."""
        try:
            return self._marks.enter(resource, shown)
        except StaleToken as stale:
            return header.stale(stale)

    def _busy(self) -> Document:
        return header.problem(503, "Resource busy", detail=f"another lease's request is inside for {self._wait:g} s")


class WSGIFence(_Gate):
    """WSGI middleware: `app = WSGIFence(app)`. The app finds the pass in `environ["leasehold.pass"]`."""

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve a request whose token is not stale."""
        names = (header.TOKEN, header.SLOT, header.SHARED)
        found = [environ.get(f"HTTP_{name.upper().replace('-', '_')}") for name in names]
        shown = self._look(environ["REQUEST_METHOD"], (found[0], found[1], found[2]))
        if shown is None:
            return self._app(environ, start_response)  # type: ignore[no-any-return]
        if not isinstance(shown, Pass):
            return _answer(shown, start_response)
        entered = self._enter(self._resource(environ.get("PATH_INFO", "")), shown)
        if isinstance(entered, dict):
            return _answer(entered, start_response)
        environ[PASS] = shown
        try:
            return _Body(self._app(environ, start_response), entered)
        except BaseException:
            entered()
            raise

    def _enter(self, resource: str, shown: Pass) -> Leave | Document:
        end, pause = time.monotonic() + self._wait, _SOONEST
        while (entered := self._try(resource, shown)) is None:
            if time.monotonic() >= end:
                return self._busy()
            time.sleep(pause)
            pause = min(2 * pause, _LATEST)
        return entered


class _Body:
    """An app may do its work while its answer is being sent: the request is inside until that is closed."""

    def __init__(self, body: Iterable[bytes], leave: Leave) -> None:
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


def _answer(document: Document, start_response: Callable[..., Any]) -> Iterable[bytes]:
    body = json.dumps(document).encode()
    status = HTTPStatus(document["status"])
    start_response(
        f"{status.value} {status.phrase}", [("Content-Type", header.PROBLEM), ("Content-Length", str(len(body)))]
    )
    return [body]


class ASGIFence(_Gate):
    """ASGI middleware: `app = ASGIFence(app)`. The app finds the pass in `scope["leasehold.pass"]`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request whose token is not stale; what is not HTTP passes unseen."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = [_value(scope, name) for name in (header.TOKEN, header.SLOT, header.SHARED)]
        shown = self._look(scope["method"], (found[0], found[1], found[2]))
        if shown is None:
            await self._app(scope, receive, send)
            return
        entered = await self._enter(self._resource(scope["path"]), shown) if isinstance(shown, Pass) else shown
        if isinstance(entered, dict):
            await _send(entered, send)
            return
        try:
            await self._app({**scope, PASS: shown}, receive, send)
        finally:
            entered()

    async def _enter(self, resource: str, shown: Pass) -> Leave | Document:
        end, pause = time.monotonic() + self._wait, _SOONEST
        while (entered := await self._try_aside(resource, shown)) is None:
            if time.monotonic() >= end:
                return self._busy()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LATEST)
        return entered

    async def _try_aside(self, resource: str, shown: Pass) -> Leave | Document | None:
        if isinstance(self._marks, Marks):
            return self._try(resource, shown)
        entering = asyncio.ensure_future(asyncio.to_thread(self._try, resource, shown))  # disks take their time
        try:
            return await asyncio.shield(entering)
        except asyncio.CancelledError:  # it enters all the same, and must leave again
            entering.add_done_callback(_leave_again)
            raise


def _leave_again(entering: asyncio.Future[Leave | Document | None]) -> None:
    if not entering.cancelled() and entering.exception() is None and callable(entered := entering.result()):
        entered()


def _value(scope: Scope, name: str) -> str | None:
    """Of a header; given twice, both, as WSGI has it: which of two tokens would count?"""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name.lower().encode()]
    return ", ".join(values) if values else None


async def _send(document: Document, send: Send) -> None:
    body = json.dumps(document).encode()
    head = [(b"content-type", header.PROBLEM.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": document["status"], "headers": head})
    await send({"type": "http.response.body", "body": body})
