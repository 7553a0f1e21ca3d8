"""The HTTP API, version 1: one function for each path, for programs in any language and for people."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from math import floor
from typing import TYPE_CHECKING, Any, Final

import msgspec

from leasehold.core.names import check_name, check_namespace, check_prefix, hash_id
from leasehold.core.timing import NEVER
from leasehold.engines.remote import wire
from leasehold.errors import LeaseholdError
from leasehold.model import Alive, Busy, Claim, Gone, Holder, Holding
from leasehold.server import problems, schemas
from leasehold.server.messages import (
    Request,
    Response,
    checked,
    encode,
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


async def acquire(app: App, request: Request) -> Response:
    service, body = app.service, read_body(schemas.AcquireBody, request.body)
    if body.limit is not None and body.mode == "shared":
        raise invalid("limit cannot be combined with mode shared: the number of shared holders is not limited")
    holder = Holder(request.caller.who if body.holder is None else body.holder, purpose=body.purpose or "")
    if not (holder.label + holder.purpose).isprintable():
        raise invalid("holder and purpose must be printable")
    claim = _claim(request, body, body.id or service.runtime.random_bytes(16).hex(), body.ttl, holder)._replace(
        mode=body.mode,
        kind="lock" if body.limit is None else "semaphore",
        limit=body.limit or 1,
        delay=body.delay,
        min_hold=body.min_hold,
    )
    wait = min(body.wait, app.limits.settings.wait, request.within if request.has_within else body.wait)
    poll = LongPoll(claim, own_id=body.id is not None, admit=app.admit_attempt(request, claim))
    if wait > 0:
        poll.slot = app.admit_waiter(request, claim)
    hang_up = asyncio.ensure_future(request.hung_up())
    hang_up.add_done_callback(lambda done: None if done.cancelled() else poll.end("hung up"))
    latest = request.arrived + request.within if request.has_within else NEVER
    try:
        reply, waited = await service.acquire(poll, wait, latest)
    except LeaseholdError as error:
        app.report_failure(request, claim, error)
        raise
    finally:
        hang_up.cancel()
    request.waited = waited
    waited = floor(waited * 1000) / 1000  # never rounded up: callers add it to the ttl (E8)
    if isinstance(reply, Busy):
        app.report("busy", request, claim, queued=poll.queued, reason=reply.holder.label if reply.holder else None)
        if poll.ended == "draining":
            detail = "this server is about to end: ask another one with the same id, the position is kept"
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
    refused: dict[int, Problem] = {}
    claims = []
    for number, lease in enumerate(body.leases):
        try:
            claims.append(_claim(request, lease, lease.id, lease.ttl)._replace(token=lease.token))
        except Problem as problem:
            refused[number] = app.explain(request, problem)
    with app.limits.call(request.caller, "renew"):
        answered = await app.service.renew(claims, None, app.deadline(request)) if claims else []
    for claim, reply in zip(claims, answered, strict=True):
        app.report_renewal(request, claim, reply)
    replies = iter(answered)
    return json_response(
        {
            "leases": [
                problems.document(refused[number]) if number in refused else _renewal(lease.name, next(replies))
                for number, lease in enumerate(body.leases)
            ]
        }
    )


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
    if released:
        app.report("released", request, claim)
    return json_response(schemas.Released(released))


async def break_(app: App, request: Request) -> Response:
    body = read_body(schemas.BreakBody, request.body)
    with checked():
        namespace, name = check_namespace(body.namespace), check_name(body.name)
    request.allow("break", namespace, name)
    with app.limits.call(request.caller, "release"):
        broken = await app.service.break_(namespace, name, body.token, app.deadline(request))
    if broken:
        app.report_break(request, namespace, name, body.token, body.reason)
    return json_response(schemas.Broken(broken))


async def traits(app: App, request: Request) -> Response:
    known_arguments(request)
    return json_response(wire.traits_to_json(app.service.engine.traits))


async def healthz(app: App, request: Request) -> Response:
    return Response(200, "text/plain; charset=utf-8", b"ok\n")


async def readyz(app: App, request: Request) -> Response:
    await app.service.check_ready()
    return json_response(schemas.Ready(True))


# Holders and waiters


async def locks(app: App, request: Request) -> Response:
    arguments = known_arguments(request, "namespace", "prefix", "name", "limit", "cursor")
    exact = "name" in arguments
    if exact and arguments.get("prefix"):
        raise invalid("give name or prefix, not both", 400)
    limit, cursor = _read_limit(arguments.get("limit")), _read_cursor(arguments.get("cursor"))
    with checked():
        namespace = check_namespace(arguments.get("namespace", ""))
        prefix = check_name(arguments["name"]) if exact else check_prefix(arguments.get("prefix", ""))
    request.allow_reading(namespace, prefix, exact)
    with app.limits.call(request.caller, "read", namespace):
        found = await app.service.inspect(namespace, prefix, exact, app.deadline(request))
    return json_response(_page(found, limit, cursor, app.service.runtime.wall()))


def _read_limit(text: str | None) -> int:
    if not text:
        return schemas.MAX_HOLDINGS
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise invalid("limit must be a whole number of at least 1", 400)
    return min(int(text), schemas.MAX_HOLDINGS)


def _read_cursor(text: str | None) -> tuple[str, int] | None:
    if not text:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=tuple[str, int])
    except (ValueError, msgspec.DecodeError):
        raise invalid("cursor must be one that an earlier answer had", 400) from None


def _page(found: Sequence[Holding], limit: int, cursor: tuple[str, int] | None, wall: float) -> schemas.Locks:
    """Holdings by name and token, so that the cursor stays good while holders come and go. Waiters are shown with the
    holdings of their name; those of names without a holder are on the page where that name would be."""
    holders = sorted((h for h in found if h.position is None), key=lambda h: (h.name, h.token or 0))
    if cursor is not None:
        holders = [h for h in holders if (h.name, h.token or 0) > cursor]
    page, more = holders[:limit], len(holders) > limit
    last = (page[-1].name, page[-1].token or 0) if more else ("", 0)
    queues: dict[str, list[schemas.Waiter]] = {}
    for waiter in found:
        if waiter.position is not None:
            queues.setdefault(waiter.name, []).append(_waiter(waiter))
    shown = [name for name in sorted(queues) if (cursor is None or name >= cursor[0]) and (not more or name <= last[0])]
    return schemas.Locks(
        [_holding(h, queues.get(h.name, []), wall) for h in page],
        [waiter for name in shown for waiter in queues[name]],
        base64.urlsafe_b64encode(encode(last)).decode() if more else None,
    )


def _holding(holding: Holding, queue: list[schemas.Waiter], wall: float) -> schemas.Holding:
    return schemas.Holding(
        name=holding.name,
        holder=holding.holder.label,
        purpose=holding.holder.purpose or None,
        token=holding.token,
        acquired_at=round(wall - holding.age, 3) if holding.since_grant and holding.state == "held" else None,
        expires_in=holding.left,
        state=holding.state,
        mode=holding.mode,
        kind=holding.kind,
        limit=holding.limit,
        slot=holding.slot,
        fingerprint=holding.fingerprint,
        host=holding.holder.host or None,
        pid=holding.holder.pid or None,
        queue=queue,
    )


def _waiter(holding: Holding) -> schemas.Waiter:
    return schemas.Waiter(
        name=holding.name,
        holder=holding.holder.label,
        purpose=holding.holder.purpose or None,
        position=holding.position,
        mode=holding.mode,
        waiting_for=holding.age,
        fingerprint=holding.fingerprint,
    )
