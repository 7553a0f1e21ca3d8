"""The HTTP API, version 1: one function for each path, for programs in any language and for people."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any, Final

from leasehold.core.names import check_name, check_namespace, hash_id
from leasehold.core.timing import NEVER
from leasehold.engines.remote import wire
from leasehold.errors import LeaseholdError
from leasehold.model import Alive, Busy, Claim, Gone, Holder
from leasehold.server import problems, schemas
from leasehold.server.auth import Verb
from leasehold.server.messages import (
    Request,
    Response,
    checked,
    json_response,
    known_arguments,
    read_body,
)
from leasehold.server.problems import Draining, Problem, invalid
from leasehold.server.routes import LongPoll

if TYPE_CHECKING:
    from leasehold.server.app import App

_RELEASE_TTL: Final = 30.0  # every claim has one; a release does not use it


def _claim(
    request: Request,
    body: schemas.AcquireBody | schemas.LeaseBody | schemas.ReleaseBody,
    claim_id: str,
    ttl: float,
    holder: Holder | None = None,
) -> Claim:
    """The claim of a body. Raises unless its caller may lock the name."""
    with checked():
        namespace, name = check_namespace(body.namespace), check_name(body.name)
        wire.check_id(claim_id)
    request.allow("lock", namespace, name)
    return Claim(namespace, name, claim_id, hash_id(claim_id), holder or Holder(request.caller.who), ttl)


def _allowed_name(
    request: Request, verb: Verb, body: schemas.BreakBody | schemas.LimitBody | schemas.RefusalBody
) -> tuple[str, str]:
    """The namespace and name of a body. Raises unless its caller has this right for them."""
    with checked():
        namespace, name = check_namespace(body.namespace), check_name(body.name)
    request.allow(verb, namespace, name)
    return namespace, name


def _claim_to_acquire(app: App, request: Request, body: schemas.AcquireBody) -> Claim:
    if body.limit is not None and body.mode == "shared":
        raise invalid("limit cannot be combined with mode shared: the number of shared holders is not limited")
    holder = Holder(request.caller.who if body.holder is None else body.holder, purpose=body.purpose or "")
    if not (holder.label + holder.purpose).isprintable():
        raise invalid("holder and purpose must be printable")
    claim_id = body.id or app.service.runtime.random_bytes(16).hex()
    return _claim(request, body, claim_id, body.ttl, holder)._replace(
        mode=body.mode,
        kind="lock" if body.limit is None else "semaphore",
        limit=body.limit or 1,
        delay=body.delay,
        min_hold=body.min_hold,
    )


async def acquire(app: App, request: Request) -> Response:
    service, body = app.service, read_body(schemas.AcquireBody, request.body)
    claim = _claim_to_acquire(app, request, body)
    wait = min(body.wait, app.limits.settings.wait, request.within if request.has_within else body.wait)
    poll = LongPoll(claim, body.id is not None, app.admit_attempt(request, claim), request.caller.who)
    if wait > 0:
        poll.admission = app.admit_waiter(request, claim)
    hang_up = None
    if wait > 0 or not poll.caller_made_id:  # else a hang-up changes nothing: an attempt under way is never cancelled
        hang_up = asyncio.ensure_future(request.hung_up())
        hang_up.add_done_callback(lambda done: None if done.cancelled() else poll.end("hung up"))
    latest = request.arrived + request.within if request.has_within else NEVER
    try:
        with app.spans.acquire(claim) as answered:
            reply, waited = await service.acquire(poll, wait, latest)
            answered(reply)
    except LeaseholdError as error:
        app.report_failure(request, claim, error)
        raise
    finally:
        if hang_up is not None:
            hang_up.cancel()
    request.waited = waited
    waited = floor(waited * 1000) / 1000  # never rounded up: callers add it to the ttl (E8)
    if isinstance(reply, Busy):
        reason = reply.holder.label if reply.holder else None
        seconds = service.runtime.now() - request.arrived
        app.report("busy", request, claim, queued=poll.queued, reason=reason, seconds=seconds)
        if poll.ended == "draining":
            detail = "this server is shutting down: ask another one with the same id, the position is kept"
            raise Draining(detail, id=claim.id)
        raise problems.busy(claim.name, reply, waited)
    app.report_grant(request, claim, reply, request.arrived, poll.queued)
    return json_response(
        schemas.Lease(
            id=claim.id,
            namespace=claim.namespace,
            name=claim.name,
            token=reply.token,
            ttl=reply.ttl,
            slot=reply.slot,
            waited=waited,
            fingerprint=claim.fingerprint,
        )
    )


async def renew(app: App, request: Request) -> Response:
    body = read_body(schemas.LeaseBody, request.body)
    claim = _claim(request, body, body.id, body.ttl)._replace(token=body.token)
    with app.limits.call(request.caller, "renew"):
        (reply,) = await app.service.renew([claim], None, app.deadline(request))
    app.report_renewal(request, claim, reply)
    if isinstance(reply, Gone):
        raise problems.lost(claim.name, reply)
    if isinstance(reply, LeaseholdError):
        raise reply
    return json_response(schemas.Renewed(reply.ttl))


async def renew_many(app: App, request: Request) -> Response:
    """One answer for each lease: what is wrong with one is no reason to lose the others."""
    body = read_body(schemas.RenewManyBody, request.body)
    async with app.limits.batch(request.caller, None) as begin:  # however late: renewals are never refused
        await begin(len(body.leases))
    app.limits.begun(request.caller, len(body.leases))
    try:
        return json_response({"leases": await _renew_all(app, request, body.leases)})
    finally:
        app.limits.ended(request.caller, len(body.leases))


async def _renew_all(
    app: App, request: Request, leases: Sequence[schemas.LeaseBody]
) -> list[schemas.Renewed | dict[str, Any]]:
    refused: dict[int, Problem] = {}
    claims = []
    for number, lease in enumerate(leases):
        try:
            claims.append(_claim(request, lease, lease.id, lease.ttl)._replace(token=lease.token))
        except Problem as problem:
            refused[number] = app.explain(request, problem)
    with app.limits.call(request.caller, "renew"):
        answered = await app.service.renew(claims, None, app.deadline(request)) if claims else []
    for claim, reply in zip(claims, answered, strict=True):
        app.report_renewal(request, claim, reply)
    replies = iter(answered)
    return [
        problems.document(refused[number]) if number in refused else _renewal(lease.name, next(replies))
        for number, lease in enumerate(leases)
    ]


def _renewal(name: str, reply: Alive | Gone | LeaseholdError) -> schemas.Renewed | dict[str, Any]:
    if isinstance(reply, Alive):
        return schemas.Renewed(reply.ttl)
    problem = problems.lost(name, reply) if isinstance(reply, Gone) else problems.problem_for(reply)
    return problems.document(problem)


async def release(app: App, request: Request) -> Response:
    body = read_body(schemas.ReleaseBody, request.body)
    claim = _claim(request, body, body.id, _RELEASE_TTL)
    with app.limits.call(request.caller, "release"):
        released = await app.service.release(claim, app.deadline(request))
    app.report_release(request, claim, released)
    return json_response(schemas.Released(released))


async def break_(app: App, request: Request) -> Response:
    body = read_body(schemas.BreakBody, request.body)
    namespace, name = _allowed_name(request, "break", body)
    seen = request.header(b"if-match")
    if seen and seen != b'"%d"' % body.token:
        raise invalid('If-Match must be the token of the body in quotation marks, such as "41"', 400)
    with app.limits.call(request.caller, "release"):
        broken = await app.service.break_(namespace, name, body.token, app.deadline(request))
    if broken:
        app.report_break(request, namespace, name, body.token, body.reason)
    elif seen:
        raise problems.moved_on(name, body.token)
    return json_response(schemas.Broken(broken))


async def set_limit(app: App, request: Request) -> Response:
    body = read_body(schemas.LimitBody, request.body)
    namespace, name = _allowed_name(request, "break", body)
    await app.set_limit(request, namespace, name, body.limit, app.deadline(request), body.reason)
    return json_response(schemas.Resized(body.limit))


async def refusal(app: App, request: Request) -> Response:
    """A fence reports a token that it refused, for the history, events, metrics and the audit log. Nothing else."""
    note_refusal(app, request, read_body(schemas.RefusalBody, request.body))
    return json_response(schemas.Noted(True))


def note_refusal(app: App, request: Request, body: schemas.RefusalBody) -> None:
    namespace, name = _allowed_name(request, "lock", body)
    if not ((body.holder or "") + body.reason).isprintable():
        raise invalid("holder and reason must be printable")
    with app.limits.call(request.caller, "read", namespace, name):
        app.report_refusal(request, namespace, name, body)


async def traits(app: App, request: Request) -> Response:
    known_arguments(request)
    return json_response(wire.traits_to_json(app.service.engine.traits))


async def healthz(app: App, request: Request) -> Response:
    return Response(200, "text/plain; charset=utf-8", b"ok\n")


async def readyz(app: App, request: Request) -> Response:
    await app.service.check_ready()
    return json_response(schemas.Ready(True))
