"""What crosses the wire between the remote engine and a Leasehold server: claims, answers and notifications as JSON
values.

Both ends use this module, so each shape is written once. Values are what `json` makes: dictionaries, lists, texts and
numbers. Defaults are left out. Both ends check everything that arrives and bound its size: a value of another shape
raises `Malformed`. The server answers that with `invalid`; for the client it is no answer (E5). Members that a reader
does not know are ignored, so a newer server may add some.

    request    POST /v1/calls [{"do": "attempt", "claim": CLAIM, "within": 4.9},   the caller's deadline, in seconds
                               {"do": "renew", "claims": [CLAIM, ...]},
                               {"do": "release", "claim": CLAIM}, {"do": "decline", "claim": CLAIM},
                               {"do": "break", "namespace": "", "name": "orders/42", "token": 41},
                               {"do": "inspect", "namespace": "", "prefix": "orders/", "exact": false,
                                "after": CURSOR},              one of a request
                               {"do": "ping"},
                               {"do": "report", "refusal": REFUSAL}]   a token that a fence refused
    answers    [{"grant": [token, ttl, slot]}
                {"busy": [left, position, token, holder], "heard": true}   whether this server can wake this client
                {"renewed": [{"alive": [ttl, position]}, {"gone": "expired"}, {"problem": PROBLEM}]}
                {"value": true}      release (true, false, null), break, decline and report
                {"value": [HOLDING, ...], "more": CURSOR}    inspect: a page, and where the next begins
                {"value": TRAITS}    ping
                {"problem": PROBLEM}]
    stream     GET /v1/stream: events whose data is a list of
               {"hello": {"traits": TRAITS}}   the stream works
               {"wakeup": id_hash, "namespace": "", "name": "orders/42"}   attempt again
               {"lost": id_hash}              an operator broke this grant
               {"moved": true}                the server is shutting down: connect to another one
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, get_args

from leasehold.config import API_KEY_VARIABLE, DAY, check_limit, check_ttl
from leasehold.core.listing import listed_seconds
from leasehold.core.names import check_name, check_namespace, hash_id
from leasehold.core.texts import escape, server_text
from leasehold.errors import (
    AccessDenied,
    ConfigError,
    LeaseholdError,
    ListingTooLong,
    Mismatch,
    NotSent,
    Overloaded,
    Unavailable,
    Unsupported,
)
from leasehold.model import (
    NO_MIN_HOLD,
    Alive,
    Busy,
    Claim,
    Gone,
    Grant,
    Holder,
    Holding,
    HoldingState,
    Kind,
    Mode,
    Traits,
)

Json: TypeAlias = dict[str, Any]
Cursor: TypeAlias = tuple[str, int]  # a name, and how many of its claims are on the pages before
T = TypeVar("T")

MAX_CALLS: Final = 512  # verbs of one request, and claims of one renewal
MAX_LABEL: Final = 255  # characters of each text of a holder
MIN_ID, MAX_ID = 16, 128  # characters of a claim's id
_MAX_REASON: Final = 500  # characters of a refusal's reason
_MAX_REPORTED_LABEL: Final = 200  # characters of its holder
PROBLEM_TYPE: Final = "https://leasehold.dev/problems/"

_ID_CHARACTERS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_HEX: Final = frozenset("0123456789abcdef")
_MODES: Final[tuple[str, ...]] = get_args(Mode)
_KINDS: Final[tuple[str, ...]] = get_args(Kind)
_ID_HASH_LENGTH: Final = 32
_MAX_INTEGER: Final = 2**63
_MAX_SECONDS: Final = 1e15
_MAX_SENT_SECONDS: Final = 1e14
_MAX_RETRY_IN: Final = 60.0  # a server says 1: one forged answer must not make a waiter sleep for ever
_CLAIM_DEFAULTS: Final[Mapping[str, object]] = {
    "namespace": "",
    "mode": "exclusive",
    "kind": "lock",
    "limit": 1,
    "delay": 0.0,
    "min_hold": 0.0,
    "queue": False,
    "token": 0,
}
_SMALL: Final = 65_536  # bytes of JSON that may contain anything
_BYTES_PER_CONTAINER: Final = 48  # of a holding: at least 100
_BYTES_PER_VALUE: Final = 8  # of a holding: at least 11
_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False, allow_nan=False).encode


class Malformed(ConfigError):
    """A JSON value does not have the shape that the protocol requires here. The text shows nothing of the value."""


def encode(value: object) -> bytes:
    return _encode(value).encode(errors="replace")  # of a host's name, which may be any bytes


def decode(data: bytes) -> Any:
    if len(data) > _SMALL and _is_dense(data):
        raise Malformed("it has too many values")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Malformed("it is not JSON") from None


def _is_dense(data: bytes) -> bool:
    """Whether the text has far more values than a list of locks of this length: three bytes of text can take eighty of
    memory, so their number is bounded before they are made. Brackets and commas in names count, too."""
    containers = data.count(b"[") + data.count(b"{")
    return containers > len(data) // _BYTES_PER_CONTAINER or data.count(b",") > len(data) // _BYTES_PER_VALUE


# Claims


def claim_to_json(claim: Claim, now: float, *, with_holder: bool = True) -> Json:
    """`now` is an instant of the clock of `claim.wait_deadline`: on the wire that is the number of seconds left. A
    renewal needs no holder, and without one 500 claims with the longest names fit into a request."""
    # A claim without an id, made from a wake-up, gives up a queue position or a reservation, never a grant.
    made: Json = {"id": claim.id} if claim.id else {"id_hash": claim.id_hash}
    made |= {"name": claim.name, "ttl": claim.ttl}
    if with_holder:
        made["holder"] = _holder_to_json(claim.holder)
    for member, default in _CLAIM_DEFAULTS.items():
        if (value := getattr(claim, member)) != default:
            made[member] = value
    if claim.wait_deadline != inf:
        made["wait_left"] = max(0.0, claim.wait_deadline - now)
    return made


def claim_from_json(value: object, now: float) -> Claim:
    """A claim as a client describes it. ConfigError: it makes no sense; the text may be shown to that client."""
    made = _object(value, "a claim")
    claim_id = made.get("id", "")
    if claim_id == "":
        claim_id, id_hash = "", id_hash_from_json(made.get("id_hash"))
    else:
        id_hash = hash_id(check_id(claim_id))
    wait_left = made.get("wait_left")
    return Claim(
        check_namespace(made.get("namespace", "")),
        check_name(made.get("name", "")),
        claim_id,
        id_hash,
        _claim_holder(made.get("holder", ("", "", 0, ""))),
        check_ttl(_at_most_a_day(made.get("ttl"), "ttl")),
        _one_of(made.get("mode", "exclusive"), _MODES, "mode"),
        _one_of(made.get("kind", "lock"), _KINDS, "kind"),
        check_limit(made.get("limit", 1)),
        _at_most_a_day(made.get("delay", 0.0), "delay"),
        _min_hold(made.get("min_hold", 0.0)),
        _flag(made.get("queue", False), "queue"),
        integer_from_json(made.get("token", 0), "token"),
        inf if wait_left is None else now + _seconds(wait_left, "wait_left"),
    )


def _min_hold(value: object) -> float:
    return NO_MIN_HOLD if value == NO_MIN_HOLD else _at_most_a_day(value, "min_hold")


def _at_most_a_day(value: object, what: str) -> float:
    if (seconds := _seconds(value, what)) > DAY:
        raise ConfigError(
            f"{what} must be at most {DAY:.0f} s on a lock server, not {seconds:g}: a caller must not keep a name for "
            "longer without renewing"
        )
    return seconds


def check_id(claim_id: object) -> str:
    if isinstance(claim_id, str) and MIN_ID <= len(claim_id) <= MAX_ID and _ID_CHARACTERS.issuperset(claim_id):
        return claim_id
    raise Malformed(f"an id has {MIN_ID} to {MAX_ID} letters, digits, '.', '_' or '-'")


def id_hash_from_json(value: object) -> str:
    if isinstance(value, str) and len(value) == _ID_HASH_LENGTH and _HEX.issuperset(value):
        return value
    raise Malformed(f"an id hash has {_ID_HASH_LENGTH} hexadecimal digits")


def _claim_holder(value: object) -> Holder:
    holder = _holder_from_json(value)
    if not (holder.label + holder.host + holder.purpose).isprintable():
        raise Malformed("a holder's texts must be printable")
    return holder


# Answers


def answer_to_json(answer: Grant | Busy | Alive | Gone | LeaseholdError) -> Json:
    if isinstance(answer, Grant):
        return {"grant": [answer.token, _sendable(answer.ttl), answer.slot]}
    if isinstance(answer, Busy):
        left = None if answer.left is None else _sendable(answer.left)
        holder = None if answer.holder is None else _holder_to_json(answer.holder)
        return {"busy": [left, answer.position, answer.token, holder]}
    if isinstance(answer, Alive):
        return {"alive": [_sendable(answer.ttl), answer.position]}
    if isinstance(answer, Gone):
        return {"gone": answer.reason}
    return {"problem": problem_to_json(answer)}


class BusyAnswer(NamedTuple):
    """The answer to an attempt that was not granted."""

    busy: Busy
    can_wake: bool  # `heard` on the wire: the server that answered can wake this client


def attempt_from_json(value: object) -> Grant | BusyAnswer:
    answer = _object(value, "an answer")
    if "grant" in answer:
        token, ttl, slot = _items(answer["grant"], 3, "a grant")
        return Grant(
            integer_from_json(token, "token"), _seconds(ttl, "ttl"), _optional(integer_from_json, slot, "slot")
        )
    left, position, token, holder = _items(answer.get("busy"), 4, "busy")
    busy = Busy(
        _optional(_seconds, left, "left"),
        _optional(integer_from_json, position, "position"),
        _optional(integer_from_json, token, "token"),
        None if holder is None else _holder_from_json(holder),
    )
    return BusyAnswer(busy, _flag(answer.get("heard", False), "heard"))


def renewed_from_json(value: object, count: int, engine: str) -> list[Alive | Gone | LeaseholdError]:
    """One answer per claim of a renewal, in the same order."""
    answers = _items(_object(value, "an answer").get("renewed"), count, "renewed")
    return [_renewal_from_json(_object(answer, "an answer"), engine) for answer in answers]


def _renewal_from_json(answer: Json, engine: str) -> Alive | Gone | LeaseholdError:
    if "alive" in answer:
        ttl, position = _items(answer["alive"], 2, "alive")
        return Alive(_seconds(ttl, "ttl"), _optional(integer_from_json, position, "position"))
    if "gone" in answer:
        return Gone(_one_of(answer["gone"], ("expired", "broken", "unknown"), "gone"))
    return error_from_problem(answer.get("problem"), engine)


def flag_from_json(value: object) -> bool | None:
    """The answer to a release (None: a request sent before may have ended the grant) or a break."""
    found = _value(value)
    return None if found is None else _flag(found, "value")


def page_from_json(value: object) -> tuple[list[Holding], Cursor | None]:
    """A page of holdings, and where the next begins; None: it is the last."""
    found = _value(value)
    if not isinstance(found, list):
        raise Malformed("holdings must be a list")
    return [holding_from_json(each) for each in found], cursor_from_json(_object(value, "an answer").get("more"))


def cursor_from_json(value: object) -> Cursor | None:
    if value is None:
        return None
    name, number = _items(value, 2, "a cursor")
    return _text(name, "a name"), integer_from_json(number, "a number")


def traits_answer_from_json(value: object) -> Traits:
    return traits_from_json(_value(value))


def _value(value: object) -> object:
    answer = _object(value, "an answer")
    if "value" not in answer:
        raise Malformed("an answer without a value")
    return answer["value"]


# Problems (RFC 9457), for every error that an engine raises


def problem_to_json(error: LeaseholdError) -> Json:
    """The members of a problem; the error's fields are extension members."""
    kind, status = next(
        (known for error_type, known in _PROBLEMS.items() if isinstance(error, error_type)), ("engine-unavailable", 503)
    )
    made: Json = {"type": PROBLEM_TYPE + kind, "status": status, "detail": str(error)}
    if isinstance(error, Mismatch):
        made |= {"name": error.name, "wanted": error.wanted, "found": error.found}
    elif isinstance(error, Unsupported):
        made["missing"] = list(error.missing)
    elif isinstance(error, NotSent):
        made["done"] = False  # the engine was never asked, so nothing must be undone
    elif isinstance(error, ListingTooLong):
        made["too_long"] = True
    elif isinstance(error, Unavailable) and error.no_majority:
        made["no_majority"] = True
    return made


# API keys and ids of claims: fingerprints have only 16 digits. Other programs' keys have any form.
_SECRET: Final = re.compile(r"(?i:bearer)\s+\S+|[0-9A-Fa-f]{32,}")

_PROBLEMS: Final[Mapping[type[LeaseholdError], tuple[str, int]]] = {
    Mismatch: ("mismatch", 409),
    Unsupported: ("unsupported", 422),
    AccessDenied: ("forbidden", 403),
    ConfigError: ("invalid", 422),
    Unavailable: ("engine-unavailable", 503),
}


def _shown(text: object) -> str:
    """What a server said, without the secrets that a request has: a proxy's error page may repeat the request."""
    return server_text(_SECRET.sub("***", str(text)))


def error_from_problem(value: object, engine: str) -> LeaseholdError:
    """The error that a problem stands for. A problem of an unknown type is `Unavailable`: the outcome is unknown."""
    problem = _object(value, "a problem")
    kind = str(problem.get("type", "")).rpartition("/")[2]
    text = _shown(problem.get("detail") or problem.get("title") or kind or "no reason given")
    if kind == "mismatch":
        name, wanted, found = (_text(problem.get(member), member) for member in ("name", "wanted", "found"))
        return Mismatch(name, wanted=_shown(wanted), found=_shown(found))
    if kind == "unsupported":
        missing = problem.get("missing", [])
        return Unsupported(
            text, engine=engine, missing=tuple(_text(each, "missing") for each in _items(missing, None, "missing"))
        )
    if kind == "unauthorized":  # the server's text shows the header, which only callers without this client write
        return AccessDenied(
            f"the Leasehold server needs a valid API key: set ${API_KEY_VARIABLE}, or name a file with api_key_file="
        )
    if kind == "forbidden":
        return AccessDenied(text)
    if kind == "invalid":
        return ConfigError(text)
    retry_in = _optional(_seconds, problem.get("retry_after"), "retry_after")
    retry_in = None if retry_in is None else min(retry_in, _MAX_RETRY_IN)
    if problem.get("done") is False:  # else the outcome is unknown, whatever the type says
        # "slow": this process was too busy to send its request in time.
        by_limit = kind in ("overloaded", "too-many", "slow") and retry_in is not None
        return (Overloaded if by_limit else NotSent)(text, engine=engine, retry_in=retry_in)
    if problem.get("too_long") is True:
        return ListingTooLong(text, engine=engine)
    return Unavailable(text, engine=engine, retry_in=retry_in, no_majority=problem.get("no_majority") is True)


# Refusals, holdings and traits


def refusal_to_json(claim: Claim, token: int, seen: int, fence: str, reason: str) -> Json:
    """A token that a fence refused, as in the body of `POST /v1/refusals`."""
    made: Json = {"namespace": claim.namespace, "name": claim.name, "token": token, "fence": fence}
    made |= {"holder": escape(claim.holder.label)[:_MAX_REPORTED_LABEL], "reason": escape(reason)[:_MAX_REASON]}
    if seen > 0:  # else the fence has lost what it had seen
        made["seen"] = seen
    return {"do": "report", "refusal": made}


def holding_to_json(holding: Holding) -> Json:
    made = {member: getattr(holding, member) for member in _HOLDING}
    times = {"age": _sendable(holding.age), "left": _sendable(holding.left)}
    return made | times | {"holder": _holder_to_json(holding.holder)}


def holding_from_json(value: object) -> Holding:
    made = _object(value, "a holding")
    return Holding(**{member: read(made.get(member), member) for member, read in _HOLDING.items()})


def traits_to_json(traits: Traits) -> Json:
    return {member: getattr(traits, member) for member in _TRAITS}


def traits_from_json(value: object) -> Traits:
    made = _object(value, "traits")
    return Traits(**{member: read(made.get(member), member) for member, read in _TRAITS.items()})


# Notifications


class Hello(NamedTuple):
    """The first notification of a stream: wake-ups reach this client from now on."""

    traits: Traits


class Wakeup(NamedTuple):
    """The claim with this id hash should attempt again."""

    namespace: str
    name: str
    id_hash: str


class Lost(NamedTuple):
    """An operator broke the grant of the claim with this id hash."""

    id_hash: str


class Moved(NamedTuple):
    """The server is shutting down: the client must connect to another one."""


Notification: TypeAlias = Hello | Wakeup | Lost | Moved


def notification_to_json(notification: Notification) -> Json:
    match notification:
        case Hello(traits):
            return {"hello": {"traits": traits_to_json(traits)}}
        case Wakeup(namespace, name, id_hash):
            return {"wakeup": id_hash, "namespace": namespace, "name": name}
        case Lost(id_hash):
            return {"lost": id_hash}
        case Moved():
            return {"moved": True}


def notifications_from_json(value: object) -> list[Notification]:
    """The notifications of one event. One of an unknown kind is left out."""
    return [
        notification
        for each in _items(value, None, "an event")
        if (notification := _notification_from_json(_object(each, "a notification"))) is not None
    ]


def _notification_from_json(made: Json) -> Notification | None:
    if "hello" in made:
        return Hello(traits_from_json(_object(made["hello"], "hello").get("traits")))
    if "wakeup" in made:
        namespace, name = check_namespace(made.get("namespace", "")), check_name(made.get("name", ""))
        return Wakeup(namespace, name, id_hash_from_json(made["wakeup"]))
    if "lost" in made:
        return Lost(id_hash_from_json(made["lost"]))
    return Moved() if "moved" in made else None


# What the shapes are made of


def _object(value: object, what: str) -> Json:
    if not isinstance(value, dict):
        raise Malformed(f"{what} must be a JSON object")
    return value


def _items(value: object, count: int | None, what: str) -> list[Any]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise Malformed(f"{what} must be a list" + ("" if count is None else f" of {count}"))
    return value


def integer_from_json(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_INTEGER:
        raise Malformed(f"{what} must be a whole number of at least 0")
    return value


def _seconds(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_SECONDS:
        raise Malformed(f"{what} must be a number of seconds of at least 0")
    return float(value)


def _listed(value: object, what: str) -> float:
    return listed_seconds(_seconds(value, what))


def _sendable(seconds: float) -> float:
    """Engines round, so a time may be slightly below 0; JSON has no infinity."""
    return min(max(0.0, seconds), _MAX_SENT_SECONDS)


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise Malformed(f"{what} must be true or false")
    return value


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_LABEL:
        raise Malformed(f"{what} must be a text of at most {MAX_LABEL} characters")
    return value


def _one_of(value: object, known: Sequence[str], what: str) -> Any:
    if value not in known:
        raise Malformed(f"{what} must be one of {', '.join(known)}")
    return value


def _optional(read: Callable[[object, str], T], value: object, what: str) -> T | None:
    return None if value is None else read(value, what)


def _holder_to_json(holder: Holder) -> list[object]:
    pid = holder.pid if 0 <= holder.pid < _MAX_INTEGER else 0  # another program may have written any number
    return [holder.label[:MAX_LABEL], holder.host[:MAX_LABEL], pid, holder.purpose[:MAX_LABEL]]


def _holder_from_json(value: object, what: str = "a holder") -> Holder:
    label, host, pid, purpose = _items(list(value) if isinstance(value, tuple) else value, 4, what)
    return Holder(_text(label, "label"), _text(host, "host"), integer_from_json(pid, "pid"), _text(purpose, "purpose"))


def _choice(*known: str) -> Callable[[object, str], Any]:
    return lambda value, what: _one_of(value, known, what)


def _or_none(read: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    return lambda value, what: _optional(read, value, what)


_HOLDING: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "namespace": _text,
    "name": _text,
    "state": _choice(*get_args(HoldingState)),
    "mode": _choice(*get_args(Mode)),
    "kind": _choice(*get_args(Kind)),
    "limit": integer_from_json,
    "fingerprint": _text,
    "holder": _holder_from_json,
    "age": _listed,
    "left": _listed,
    "token": _or_none(integer_from_json),
    "slot": _or_none(integer_from_json),
    "position": _or_none(integer_from_json),
    "owner": _text,
    "since_grant": _flag,
}
_TRAITS: Final[Mapping[str, Callable[[object, str], Any]]] = {
    "liveness": _choice("ttl", "session"),
    "clock": _choice("engine", "client"),
    "fencing": _flag,
    "fair": _flag,
    "push": _flag,
    "shared": _flag,
    "max_limit": _or_none(integer_from_json),
    "slots": _flag,
    "outlives": _flag,
    "break_notice": _flag,
    "resizable": _flag,
    "min_ttl": _seconds,
    "ttl_step": _seconds,
    "survives": _choice("nothing", "restart", "minority"),
}
