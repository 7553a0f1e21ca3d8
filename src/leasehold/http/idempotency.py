"""Middleware for `Idempotency-Key`: a repeated request gets the first response and is not processed again.

    app = leasehold.asgi.IdempotencyKey(app, client)        # any ASGI application; client: an AsyncClient
    app = leasehold.wsgi.IdempotencyKey(app, client)        # any WSGI application; client: a Client

The same key with the same request replays the first response. The same key with another request gets 422. While the
first request is in progress, a repetition gets 409 with Retry-After. If the application raised or responded with 5xx,
the request may be repeated.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from hashlib import sha256
from typing import Any, ClassVar, Final, TypedDict

from leasehold.aio import AsyncClient
from leasehold.client.base import BaseClient
from leasehold.config import DAY, Duration, check_keep, check_seconds
from leasehold.errors import (
    ConfigError,
    LeaseholdError,
    LeaseLost,
    Mismatch,
    NotAcquired,
    RunFailed,
    StaleToken,
    Unavailable,
)
from leasehold.http.responses import (
    App,
    Message,
    Receive,
    Scope,
    Send,
    header_values,
    problem,
    send_problem,
    send_response,
)
from leasehold.records.once import OnceOptions, make_once
from leasehold.records.store import Store
from leasehold.runtime.base import run_sync

_log = logging.getLogger("leasehold.http.idempotency")

_HEADER: Final = b"idempotency-key"
_LONGEST_KEY: Final = 255
_HEADER_ALLOWANCE: Final = 16_384  # for the status and headers
# Stored instead of a body, and the answers to a repeated request then.
_TOO_LARGE: Final = "large"
_CUT_SHORT: Final = "cut short"
_NOT_KEPT: Final = "this request was already processed; its response was too large to be stored"
_NOT_COMPLETE: Final = "this request was already processed; its response was cut short, and is not stored"


class IdempotencyOptions(TypedDict, total=False):
    """The keyword arguments of both middlewares."""

    methods: Collection[str]
    keep: Duration | None
    required: bool
    who: Callable[[Scope], str] | None
    max_body: int
    max_answer: int
    retry_after: Duration
    ttl: Duration | None
    store: Store | str | None


class IdempotencyKey:
    """Wraps an ASGI application. Requests without the header, or with other methods, pass through unchanged.

    The twin for WSGI runs the same code: with a blocking client, nothing here ever suspends.

    methods      the methods it handles
    keep         seconds a response is stored
    required     respond with 400 to such a request without the header
    who          function from the scope to a text that identifies the sender: keys of different senders are separate.
                 The default is the Authorization header, under WSGI with the user whom the server has authenticated
                 (REMOTE_USER); if you have session cookies, pass your own function
    max_body     maximum bytes of a request body; a larger one gets 413
    max_answer   maximum bytes of a response body that is stored; a larger one is sent as it comes, and a repetition
                 gets 409
    retry_after  seconds for the Retry-After header
    ttl, store   as for `AsyncClient.once`
    """

    _client_type: ClassVar[type[BaseClient]] = AsyncClient
    _needs: ClassVar[str] = "IdempotencyKey of leasehold.asgi needs an ASGI application and an AsyncClient"

    def __init__(
        self,
        app: App,
        client: AsyncClient,
        *,
        methods: Collection[str] = ("POST", "PATCH"),
        keep: Duration | None = DAY,
        required: bool = False,
        who: Callable[[Scope], str] | None = None,
        max_body: int = 1_048_576,
        max_answer: int = 262_144,
        retry_after: Duration = 1.0,
        ttl: Duration | None = None,
        store: Store | str | None = None,
    ) -> None:
        if not callable(app) or not isinstance(client, self._client_type):
            raise ConfigError(f"{self._needs}: leasehold.asgi is for AsyncClient, leasehold.wsgi for Client")
        if isinstance(methods, str) or not methods:
            raise ConfigError('methods must be a list of methods, such as ["POST", "PATCH"]')
        if who is not None and not callable(who):
            raise ConfigError("who must be a function of the scope")
        for name, size in (("max_body", max_body), ("max_answer", max_answer)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise ConfigError(f"{name} must be a number of bytes, not {size!r}")
        seconds = check_seconds("retry_after", retry_after)
        self._app, self._client = app, client
        self._methods = frozenset(method.upper() for method in methods)
        self._required, self._who = required, who or self._default_who
        self._max_body, self._max_answer = max_body, max_answer
        self._retry_after_header = ("Retry-After", str(max(1, round(seconds))))
        self._ttl, self._store = ttl, store
        self._options = OnceOptions(check_keep(keep), max_result=max_answer * 4 // 3 + _HEADER_ALLOWANCE)

    def _default_who(self, scope: Scope) -> str:
        return _header_value(scope, b"authorization").decode("latin-1")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._passes(scope):
            await self._app(scope, receive, send)
            return
        keys = header_values(scope, _HEADER)
        if len(keys) != 1 or not 1 <= len(keys[0]) <= _LONGEST_KEY:
            detail = f"this request needs one Idempotency-Key header of 1 to {_LONGEST_KEY} bytes"
            await send_problem(send, problem(400, detail))
        else:
            body, complete = await _read_body(receive, self._max_body)
            if complete:
                await self._run_once(keys[0], body, scope, receive, send)
            elif body:  # otherwise the sender disconnected before the end
                detail = f"the body of a request with an Idempotency-Key must not exceed {self._max_body} bytes"
                await send_problem(send, problem(413, detail))

    def _passes(self, scope: Scope) -> bool:
        """Whether this request goes to the application unchanged."""
        if scope["type"] != "http" or scope["method"] not in self._methods:
            return True
        return not self._required and not header_values(scope, _HEADER)

    async def _run_once(self, key: bytes, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        # Hashed, so that `inspect` shows neither the key nor the sender, and any bytes are accepted.
        name = "http:" + _hash(self._sender_id(scope), key)
        response, app_errors = CapturedResponse(self._max_answer, send), list[Exception]()
        options = OnceOptions(
            self._options.keep, request=_request_hash(scope, body), max_result=self._options.max_result
        )
        call = make_once(self._client, name, 0, self._ttl, self._store, options)

        async def run_app() -> dict[str, Any]:
            try:
                await self._app(_without_response_extensions(scope), _body_receiver(body, receive), response.capture)
            except Exception as error:
                app_errors.append(error)
                if not response.complete or response.status >= 500:
                    raise  # otherwise it is answered, and something that follows has failed, such as a background task
            if response.status >= 500:
                raise _ServerError
            return response.to_dict()

        try:
            blocking = self._client._core.runtime.blocking
            stored = await call.run((lambda: run_sync(run_app())) if blocking else run_app, (), {})
        except _ServerError:
            await response.forward(send)
        except LeaseholdError as error:
            if error in app_errors:  # raised by the application, which may use locks too
                raise
            await self._respond_to_error(error, response if call.ran else None, send)
        else:
            await (response.forward(send) if call.ran else _send_stored(stored, send))
        if app_errors:
            raise app_errors[0]

    def _sender_id(self, scope: Scope) -> bytes:
        who = self._who(scope)
        if not isinstance(who, str):
            raise ConfigError(f"who() must return a str that identifies the sender, not {type(who).__name__}")
        return who.encode(errors="surrogatepass")

    async def _respond_to_error(self, error: LeaseholdError, response: CapturedResponse | None, send: Send) -> None:
        """Respond when there is no stored response to replay. `response`: the application's, if it ran."""
        if response is not None and response.sent:
            _log.warning("could not record that the request of an Idempotency-Key was processed: %s", error)
        elif isinstance(error, RunFailed):
            await send_problem(send, problem(409, _NOT_KEPT))
        elif isinstance(error, Mismatch):
            detail = "this Idempotency-Key was already used for a different request"
            await send_problem(send, problem(422, detail))
        elif isinstance(error, NotAcquired | StaleToken | LeaseLost):
            detail = "a request with this Idempotency-Key is in progress"
            await send_problem(send, problem(409, detail), [self._retry_after_header])
        elif isinstance(error, Unavailable):
            _log.warning("could not read or store the record of an Idempotency-Key: %s", error)
            if response is not None:  # the request was processed: with its response, the sender will not repeat it
                await response.forward(send)
            else:
                detail = "cannot check now whether this request was already processed; repeat it later"
                await send_problem(send, problem(503, detail), [self._retry_after_header])
        elif response is not None:  # its headers were too large to be stored
            await response.forward(send)
        else:
            raise error


class CapturedResponse:
    """The application's response, held back until it is stored: a sender that gets it can rely on the record. One that
    is too large to be stored is sent as it comes, because it may have no end."""

    def __init__(self, max_size: int, send: Send) -> None:
        self.status = 0
        self.sent = False  # or a part of it
        self.complete = False  # else the application ended early, because its sender disconnected
        self._max_body, self._send = max_size, send
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = bytearray()

    async def capture(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", ())]
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            more = message.get("more_body", False)
            self.complete = self.complete or not more
            if self.sent or len(self._body) > self._max_body:
                await self._send_part(more)

    async def _send_part(self, more: bool) -> None:
        body, self._body = bytes(self._body), bytearray()
        with suppress(OSError):  # the sender has disconnected: the application must end as if it had not
            if not self.sent:
                self.sent = True
                await self._send({"type": "http.response.start", "status": self.status, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    def to_dict(self) -> dict[str, Any]:
        if not self.status:
            raise RuntimeError("the application returned without a response")
        kept = self.complete and not self.sent
        body = base64.b64encode(self._body).decode() if kept else _TOO_LARGE if self.sent else _CUT_SHORT
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self._headers]
        return {"status": self.status, "headers": headers, "body": body, "kept": kept}

    async def forward(self, send: Send) -> None:
        """Send what was held back. A response that is not complete stays so: its sender must not take it for all."""
        if not self.sent:
            await send_response(send, self.status, self._headers, bytes(self._body), more=not self.complete)


class _ServerError(Exception):
    """The application responded with 5xx: only the failure is recorded."""


async def _send_stored(stored: dict[str, Any], send: Send) -> None:
    if not stored["kept"]:
        await send_problem(send, problem(409, _NOT_COMPLETE if stored["body"] == _CUT_SHORT else _NOT_KEPT))
        return
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in stored["headers"]]
    headers.append((b"idempotency-replayed", b"true"))
    await send_response(send, stored["status"], headers, base64.b64decode(stored["body"]))


async def _read_body(receive: Receive, max_size: int) -> tuple[bytes, bool]:
    """The body of a request, and whether it is complete. Empty if the sender disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"", False
        body += message.get("body", b"")
        if len(body) > max_size:
            return bytes(body), False
        if not message.get("more_body", False):
            return bytes(body), True


def _body_receiver(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the application: first the body that was already read, then the server's messages."""
    body_sent = False

    async def receive_body() -> Message:
        nonlocal body_sent
        if body_sent:
            return await receive()
        body_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body


def _without_response_extensions(scope: Scope) -> Scope:
    """The scope without the server's response extensions, which would bypass the captured response."""
    extensions = scope.get("extensions")
    if not extensions:
        return scope
    return {
        **scope,
        "extensions": {
            name: extension for name, extension in extensions.items() if not name.startswith("http.response.")
        },
    }


def _request_hash(scope: Scope, body: bytes) -> str:
    """Identifies the request. Of its headers, only those that determine its meaning count."""
    path = scope.get("raw_path") or scope["path"].encode()
    identifying_headers = (_header_value(scope, b"host"), _header_value(scope, b"content-type"))
    return _hash(scope["method"].encode(), path, scope.get("query_string", b""), *identifying_headers, body)


def _header_value(scope: Scope, wanted: bytes) -> bytes:
    return b"\n".join(header_values(scope, wanted))


def _hash(*parts: bytes) -> str:
    """The hash of the parts and their lengths, so that moving a boundary changes it."""
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
