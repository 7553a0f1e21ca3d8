"""The WSGI twin of `leasehold.http.idempotency`: a request as an ASGI scope and messages, run without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from io import BytesIO
from typing import Any, ClassVar, Final, TypeAlias, Unpack

from leasehold.blocking import Client
from leasehold.client.base import BaseClient
from leasehold.http.idempotency import IdempotencyKey, IdempotencyOptions
from leasehold.http.responses import Message, Receive, Scope, Send, send_response
from leasehold.runtime.base import run_sync

Environ: TypeAlias = dict[str, Any]
StartResponse: TypeAlias = Callable[..., Any]
WSGIApp: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]

_CHUNK: Final = 65_536
_ENVIRON: Final = "wsgi.environ"  # the key of the request's environ in its scope


class WSGIIdempotencyKey(IdempotencyKey):
    """Wraps a WSGI application, such as Django's or Flask's `app.wsgi_app`. Options and answers are those of the ASGI
    middleware; `who` gets a scope, whose `"wsgi.environ"` is the environ."""

    _client_type: ClassVar[type[BaseClient]] = Client
    _needs: ClassVar[str] = "IdempotencyKey of leasehold.wsgi needs a WSGI application and a Client"

    def __init__(self, app: WSGIApp, client: Client, **options: Unpack[IdempotencyOptions]) -> None:
        super().__init__(_as_asgi(app), client, **options)  # type: ignore[arg-type]  # checked against _client_type
        self._wsgi_app = app

    def _default_who(self, scope: Scope) -> str:
        """With the user whom the server has authenticated: such a server may keep the Authorization header back."""
        user = scope[_ENVIRON].get("REMOTE_USER")
        return f"{user}\n{super()._default_who(scope)}" if user else super()._default_who(scope)

    def __call__(  # type: ignore[override]  # another protocol
        self, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        scope = _scope(environ)
        if self._passes(scope):
            return self._wsgi_app(environ, start_response)
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        run_sync(super().__call__(scope, _receiver(environ), send))
        if not sent:  # the sender disconnected before the end of its request
            sent = [{"status": 400, "headers": []}, {"body": b""}]
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent[0]["headers"]]
        start_response(_status_line(sent[0]["status"]), headers)
        return [message["body"] for message in sent[1:]]


def _status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def _scope(environ: Environ) -> Scope:
    headers = [
        (name[5:].replace("_", "-").lower().encode("latin-1"), value.encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    if environ.get("CONTENT_TYPE"):
        headers.append((b"content-type", environ["CONTENT_TYPE"].encode("latin-1")))
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    return {
        "type": "http",
        "method": environ["REQUEST_METHOD"],
        "path": path,
        "raw_path": path.encode("latin-1"),
        "query_string": environ.get("QUERY_STRING", "").encode("latin-1"),
        "headers": headers,
        _ENVIRON: environ,
    }


def _receiver(environ: Environ) -> Receive:
    """The body in pieces. The server says how long it is, or that reading ends with it (`wsgi.input_terminated`)."""
    terminated = bool(environ.get("wsgi.input_terminated"))
    left = max(0, int(environ.get("CONTENT_LENGTH") or 0))

    async def receive() -> Message:
        nonlocal left
        piece = environ["wsgi.input"].read(_CHUNK if terminated else min(left, _CHUNK)) if terminated or left else b""
        left -= len(piece)
        if left > 0 and not piece and not terminated:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(piece) if terminated else left > 0}

    return receive


def _as_asgi(app: WSGIApp) -> Callable[[Scope, Receive, Send], Any]:
    """The WSGI application as the middleware calls it: with the whole body, and for the whole response."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        environ = {**scope[_ENVIRON], "wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        started: list[tuple[str, list[tuple[str, str]]]] = []
        written = bytearray()

        def start_response(
            status: str, headers: list[tuple[str, str]], _exc_info: Any = None
        ) -> Callable[[bytes], None]:
            started[:] = [(status, headers)]  # the last call counts: nothing was sent yet
            return written.extend

        pieces = app(environ, start_response)
        try:
            written.extend(b"".join(pieces))
        finally:
            if (close := getattr(pieces, "close", None)) is not None:
                close()
        if started:
            status, headers = started[0]
            encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            await send_response(send, int(status.partition(" ")[0]), encoded, bytes(written))

    return run
