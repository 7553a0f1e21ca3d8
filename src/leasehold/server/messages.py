"""Requests and responses, without ASGI: what handlers get and return, and how bodies and queries are read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar
from urllib.parse import parse_qsl

import msgspec

from leasehold.errors import ConfigError
from leasehold.server import problems
from leasehold.server.auth import ANYONE, Caller, Verb
from leasehold.server.limits import CountedConnection
from leasehold.server.problems import Forbidden, Problem, invalid
from leasehold.server.routes import ClientKey

S = TypeVar("S", bound=msgspec.Struct)
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]  # names in lower case

encode = msgspec.json.Encoder().encode


async def _never() -> None:
    await asyncio.get_running_loop().create_future()


async def _no_body() -> bytes:
    return b""


@dataclass(slots=True)
class Request:
    method: str
    path: str
    headers: Headers = ()
    query: bytes = b""
    read_body: Callable[[], Awaitable[bytes]] = _no_body
    hung_up: Callable[[], Awaitable[None]] = _never  # returns when the caller is gone
    certificate_names: Sequence[str] = ()  # of the client certificate
    connection: CountedConnection = field(default_factory=CountedConnection)
    # Filled in by the application, in this order.
    request_id: str = ""
    trace: str = ""
    arrived: float = 0.0
    caller: Caller = ANYONE
    client: ClientKey = ("", "")
    is_last: bool = False  # the connection is closed after the answer
    within: float = 0.0  # seconds that the caller waits for the engine's answer
    has_within: bool = False
    arguments: dict[str, str] = field(default_factory=dict)  # of the query
    body: bytes = b""
    waited: float = 0.0  # seconds in a queue

    def header(self, name: bytes) -> bytes:
        """The first with this name; empty: there is none."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    def allow(self, verb: Verb, namespace: str, name: str) -> None:
        """Raise unless the caller has this right for this name."""
        if not self.caller.may(verb, namespace, name):
            raise Forbidden(self.caller.who, verb, namespace, name)

    def allow_reading(self, namespace: str, prefix: str, exact: bool) -> None:
        caller = self.caller
        if not (caller.may("read", namespace, prefix) if exact else caller.may_list(namespace, prefix)):
            raise Forbidden(caller.who, "read", namespace, prefix, "these names")


class Response(NamedTuple):
    status: int
    media_type: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


class EventStream(NamedTuple):
    """A response of server-sent events. `next_events` returns what to send, or None at the end."""

    next_events: Callable[[], Awaitable[bytes | None]]
    close: Callable[[], None]
    headers: tuple[tuple[bytes, bytes], ...] = ()


class checked:
    """Turns the ConfigError of a check into the problem `invalid`. The same error from the engine is another matter."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError):
            raise invalid(str(error)) from None


def read_body(kind: type[S], body: bytes) -> S:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as bad:
        raise invalid(str(bad)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid("the body is not JSON", 400) from None


def read_query(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query.decode(), keep_blank_values=True, max_num_fields=20, errors="strict")
    except ValueError:
        raise invalid("the query cannot be read: write ?name=value&name=value, percent-encoded as UTF-8", 400) from None
    if len(dict(pairs)) < len(pairs):
        raise invalid("a query parameter is given twice", 400)
    return dict(pairs)


def known_arguments(request: Request, *names: str) -> dict[str, str]:
    for name in request.arguments:
        if name not in names:
            raise invalid(f"there is no query parameter {name[:40]!r}; known: {', '.join(names) or 'none'}", 400)
    return request.arguments


def json_response(value: object) -> Response:
    return Response(200, "application/json", encode(value))


def problem_response(problem: Problem) -> Response:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if problem.retry_after is not None:
        headers = ((b"retry-after", b"%d" % max(1, -int(-problem.retry_after // 1))),)
    if problem.status == 405:
        headers += ((b"allow", problem.fields["allow"].encode()),)
    if problem.status == 401:
        headers += ((b"www-authenticate", b'Bearer realm="leasehold"'),)
    return Response(problem.status, problems.MEDIA_TYPE, encode(problems.document(problem)), headers)


def problem_member(problem: Problem) -> dict[str, Any]:
    """The problem as a part of an answer, which has no headers for it."""
    made = problems.document(problem)
    return made if problem.retry_after is None else made | {"retry_after": problem.retry_after}
