"""What remote engines use: the verbs of the engine interface in batches, and a stream of wake-ups.

The shapes are those of `engines/remote/wire.py`. A call is checked in full before any call of its request is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from leasehold import tracing
from leasehold.config import check_limit, check_seconds
from leasehold.core.names import check_name, check_namespace, check_prefix
from leasehold.core.timing import HEARTBEAT_INTERVAL
from leasehold.engines.remote import wire
from leasehold.errors import LeaseholdError
from leasehold.model import Alive, Busy, Claim, Gone, Holding
from leasehold.server import api, problems, schemas
from leasehold.server.auth import Caller
from leasehold.server.limits import Limits, make_list
from leasehold.server.messages import EventStream, Request, Response, checked, encode, json_response, problem_member
from leasehold.server.problems import Forbidden, TooMany, invalid

if TYPE_CHECKING:
    from leasehold.server.app import App

Answer: TypeAlias = "Coroutine[Any, Any, wire.Json]"
Call: TypeAlias = wire.Json

_SHORT: Final = 1024  # bytes of a body that is read before it is known to be a batch
_PAGE_BYTES: Final = 1_500_000  # of a list of locks


async def calls(app: App, request: Request) -> Response:
    """The answers in the order of the calls, which run side by side: a slow one holds up its own request only."""
    caller, limits = request.caller, app.limits
    seconds = app.deadline(request) - app.service.runtime.now()
    if len(request.body) <= _SHORT and len(given := _read_calls(request.body)) == 1 and _claims(given[0]) == 1:
        await limits.begin(caller, seconds)
        return json_response([await _answer(app, request, given[0])])
    answers = []
    refused: wire.Json = {}
    async with limits.batch(caller, seconds) as begin:
        given = _read_calls(request.body)  # only now: it takes ten times the memory of the body
        for call in given:
            claims = _claims(call)
            try:
                await begin(claims)
            except TooMany as problem:  # the calls before it have begun
                refused = {"problem": problem_member(problem)}
                break
            limits.begun(caller, claims)
            answers.append(asyncio.ensure_future(_answer(app, request, call)))
            answers[-1].add_done_callback(partial(_end, limits, caller, claims))
    return json_response([*await asyncio.gather(*answers), *[refused] * (len(given) - len(answers))])


def _end(limits: Limits, caller: Caller, claims: int, _answered: object) -> None:
    limits.ended(caller, claims)


def _read_calls(body: bytes) -> list[object]:
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid("the body is not JSON", 400) from None
    if not isinstance(given, list) or not 0 < len(given) <= wire.MAX_CALLS:
        raise invalid(f"the body must be a list of 1 to {wire.MAX_CALLS} calls")
    if sum(isinstance(call, dict) and call.get("do") == "inspect" for call in given) > 1:
        raise invalid("a request may inspect once: the answer would be too long")
    return given


def _claims(call: object) -> int:
    """How many claims the call is about, to know what it costs."""
    claims = call.get("claims") if isinstance(call, dict) else None
    return max(1, len(claims)) if isinstance(claims, list) else 1


async def _answer(app: App, request: Request, call: object) -> wire.Json:
    """The answer to one call. If the call fails, the others still get their answers."""
    try:
        with checked():
            if not isinstance(call, dict):
                raise invalid("a call must be a JSON object")
            do = call.get("do")
            if not isinstance(do, str) or do not in _VERBS:
                raise invalid(f"do must be one of {', '.join(_VERBS)}")
            deadline = app.deadline(request)
            if (within := call.get("within")) is not None:
                deadline = min(deadline, request.arrived + check_seconds("within", within))
            answer = _VERBS[do](app, request, call, deadline)
        with app.spans.call(request, do, call.get(tracing.HEADER)):
            return await answer
    except Exception as error:
        return {"problem": problem_member(app.explain(request, error))}


def _claim(app: App, request: Request, call: Call) -> Claim:
    claim = wire.claim_from_json(call.get("claim"), app.service.runtime.now())
    request.allow("lock", claim.namespace, claim.name)
    return claim


def _attempt(app: App, request: Request, call: Call, deadline: float) -> Answer:
    claim = _claim(app, request, call)

    async def run() -> wire.Json:
        since = app.service.queued_since(claim)
        try:
            with app.admit_attempt(request, claim)(since is None):
                admission = app.admit_waiter(request, claim) if claim.queue else None
                reply = await app.service.attempt(claim, request.client, deadline, admission)
        except LeaseholdError as error:
            if since is None:  # a waiter goes on: its client attempts again
                app.report_failure(request, claim, error)
            raise
        answer = wire.answer_to_json(reply)
        if isinstance(reply, Busy):
            answer["heard"] = app.service.can_wake(request.client)
        else:
            app.report_grant(request, claim, reply, request.arrived if since is None else since, since is not None)
        return answer

    return run()


def _renew(app: App, request: Request, call: Call, deadline: float) -> Answer:
    given = call.get("claims")
    if not isinstance(given, list) or len(given) > wire.MAX_CALLS:
        raise invalid(f"claims must be a list of at most {wire.MAX_CALLS}")
    claims = [wire.claim_from_json(each, app.service.runtime.now()) for each in given]
    if not all(claim.id for claim in claims):
        raise invalid("a renewal needs the claim's id")
    permitted = [request.caller.may("lock", claim.namespace, claim.name) for claim in claims]

    async def run() -> wire.Json:
        asked = [claim for claim, may in zip(claims, permitted, strict=True) if may]
        with app.limits.call(request.caller, "renew"):
            answered = await app.service.renew(asked, request.client, deadline) if asked else []
        for claim, reply in zip(asked, answered, strict=True):
            if claim.token:
                app.report_renewal(request, claim, reply)
        replies = iter(answered)
        return {
            "renewed": [
                _renewed(next(replies)) if may else _denied(app, request, claim)
                for claim, may in zip(claims, permitted, strict=True)
            ]
        }

    return run()


def _denied(app: App, request: Request, claim: Claim) -> wire.Json:
    problem = Forbidden(request.caller.who, "lock", claim.namespace, claim.name)
    return {"problem": problem_member(app.explain(request, problem))}


def _renewed(reply: Alive | Gone | LeaseholdError) -> wire.Json:
    if isinstance(reply, LeaseholdError):
        return {"problem": problem_member(problems.problem_for(reply))}
    return wire.answer_to_json(reply)


def _release(app: App, request: Request, call: Call, deadline: float) -> Answer:
    claim = _claim(app, request, call)

    async def run() -> wire.Json:
        since = app.service.queued_since(claim)
        with app.limits.call(request.caller, "release"):
            released = await app.service.release(claim, deadline)
        if since is not None:
            app.report("busy", request, claim, queued=True, seconds=app.service.runtime.now() - since)
        else:
            app.report_release(request, claim, released)
        return {"value": released}

    return run()


def _decline(app: App, request: Request, call: Call, deadline: float) -> Answer:
    claim = _claim(app, request, call)

    async def run() -> wire.Json:
        with app.limits.call(request.caller, "release"):
            return {"value": await app.service.decline(claim, request.client, deadline)}

    return run()


def _break(app: App, request: Request, call: Call, deadline: float) -> Answer:
    namespace, name = check_namespace(call.get("namespace", "")), check_name(call.get("name", ""))
    token = wire.integer_from_json(call.get("token"), "token")
    request.allow("break", namespace, name)

    async def run() -> wire.Json:
        with app.limits.call(request.caller, "release"):
            broken = await app.service.break_(namespace, name, token, deadline)
        if broken:
            app.report_break(request, namespace, name, token, "")
        return {"value": broken}

    return run()


def _set_limit(app: App, request: Request, call: Call, deadline: float) -> Answer:
    namespace, name = check_namespace(call.get("namespace", "")), check_name(call.get("name", ""))
    given = call.get("limit")
    limit = None if given is None else check_limit(wire.integer_from_json(given, "limit"))
    request.allow("break", namespace, name)

    async def run() -> wire.Json:
        await app.set_limit(request, namespace, name, limit, deadline)
        return {"value": True}

    return run()


def _inspect(app: App, request: Request, call: Call, deadline: float) -> Answer:
    namespace, prefix = check_namespace(call.get("namespace", "")), check_prefix(call.get("prefix", ""))
    exact = call.get("exact", False) is True
    after = wire.cursor_from_json(call.get("after"))
    request.allow_reading(namespace, prefix, exact)

    async def run() -> wire.Json:
        seconds = deadline - app.service.runtime.now()
        with app.limits.call(request.caller, "read", namespace):
            async with app.limits.listing(request.caller, seconds):
                found = await app.service.inspect(namespace, prefix, exact, deadline)
                page, more = await make_list(len(found), lambda: _page(found, after))
        return {"value": page} if more is None else {"value": page, "more": more}

    return run()


def _page(found: Sequence[Holding], after: wire.Cursor | None) -> tuple[list[wire.Json], wire.Cursor | None]:
    """The claims from `after` on, as many as `_PAGE_BYTES` have, and where the next page begins."""
    page: list[wire.Json] = []
    size = 0
    by_name = sorted(found, key=lambda holding: holding.name)  # stable: the claims of a name stay in their order
    for name, claims in groupby(by_name, lambda holding: holding.name):
        for number, holding in enumerate(claims):
            if after is None or (name, number) >= after:
                shown = wire.holding_to_json(holding)
                size += len(encode(shown)) + 1
                if size > _PAGE_BYTES and page:
                    return page, (name, number)
                page.append(shown)
    return page, None


def _ping(app: App, request: Request, call: Call, deadline: float) -> Answer:
    async def run() -> wire.Json:
        with app.limits.call(request.caller, "read"):
            await app.service.ping(deadline)
        return {"value": wire.traits_to_json(app.service.engine.traits)}

    return run()


def _report(app: App, request: Request, call: Call, deadline: float) -> Answer:
    """The same as `POST /v1/refusals`."""
    try:
        body = msgspec.convert(call.get("refusal"), schemas.RefusalBody)
    except msgspec.ValidationError as bad:
        raise invalid(str(bad)) from None

    async def run() -> wire.Json:
        api.note_refusal(app, request, body)
        return {"value": True}

    return run()


_VERBS: Final[dict[str, Callable[[App, Request, Call, float], Answer]]] = {
    "attempt": _attempt,
    "renew": _renew,
    "release": _release,
    "decline": _decline,
    "break": _break,
    "set_limit": _set_limit,
    "inspect": _inspect,
    "ping": _ping,
    "report": _report,
}


async def stream(app: App, request: Request) -> EventStream:
    """The wake-ups of one client. A comment every 5 s shows both ends that the connection lives."""
    client = request.client
    if not client[1]:
        raise invalid("the header Leasehold-Client is missing: it says whose wake-ups the stream has", 400)
    opened = app.service.open_stream(client)

    async def next_events() -> bytes | None:
        notifications = await opened.take(HEARTBEAT_INTERVAL)
        if not app.authenticator.still(request.caller):
            return None
        if notifications:
            return b"data: %s\n\n" % encode([wire.notification_to_json(each) for each in notifications])
        return None if opened.closed else b": alive\n\n"

    return EventStream(next_events, lambda: app.service.close_stream(client, opened))
