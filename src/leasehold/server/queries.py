"""The routes that only read: locks, owners, history, incidents, statistics.

Each shows only what its caller may read: names of one namespace, or those that begin with a prefix.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from leasehold.core.names import check_name, check_namespace, check_prefix
from leasehold.model import Holding
from leasehold.server import schemas
from leasehold.server.auth import Caller
from leasehold.server.keys import ANY_NAMESPACE
from leasehold.server.limits import make_list
from leasehold.server.messages import Request, Response, checked, encode, json_response, known_arguments
from leasehold.server.past import Incident, PastGrant, PastWait
from leasehold.server.problems import invalid
from leasehold.server.stats import BUCKET_SECONDS, BUCKETS

if TYPE_CHECKING:
    from leasehold.server.app import App

R = TypeVar("R", PastGrant, PastWait, Incident)
_Place: TypeAlias = tuple[str, int, str]

_HOUR: Final = BUCKET_SECONDS * BUCKETS
_INCIDENTS: Final = "100"  # of one answer, unless the caller asks for more


async def owners(app: App, request: Request) -> Response:
    """The holders of a namespace, those gone quiet first. `limit`: only the first."""
    arguments = known_arguments(request, "namespace", "prefix", "limit", "local")
    namespace, prefix = _read_scope(arguments)
    most = _read_limit(arguments["limit"]) if "limit" in arguments else None
    request.allow_reading(namespace, prefix, exact=False)
    seconds = app.deadline(request) - app.service.runtime.now()
    with app.limits.call(request.caller, "read", namespace):
        async with app.limits.listing(request.caller, seconds):
            picture = (await app.pictures.get(namespace, outdated=True)).with_prefix(prefix)
            found, missing = await app.peers.owners(picture, most, local=_flag(arguments, "local"))
    shown = schemas.Owners(
        owners=found,
        as_of=round(picture.as_of, 3),
        stale=picture.stale,
        missing=_missing(app, request, missing),
        server=app.peers.instance,
    )
    return json_response(shown)


async def history(app: App, request: Request) -> Response:
    """The past grants and waits of one name."""
    arguments = known_arguments(request, "namespace", "name", "local")
    with checked():
        namespace, name = check_namespace(arguments.get("namespace", "")), check_name(arguments.get("name", ""))
    request.allow("read", namespace, name)
    with app.limits.call(request.caller, "read", namespace, name):
        found, missing = await app.peers.past(namespace, name, local=_flag(arguments, "local"))
    return json_response(
        schemas.NameHistory(
            namespace=namespace,
            name=name,
            grants=_of_peers(app, request, found.grants),
            waits=_of_peers(app, request, found.waits),
            missing=_missing(app, request, missing),
            server=app.peers.instance,
        )
    )


async def incidents(app: App, request: Request) -> Response:
    """Incidents, latest first. Without a namespace: of all names that the caller may read."""
    arguments = known_arguments(request, "namespace", "prefix", "limit", "local")
    namespace, prefix = _read_scope(arguments)
    limit = _read_limit(arguments.get("limit") or _INCIDENTS)
    everywhere = "namespace" not in arguments and not prefix
    if not everywhere:
        request.allow_reading(namespace, prefix, exact=False)
    seconds = app.deadline(request) - app.service.runtime.now()
    with app.limits.call(request.caller, "read"):
        async with app.limits.listing(request.caller, seconds):
            await app.pictures.get_many(app.pictures.latest_namespaces() if everywhere else [namespace])  # deadlocks
            of = None if everywhere else namespace
            found, missing = await app.peers.incidents(of, local=_flag(arguments, "local"))
            shown = [each for each in found if may_see(request.caller, each) and each.name.startswith(prefix)]
    return json_response(
        schemas.Incidents(
            incidents=_of_peers(app, request, shown[:limit]),
            missing=_missing(app, request, missing),
            server=app.peers.instance,
        )
    )


def may_see(caller: Caller, incident: Incident) -> bool:
    """Incidents of the whole engine, which have no name, are for callers that may read every name. A deadlock is for
    those that may read all its names, because its text has them."""
    if not incident.name:
        return caller.may_list(ANY_NAMESPACE, "")
    return all(caller.may("read", incident.namespace, name) for name in (incident.name, *incident.names))


async def stats(app: App, request: Request) -> Response:
    """A namespace over the last `seconds`, at most an hour."""
    arguments = known_arguments(request, "namespace", "seconds", "local")
    with checked():
        namespace = check_namespace(arguments.get("namespace", ""))
    request.allow_reading(namespace, "", exact=False)  # groups are parts of all its names
    seconds = _read_seconds(arguments.get("seconds"))
    with app.limits.call(request.caller, "read", namespace):
        async with app.limits.listing(request.caller, app.deadline(request) - app.service.runtime.now()):
            found, missing = await app.peers.stats(namespace, seconds, local=_flag(arguments, "local"))
    return json_response(
        schemas.StatsAnswer(stats=found, missing=_missing(app, request, missing), server=app.peers.instance)
    )


def _missing(app: App, request: Request, peers: Sequence[str]) -> list[str]:
    return list(map(app.peers.names_for(request.caller), peers))


def _of_peers(app: App, request: Request, records: Sequence[R]) -> list[R]:
    """The records, with what the caller may see of the servers that saw them. Other callers get the same records."""
    name = app.peers.names_for(request.caller)
    return [replace(each, server=name(each.server)) if each.server else each for each in records]


def _read_scope(arguments: Mapping[str, str]) -> tuple[str, str]:
    with checked():
        return check_namespace(arguments.get("namespace", "")), check_prefix(arguments.get("prefix", ""))


def _flag(arguments: Mapping[str, str], name: str) -> bool:
    text = arguments.get(name, "")
    if text not in ("", "0", "1"):
        raise invalid(f"{name} must be 0 or 1", 400)
    return text == "1"


def _read_seconds(text: str | None) -> float:
    if not text:
        return float(_HOUR)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise invalid(f"seconds must be a whole number from 1 to {_HOUR}", 400)
    return float(min(int(text), _HOUR))


# -- locks


async def locks(app: App, request: Request) -> Response:
    arguments = known_arguments(request, "namespace", "prefix", "name", "limit", "cursor", "fresh")
    exact = "name" in arguments
    if exact and arguments.get("prefix"):
        raise invalid("give name or prefix, not both", 400)
    limit, cursor = _read_limit(arguments.get("limit")), _read_cursor(arguments.get("cursor"))
    with checked():
        namespace = check_namespace(arguments.get("namespace", ""))
        prefix = check_name(arguments["name"]) if exact else check_prefix(arguments.get("prefix", ""))
    request.allow_reading(namespace, prefix, exact)
    deadline = app.deadline(request)
    with app.limits.call(request.caller, "read", namespace):
        async with app.limits.listing(request.caller, deadline - app.service.runtime.now()):
            if exact or _flag(arguments, "fresh"):
                as_of, stale = app.service.runtime.wall(), False
                found = await app.service.inspect(namespace, prefix, exact, deadline)
            else:
                picture = await app.pictures.get(namespace)
                as_of, stale = picture.as_of, picture.stale
                found = [holding for holding in picture.snapshot.holdings if holding.name.startswith(prefix)]
            return await make_list(len(found), lambda: json_response(_page(found, limit, cursor, as_of, stale)))


def _read_limit(text: str | None) -> int:
    if not text:
        return schemas.MAX_HOLDINGS
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise invalid("limit must be a whole number of at least 1", 400)
    return min(int(text), schemas.MAX_HOLDINGS)


def _read_cursor(text: str | None) -> _Place | None:
    if not text:
        return None
    try:
        found: _Place = msgspec.json.decode(base64.urlsafe_b64decode(text.encode()), type=_Place)
    except (ValueError, msgspec.DecodeError):
        raise invalid("cursor must come from an earlier answer", 400) from None
    return found


def _page(found: Sequence[Holding], limit: int, cursor: _Place | None, as_of: float, stale: bool) -> schemas.Locks:
    """Holdings in an order in which the cursor stays good while holders come and go. Waiters are shown with the
    holdings of their name; those of names without a holder are on the page where that name would be."""
    holders = sorted((h for h in found if h.position is None), key=_place)
    if cursor is not None:
        holders = [h for h in holders if _place(h) > cursor]
    queues: dict[str, list[schemas.Waiter]] = {}
    for waiter in found:
        if waiter.position is not None:
            queues.setdefault(waiter.name, []).append(_waiter(waiter))
    page = holders[: _fitting(holders[:limit], queues)]
    more = len(holders) > len(page)
    last = _place(page[-1]) if more else ("", 0, "")
    shown = [name for name in sorted(queues) if (cursor is None or name >= cursor[0]) and (not more or name <= last[0])]
    return schemas.Locks(
        [_holding(h, queues.get(h.name, []), as_of) for h in page],
        [waiter for name in shown for waiter in queues[name]],
        base64.urlsafe_b64encode(encode(last)).decode() if more else None,
        round(as_of, 3),
        stale,
    )


def _place(holding: Holding) -> _Place:
    return holding.name, holding.token or 0, holding.fingerprint  # what is reserved has no token yet


def _fitting(holders: Sequence[Holding], queues: Mapping[str, Sequence[object]]) -> int:
    """How many of these holdings a page has, each with the queue of its name: a semaphore may have many of both."""
    shown = 0
    for number, holding in enumerate(holders):
        shown += len(queues.get(holding.name, ()))
        if shown > schemas.MAX_WAITERS and number:
            return number
    return len(holders)


def _holding(holding: Holding, queue: list[schemas.Waiter], as_of: float) -> schemas.Holding:
    return schemas.Holding(
        name=holding.name,
        holder=holding.holder.label,
        purpose=holding.holder.purpose or None,
        token=holding.token,
        acquired_at=round(as_of - holding.age, 3) if holding.since_grant and holding.state == "held" else None,
        expires_in=holding.left,
        state=holding.state,
        mode=holding.mode,
        kind=holding.kind,
        limit=holding.limit,
        slot=holding.slot,
        fingerprint=holding.fingerprint,
        host=holding.holder.host or None,
        pid=holding.holder.pid or None,
        owner=holding.owner,
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
        owner=holding.owner,
    )
