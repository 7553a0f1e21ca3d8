"""Responses of the middlewares: problem documents (RFC 9457), and the parts of ASGI that they share."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Final, TypeAlias

Document: TypeAlias = dict[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PROBLEM_JSON: Final = "application/problem+json"


def problem(status: int, detail: str, **members: Any) -> Document:
    return {"type": "about:blank", "status": status, "detail": detail, **members}


def problem_response(document: Document, method: str) -> tuple[list[tuple[str, str]], bytes]:
    """The headers and the body of a response. A response to HEAD has the headers that GET would get, and no body."""
    body = json.dumps(document).encode()
    headers = [("Content-Type", PROBLEM_JSON), ("Content-Length", str(len(body)))]
    return headers, b"" if method.upper() == "HEAD" else body


async def send_problem(
    send: Send, document: Document, extra_headers: Iterable[tuple[str, str]] = (), method: str = "GET"
) -> None:
    headers, body = problem_response(document, method)
    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in [*headers, *extra_headers]]
    await send_response(send, document["status"], encoded, body)


async def send_response(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, more: bool = False
) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more})


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """All values of a header; `name` in lower case."""
    return [value for key, value in scope["headers"] if key.lower() == name]
