"""The application: which path does what, who may call it, and how an answer is sent.

A request on its way: path known? key known? body valid? permitted? within the limits? Then the engine is asked.
`App.answer` knows nothing of ASGI; the shell that does is `App.__call__`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from leasehold import tracing
from leasehold.core.texts import escape
from leasehold.engines.sql.fair_mutex import ON_BEHALF_OF
from leasehold.errors import LeaseholdError, Unavailable
from leasehold.events import Event, EventKind
from leasehold.model import Alive, Claim, Gone, Grant
from leasehold.server import api, calls, feed, metrics, openapi, problems, queries, schemas
from leasehold.server.audit import Audit
from leasehold.server.auth import Authenticator, Caller, certificate_names
from leasehold.server.dashboard.routes import Dashboard
from leasehold.server.history import History
from leasehold.server.limits import CONNECTION, Admitted, CountedConnection, Limits
from leasehold.server.messages import EventStream, Request, Response, problem_response, read_query
from leasehold.server.peers import Peer, Peers
from leasehold.server.picture import MAX_AGE, Pictures
from leasehold.server.problems import Draining, Forbidden, Problem, TooMany, invalid
from leasehold.server.routes import Admission, Stream
from leasehold.server.service import Service
from leasehold.server.spans import OTHER, Spans

Handler: TypeAlias = Callable[["App", Request], Awaitable[Response | EventStream]]
Scope: TypeAlias = dict[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]

_log = logging.getLogger("leasehold.server")

_MAX_SEND_SECONDS: Final = 20.0  # a client that does not read its stream for this long is disconnected
_WRONG_KEY_DELAY: Final = 0.1  # seconds before the answer: a connection guesses 10 keys a second at most
_CHANGES: Final = frozenset({"granted", "released", "lost", "broken", "resized"})  # what a picture shows
_CLIENT_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")


class Route(NamedTuple):
    """What answers a path, and what the OpenAPI document says about it."""

    handler: Handler
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    problems: tuple[str, ...] = ()
    needs_key: bool = True


_ENGINE: Final = ("engine-unavailable", "internal")
_READ: Final = ("invalid", "unauthorized", "forbidden", "too-many", "overloaded", *_ENGINE)
_WRITE: Final = (*_READ, "slow", "too-large")
_PROBE: Final = ("invalid", "draining", "engine-unavailable")

# These have no HEAD: the answer would stay open, and that of /v1/stream would end the client's own stream.
_STREAMS: Final = frozenset({"/v1/events", "/v1/stream"})
# What may keep a connection for long: refused to a key with too many. Anything else, such as a renewal, is answered.
_LONG: Final = _STREAMS | {"/v1/acquire", "/ui/stream"}

# They wait until they may begin once their length is known.
_BATCHES: Final = frozenset({"/v1/calls", "/v1/renew-many"})

# path -> method -> route
ROUTES: Final[dict[str, dict[str, Route]]] = {
    "/v1/acquire": {
        "POST": Route(
            api.acquire,
            "Acquire a lock, or wait in its queue",
            schemas.AcquireBody,
            schemas.Lease,
            ("busy", "mismatch", "unsupported", "draining", *_WRITE),
        )
    },
    "/v1/renew": {"POST": Route(api.renew, "Renew a lease", schemas.LeaseBody, schemas.Renewed, ("lost", *_WRITE))},
    "/v1/renew-many": {
        "POST": Route(
            api.renew_many,
            "Renew up to 500 leases",
            schemas.RenewManyBody,
            schemas.RenewedMany,
            _WRITE,
        )
    },
    "/v1/release": {"POST": Route(api.release, "Release a lock", schemas.ReleaseBody, schemas.Released, _WRITE)},
    "/v1/break": {
        "POST": Route(
            api.break_, "End the lease with this token", schemas.BreakBody, schemas.Broken, ("moved-on", *_WRITE)
        )
    },
    "/v1/limit": {
        "POST": Route(
            api.set_limit,
            "Change the limit of a semaphore",
            schemas.LimitBody,
            schemas.Resized,
            ("mismatch", "unsupported", *_WRITE),
        )
    },
    "/v1/locks": {"GET": Route(queries.locks, "List holders and waiters", None, schemas.Locks, _READ)},
    "/v1/owners": {"GET": Route(queries.owners, "List holders and what each holds", None, schemas.Owners, _READ)},
    "/v1/history": {"GET": Route(queries.history, "The past of a name", None, schemas.NameHistory, _READ)},
    "/v1/incidents": {"GET": Route(queries.incidents, "List incidents", None, schemas.Incidents, _READ)},
    "/v1/stats": {"GET": Route(queries.stats, "Statistics of a namespace", None, schemas.StatsAnswer, _READ)},
    "/v1/refusals": {
        "POST": Route(api.refusal, "Report a token that a fence refused", schemas.RefusalBody, schemas.Noted, _WRITE)
    },
    "/v1/events": {"GET": Route(feed.events, "Watch what happens through this server", problems=("draining", *_READ))},
    "/v1/traits": {
        "GET": Route(api.traits, "What the engine of this server promises", problems=("invalid", "unauthorized"))
    },
    "/v1/calls": {"POST": Route(calls.calls, "Verbs of a remote engine", problems=_WRITE)},
    "/v1/stream": {
        "GET": Route(
            calls.stream, "Wake-ups of a remote engine", problems=("invalid", "unauthorized", "too-many", "draining")
        )
    },
    "/metrics": {
        "GET": Route(metrics.metrics, "Metrics for Prometheus", problems=("invalid", "unauthorized", "too-many"))
    },
    "/openapi.json": {"GET": Route(openapi.openapi, "This description", problems=("invalid",), needs_key=False)},
    "/healthz": {"GET": Route(api.healthz, "Whether the process runs", problems=("invalid",), needs_key=False)},
    "/readyz": {"GET": Route(api.readyz, "Whether the server can serve", None, schemas.Ready, _PROBE, needs_key=False)},
}


class ReadOptions(NamedTuple):
    """Where the answers of the routes that only read come from."""

    picture_max_age: float = MAX_AGE
    peers: Sequence[Peer] = ()
    instance: str = ""  # names the server to its peers


class App:
    """The ASGI application of one worker."""

    def __init__(
        self,
        service: Service,
        authenticator: Authenticator,
        limits: Limits,
        audit: Audit | None = None,
        reading: ReadOptions | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.service, self.authenticator, self.limits, self.audit = service, authenticator, limits, audit
        self.spans = service.spans = spans or Spans()
        self.feed = feed.Feed()
        self.feed.on_event = self._record
        self.history = History(service.runtime.wall)
        reading = reading or ReadOptions()
        self.peers = Peers(self.history, reading.peers, reading.instance)
        self.pictures = Pictures(service, reading.picture_max_age)
        self.pictures.on_taken = self.history.observe
        service.on_breaker = self._on_breaker
        self.metrics = metrics.ServerMetrics(self)
        self.dashboard = Dashboard(self)
        if audit is not None:
            self.metrics.sources.append(audit.file)

    def drain(self) -> None:
        """The server is shutting down: callers continue at another one."""
        self.service.drain()
        self.feed.close()
        self.dashboard.streams.drain()

    async def answer(self, request: Request) -> Response | EventStream:
        """Raises no error: each becomes a problem document."""
        self._read_ids(request)
        with self.spans.request(request, request.path if request.path in ROUTES else OTHER) as answered:
            try:
                answer = await self._dispatch(request)
            except Exception as error:
                answer = problem_response(self.explain(request, error))
            answered(answer.status if isinstance(answer, Response) else 200)
        if self.audit is not None:
            await self.audit.written()
        self._measure(request, answer)
        echoed = [(b"x-request-id", request.request_id.encode())]
        if request.trace:
            echoed.append((b"traceparent", request.trace.encode()))
        if request.is_last:
            echoed.append((b"connection", b"close"))
        return answer._replace(headers=(*answer.headers, *echoed))

    async def _dispatch(self, request: Request) -> Response | EventStream:
        request.arrived = self.service.runtime.now()
        methods = ROUTES.get(request.path)
        if methods is None:
            if (page := await self.dashboard.answer(request)) is not None:
                return page
            raise Problem("not-found", 404, f"there is no {request.path[:200]!r} here: see /openapi.json")
        has_head = request.method == "HEAD" and request.path not in _STREAMS
        route = methods.get("GET" if has_head else request.method)
        if route is None:
            allowed = ", ".join(methods)
            raise Problem(
                "method-not-allowed", 405, f"{request.path} has {allowed}, not {request.method[:20]!r}", allow=allowed
            )
        if route.needs_key:
            await self._identify(request)
        request.within, request.has_within = self._read_within(request)
        request.arguments = read_query(request.query)
        if request.method == "POST":
            request.body = await request.read_body()
        return await route.handler(self, request)

    async def _identify(self, request: Request) -> None:
        authorization = request.header(b"authorization")
        caller = self.authenticator.identify(authorization, request.certificate_names)
        if caller is None:
            if authorization:
                await asyncio.sleep(_WRONG_KEY_DELAY)
            raise Problem(
                "unauthorized", 401, "send a valid API key: the header is Authorization: Bearer lh_WHO_SECRET"
            )
        client = request.header(b"leasehold-client")
        if client and not _CLIENT_ID.fullmatch(client):
            raise invalid("Leasehold-Client has 1 to 64 letters, digits, '.', '_' or '-'", 400)
        request.client = (caller.who, client.decode())
        await self.admit(request, caller)

    def _read_within(self, request: Request) -> tuple[float, bool]:
        """How long the caller waits for the engine: its `Leasehold-Within`, else `call_timeout`."""
        text = request.header(b"leasehold-within")
        if not text:
            return self.service.call_timeout, False
        try:
            within = float(text)
        except ValueError:
            within = -1.0
        if not 0 < within < 1e9:
            raise invalid("Leasehold-Within must be a number of seconds above 0", 400)
        return within, True

    def _read_ids(self, request: Request) -> None:
        given, trace = request.header(b"x-request-id"), request.header(b"traceparent")
        known = _REQUEST_ID.fullmatch(given)
        request.request_id = given.decode() if known else self.service.runtime.random_bytes(8).hex()
        traceparent = trace.decode("latin-1")
        request.trace = traceparent if tracing.trace_id(traceparent) else ""

    def _measure(self, request: Request, answer: Response | EventStream) -> None:
        path = request.path if request.path in ROUTES else "other"
        method = request.method if request.method in ("GET", "HEAD", "POST") else "other"
        status = answer.status if isinstance(answer, Response) else 200
        self.metrics.requests.inc(path, method, str(status))
        if isinstance(answer, Response):
            seconds = self.service.runtime.now() - request.arrived - request.waited
            self.metrics.request_seconds.series(path).observe(max(0.0, seconds))

    # ------------------------------------------------------ used by the routes

    async def admit(self, request: Request, caller: Caller) -> None:
        """Count the connection for this caller, and wait until the request may begin. Raises TooMany if the caller has
        too many connections, and this request would keep one for long."""
        request.caller = caller
        if caller.limited:
            ON_BEHALF_OF.set(caller.who)
        request.is_last = not self.limits.connection(caller, request.connection)
        if request.is_last and request.path in _LONG:
            detail = f"{caller.who} has {self.limits.settings.connections_per_key} connections at this server"
            raise TooMany(f"{detail}, which is its limit: retry")
        if request.path not in _BATCHES:
            await self.limits.begin(caller)

    def report(self, kind: EventKind, request: Request, claim: Claim, **fields: Any) -> None:
        """Pass an event to the audit log and to callers that watch."""
        event = Event(
            kind,
            self.service.config.scheme,
            claim.namespace,
            claim.name,
            self.service.runtime.wall(),
            fingerprint=claim.fingerprint,
            holder=claim.holder.label,
            mode=claim.mode,
            purpose=claim.holder.purpose or None,
            **fields,
        )
        trace = tracing.find(None) if kind == "granted" else None
        if trace is not None:  # for what happens to the lease later
            tracing.remember(claim.fingerprint, trace)
        self._pass_on(event, request)
        if kind in ("released", "lost"):
            tracing.forget(claim.fingerprint)

    def _pass_on(self, event: Event, request: Request) -> None:
        self.feed(event, tracing.find(event.fingerprint) or "")
        self.metrics.locks.count(event)
        if self.audit is not None:
            self.audit.note(event, request)

    def _record(self, event: Event, trace: str) -> None:
        """An event of any worker of this server. What it reports has happened: an error here must not fail the call."""
        try:
            if event.kind in _CHANGES or event.queued:
                self.pictures.touch(event.namespace)
            self.history(event, trace)
        except Exception as error:
            _log.error("the event %s of %s is missing in the history", event.kind, escape(event.name), exc_info=error)

    def _on_breaker(self, opened: bool) -> None:
        kind: EventKind = "breaker_opened" if opened else "breaker_closed"
        self.feed(Event(kind, self.service.config.scheme, "", "", self.service.runtime.wall()))

    def report_grant(self, request: Request, claim: Claim, grant: Grant, began: float, queued: bool) -> None:
        seconds = self.service.runtime.now() - began
        fields = {"token": grant.token, "ttl": grant.ttl, "slot": grant.slot}
        self.report("granted", request, claim, seconds=seconds, queued=queued, **fields)

    def report_failure(self, request: Request, claim: Claim, error: LeaseholdError) -> None:
        """An acquire ended without an answer of the engine, or was refused."""
        name = "Unavailable" if isinstance(error, Unavailable) else type(error).__name__
        self.report("failed", request, claim, reason=problems.problem_for(error).kind, error=name)

    def report_renewal(self, request: Request, claim: Claim, reply: Alive | Gone | LeaseholdError) -> None:
        if isinstance(reply, Alive):
            self.report("renewed", request, claim, token=claim.token, ttl=reply.ttl)
        elif isinstance(reply, Gone):
            self.report("lost", request, claim, token=claim.token, reason=reply.reason)
        else:
            self.report("renew_failed", request, claim, token=claim.token, error=type(reply).__name__)

    def report_release(self, request: Request, claim: Claim, released: bool | None) -> None:
        """A lease that was over before its release was lost, if it was acquired here and its ttl is over."""
        if released:
            self.report("released", request, claim)
        elif released is False and (token := self.history.expired_token(claim)) is not None:
            self.report("lost", request, claim, token=token, reason="expired")

    def report_break(self, request: Request, namespace: str, name: str, token: int, reason: str) -> None:
        engine, now = self.service.config.scheme, self.service.runtime.wall()
        event = Event("broken", engine, namespace, name, now, token=token, actor=request.caller.who, why=reason or None)
        self._pass_on(event, request)

    async def set_limit(
        self, request: Request, namespace: str, name: str, limit: int | None, deadline: float, reason: str = ""
    ) -> None:
        caller = request.caller
        with self.limits.call(caller, "release"), self.limits.resizing(caller, namespace, name, limit):
            await self.service.set_limit(namespace, name, limit, deadline)
        engine, now = self.service.config.scheme, self.service.runtime.wall()
        event = Event(
            "resized", engine, namespace, name, now, actor=request.caller.who, why=reason or None, limit=limit
        )
        self._pass_on(event, request)

    def report_refusal(self, request: Request, namespace: str, name: str, body: schemas.RefusalBody) -> None:
        engine, now = self.service.config.scheme, self.service.runtime.wall()
        event = Event("stale_token", engine, namespace, name, now, body.token, holder=body.holder)
        self._pass_on(event._replace(fence=body.fence, seen=body.seen, reason=body.reason or None), request)

    def watch(self, namespace: str, prefix: str, who: str) -> Stream[bytes]:
        if self.service.draining:
            raise Draining(done=False)
        return self.feed.watch(namespace, prefix, who)

    def deadline(self, request: Request) -> float:
        """When a call of the engine for this request must have its answer."""
        return request.arrived + min(request.within, self.service.call_timeout)

    def admit_attempt(self, request: Request, claim: Claim) -> Callable[[bool], Admitted]:
        """Counts attempts of a claim. Only the first may be refused: later ones may have a reservation. All are if the
        audit log is required and cannot be written."""

        def admit(first: bool) -> Admitted:
            if self.audit is not None:
                self.audit.check()
            if first and claim not in self.service.grants:
                self.limits.lease(request.caller, self.service.grants.leases.get(request.caller.who, 0))
            return self.limits.call(request.caller, "attempt" if first else "renew", claim.namespace, claim.name)

        return admit

    def admit_waiter(self, request: Request, claim: Claim) -> Admission:
        """Counts a waiter. A repeated request takes over the admission of the earlier one."""
        return self.service.take_admission(claim) or self.limits.waiter(request.caller, claim.namespace, claim.name)

    def explain(self, request: Request, error: Exception) -> Problem:
        """The problem that an error becomes. What the engine said is logged: it may contain an address, which callers
        must not see."""
        problem = problems.problem_for(error)
        if problem.kind == "internal":
            _log.error("%s %s failed (request %s)", request.method, request.path, request.request_id, exc_info=error)
        elif isinstance(problem, Forbidden):
            self.authenticator.count_failure(request.caller.failure(problem.namespace))
            if self.audit is not None:
                self.audit.note_denied(request, problem)
        elif problem is not error and problem.kind == "engine-unavailable":
            _log.info("%s %s: %s (request %s)", request.method, request.path, error, request.request_id)
        return problem

    # ------------------------------------------------------------------- ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"this application serves http, not {scope['type']}")

        async def hung_up() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue

        request = Request(
            scope["method"],
            scope["path"],
            scope["headers"],
            scope["query_string"],
            lambda: _read_body(receive),
            hung_up,
            certificate_names(scope),
            scope.get("extensions", {}).get(CONNECTION) or CountedConnection(),
        )
        answer = await self.answer(request)
        if isinstance(answer, EventStream):
            await _send_events(answer, hung_up, send)
        else:
            await _send_response(answer, send)


async def _read_body(receive: Receive) -> bytes:
    """The protocol bounds its size and time, and then hangs up."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem("slow", 408, "the connection ended before the body did")
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _send_response(response: Response, send: Send) -> None:
    headers = [
        (b"content-type", response.media_type.encode()),
        (b"content-length", b"%d" % len(response.body)),
        *response.headers,
    ]
    if all(name != b"cache-control" for name, _ in response.headers):
        headers.append((b"cache-control", b"no-store"))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})


async def _send_events(events: EventStream, hung_up: Callable[[], Awaitable[None]], send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
    watch = asyncio.ensure_future(hung_up())
    watch.add_done_callback(lambda _done: events.close())
    try:
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *events.headers]})
        while (data := await events.next_events()) is not None:
            async with asyncio.timeout(_MAX_SEND_SECONDS):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    except TimeoutError:
        _log.info("a client did not read its stream for %g s", _MAX_SEND_SECONDS)
    finally:
        watch.cancel()
        events.close()
