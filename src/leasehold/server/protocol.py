"""HTTP/1.1 as uvicorn speaks it, with the limits that a server on a network needs.

uvicorn alone accepts any number of headers, waits for the rest of a request for ever, and leaves the body's size to the
application. Here a request must arrive in time and within its size, its framing must have one meaning, and
a web page in a browser cannot send it. The names in a verified client certificate are in the scope.
"""

from __future__ import annotations

import asyncio
import json
import select
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from leasehold.server.auth import CERTIFICATE_NAMES, Caller
from leasehold.server.limits import CONNECTION, Bodies, CountedConnection
from leasehold.server.problems import MEDIA_TYPE, RETRY_AFTER, Problem, ServerOverloaded, document
from leasehold.server.settings import Settings, is_local, split_address
from leasehold.server.tls import names_in

if TYPE_CHECKING:
    from leasehold.server.app import App

BATCH_PATHS: Final = frozenset({b"/v1/calls", b"/v1/renew-many"})
MAX_HEADERS: Final = 100
MAX_PIPELINED: Final = 16  # requests that wait behind one that is being answered
LINGER: Final = 1.0  # seconds in which a refused caller can read why, before the connection is closed
_MAX_UNSENT: Final = 16 * 1024  # bytes of an answer that are not counted; over TLS it would be half a megabyte
_MAX_LINGERING: Final = 100  # connections above the limit that get an answer; further ones are closed at once
_MAX_DISCARDED: Final = 1024 * 1024  # bytes of a refused caller that are read and dropped

# Headers that must not be repeated: two parsers could choose different ones.
_ONCE: Final = frozenset(
    {
        b"authorization",
        b"content-length",
        b"content-type",
        b"host",
        b"leasehold-client",
        b"leasehold-within",
        b"origin",
        b"transfer-encoding",
    }
)
_HANG_UP: Final = getattr(select, "POLLRDHUP", select.POLLHUP)  # the first is Linux's
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Rules:
    """What a connection may do. `hosts`: values of the header Host that are accepted; None accepts all."""

    connections: int
    hosts: frozenset[str] | None = None
    head_bytes: int = 16 * 1024
    head_seconds: float = 5.0
    body_bytes: int = 64 * 1024
    batch_bytes: int = 1024 * 1024  # of a body with many calls
    body_seconds: float = 20.0
    write_seconds: float = 20.0  # in which a caller must read something of its answer
    bodies: Bodies = field(default_factory=Bodies)  # that are received or being answered
    unread: Bodies = field(default_factory=Bodies)  # answers that callers do not read as fast as they come
    # Connections on which no caller has shown a key or certificate, or only a caller with too many of them, the oldest
    # first; some may have been admitted by now. None: this server asks for neither key nor certificate.
    strangers: dict[Protocol, None] | None = None
    refused: dict[str, int] = field(default_factory=dict)  # limit -> refusals, for metrics
    # The caller with this header Authorization and these names in its certificate; None: nobody that is known.
    find_caller: Callable[[bytes, Sequence[str]], Caller | None] = lambda _authorization, _names: None

    @classmethod
    def of(cls, settings: Settings, app: App | None = None) -> Rules:
        """Without authentication on loopback, a web page could reach the server under a host name of its own (DNS
        rebinding). So only names of this machine are accepted there."""
        hosts = None
        own = {split_address(each)[0] for each in settings.listen if not each.startswith("unix:")}
        if own and not settings.authenticates and all(is_local(address) for address in settings.listen):
            hosts = _LOOPBACK_NAMES | own
        strangers: dict[Protocol, None] | None = {} if settings.authenticates else None
        rules = cls(settings.limits.connections, hosts, strangers=strangers)
        return rules if app is None else replace(rules, refused=app.limits.refused, find_caller=app.authenticator.find)


def protocol_for(rules: Rules) -> Callable[..., Protocol]:
    """What `uvicorn.Config(http=...)` takes."""
    return partial(Protocol, rules=rules)


class Protocol(HttpToolsProtocol):
    """One connection. After a refusal it reads nothing more and is closed."""

    def __init__(self, *args: Any, rules: Rules, **named: Any) -> None:
        super().__init__(*args, **named)
        self._rules = rules
        self._problem: Problem | None = None  # why the parser was stopped
        self._answering: RequestResponseCycle | None = None
        self._refused = False
        self._discarded = 0
        self._in_head = self._in_body = False
        self._unread = 0  # bytes since the last complete head or message
        self._head_bytes = self._body_bytes = self._body_limit = 0
        self._timer: asyncio.TimerHandle | None = None  # for the rest of a head or body
        self._write_timer: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes of an answer when that timer was started
        self._unread_answer: tuple[str | None, int] | None = None  # caller and bytes, while the caller does not read
        self._connection = CountedConnection(rules.bodies)
        self._names: tuple[str, ...] = ()
        self._names_until = 0.0

    # -- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(_MAX_UNSENT)
        if len(self.connections) > self._rules.connections and not self._close_a_stranger():
            self._count_refusal("connections")
            if len(self.connections) > self._rules.connections + _MAX_LINGERING:
                self._refused = True
                self.loop.call_soon(transport.abort)
                return
            self._refuse(ServerOverloaded(f"this server has {self._rules.connections} connections open: retry"))
            return
        if (connection := transport.get_extra_info("ssl_object")) is not None:
            certificate = connection.getpeercert()
            self._names = names_in(certificate)
            self._names_until = ssl.cert_time_to_seconds(certificate["notAfter"]) if self._names else 0.0
        if self._rules.strangers is not None:
            self._rules.strangers[self] = None
        self._expect_more(self._rules.head_seconds)

    def _close_a_stranger(self) -> bool:
        """Make room for this connection, so that hosts without a key cannot keep callers out. False: there is none."""
        strangers = self._rules.strangers
        while strangers:
            oldest = next(iter(strangers))
            del strangers[oldest]
            if not oldest._connection.is_admitted:
                oldest.transport.abort()
                return True
        return False

    def eof_received(self) -> None:
        """The caller has hung up: known at once, before the connection is closed."""
        self._hang_up(self._answering)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._rules.strangers is not None:
            self._rules.strangers.pop(self, None)
        self._hang_up(self._answering)
        self._unset_keepalive_if_required()
        self._connection.drop_bodies()
        self._drop_unread_answer()
        self._expect_nothing()
        self._stop_write_timer()
        self._connection.end()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded += len(data)
            if self._discarded > _MAX_DISCARDED:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered as if it had not asked for it. What follows is of an unknown protocol.
            self._stop_after_answer()
            return
        except httptools.HttpParserError:
            problem = self._problem or Problem("invalid", 400, "this is not a valid HTTP/1.1 request")
            problem.__traceback__ = None  # its frames refer to the body and, in a cycle, to this connection
            self._refuse(problem)
            return
        if self._in_body:
            if self._unread > 2 * self._body_limit + self._rules.head_bytes:  # chunks of a byte, endless trailers
                self._refuse(self._too_large(self._body_limit))
            else:
                self._expect_more(self._rules.body_seconds)
        elif self._in_head or self._unread:
            if self._unread > self._rules.head_bytes:
                self._refuse(self._head_too_large())
            else:
                self._expect_more(self._rules.head_seconds)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._expect_reading()
        self._drop_unread_answer()
        unread, (caller, size) = self._rules.unread, (self._connection.caller, self.transport.get_write_buffer_size())
        if not unread.has_room(caller, size):
            self._count_refusal("unread_answers_per_key")
            self.loop.call_soon(self.transport.abort)  # not inside its own call
            return
        self._unread_answer = caller, size
        unread.add(caller, size)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()
        self._drop_unread_answer()

    def _expect_reading(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self._rules.write_seconds, self._check_reading)

    def _check_reading(self) -> None:
        """A caller may read slowly, but not stop reading. Nothing is added to an answer meanwhile."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._expect_reading()
        else:
            self.transport.abort()

    def _drop_unread_answer(self) -> None:
        if self._unread_answer is not None:
            caller, size = self._unread_answer
            self._unread_answer = None
            self._rules.unread.add(caller, -size)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        extensions: dict[str, Any] = {CONNECTION: self._connection}
        if names := self._certificate_names():
            extensions[CERTIFICATE_NAMES] = names
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer: it must not be taken for a header
        self._head_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._expect_nothing()
        self._in_head, self._unread, self._body_bytes = False, 0, 0
        is_batch = self.url.partition(b"?")[0] in BATCH_PATHS
        self._body_limit = self._rules.batch_bytes if is_batch else self._rules.body_bytes
        self._problem = self._head_problem()
        if self._problem is not None:
            raise self._problem  # stops the parser
        if self._connection.caller == "":
            self._identify()
        super().on_headers_complete()  # raises for a path that cannot be parsed
        self._in_body = True

    def _identify(self) -> None:
        """Before the first body, which may come with its head: it must have room whatever callers without a key send,
        and count for the caller's key."""
        authorization = next((value for name, value in self.headers if name == b"authorization"), b"")
        caller = self._rules.find_caller(authorization, self._certificate_names())
        if caller is not None:
            self._connection.identify(caller)

    def _certificate_names(self) -> Sequence[str]:
        return self._names if self._names and time.time() < self._names_until else ()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._body_limit:
            self._problem = self._too_large(self._body_limit)
        elif not self._connection.has_room(len(body)):
            self._problem = ServerOverloaded("other requests use all of this server's memory for bodies: retry")
        if self._problem is not None:
            raise self._problem
        if not self.cycle.response_complete:  # else the body is dropped
            self._connection.keep_body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A server that was stopped for a while finds requests whose callers have given up, and perhaps repeated them
        at another server: these must not be carried out. The loop would read the hang-up only after the request, and
        never if another request follows it: reading goes on after an answer, and a caller that has left gets none."""
        self._expect_nothing()
        self._in_body, self._unread = False, 0
        if self.parser.get_method() == b"POST" and self._has_hung_up():
            self._hang_up(self.cycle)
            if self._answering is self.cycle:
                self.loop.call_soon(self.transport.close)
        super().on_message_complete()

    # -- what is refused

    def _count_refusal(self, limit: str) -> None:
        self._rules.refused[limit] = self._rules.refused.get(limit, 0) + 1

    def _head_problem(self) -> Problem | None:
        if self._head_bytes + len(self.url) > self._rules.head_bytes or len(self.headers) > MAX_HEADERS:
            return self._head_too_large()
        found: dict[bytes, bytes] = {}
        for name, value in self.headers:
            if name in _ONCE:
                if name in found:
                    return Problem("invalid", 400, f"the header {name.decode('ascii')} is given twice")
                found[name] = value
            elif name.startswith(b"sec-fetch-"):
                found[name] = value
        return self._framing_problem(found) or self._browser_problem(found)

    def _framing_problem(self, found: dict[bytes, bytes]) -> Problem | None:
        """Two readings of where the body ends would let one caller speak for the next (request smuggling)."""
        if len(self.pipeline) >= MAX_PIPELINED:
            return Problem("invalid", 400, f"more than {MAX_PIPELINED} requests wait on this connection")
        length, encoding = found.get(b"content-length"), found.get(b"transfer-encoding")
        is_newest = self.parser.get_http_version() == "1.1"
        if encoding is not None and (length is not None or encoding.lower() != b"chunked" or not is_newest):
            return Problem(
                "invalid", 400, "a body has either Content-Length or Transfer-Encoding: chunked, in HTTP/1.1"
            )
        if length is not None and not (length.isdigit() and len(length) < 16):
            return Problem("invalid", 400, "Content-Length must be a number of bytes")
        if is_newest and b"host" not in found:
            return Problem("invalid", 400, "the header Host is missing")
        if length is not None and int(length) > self._body_limit:
            return self._too_large(self._body_limit)
        return None

    def _browser_problem(self, found: dict[bytes, bytes]) -> Problem | None:
        host = found.get(b"host", b"").decode("latin-1").lower()
        if self._rules.hosts is not None and _without_port(host) not in self._rules.hosts:
            return Problem(
                "forbidden", 403, "this server has no authentication, so it answers only requests to localhost"
            )
        origin = found.get(b"origin")
        is_link = self.parser.get_method() == b"GET" and found.get(b"sec-fetch-mode") == b"navigate"
        is_own = found.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin") or is_link
        if not is_own or (origin is not None and urlsplit(origin.decode("latin-1").lower()).netloc != host):
            return Problem("forbidden", 403, "web pages of other origins may not call this server")
        return None

    def _head_too_large(self) -> Problem:
        return Problem(
            "too-large",
            431,
            f"the head of a request has at most {self._rules.head_bytes} bytes and {MAX_HEADERS} headers",
        )

    def _too_large(self, limit: int) -> Problem:
        return Problem("too-large", 413, f"the body of this request has at most {limit} bytes")

    def _refuse(self, problem: Problem) -> None:
        """Answer with the problem, unless another answer is on its way, and close the connection."""
        self._refused = True
        self._expect_nothing()
        if self._in_body and self._answering is self.cycle:  # the request that is being answered is itself refused
            started = self.cycle.response_started
            self._hang_up(self.cycle)
            if started:
                self.transport.close()
                return
        elif self._in_body or self._answering is not None:
            self._stop_after_answer()
            return
        body = json.dumps(document(problem)).encode()
        head = [STATUS_LINE[problem.status], f"content-type: {MEDIA_TYPE}\r\ncontent-length: {len(body)}\r\n".encode()]
        if problem.retry_after is not None:
            head.append(b"retry-after: %d\r\n" % max(1, round(problem.retry_after)))
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", body]))
        # A connection that is closed with unread data is reset, and the caller might not get to read the answer.
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(LINGER, self.transport.abort)

    def _stop_after_answer(self) -> None:
        """Read nothing more, and close the connection when the request under way has been answered."""
        self._refused = True
        self._expect_nothing()
        self.pipeline.clear()
        if self._answering is None:
            self.transport.close()
        else:
            self._answering.keep_alive = False

    # -- the request that is being answered; `self.cycle` is the newest, which may wait in `self.pipeline`

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self._answering is not None:
            self._answering.body = bytearray()  # not read if the request was refused, and kept until the next one
        self._answering = None
        if not self.pipeline:
            self._connection.drop_bodies()
        super().on_response_complete()

    def _has_hung_up(self) -> bool:
        """Whether the end of what the caller sends has arrived, even if it is not read yet."""
        if self.transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HANG_UP)
        return bool(poll.poll(0))

    def _hang_up(self, cycle: RequestResponseCycle | None) -> None:
        """Notify the application, through `receive`, that this caller is gone, so that it sends nothing more."""
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    # -- time

    def _expect_more(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self._too_slow, seconds)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self, seconds: float) -> None:
        self._timer = None
        what = "body" if self._in_body else "head"
        detail = f"the {what} of the request did not arrive within {seconds:g} s"
        self._refuse(Problem("slow", 408, detail, retry_after=RETRY_AFTER, done=False))


def _without_port(host: str) -> str:
    name, separator, port = host.rpartition(":")
    if separator and port.isdigit():
        host = name
    return host.removeprefix("[").removesuffix("]")
